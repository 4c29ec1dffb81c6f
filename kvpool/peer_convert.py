"""Between the protobuf messages that nodes send each other and the pool's own types. A peer's numbers are checked before use."""

from collections.abc import Sequence
from dataclasses import dataclass

from baton.errors import TransferError
from baton.rpc.v1 import pool_pb2 as pb
from kvpool.convert import owner_from_proto, owner_to_proto
from kvpool.messages import HeldBlock, Owner, Stored

_CHECKSUM_BYTES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Coming:
    """What a holder says of the blocks that it sends.

    Attributes:
        block_bytes: Of each.
        checksums: Of each, as `HeldBlock` has them.
        owners: Of each.
    """

    block_bytes: int
    checksums: tuple[bytes, ...]
    owners: tuple[Owner, ...]


def coming_to_proto(held: Sequence[HeldBlock], stored: Sequence[Stored]) -> pb.BlocksComing:
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


def coming_from_proto(message: pb.BlocksComing, *, num_blocks: int, slot_bytes: int) -> Coming:
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
    return Coming(
        block_bytes=message.block_bytes,
        checksums=checksums,
        owners=tuple(owners[block.owner] for block in message.blocks),
    )
