"""The journal of the disk tier: which extent holds which block, also after the process was killed;
and what a restart finds.

Records stand one after the other in a file, one per change, each sealed with the hash of itself and of all before it:

    length (4) | seal (8) | record …        little-endian; seal = xxh3(record, seeded with the seal of the record before)

    begins   kind | "BATONSSD" | version (4) | bytes of a slot (8) | 16 random bytes
    holds    kind | extent (8) | epoch (8) | bytes (8) | position (8) | 5 lengths (2 each) | key | tenant | scope | model | checksums
    erased   kind | extent (8) | epoch (8)
    flushed  kind | number of the latest flush (8) | its directory (16)

A record counts only where it was written: what is left of an older file, or of a longer record that was not finished,
never reads as a record, and with one that is damaged everything after it is void.
Nothing in a record is ever run or unpickled.

A record is written when the bytes it speaks of are, and an extent's erasure before other bytes go there. So at whatever
moment a process dies, the file has the beginning of what it did, and the last record may be torn: it does not count.
What is forgotten has its erasure on the disk at once, also where its bytes are still being written: those get no record.
A flush is recorded after the erasures that it takes: where its number is found, none of its blocks is.

Once there are three records per extent, those that count are written to a file beside,
which then takes the journal's name.

At a restart only the journal is read (`recover`). Whether an extent has the bytes that the journal says is seen when
its block is read. ADR 0014 says why this is not a database.
"""

import errno
import os
import struct
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain
from pathlib import Path
from threading import Lock
from typing import BinaryIO

import xxhash

from baton.hashing import KEY_BYTES
from baton.ids import BlockKey
from baton.telemetry.logs import get_logger
from kvpool.messages import DiskBlock, Erase, FlushMark, Owner
from kvpool.ssd.raw_file import RawFile, sync_directory

VERSION = 1
"""Of these records, and of how blocks lie in extents."""

_BEGINS, _HOLDS, _ERASED, _FLUSHED = 0, 1, 2, 3
_MAGIC = b"BATONSSD"
_LONGEST_PART = 0xFFFF
_LARGEST = (1 << 63) - 1
"""Of all numbers in records that are not lengths."""


_BEGIN_RECORD = struct.Struct("<B8sIQ16s")
_HOLDS_HEAD = struct.Struct("<BQQQQ5H")
_ERASED_RECORD = struct.Struct("<BQQ")
_FLUSHED_RECORD = struct.Struct("<BQ16s")

_HEAD = struct.Struct("<IQ")
_LONGEST = 1 << 20
_TURN_BYTES = 1 << 20
_FIRST_SEAL = 0

_NOTHING = -1
_MOST_RECORDS_PER_EXTENT = 3
_READ_BYTES = 1 << 20

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Begins:
    """The first record of a journal.

    Attributes:
        version: Of what follows.
        slot_bytes: The size of the largest block.
    """

    version: int
    slot_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Erased:
    """An extent holds nothing from here on, if it held a block of that epoch.

    Attributes:
        extent: Index of the extent.
        epoch: Of the use that is over.
    """

    extent: int
    epoch: int


Record = Begins | DiskBlock | Erased | FlushMark


def encode_begins(slot_bytes: int) -> bytes:
    """The first record of a new journal; no two are the same."""
    return _BEGIN_RECORD.pack(_BEGINS, _MAGIC, VERSION, slot_bytes, os.urandom(16))


def encode_holds(block: DiskBlock) -> bytes:
    """An extent holds `block` from here on.

    Raises:
        OSError: Its owner has a name, or it has more layers, than a record has room for (`ENAMETOOLONG`).
    """
    owner = block.owner
    names = [_encoded(name) for name in (owner.tenant, owner.scope, owner.model)]
    parts = [block.key, *names, block.checksums]
    if max(map(len, parts)) > _LONGEST_PART:
        raise OSError(errno.ENAMETOOLONG, "the block's owner or checksums are too long to record")
    head = _HOLDS_HEAD.pack(
        _HOLDS, block.extent, block.epoch, block.size_bytes, block.position, *map(len, parts)
    )
    return head + b"".join(parts)


