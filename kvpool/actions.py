"""What a node's ledger wants done on the disk. Whoever does it says so with the same action, or that it failed."""

from dataclasses import dataclass

from baton.ids import BlockKey
from kvpool.messages import Owner


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskBlock:
    """What an extent holds: all that is needed to find the block again after a restart.

    Attributes:
        extent: Index of the extent.
        epoch: Of this use of it; higher than that of any earlier use.
        key: The block.
        owner: Whose it is.
        size_bytes: Its bytes.
        position: How many blocks of its text are before it.
        checksums: One 64-bit number per layer, little-endian.
    """

    extent: int
    epoch: int
    key: BlockKey
    owner: Owner
    size_bytes: int
    position: int
    checksums: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Demote:
    """Copy a slot to an extent; the slot's bytes stay as they are until this is answered by `written` or `io_failed`.

    Attributes:
        move: Names the action.
        slot: From where.
        block: To where, and what the extent then holds.
    """

    move: int
    slot: int
    block: DiskBlock


@dataclass(frozen=True, slots=True, kw_only=True)
class Promote:
    """Read an extent into a slot, verified; answered by `loaded` or `io_failed`. The extent stays as it is until then.

    Attributes:
        move: Names the action.
        slot: To where.
        block: From where, and what the extent holds.
    """

    move: int
    slot: int
    block: DiskBlock


@dataclass(frozen=True, slots=True, kw_only=True)
class Erase:
    """An extent holds nothing any more, also after a restart. Not answered; comes before any other use of the extent.

    Attributes:
        extent: Index of the extent.
        epoch: Of the use that is over.
        key: The block that it held.
    """

    extent: int
    epoch: int
    key: BlockKey


NodeAction = Demote | Promote | Erase
