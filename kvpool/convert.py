"""Between the pool's protobuf messages and its own records. What comes from outside is checked before use."""

from collections.abc import Sequence
from dataclasses import dataclass

from baton.errors import InvalidRequestError, TransferError
from baton.hashing import KEY_BYTES
from baton.ids import BlockKey
from baton.rpc.hello import identity_to_proto
from baton.rpc.v1 import pool_pb2 as pb
from kvpool.messages import (
    BlockLease,
    HeldBlock,
    NodeStatus,
    Owner,
    PutGrant,
    PutItem,
    PutRefusalReason,
    PutRefused,
    Selection,
    Stored,
)

MAX_KEYS = 16_384
"""In one message: a text of a million tokens in blocks of 64."""


def keys_to_bytes(keys: Sequence[BlockKey]) -> bytes:
    """Keys one after the other."""
    return b"".join(keys)


def keys_from_bytes(packed: bytes) -> list[BlockKey]:
    """The keys that stand in `packed`.

    Raises:
        InvalidRequestError: One is cut short, or there are more than `MAX_KEYS`.
    """
    if len(packed) % KEY_BYTES:
        raise InvalidRequestError(
            f"keys: {len(packed)} bytes are not keys of {KEY_BYTES}", param="keys"
        )
    if len(packed) > MAX_KEYS * KEY_BYTES:
        raise InvalidRequestError(
            f"keys: {len(packed) // KEY_BYTES} are more than {MAX_KEYS}", param="keys"
        )
    return [BlockKey(packed[at : at + KEY_BYTES]) for at in range(0, len(packed), KEY_BYTES)]


def owner_to_proto(owner: Owner) -> pb.BlockOwner:
    """Owner as its message."""
    return pb.BlockOwner(
        tenant=owner.tenant, cache_scope=owner.scope, model_fingerprint=owner.model
    )


def owner_from_proto(message: pb.BlockOwner) -> Owner:
    """Owner of its message."""
    return Owner(tenant=message.tenant, scope=message.cache_scope, model=message.model_fingerprint)


def selection_from_proto(message: pb.FlushPoolRequest) -> Selection:
    """What a flush means."""
    return Selection(
        tenant=message.tenant, scope=message.cache_scope, model=message.model_fingerprint
    )


def grant_to_proto(outcome: PutGrant | PutRefused, keys: Sequence[BlockKey]) -> pb.ReservePutReply:
    """What came of a put of `keys`."""
    if isinstance(outcome, PutRefused):
        return pb.ReservePutReply(refused=outcome.reason.value, detail=outcome.detail)
    index = {key: place for place, key in enumerate(keys)}
    places = [
        pb.PutPlace(index=index[item.key], slot=item.slot, epoch=item.epoch)
        for item in outcome.items
    ]
    return pb.ReservePutReply(put_id=outcome.put_id, places=places)


def grant_from_proto(
    message: pb.ReservePutReply, keys: Sequence[BlockKey]
) -> PutGrant | PutRefused:
    """The inverse."""
    if message.refused:
        return PutRefused(reason=PutRefusalReason(message.refused), detail=message.detail)
    items = tuple(
        PutItem(key=keys[place.index], slot=place.slot, epoch=place.epoch)
        for place in message.places
    )
    return PutGrant(put_id=message.put_id, items=items)


def lease_to_proto(lease: BlockLease) -> pb.LeaseBlocksReply:
    """A lease as its message."""
    blocks = [
        pb.LeasedBlock(slot=held.slot, epoch=held.epoch, checksums=held.checksums)
        for held in lease.blocks
    ]
    return pb.LeaseBlocksReply(lease_id=lease.lease_id, blocks=blocks, lease_s=lease.lease_s)


def lease_from_proto(message: pb.LeaseBlocksReply, keys: Sequence[BlockKey]) -> BlockLease:
    """The inverse; `keys` are those that were asked for."""
    blocks = tuple(
        HeldBlock(key=key, slot=leased.slot, epoch=leased.epoch, checksums=leased.checksums)
        for key, leased in zip(keys, message.blocks, strict=False)
    )
    return BlockLease(lease_id=message.lease_id, blocks=blocks, lease_s=message.lease_s)


