"""The prefix index's memory: who holds each block, one bit per holder, in 40 to 80 bytes per block for 128 holders.

A hash table (`router.routing.memory`) that grows and widens. What is done to it for every report and every decision is
written twice: in C (`table.c`), and for machines without a compiler in Python (`router.routing.plain_table`).
"""

from typing import Protocol

import numpy as np

from baton.errors import InvariantError
from router.routing.held import HeldBySlot
from router.routing.memory import WIDTH, WORD_BITS, Memory, Places, Prints, Words
from router.routing.sources import Sources

_MAX_FILL = 0.6
_MIN_FILL = 0.3
"""With less of it filled the table does not grow, so that keys that are not random cannot make it."""

_FIRST_BUCKETS = 512


class HotPart(Protocol):
    """What is done for every report and every decision."""

    def held(
        self, sources: Sources, prints: Prints, noted: Places | None, unit: int, held: HeldBySlot
    ) -> None:
        """Writes to `held` how many leading blocks of a chain, not empty, each holder has reported, or is expected to
        have by the notes that stand at the places `noted`; a block counts for `unit`. Who has none is left out.

        Takes time with the logarithm of the chain, for each different depth; where columns are ragged, with the chain.
        """

    def add(
        self, memory: Memory, prints: Prints, noted: Places | None, begin: int, column: int
    ) -> int:
        """Adds `column` to the sets of the prints, or of those at the places `noted`, from the one numbered `begin` on;
        returns the first one for which there is no place.
        """

    def discard(self, memory: Memory, prints: Prints, column: int) -> None:
        """Takes `column` out of the sets of all prints; empty sets are forgotten."""


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
        self.memory = Memory(
            num_buckets=_FIRST_BUCKETS,
            num_words=num_columns // WORD_BITS,
            limit=self._limit(_FIRST_BUCKETS),
        )

    def __len__(self) -> int:
        return self.memory.used

    @property
    def num_columns(self) -> int:
        """Columns there is room for."""
        return int(self.memory.num_words * WORD_BITS)

    @property
    def size_bytes(self) -> int:
        """Memory taken."""
        return self.memory.cells.nbytes

    def clear(self) -> None:
        """Forgets everything."""
        self._refill(_FIRST_BUCKETS, self.memory.num_words)

    def widen(self) -> None:
        """Makes room for 64 more columns."""
        memory = self.memory
        prints, sets, used = memory.prints, memory.sets, memory.used
        self._refill(memory.num_buckets, memory.num_words + 1)
        memory.prints[:], memory.sets[:, :, :-1], memory.used = prints, sets, used

    def add(self, prints: Prints, column: int, noted: Places | None = None) -> int:
        """Adds `column` to the sets of all `prints`, or of those at the places `noted`; returns how many found no room."""
        count = len(prints if noted is None else noted)
        done, lost = 0, 0
        while (done := self._hot.add(self.memory, prints, noted, done, column)) < count:
            if not self._grow():
                done, lost = done + 1, lost + 1
        return lost

    def discard(self, prints: Prints, column: int) -> None:
        """Takes `column` out of the sets of all `prints`; empty sets are forgotten."""
        self._hot.discard(self.memory, prints, column)

    def keep_columns(self, live: Words) -> None:
        """Takes every column that is not in `live` out of all sets, and forgets empty ones. Looks at the whole table."""
        memory = self.memory
        memory.sets &= live
        memory.prints[~memory.sets.any(axis=2)] = 0
        memory.used = int(np.count_nonzero(memory.prints))

    def check_integrity(self) -> None:
        """Raises `InvariantError` when a print is not where it belongs or an empty place holds bits."""
        memory = self.memory
        buckets, places = memory.prints.nonzero()
        prints = memory.prints[buckets, places]
        first, second = prints & memory.mask, (prints >> np.uint64(32)) & memory.mask
        if not ((buckets == first) | (buckets == second)).all():
            raise InvariantError("a block lies in a bucket that is not its own")
        if len(prints) != memory.used or len(np.unique(prints)) != memory.used:
            raise InvariantError(f"{len(prints)} blocks, counted {memory.used}")
        if not np.array_equal(memory.sets.any(axis=2), memory.prints != 0):
            raise InvariantError("a block without holder, or a holder without block")

    def _limit(self, num_buckets: int) -> int:
        return min(int(num_buckets * WIDTH * _MAX_FILL), self._max_blocks)

    def _refill(self, num_buckets: int, num_words: int) -> None:
        self.memory.reset(
            num_buckets=num_buckets, num_words=num_words, limit=self._limit(num_buckets)
        )

    def _grow(self) -> bool:
        """Doubles the table if that is of use. Every bucket is split by the next bit of what named it, so that each entry
        keeps its place within the bucket.
        """
        memory, old, sets = self.memory, self.memory.prints[:-1], self.memory.sets[:-1]
        if not old.size * _MIN_FILL <= memory.used < self._max_blocks:
            return False
        is_first = old & memory.mask == np.arange(len(old), dtype=np.uint64)[:, None]
        namer = np.where(is_first, old, old >> np.uint64(32))
        moves = (namer & np.uint64(memory.num_buckets)) != 0
        used = memory.used
        self._refill(2 * len(old), memory.num_words)
        for half, leaves in ((slice(len(old)), moves), (slice(len(old), -1), ~moves)):
            memory.prints[half] = np.where(leaves, np.uint64(0), old)
            memory.sets[half] = np.where(leaves[..., None], np.uint64(0), sets)
        memory.used = used
        return True
