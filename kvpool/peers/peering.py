"""A node's part in a pool of several: brings blocks from the others, sends them its own, sees to copies of what is hot.

    this host's workers ── lease ──▶ PoolNode ──▶ Fetcher ── ask ──▶ other nodes
                                        └───────▶ Replicator ─ ask ─▶
    other nodes ── ask ──▶ PeerServer ──▶ PeerRequestHandler ──▶ PeerSender ── blocks ──▶ them
                ── blocks ──────────────────────────▶ PeerReceiver

A node alone has none of this.
"""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from baton.clock import Clock, MonotonicClock
from baton.config.schema import PoolConfig, TransferConfig
from baton.errors import ConfigError
from baton.ids import BlockKey, WorkerIdentity
from baton.rpc.credentials import ClusterCredentials
from baton.telemetry.logs import get_logger
from kv_transfer.backends.registry import needed, open_receivers, open_senders
from kv_transfer.memory.listening import Listening
from kv_transfer.memory.region_server import Refused, RegionAccess
from kv_transfer.ports import KvReceiver
from kv_transfer.session.handshake import SessionEndpoint
from kv_transfer.ticket import TicketOffice
from kvpool.node.slab import slab_layout
from kvpool.node.storage import NodeStorage
from kvpool.peers.client import PeerClient, PeerSeal
from kvpool.peers.fetcher import Fetcher, PartFetcher
from kvpool.peers.peer_table import PeerTable
from kvpool.peers.receiver import PeerReceiver
from kvpool.peers.replication import ReplicationPolicy, Replicator
from kvpool.peers.sender import PeerSender
from kvpool.peers.server import PeerRequestHandler, PeerServer
from kvpool.ports import Directory

_OVERDUE_SHARE = 4
"""What is under way takes at most half of a slab, so a quarter is left to the node whatever others do."""

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PeeringConfig:
    """What a node needs to reach the others, and to be reached.

    Attributes:
        identity: The node's.
        address: Where its service for other nodes is bound: `unix:/path` or `host:port`.
        gate_path: Unix socket that lets nodes of the same host map the slab.
        secret: Of the cluster.
        credentials: Of this process; None where it is reached by Unix sockets only.
        pool: Bounds.
        transfer: Backends and durations.
        refused: Told of connections to the slab that were closed before their peer had proven itself; from any thread.
    """

    identity: WorkerIdentity
    address: str
    gate_path: Path
    secret: bytes
    pool: PoolConfig
    transfer: TransferConfig
    refused: Callable[[Refused], None]
    credentials: ClusterCredentials | None = None

    @property
    def listening(self) -> Listening:
        """Where its transports listen."""
        return Listening.at(self.address, self.transfer.ports, self.pool.advertise_address)

    @property
    def advertised(self) -> str:
        """Where others are told that it is."""
        return self.pool.advertise_address or self.address


