"""What an earlier start of the node has left on the disk, as far as it can be used; the rest is forgotten, with a line in the log.

Only the journal is read. Whether an extent has the bytes that the journal says is seen when its block is asked for.
"""

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from baton.ids import BlockKey
from baton.telemetry.logs import get_logger
from kvpool.messages import DiskBlock
from kvpool.ssd.journal import Journal, begin_log
from kvpool.ssd.records import VERSION, Begins, Erased, decode, encode_holds
from kvpool.ssd.sealed_log import Frame, SealedLog, frames

_READ_BYTES = 1 << 20

_log = get_logger(__name__)


def recover(
    folder: Path, present: Callable[[int], bool], *, slot_bytes: int, num_extents: int
) -> tuple[Journal, list[DiskBlock]]:
    """Opens the journal in `folder`, or begins one.

    Args:
        folder: Where it is.
        present: Whether there is such an extent.
        slot_bytes: The size of the largest block; a journal of another size is of no use.
        num_extents: How many there may be.

    Returns:
        The journal, and what the extents hold: no extent and no block twice.

    Raises:
        OSError: No journal can be kept there.
    """
    path = folder / "journal"
    found = _read(path, slot_bytes)
    path.with_suffix(".new").unlink(missing_ok=True)
    held = _usable(found.blocks.values(), present, num_extents)
    if found.last is None or len(held) < len(found.blocks):
        log = begin_log(path, slot_bytes, map(encode_holds, held))
    else:
        log = SealedLog(path, found.last, found.num_records)
    _report(found, held)
    journal = Journal(path, log, slot_bytes=slot_bytes, num_extents=num_extents, held=held)
    return journal, held


@dataclass(slots=True, eq=False)
class _Found:
    """A journal as it was read.

    Attributes:
        blocks: By extent.
        last: The last record that counts; None if none does.
        num_records: How many count.
        unusable: Why none of it counts, or why what follows `last` does not.
    """

    blocks: dict[int, DiskBlock] = field(default_factory=dict)
    last: Frame | None = None
    num_records: int = 0
    unusable: str = ""


def _read(path: Path, slot_bytes: int) -> _Found:
    found = _Found()
    try:
        with path.open("rb", buffering=_READ_BYTES) as file:
            for frame in frames(file):
                found.unusable = _take(found, frame, slot_bytes)
                if found.unusable:
                    return found
            end = found.last.end if found.last is not None else 0
            if os.fstat(file.fileno()).st_size > end:
                found.unusable = "its end is torn or damaged"
    except FileNotFoundError:
        return found
    except OSError as error:
        found.unusable = f"it cannot be read: {error.strerror}"
    return found


def _take(found: _Found, frame: Frame, slot_bytes: int) -> str:
    record = decode(frame.record)
    match record:
        case Begins() if found.last is None:
            if record.version != VERSION:
                return f"it is of version {record.version}, not {VERSION}"
            if record.slot_bytes != slot_bytes:
                return f"its blocks are of {record.slot_bytes} bytes, not {slot_bytes}"
        case DiskBlock() if found.last is not None:
            found.blocks[record.extent] = record
        case Erased() if found.last is not None:
            held = found.blocks.get(record.extent)
            if held is not None and held.epoch == record.epoch:
                del found.blocks[record.extent]
        case _:
            return "it says what this version does not understand"
    found.last = frame
    found.num_records += 1
    return ""


def _usable(
    blocks: Iterable[DiskBlock], present: Callable[[int], bool], num_extents: int
) -> list[DiskBlock]:
    # A block is in two extents where the process died before the older one, still being read, was erased.
    newest: dict[BlockKey, DiskBlock] = {}
    for block in blocks:
        if block.extent < num_extents and present(block.extent):
            other = newest.get(block.key)
            if other is None or other.epoch < block.epoch:
                newest[block.key] = block
    return list(newest.values())


def _report(found: _Found, held: list[DiskBlock]) -> None:
    lost = len(found.blocks) - len(held)
    if found.unusable or lost:
        _log.warning(
            "a part of the pool's disk is forgotten",
            reason=found.unusable or "extents are gone, or have blocks that others have too",
            blocks_kept=len(held),
            blocks_lost=lost,
        )
    else:
        _log.info("the pool's disk is open", blocks=len(held))
