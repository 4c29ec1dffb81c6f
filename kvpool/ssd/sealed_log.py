"""Records one after the other in a file, each sealed with the hash of itself and of all before it.

    length (4) | seal (8) | record …        little-endian; seal = xxh3(record, seeded with the seal of the record before)

So a record counts only where it was written: what is left of an older file, or of a longer record that was not finished, never
reads as a record, and with one that is damaged everything after it is void.
"""

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import xxhash

from kvpool.ssd.raw_file import RawFile

_HEAD = struct.Struct("<IQ")
_LONGEST = 1 << 20
_TURN_BYTES = 1 << 20
_FIRST_SEAL = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
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
        last: Its last record that counts, of `num_records`; what follows is cut off. None: the file begins with nothing in it.
        num_records: How many count.
    """

    def __init__(self, path: Path, last: Frame | None = None, num_records: int = 0) -> None:
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


def frames(file: BinaryIO) -> Iterator[Frame]:
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
        yield Frame(record=record, end=end, seal=seal)
