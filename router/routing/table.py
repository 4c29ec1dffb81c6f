"""The prefix index's memory: who holds each block, one bit per holder, in 40 to 80 bytes per block for 128 holders.

A hash table in two numpy arrays. A block is known by its *print*, the first 8 bytes of its key, which are already
uniformly random: that any two among a million blocks have the same has odds of one in thirty million, and a wrong
answer costs a wrong guess. A print lies in one of two buckets of 8 (half of its bits name one, half the other), so that
a lookup is two cache lines at most, and a removal leaves no trace.

Three methods are hot: they are written in C (`table.c`), and here for machines without a compiler.
"""

import ctypes
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from baton.errors import InvariantError
from baton.hashing import KEY_BYTES

Prints = NDArray[np.uint64]
"""Prints of a chain's blocks, in order."""

Words = NDArray[np.uint64]
"""A set of columns, 64 per word, lowest first."""

Depths = NDArray[np.int32]
"""How many leading blocks each column holds, by column."""

Places = NDArray[np.int64]
"""Positions in a chain, ascending."""

WIDTH = 8
WORD_BITS = 64
_CROWDED = 5
"""With so many entries in a print's first bucket its second one is considered."""

_MAX_FILL = 0.6
_MIN_FILL = 0.3
"""With less of it filled the table does not grow, so that keys that are not random cannot make it."""

_FIRST_BUCKETS = 512