def encode_erased(erased: Erased) -> bytes:
    """An extent holds nothing from here on."""
    return _ERASED_RECORD.pack(_ERASED, erased.extent, erased.epoch)


def encode_flushed(mark: FlushMark) -> bytes:
    """What the flushes up to that of `mark` cover was erased before this."""
    return _FLUSHED_RECORD.pack(_FLUSHED, mark.number, mark.directory)


def decode(record: bytes) -> Record | None:
    """What a record says; None where this version of the code does not know."""
    kind = record[0] if record else None
    if kind == _HOLDS and len(record) >= _HOLDS_HEAD.size:
        return _decode_holds(record)
    if kind == _ERASED and len(record) == _ERASED_RECORD.size:
        _, extent, epoch = _ERASED_RECORD.unpack(record)
        if max(extent, epoch) > _LARGEST:
            return None
        return Erased(extent=extent, epoch=epoch)
    if kind == _FLUSHED and len(record) == _FLUSHED_RECORD.size:
        _, number, directory = _FLUSHED_RECORD.unpack(record)
        return FlushMark(directory=directory, number=number) if number <= _LARGEST else None
    if kind == _BEGINS and len(record) == _BEGIN_RECORD.size:
        _, magic, version, slot_bytes, _ = _BEGIN_RECORD.unpack(record)
        return Begins(version=version, slot_bytes=slot_bytes) if magic == _MAGIC else None
    return None


def _decode_holds(record: bytes) -> DiskBlock | None:
    _, extent, epoch, size_bytes, position, *lengths = _HOLDS_HEAD.unpack_from(record)
    if len(record) != _HOLDS_HEAD.size + sum(lengths) or lengths[0] != KEY_BYTES:
        return None
    if max(extent, epoch, size_bytes, position) > _LARGEST:
        return None
    parts, begin = [], _HOLDS_HEAD.size
    for length in lengths:
        parts.append(record[begin : begin + length])
        begin += length
    key, tenant, scope, model, checksums = parts
    try:
        owner = _owner(tenant, scope, model)
    except UnicodeDecodeError:
        return None
    return DiskBlock(
        extent=extent,
        epoch=epoch,
        key=BlockKey(key),
        owner=owner,
        size_bytes=size_bytes,
        position=position,
        checksums=checksums,
    )


@lru_cache(maxsize=4096)
def _owner(tenant: bytes, scope: bytes, model: bytes) -> Owner:
    # A disk holds many blocks of few owners.
    return Owner(tenant=_decoded(tenant), scope=_decoded(scope), model=_decoded(model))


def _encoded(name: str) -> bytes:
    return name.encode("utf-8", "surrogatepass")


def _decoded(name: bytes) -> str:
    return name.decode("utf-8", "surrogatepass")


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalFrame:
    """A record where it stands in a file.

    Attributes:
        record: Its bytes.
        end: Where the next one begins.
        seal: That seeds the next one's.
    """

    record: bytes
    end: int
    seal: int


class SealedLog:
    """Such a file, to be written at its end. Every method may raise `OSError`; not thread-safe.

    Args:
        path: Of the file.
        last: Its last record that counts, of `num_records`; what follows is cut off. None:
            the file begins with nothing in it.
        num_records: How many count.
    """

    def __init__(self, path: Path, last: JournalFrame | None = None, num_records: int = 0) -> None:
        self._file = RawFile(path, empty=last is None)
        self._end, self._seal = (last.end, last.seal) if last is not None else (0, _FIRST_SEAL)
        self._num_records = num_records
        if self._file.size_bytes > self._end:
            self._file.cut(self._end)

    def __len__(self) -> int:
        return self._num_records

    @property
    def size_bytes(self) -> int:
        """Of all records, with their seals."""
        return self._end

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return self._file.closed

    def append(self, *records: bytes) -> None:
        """Writes records. If this raises, they do not count, and the next ones take their place."""
        self.extend(records)

    def extend(self, records: Iterable[bytes]) -> None:
        """Writes records in turns of a bounded size; if this raises, those of some turns may count."""
        turn, seal, count = bytearray(), self._seal, 0
        for record in records:
            seal = xxhash.xxh3_64_intdigest(record, seal)
            turn += _HEAD.pack(len(record), seal) + record
            count += 1
            if len(turn) >= _TURN_BYTES:
                self._write(turn, seal, count)
                turn, count = bytearray(), 0
        self._write(turn, seal, count)

    def sync(self) -> None:
        """Returns once all of it is on the disk, whatever happens to the power."""
        self._file.sync()

    def close(self) -> None:
        """Lets go of the file."""
        self._file.close()

    def _write(self, turn: bytearray, seal: int, count: int) -> None:
        self._file.write_at(self._end, turn)
        self._end += len(turn)
        self._seal = seal
        self._num_records += count