def status_to_proto(status: NodeStatus) -> pb.PoolUsageReply:
    """How a node is used."""
    usage = status.usage
    return pb.PoolUsageReply(
        node=identity_to_proto(status.state.node),
        slots_total=usage.slots_total,
        slots_free=usage.slots_free,
        slot_bytes=status.slot_bytes,
        ssd_blocks=usage.ssd_blocks,
        hit_blocks=usage.hit_blocks,
        missed_blocks=usage.missed_blocks,
        stored_blocks=usage.stored_blocks,
        evicted_blocks=usage.evicted_blocks,
        demoted_blocks=usage.demoted_blocks,
        promoted_blocks=usage.promoted_blocks,
        zombie_puts=usage.zombie_puts,
        corrupt_blocks=usage.corrupt_blocks,
        leases=usage.leases,
        puts=usage.puts,
        sick=status.state.sick,
        directory_reachable=status.directory_reachable,
        owners=[
            pb.OwnerUsage(
                tenant=owner.tenant,
                dram_bytes=owner.dram_bytes,
                ssd_bytes=owner.ssd_bytes,
                blocks=owner.blocks,
                quota_bytes=owner.quota_bytes,
                weight=owner.weight,
                hit_blocks=owner.hit_blocks,
                missed_blocks=owner.missed_blocks,
            )
            for owner in status.owners
        ],
        fetched_blocks=usage.fetched_blocks,
        sent_blocks=usage.sent_blocks,
        failed_fetches=usage.failed_fetches,
        copies=usage.copies,
        hottest=[pb.HotPrefix(key=key, hits=hits) for key, hits in status.hottest],
    )


_CHECKSUM_BYTES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class IncomingBlocks:
    """What a holder says of the blocks that it sends.

    Attributes:
        block_bytes: Of each.
        checksums: Of each, as `HeldBlock` has them.
        owners: Of each.
    """

    block_bytes: int
    checksums: tuple[bytes, ...]
    owners: tuple[Owner, ...]


def incoming_to_proto(held: Sequence[HeldBlock], stored: Sequence[Stored]) -> pb.BlocksComing:
    """What is said of leased blocks; all of one size, being of one text."""
    owners = dict.fromkeys(block.owner for block in stored)
    numbers = {owner: number for number, owner in enumerate(owners)}
    blocks = [
        pb.ComingBlock(checksums=block.checksums, owner=numbers[known.owner])
        for block, known in zip(held, stored, strict=True)
    ]
    return pb.BlocksComing(
        held=len(held),
        block_bytes=stored[0].size_bytes,
        owners=[owner_to_proto(owner) for owner in owners],
        blocks=blocks,
    )


def incoming_from_proto(
    message: pb.BlocksComing, *, num_blocks: int, slot_bytes: int
) -> IncomingBlocks:
    """The inverse.

    Raises:
        TransferError: It does not fit what was asked for, or itself.
    """
    owners = [owner_from_proto(owner) for owner in message.owners]
    checksums = tuple(block.checksums for block in message.blocks)
    sizes = {len(sums) for sums in checksums}
    num_layers, odd = divmod(max(sizes, default=0), _CHECKSUM_BYTES)
    fits = (
        len(checksums) == num_blocks
        and len(sizes) == 1
        and not odd
        and num_layers > 0
        and 0 < message.block_bytes <= slot_bytes
        and message.block_bytes % num_layers == 0
        and all(block.owner < len(owners) for block in message.blocks)
    )
    if not fits:
        raise TransferError("what another pool node says of its blocks contradicts itself")
    return IncomingBlocks(
        block_bytes=message.block_bytes,
        checksums=checksums,
        owners=tuple(owners[block.owner] for block in message.blocks),
    )