def prints_of(keys: bytes) -> Prints:
    """Prints of keys that stand one after the other."""
    words = np.frombuffer(keys, dtype="<u8").reshape(-1, KEY_BYTES // 8)
    prints: Prints = np.maximum(words[:, 0], np.uint64(1))  # 0 marks an empty place
    return prints


class Memory(ctypes.Structure):
    """A bucket's prints, 0 where empty, stand before its sets: close together, for looking one up is waiting for memory.

    Its counts lie in a record as `table.c` has it.

    Attributes:
        cells: `[buckets + 1, WIDTH * (1 + words)]`; the last bucket stays empty, for blocks that nobody holds.
        prints: `[buckets + 1, WIDTH]`, a view.
        sets: `[buckets + 1, WIDTH, words]`, a view.
        used: Places that hold a print.
        limit: So many may be used before the table has to grow.
    """

    num_words: int
    used: int
    limit: int

    _fields_ = (
        ("cells_address", ctypes.c_void_p),
        ("last_bucket", ctypes.c_uint64),
        ("num_words", ctypes.c_int64),
        ("used", ctypes.c_int64),
        ("limit", ctypes.c_int64),
    )

    def __init__(self, prints: Prints, sets: NDArray[np.uint64], *, used: int, limit: int) -> None:
        super().__init__()
        buckets, self.num_words = len(prints), sets.shape[2]
        self.cells = np.zeros((buckets + 1, WIDTH * (1 + self.num_words)), np.uint64)
        self.prints = self.cells[:, :WIDTH]
        self.sets = self.cells[:, WIDTH:].reshape(buckets + 1, WIDTH, self.num_words)
        self.prints[:-1], self.sets[:-1] = prints, sets
        self.used, self.limit = used, limit
        self.cells_address, self.last_bucket = self.cells.ctypes.data, buckets - 1

    @property
    def num_buckets(self) -> int:
        """A power of two."""
        return len(self.cells) - 1

    @property
    def mask(self) -> np.uint64:
        """What of a number names a bucket."""
        return np.uint64(self.num_buckets - 1)


class HotPart(Protocol):
    """What is done to a `Memory` for every report and every decision."""

    def whole(
        self, memory: Memory, prints: Prints, live: Words, depths: Depths, places: Places | None
    ) -> None:
        """Raises `depths` to how many leading prints each column of `live` holds, where holding one means to hold those
        before it. With `places` only the prints that stand there are looked at.

        Takes time with the logarithm of the chain, for each different depth.
        """

    def ragged(self, memory: Memory, prints: Prints, live: Words, depths: Depths) -> None:
        """The same where that does not follow; `depths` of `live` are 0. Takes time with the chain."""

    def add(self, memory: Memory, prints: Prints, begin: int, column: int) -> int:
        """Adds `column` to the sets of the prints from `begin` on; returns the first one for which there is no place."""

    def discard(self, memory: Memory, prints: Prints, column: int) -> None:
        """Takes `column` out of the sets of all prints; empty sets are forgotten."""


class PlainHotPart:
    """In Python: chains by numpy, single blocks without it, as each is several times faster its own way."""

    def whole(
        self, memory: Memory, prints: Prints, live: Words, depths: Depths, places: Places | None
    ) -> None:
        """See HotPart."""
        blocks = (prints if places is None else prints[places]).tolist()
        # Spans (low, high] of positions with the sets at both ends; -1 stands for the empty chain.
        spans = [(-1, len(blocks), _number(live), 0)]
        while spans:
            low, high, at_low, at_high = spans.pop()
            if not at_low & ~at_high:
                continue
            if high - low == 1:
                columns = bits_of(at_low & ~at_high)
                depth = high if places is None or high == 0 else places[high - 1] + 1
                depths[columns] = np.maximum(depths[columns], depth)
                continue
            middle = low + (high - low) // 2
            place = _find(memory, blocks[middle])
            here = 0 if place is None else at_low & _number(memory.sets[place])
            spans.append((middle, high, here, at_high))
            spans.append((low, middle, at_low, here))

    def ragged(self, memory: Memory, prints: Prints, live: Words, depths: Depths) -> None:
        """See HotPart."""
        common = np.bitwise_and.accumulate(_rows(memory, prints) & live, axis=0)
        # Sets only shrink along the chain: count each distinct one for as many blocks as it lasts.
        (ends,) = np.any(common[1:] != common[:-1], axis=1).nonzero()
        ends = np.append(ends, len(common) - 1)
        lasted = np.diff(ends, prepend=-1).astype(np.int32)
        members = np.unpackbits(common[ends].view(np.uint8), axis=1, bitorder="little")
        depths += lasted @ members.astype(np.int32)

    def add(self, memory: Memory, prints: Prints, begin: int, column: int) -> int:
        """See HotPart."""
        word, bit = divmod(column, WORD_BITS)
        for at, block in enumerate(prints[begin:].tolist(), begin):
            place = _find(memory, block)
            if place is None:
                place = _empty_place(memory, block) if memory.used < memory.limit else None
                if place is None:
                    return at
                memory.prints[place] = block
                memory.used += 1
            memory.sets[(*place, word)] |= np.uint64(1 << bit)
        return len(prints)

    def discard(self, memory: Memory, prints: Prints, column: int) -> None:
        """See HotPart."""
        word, bit = divmod(column, WORD_BITS)
        for block in prints.tolist():
            place = _find(memory, block)
            if place is None:
                continue
            memory.sets[(*place, word)] &= ~np.uint64(1 << bit)
            if not memory.sets[place].any():
                memory.prints[place] = 0
                memory.used -= 1


def bits_of(columns: int) -> list[int]:
    """The members of a set of columns."""
    found: list[int] = []
    while columns:
        lowest = columns & -columns
        found.append(lowest.bit_length() - 1)
        columns ^= lowest
    return found


def _number(columns: Words) -> int:
    return int.from_bytes(columns.tobytes(), "little")


def _rows(memory: Memory, prints: Prints) -> NDArray[np.uint64]:
    """The sets of `prints`; all zero where nobody holds it."""
    buckets, places = np.full(len(prints), memory.num_buckets), np.zeros(len(prints), np.intp)
    for half in (np.uint64(0), np.uint64(32)):
        (rest,) = (buckets == memory.num_buckets).nonzero()
        bucket = (prints[rest] >> half) & memory.mask
        row, at = (memory.prints[bucket] == prints[rest, None]).nonzero()
        buckets[rest[row]], places[rest[row]] = bucket[row], at
    sets: NDArray[np.uint64] = memory.sets[buckets, places]
    return sets


def _buckets(memory: Memory, block: int) -> tuple[int, int]:
    mask = memory.num_buckets - 1
    return block & mask, block >> 32 & mask


def _find(memory: Memory, block: int) -> tuple[int, int] | None:
    for bucket in _buckets(memory, block):
        prints = memory.prints[bucket].tolist()
        if block in prints:
            return bucket, prints.index(block)
    return None


def _empty_place(memory: Memory, block: int) -> tuple[int, int] | None:
    """In the first of its buckets, or in the second if the first is crowded and the second is emptier."""
    bucket, other = _buckets(memory, block)
    prints, others = memory.prints[bucket].tolist(), memory.prints[other].tolist()
    if prints.count(0) <= WIDTH - _CROWDED and others.count(0) > prints.count(0):
        bucket, prints = other, others
    return (bucket, prints.index(0)) if 0 in prints else None


class BlockTable:
    """Sets of columns (holders) by print.

    Args:
        max_blocks: Prints held at most.
        hot: Who does the hot part.
        num_columns: Columns to begin with, a multiple of 64.
    """

    def __init__(self, *, max_blocks: int, hot: HotPart, num_columns: int = WORD_BITS) -> None:
        self._max_blocks = max_blocks
        self._hot = hot
        prints = np.zeros((_FIRST_BUCKETS, WIDTH), np.uint64)
        sets = np.zeros((*prints.shape, num_columns // WORD_BITS), np.uint64)
        self._memory = self._made_of(prints, sets, 0)

    def __len__(self) -> int:
        return self._memory.used

    @property
    def num_columns(self) -> int:
        """Columns there is room for."""
        return int(self._memory.num_words * WORD_BITS)

    @property
    def size_bytes(self) -> int:
        """Memory taken."""
        return self._memory.cells.nbytes

    def widen(self) -> None:
        """Makes room for 64 more columns."""
        memory = self._memory
        sets = np.pad(memory.sets[:-1], ((0, 0), (0, 0), (0, 1)))
        self._memory = self._made_of(memory.prints[:-1], sets, memory.used)

    def add(self, prints: Prints, column: int) -> int:
        """Adds `column` to the sets of all `prints`; returns how many found no room."""
        done, lost = 0, 0
        while (done := self._hot.add(self._memory, prints, done, column)) < len(prints):
            if not self._grow():
                done, lost = done + 1, lost + 1
        return lost

    def discard(self, prints: Prints, column: int) -> None:
        """Takes `column` out of the sets of all `prints`; empty sets are forgotten."""
        self._hot.discard(self._memory, prints, column)

    def depths(self, prints: Prints, whole: Words, ragged: Words | None) -> Depths:
        """How many leading blocks of a chain, not empty, the columns hold.

        Args:
            prints: Of the chain.
            whole: Columns of which it is known that to hold a block is to hold those before it.
            ragged: Other columns, if there are any.
        """
        depths = np.zeros(self.num_columns, np.int32)
        self._hot.whole(self._memory, prints, whole, depths, None)
        if ragged is not None:
            self._hot.ragged(self._memory, prints, ragged, depths)
        return depths

    def deepen(self, depths: Depths, prints: Prints, whole: Words, places: Places) -> None:
        """Raises `depths` to what the table knows of the columns `whole`, where of a chain only the prints at `places` are
        in the table.
        """
        self._hot.whole(self._memory, prints, whole, depths, places)

    def keep_columns(self, live: Words) -> None:
        """Takes every column that is not in `live` out of all sets, and forgets empty ones. Looks at the whole table."""
        memory = self._memory
        memory.sets &= live
        memory.prints[~memory.sets.any(axis=2)] = 0
        memory.used = int(np.count_nonzero(memory.prints))

    def check_integrity(self) -> None:
        """Raises `InvariantError` when a print is not where it belongs or an empty place holds bits."""
        memory = self._memory
        buckets, places = memory.prints.nonzero()
        prints = memory.prints[buckets, places]
        first, second = prints & memory.mask, (prints >> np.uint64(32)) & memory.mask
        if not ((buckets == first) | (buckets == second)).all():
            raise InvariantError("a block lies in a bucket that is not its own")
        if len(prints) != memory.used or len(np.unique(prints)) != memory.used:
            raise InvariantError(f"{len(prints)} blocks, counted {memory.used}")
        if not np.array_equal(memory.sets.any(axis=2), memory.prints != 0):
            raise InvariantError("a block without holder, or a holder without block")

    def _made_of(self, prints: Prints, sets: NDArray[np.uint64], used: int) -> Memory:
        limit = min(int(prints.size * _MAX_FILL), self._max_blocks)
        return Memory(prints, sets, used=used, limit=limit)

    def _grow(self) -> bool:
        """Doubles the table if that is of use. Every bucket is split by the next bit of what named it, so that each entry
        keeps its place within the bucket.
        """
        memory, old = self._memory, self._memory.prints[:-1]
        if not old.size * _MIN_FILL <= memory.used < self._max_blocks:
            return False
        is_first = old & memory.mask == np.arange(len(old), dtype=np.uint64)[:, None]
        namer = np.where(is_first, old, old >> np.uint64(32))
        moves = (namer & np.uint64(memory.num_buckets)) != 0
        leaves = np.concatenate([moves, ~moves])
        prints, sets = np.tile(old, (2, 1)), np.tile(memory.sets[:-1], (2, 1, 1))
        prints[leaves] = 0
        sets[leaves] = 0
        self._memory = self._made_of(prints, sets, memory.used)
        return True