def frames(file: BinaryIO) -> Iterator[JournalFrame]:
    """The records from the beginning of `file` to its end, or to the first that is not whole and sound.

    Raises:
        OSError: The file cannot be read.
    """
    end, seal = 0, _FIRST_SEAL
    while len(head := file.read(_HEAD.size)) == _HEAD.size:
        length, said = _HEAD.unpack(head)
        record = file.read(length) if length <= _LONGEST else b""
        seal = xxhash.xxh3_64_intdigest(record, seal)
        if len(record) != length or seal != said:
            return
        end += _HEAD.size + length
        yield JournalFrame(record=record, end=end, seal=seal)


class Journal:
    """The file while blocks come and go. Its methods may be called from any thread;
    a call may wait for a rewrite of the file.

    Args:
        path: Of the file.
        log: The same, open.
        slot_bytes: The size of the largest block.
        num_extents: How many there are.
        held: What the file says they hold.
        mark: The last one in the file.
    """

    def __init__(
        self,
        path: Path,
        log: SealedLog,
        *,
        slot_bytes: int,
        num_extents: int,
        held: Iterable[DiskBlock],
        mark: FlushMark | None,
    ) -> None:
        self._path = path
        self._log = log
        self._slot_bytes = slot_bytes
        self._lock = Lock()
        self._epochs = array("q", [_NOTHING]) * num_extents
        self._owed: dict[int, int] = {}
        # By extent, epochs of blocks that may still be being written.
        self._forgotten: dict[int, int] = {}
        self._mark, self._recorded_mark = mark, mark
        self._compacts_above = _MOST_RECORDS_PER_EXTENT * num_extents
        for block in held:
            self._epochs[block.extent] = block.epoch

    @property
    def flush_mark(self) -> FlushMark | None:
        """The last one that was recorded."""
        return self._recorded_mark

    def wrote(self, block: DiskBlock) -> None:
        """A block's bytes are in its extent. Those of one that was forgotten meanwhile are not recorded.

        Raises:
            OSError: That could not be recorded; after a restart the extent holds nothing.
        """
        with self._lock:
            self._pay()
            if self._forgotten.pop(block.extent, None) == block.epoch:
                return
            self._log.append(encode_holds(block))
            self._epochs[block.extent] = block.epoch
            self._compact_if_due()

    def erase(self, extent: int, epoch: int) -> None:
        """An extent holds nothing any more, if it held a block of that epoch.

        Raises:
            OSError: That could not be recorded yet; it will be before anything else is.
        """
        with self._lock:
            if self._epochs[extent] == epoch:
                self._let_go(extent)
            self._pay()
            self._compact_if_due()

    def forget(self, erased: Iterable[Erase], mark: FlushMark | None = None) -> None:
        """Extents hold nothing any more, if they held a block of that epoch, or one is being written there; returns
        once that is on the disk, and `mark` after it, whatever happens to the power.

        Raises:
            OSError: That could not be recorded yet, or may not be on the disk; it will be recorded before anything else.
        """
        with self._lock:
            for each in erased:
                if self._epochs[each.extent] == each.epoch:
                    self._let_go(each.extent)
                else:
                    self._forgotten[each.extent] = each.epoch
            self._mark = mark or self._mark
            self._pay()
            self._log.sync()
            self._compact_if_due()

    def vacate(self, extent: int) -> None:
        """Other bytes are about to be written to an extent, whatever it held.

        Raises:
            OSError: That could not be recorded; the extent is not to be written to.
        """
        with self._lock:
            if self._epochs[extent] != _NOTHING:
                self._let_go(extent)
            self._pay()

    def close(self) -> None:
        """Lets go of the file, once it is on the disk or that has failed (`OSError`). A second time has no effect."""
        with self._lock:
            if self._log.closed:
                return
            try:
                self._log.sync()
            finally:
                self._log.close()

    def _let_go(self, extent: int) -> None:
        self._owed[extent] = self._epochs[extent]
        self._epochs[extent] = _NOTHING

    def _pay(self) -> None:
        self._log.extend(
            encode_erased(Erased(extent=extent, epoch=epoch))
            for extent, epoch in self._owed.items()
        )
        self._owed.clear()
        if self._mark is not None and self._mark != self._recorded_mark:
            self._log.append(encode_flushed(self._mark))
            self._recorded_mark = self._mark

    def _compact_if_due(self) -> None:
        if len(self._log) <= self._compacts_above:
            return
        try:
            log = begin_log(self._path, self._slot_bytes, self._records_that_count())
        except OSError as error:
            self._compacts_above = 2 * len(self._log)
            _log.warning("the journal of the pool's disk stays long", reason=str(error))
            return
        self._log, old = log, self._log
        self._compacts_above = _MOST_RECORDS_PER_EXTENT * len(self._epochs)
        old.close()

    def _records_that_count(self) -> Iterator[bytes]:
        # An extent's epochs may repeat after a restart. The order stays,
        # so the last record is the one that counts again.
        end = 0
        yield from _marked(self._recorded_mark)
        with self._path.open("rb", buffering=_READ_BYTES) as file:
            for frame in frames(file):
                block, end = decode(frame.record), frame.end
                if isinstance(block, DiskBlock) and self._epochs[block.extent] == block.epoch:
                    yield frame.record
        if end != self._log.size_bytes:
            raise OSError(errno.EIO, "the journal does not read as it was written")


