"""What the pool's node of this host says of itself, asked over the service that workers use too."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import grpc

from baton.errors import UnavailableError
from baton.rpc.channel import open_channel, stranger
from baton.rpc.identity import PeerRole
from baton.rpc.v1.pool_pb2 import PoolUsageReply, PoolUsageRequest
from baton.rpc.v1.pool_pb2_grpc import PoolStub
from baton_cluster.cli.router_control import ANSWER_WAIT_S, operator_credentials
from baton_cluster.launch.runtime_dir import pool_address

if TYPE_CHECKING:
    from baton.rpc.v1.pool_pb2_grpc import PoolAsyncStub  # exists for type checkers only

_Reply = TypeVar("_Reply")


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantPoolUsage:
    """One tenant's part of a node. `quota_bytes` is None where there is no limit,
    `hit_rate` where it has asked for nothing.
    """

    tenant: str
    dram_bytes: int
    ssd_bytes: int
    blocks: int
    quota_bytes: int | None = None
    weight: float = 1.0
    hit_rate: float | None = None
    hit_blocks: int = 0
    missed_blocks: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class HotPrefix:
    """A chain of blocks that is read often, by the key of its first one, in hex. Never what stands in it."""

    key: str
    hits: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolUsage:
    """A node; the fields are those of the protobuf message, with bytes and rates where it has slots and counts."""

    node: str
    incarnation: str
    dram_bytes: int
    dram_capacity_bytes: int
    ssd_bytes: int
    slot_bytes: int
    hit_rate: float | None
    hit_blocks: int
    missed_blocks: int
    stored_blocks: int
    evicted_blocks: int
    demoted_blocks: int
    promoted_blocks: int
    corrupt_blocks: int
    zombie_puts: int
    fetched_blocks: int
    sent_blocks: int
    failed_fetches: int
    copies: int
    leases: int
    puts: int
    sick: bool
    directory_reachable: bool
    tenants: tuple[TenantPoolUsage, ...]
    hottest: tuple[HotPrefix, ...]


def address_in(cluster: Path) -> str:
    """Where the node of the cluster at `cluster` listens.

    Raises:
        UnavailableError: That cluster has no pool.
    """
    address = pool_address(cluster)
    if not address:
        raise UnavailableError(f"the cluster at {cluster} has no pool (pool.enabled)")
    return address


async def ask(address: str, question: Callable[["PoolAsyncStub"], Awaitable[_Reply]]) -> _Reply:
    """What the node at `address` answers.

    Raises:
        UnavailableError: It does not.
    """
    own = operator_credentials()
    async with open_channel(address, own, PeerRole.POOL) as channel:
        try:
            return await question(PoolStub(channel))
        except grpc.aio.AioRpcError as error:
            raise stranger(error, address, own) or UnavailableError(
                f"the pool does not answer at {address}: {error.details()}"
            ) from error


async def fetch(address: str, *, hottest: int = 0) -> PoolUsage:
    """Asks the node at `address`, also for so many of its hottest prefixes.

    Raises:
        UnavailableError: It does not answer.
    """
    asked = PoolUsageRequest(hottest=hottest)
    return _from_proto(await ask(address, lambda pool: pool.Usage(asked, timeout=ANSWER_WAIT_S)))


def _from_proto(reply: PoolUsageReply) -> PoolUsage:
    tenants = [
        TenantPoolUsage(
            tenant=owner.tenant,
            dram_bytes=owner.dram_bytes,
            ssd_bytes=owner.ssd_bytes,
            blocks=owner.blocks,
            quota_bytes=owner.quota_bytes if owner.HasField("quota_bytes") else None,
            weight=owner.weight,
            hit_rate=_rate(owner.hit_blocks, owner.missed_blocks),
            hit_blocks=owner.hit_blocks,
            missed_blocks=owner.missed_blocks,
        )
        for owner in reply.owners
    ]
    hottest = [HotPrefix(key=prefix.key.hex(), hits=prefix.hits) for prefix in reply.hottest]
    return PoolUsage(
        node=reply.node.worker_id,
        incarnation=f"{reply.node.incarnation:x}",
        dram_bytes=(reply.slots_total - reply.slots_free) * reply.slot_bytes,
        dram_capacity_bytes=reply.slots_total * reply.slot_bytes,
        ssd_bytes=reply.ssd_blocks * reply.slot_bytes,
        slot_bytes=reply.slot_bytes,
        hit_rate=_rate(reply.hit_blocks, reply.missed_blocks),
        hit_blocks=reply.hit_blocks,
        missed_blocks=reply.missed_blocks,
        stored_blocks=reply.stored_blocks,
        evicted_blocks=reply.evicted_blocks,
        demoted_blocks=reply.demoted_blocks,
        promoted_blocks=reply.promoted_blocks,
        corrupt_blocks=reply.corrupt_blocks,
        zombie_puts=reply.zombie_puts,
        fetched_blocks=reply.fetched_blocks,
        sent_blocks=reply.sent_blocks,
        failed_fetches=reply.failed_fetches,
        copies=reply.copies,
        leases=reply.leases,
        puts=reply.puts,
        sick=reply.sick,
        directory_reachable=reply.directory_reachable,
        tenants=tuple(sorted(tenants, key=lambda one: (-one.dram_bytes, one.tenant))),
        hottest=tuple(sorted(hottest, key=lambda one: (-one.hits, one.key))),
    )


def _rate(hits: int, missed: int) -> float | None:
    return hits / (hits + missed) if hits + missed else None
