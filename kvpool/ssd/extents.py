"""Where the bytes of blocks lie: extents of one size,
spread over a few files so that writes do not wait for each other.

    extent      header (one page of 4 KiB) | the block's bytes, its layers one after the other | up to a multiple of 4 KiB
    file f      extents f, f + 8, f + 16, …      as far as they were ever needed: room is taken in steps and never given back

The header says which block it is and of which use of the extent, so that a journal that is older or newer than the
bytes is found out when they are read. What is read is hashed, layer by layer, where it has arrived.
"""

import struct
from pathlib import Path
from threading import Lock

import xxhash

from baton.errors import CorruptKvError
from kvpool.messages import DiskBlock
from kvpool.ssd.journal import VERSION
from kvpool.ssd.raw_file import RawFile

_NUM_FILES = 8
_PAGE_BYTES = 4096
_STEP_BYTES = 64 << 20
_CHECKSUM_BYTES = 8

_MAGIC = b"BATONEXT"
_HEADER = struct.Struct("<8sIQQQQ")


def extent_bytes(slot_bytes: int) -> int:
    """What one extent takes of the disk."""
    return _PAGE_BYTES - (-slot_bytes // _PAGE_BYTES) * _PAGE_BYTES


class Extents:
    """The files. Calls about different extents may come from different threads at once.

    Args:
        folder: Where the files are.
        num_extents: How many there may be.
        slot_bytes: The size of the largest block.

    Raises:
        OSError: A file cannot be opened.
    """

    def __init__(self, folder: Path, num_extents: int, slot_bytes: int) -> None:
        self._extent_bytes = extent_bytes(slot_bytes)
        self._slot_bytes = slot_bytes
        self._num_extents = num_extents
        self._files: list[_GrowingFile] = []
        try:
            for number in range(_NUM_FILES):
                self._files.append(_GrowingFile(folder / f"extents.{number}"))
        except OSError:
            self.close()
            raise

    def present(self, extent: int) -> bool:
        """Whether its file reaches that far."""
        file, begin = self._place(extent)
        return file.reaches >= begin + self._extent_bytes

    def write(self, block: DiskBlock, data: memoryview) -> None:
        """Puts a block where it belongs, over whatever is there.

        Raises:
            CorruptKvError: It has other bytes or checksums than a block has.
            OSError: The disk fails or has no room; the extent may hold anything.
        """
        self._check(block, data)
        file, begin = self._place(block.extent)
        end = begin + self._extent_bytes
        if file.reaches < end:
            file.reach(end, at_most=self._step(block.extent) * self._extent_bytes)
        header = _header(block).ljust(_PAGE_BYTES, b"\0")
        file.raw.write_at(begin, header, data[: block.size_bytes])
        file.raw.not_again_soon(begin, self._extent_bytes)

    def read(self, block: DiskBlock, into: memoryview) -> None:
        """Copies a block to the beginning of `into`, which has anything in it if this raises.

        Raises:
            CorruptKvError: The extent has another block, or other bytes.
            OSError: The disk fails.
        """
        self._check(block, into)
        file, begin = self._place(block.extent)
        header, data = bytearray(_PAGE_BYTES), into[: block.size_bytes]
        done = file.raw.read_at(begin, header, data)
        file.raw.not_again_soon(begin, self._extent_bytes)
        if done < _PAGE_BYTES + block.size_bytes:
            raise CorruptKvError(f"extent {block.extent}: its file ends before it does")
        if header[: _HEADER.size] != _header(block):
            raise CorruptKvError(f"extent {block.extent}: it has another block, or none")
        _verify(block, data)

    def close(self) -> None:
        """Lets go of the files."""
        for file in self._files:
            file.raw.close()

    def _place(self, extent: int) -> tuple["_GrowingFile", int]:
        index, number = divmod(extent, _NUM_FILES)
        return self._files[number], index * self._extent_bytes

    def _step(self, extent: int) -> int:
        # How many extents the file should have, now that it needs this one.
        index, number = divmod(extent, _NUM_FILES)
        of_file = -(-(self._num_extents - number) // _NUM_FILES)
        return min(index + 1 + _STEP_BYTES // self._extent_bytes, of_file)

    def _check(self, block: DiskBlock, data: memoryview) -> None:
        num_layers, odd = divmod(len(block.checksums), _CHECKSUM_BYTES)
        if odd or not num_layers or block.size_bytes % num_layers:
            raise CorruptKvError(f"extent {block.extent}: {num_layers} checksums do not fit")
        if block.size_bytes > min(len(data), self._slot_bytes):
            raise CorruptKvError(f"extent {block.extent}: a block of {block.size_bytes} bytes")


class _GrowingFile:
    """Knows how far it reaches, so that the system is asked for room only where there is none yet."""

    def __init__(self, path: Path) -> None:
        self.raw = RawFile(path)
        self.reaches = self.raw.size_bytes
        self._lock = Lock()

    def reach(self, end: int, at_most: int) -> None:
        with self._lock:
            if self.reaches >= end:
                return
            try:
                self.raw.allocate(self.reaches, at_most)
                self.reaches = at_most
            except OSError:
                # Less than a step may be left, and enough for this block.
                self.raw.allocate(self.reaches, end)
                self.reaches = end


def _header(block: DiskBlock) -> bytes:
    names = xxhash.xxh3_64_intdigest(block.key + block.checksums)
    fields = (VERSION, block.extent, block.epoch, block.size_bytes, names)
    return _HEADER.pack(_MAGIC, *fields)


def _verify(block: DiskBlock, data: memoryview) -> None:
    num_layers = len(block.checksums) // _CHECKSUM_BYTES
    layer_bytes = len(data) // num_layers
    for index, said in enumerate(struct.unpack(f"<{num_layers}Q", block.checksums)):
        layer = data[index * layer_bytes : (index + 1) * layer_bytes]
        if xxhash.xxh3_64_intdigest(layer) != said:
            raise CorruptKvError(f"extent {block.extent}: layer {index} has other bytes")