def _marked(mark: FlushMark | None) -> Iterator[bytes]:
    if mark is not None:
        yield encode_flushed(mark)


def begin_log(path: Path, slot_bytes: int, records: Iterable[bytes]) -> SealedLog:
    """Writes a journal beside the one at `path`, which it then replaces:
    at any moment there is the one or the other, whole.

    Raises:
        OSError: It could not be written; the journal at `path` is as it was.
    """
    beside = path.with_suffix(".new")
    log = SealedLog(beside)
    try:
        log.extend(chain((encode_begins(slot_bytes),), records))
        log.sync()
        os.replace(beside, path)
    except OSError:
        log.close()
        beside.unlink(missing_ok=True)
        raise
    try:
        sync_directory(path.parent)
    except OSError as error:
        # A power loss may bring the old one back, which has other bytes in its extents than it says: those are misses.
        _log.warning("the new journal may be lost with the power", reason=str(error))
    return log


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
    fitting = [block for block in found.blocks.values() if block.size_bytes <= slot_bytes]
    held = _usable(fitting, present, num_extents)
    if found.last is None or len(held) < len(found.blocks):
        log = begin_log(path, slot_bytes, chain(_marked(found.mark), map(encode_holds, held)))
    else:
        log = SealedLog(path, found.last, found.num_records)
    _report(found, held)
    journal = Journal(
        path, log, slot_bytes=slot_bytes, num_extents=num_extents, held=held, mark=found.mark
    )
    return journal, held


@dataclass(slots=True, eq=False)
class _Found:
    """A journal as it was read.

    Attributes:
        blocks: By extent.
        last: The last record that counts; None if none does.
        num_records: How many count.
        mark: The last one.
        unusable: Why none of it counts, or why what follows `last` does not.
    """

    blocks: dict[int, DiskBlock] = field(default_factory=dict)
    last: JournalFrame | None = None
    num_records: int = 0
    mark: FlushMark | None = None
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


def _take(found: _Found, frame: JournalFrame, slot_bytes: int) -> str:
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
        case FlushMark() if found.last is not None:
            found.mark = record
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
