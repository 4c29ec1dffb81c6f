"""The prefix index's memory: who holds each block, one bit per holder, in about 50 bytes per block for 128 holders.

A hash table in two numpy arrays. A block is known by its *print*, the first 8 bytes of its key, which are already
uniformly random: two equal prints among a million blocks have odds of one in thirty million, and a wrong answer costs a
wrong guess. A print lies in one of two buckets of 8 (half of its bits name one, half the other), so that a lookup is at
most two cache lines and a removal leaves no trace. Whole chains are looked up by numpy, single blocks changed without
it: each is several times faster its own way.
"""

import numpy as np
from numpy.typing import NDArray

from baton.errors import InvariantError
from baton.hashing import KEY_BYTES

Prints = NDArray[np.uint64]
"""Prints of a chain's blocks, in order."""

_WIDTH = 8
_WORD_BITS = 64
_CROWDED = 5
"""So many entries in a print's first bucket, and its second one is considered."""

_MAX_FILL = 0.6
_MIN_FILL = 0.3
"""With less of it filled the table does not grow, so that keys that are not random cannot make it."""

_FIRST_BUCKETS = 512


def prints_of(keys: bytes) -> Prints:
    """Prints of keys that stand one after the other."""
    words = np.frombuffer(keys, dtype="<u8").reshape(-1, KEY_BYTES // 8)
    prints: Prints = np.maximum(words[:, 0], np.uint64(1))  # 0 marks an empty place
    return prints


class BlockTable:
    """Sets of columns (holders) by print.

    Args:
        max_blocks: Prints held at most, about.
    """

    def __init__(self, *, max_blocks: int) -> None:
        self._max_buckets = max(
            _FIRST_BUCKETS, 1 << (int(max_blocks / _WIDTH / _MAX_FILL)).bit_length()
        )
        self._max_blocks = max_blocks
        self._num_words = 1
        self._len = 0
        self._keep(
            np.zeros(_FIRST_BUCKETS * _WIDTH, np.uint64),
            np.zeros(((_FIRST_BUCKETS + 1) * _WIDTH, 1), np.uint64),
        )

    def __len__(self) -> int:
        return self._len

    @property
    def num_columns(self) -> int:
        """Columns there is room for."""
        return self._num_words * _WORD_BITS

    @property
    def size_bytes(self) -> int:
        """Memory taken."""
        return int(self._prints.nbytes + self._bits.nbytes)

    def widen(self) -> None:
        """Makes room for 64 more columns."""
        self._num_words += 1
        self._keep(self._prints, np.pad(self._bits, ((0, 0), (0, 1))))

    def add(self, prints: Prints, column: int) -> int:
        """Adds `column` to the sets of all `prints`; returns how many found no room."""
        word, bit = divmod(column, _WORD_BITS)
        lost = 0
        for block in prints.tolist():
            place = self._find(block)
            if place < 0:
                place = self._insert(block)
            if place < 0:
                lost += 1
            else:
                self._bits_view[place, word] |= 1 << bit
        return lost

    def discard(self, prints: Prints, column: int) -> None:
        """Takes `column` out of the sets of all `prints`; empty sets are forgotten."""
        word, bit = divmod(column, _WORD_BITS)
        keep = ~(1 << bit)
        view, words = self._bits_view, range(self._num_words)
        for block in prints.tolist():
            place = self._find(block)
            if place < 0:
                continue
            view[place, word] &= keep
            if not any(view[place, each] for each in words):
                self._prints_view[place] = 0
                self._len -= 1

    def rows(self, prints: Prints) -> NDArray[np.uint64]:
        """The sets of `prints` as rows of 64-bit words; all zero where nobody holds it."""
        buckets = self._prints.reshape(-1, _WIDTH)
        places = np.full(
            len(prints), len(self._prints)
        )  # behind the last bucket all sets are empty
        first = prints & self._mask
        row, at = (buckets.take(first, axis=0, mode="clip") == prints[:, None]).nonzero()
        places[row] = first[row] * _WIDTH + at
        (rest,) = (places == len(self._prints)).nonzero()
        if len(rest):
            second = (prints[rest] >> np.uint64(32)) & self._mask
            row, at = (buckets.take(second, axis=0, mode="clip") == prints[rest, None]).nonzero()
            places[rest[row]] = second[row] * _WIDTH + at
        return self._bits.take(places, axis=0, mode="clip")

    def keep_columns(self, live: NDArray[np.uint64]) -> None:
        """Takes every column that is not in `live` out of all sets, and forgets empty ones. Looks at the whole table."""
        self._bits &= live
        gone = ~self._bits[: len(self._prints)].any(axis=1)
        self._prints[gone] = 0
        self._len = len(self._prints) - int(np.count_nonzero(gone))

    def check_integrity(self) -> None:
        """Raises `InvariantError` when a print is not where it belongs or an empty place holds bits."""
        (places,) = self._prints.nonzero()
        prints = self._prints[places]
        buckets = (places // _WIDTH).astype(np.uint64)
        first, second = prints & self._mask, (prints >> np.uint64(32)) & self._mask
        if not ((buckets == first) | (buckets == second)).all():
            raise InvariantError("a block lies in a bucket that is not its own")
        if len(places) != self._len or len(np.unique(prints)) != self._len:
            raise InvariantError(f"{len(places)} blocks, counted {self._len}")
        if not np.array_equal(np.flatnonzero(self._bits.any(axis=1)), places):
            raise InvariantError("a block without holder, or a holder without block")

    def _keep(self, prints: NDArray[np.uint64], bits: NDArray[np.uint64]) -> None:
        self._prints, self._bits = prints, bits
        self._prints_view, self._bits_view = memoryview(prints), memoryview(bits)  # type: ignore[arg-type]
        self._num_buckets = len(prints) // _WIDTH
        self._mask = np.uint64(self._num_buckets - 1)

    def _find(self, block: int) -> int:
        mask = self._num_buckets - 1
        for start in ((block & mask) * _WIDTH, (block >> 32 & mask) * _WIDTH):
            bucket = self._prints_view[start : start + _WIDTH].tolist()
            if block in bucket:
                return start + bucket.index(block)
        return -1

    def _insert(self, block: int) -> int:
        """A place for a print that is not here: in the emptier of its buckets; -1 when there is none."""
        if self._len >= self._num_buckets * _WIDTH * _MAX_FILL:
            self._grow()
        if self._len >= self._max_blocks:
            return -1
        place = self._empty_place(block)
        if place < 0 and self._len >= self._num_buckets * _WIDTH * _MIN_FILL and self._grow():
            place = self._empty_place(block)
        if place >= 0:
            self._prints_view[place] = block
            self._len += 1
        return place

    def _empty_place(self, block: int) -> int:
        mask = self._num_buckets - 1
        start = (block & mask) * _WIDTH
        bucket = self._prints_view[start : start + _WIDTH].tolist()
        if _WIDTH - bucket.count(0) >= _CROWDED:
            other = (block >> 32 & mask) * _WIDTH
            others = self._prints_view[other : other + _WIDTH].tolist()
            if others.count(0) > bucket.count(0):
                start, bucket = other, others
        return start + bucket.index(0) if 0 in bucket else -1

    def _grow(self) -> bool:
        """Doubles the table, unless it is as large as it may get. Every bucket is split by the next bit of what named it,
        so that each entry keeps its place within the bucket.
        """
        if self._num_buckets >= self._max_buckets:
            return False
        old, bits, size = self._prints, self._bits[:-_WIDTH], len(self._prints)
        buckets = (np.arange(size) // _WIDTH).astype(np.uint64)
        namer = np.where(old & self._mask == buckets, old, old >> np.uint64(32))
        upper = (namer & np.uint64(self._num_buckets)) != 0
        halves = (~upper & (old != 0), upper & (old != 0))
        prints = np.concatenate([np.where(half, old, np.uint64(0)) for half in halves])
        end = np.zeros((_WIDTH, self._num_words), np.uint64)
        parts = [np.where(half[:, None], bits, np.uint64(0)) for half in halves]
        self._keep(prints, np.concatenate([*parts, end]))
        return True