class Peering:
    """For the event loop that made it.

    Args:
        plan: This node's identity, and how it is reached.
        store: The node's blocks.
        directory: Of the pool.
        service: Is opened for the others.
        clock: Monotonic.

    Raises:
        ConfigError: None of the transfer backends works here.
        OSError: A socket that gives access to the slab cannot be bound.
    """

    def __init__(
        self,
        plan: PeeringConfig,
        store: NodeStorage,
        directory: Directory,
        service: PeerServer,
        clock: Clock,
    ) -> None:
        slab, pool = store.slab, plan.pool
        layout = slab_layout(slab.slot_bytes)
        here = SessionEndpoint(
            identity=plan.identity,
            layout=layout,
            office=TicketOffice(plan.secret),
            credentials=plan.credentials,
        )
        self._store = store
        self._inbound = PeerReceiver(
            here,
            num_slots=slab.num_slots,
            receivers=_receivers(plan, store),
            transfer=plan.transfer,
            clock=clock,
        )
        self._outbound = PeerSender(
            here,
            senders=open_senders(
                plan.transfer.backends,
                slab.region,
                num_blocks=slab.num_slots,
                secret=plan.secret,
                listening=plan.listening,
            ),
            sent=self._sent,
            timeout_s=pool.fetch_timeout_s,
            clock=clock,
        )
        client = PeerClient(PeerSeal(plan.secret), plan.credentials)
        self._neighbours = PeerTable(plan.identity, directory, client, clock)
        parts = PartFetcher(
            here,
            plan.advertised,
            store,
            self._inbound,
            self._neighbours,
            timeout_s=pool.fetch_timeout_s,
            max_overdue_blocks=slab.num_slots // _OVERDUE_SHARE,
            clock=clock,
        )
        self._fetcher = Fetcher(
            parts,
            self._neighbours,
            num_slots=slab.num_slots,
            slot_bytes=slab.slot_bytes,
            fetch_bytes=pool.fetch_bytes,
        )
        self._replicator = Replicator(
            ReplicationPolicy(
                store.ledger.read_frequency, reads=pool.replicate_reads, most=pool.max_replicas
            ),
            self._neighbours,
            block_bytes=slab.slot_bytes,
            clock=clock,
        )
        service.open(
            PeerRequestHandler(here, store, self._outbound, self._fetcher, clock), self._inbound
        )

    async def bring(self, keys: Sequence[BlockKey], held: int, wait_s: float) -> None:
        """See `Fetcher.bring`."""
        await self._fetcher.bring(keys, held, wait_s)

    def read(self, keys: Sequence[BlockKey]) -> None:
        """See `Replicator.read`."""
        self._replicator.read(keys)

    def tick(self) -> None:
        """Ends what takes too long; several times per second."""
        self._inbound.tick()
        self._outbound.tick()

    async def close(self) -> None:
        """Asks for nothing more, sends nothing more, ends every writer's access."""
        await self._replicator.close()
        await self._fetcher.close()
        await self._neighbours.close()
        await self._outbound.close()
        await self._inbound.close()

    def check_integrity(self) -> None:
        """Raises InvariantError if the state of what is under way contradicts itself."""
        self._inbound.check_integrity()
        self._outbound.check_integrity()

    def _sent(self, blocks: int) -> None:
        self._store.ledger.counts.sent_blocks += blocks


@asynccontextmanager
async def serve_peers(
    plan: PeeringConfig, directory: Directory
) -> AsyncIterator[tuple[PeeringConfig, Callable[[NodeStorage], Peering | None]]]:
    """Serves other nodes while the context lasts: the plan with the address that was bound, and how the node joins in.
    Where no way to them works that gives None, and is logged: this host's blocks are worth having.

    Raises:
        OSError: The address cannot be bound.
    """
    service = PeerServer(PeerSeal(plan.secret), plan.credentials)
    bound = replace(plan, address=await service.start(plan.address))

    def join(store: NodeStorage) -> Peering | None:
        try:
            return Peering(bound, store, directory, service, MonotonicClock())
        except (OSError, ConfigError) as error:
            _log.error("the pool goes on without the nodes of other hosts", reason=str(error))
            return None

    try:
        yield bound, join
    finally:
        await service.close()


def _receivers(plan: PeeringConfig, store: NodeStorage) -> dict[str, KvReceiver]:
    slab = store.slab
    return open_receivers(
        needed(plan.transfer.backends, plan.address, slab.region),
        slab.region,
        server_address=lambda backend: _server_address(plan, backend),
        layout=slab_layout(slab.slot_bytes),
        num_blocks=slab.num_slots,
        admission=RegionAccess(secret=plan.secret, listening=plan.listening, refused=plan.refused),
    )


def _server_address(plan: PeeringConfig, backend: str) -> str:
    """Where writers attach: by a Unix socket, or beside the port that they ask at."""
    if plan.address.startswith("unix:") or backend == "shm":
        return f"unix:{plan.gate_path}"
    host = plan.address.rpartition(":")[0]
    return f"{host}:0"
