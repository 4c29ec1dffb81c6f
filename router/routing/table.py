"""The prefix index's memory: who holds each block, one bit per holder, in 40 to 80 bytes per block for 128 holders.

A hash table (`router.routing.memory`) that grows, a little with each report that needs it so that nothing waits for it, and
widens. What is done to it for every report and every decision is
written twice: in C (`table.c`), and for machines without a compiler in Python (`router.routing.plain_table`).
"""

from typing import Protocol

import numpy as np

from baton.errors import InvariantError
from router.routing.held import HeldBySlot
from router.routing.memory import WIDTH, WORD_BITS, Memory, Places, Prints, Split, Words
from router.routing.sources import Sources

_MAX_FILL = 0.6
"""Once so much of it is filled a table begins to grow."""

_FIRST_BUCKETS = 512

_STRIDE = 1024
"""Buckets that are split at a time."""

_PACE = 2
"""Buckets that are split per block that comes meanwhile: then those that wait for it fill up by a tenth."""


class HotPart(Protocol):
    """What is done for every report and every decision."""

    def held(
        self, sources: Sources, prints: Prints, noted: Places | None, unit: int, held: HeldBySlot
    ) -> None:
        """Writes to `held` how many leading blocks of a chain, not empty, each holder has reported, or is expected to
        have by the notes that stand at the places `noted`; a block counts for `unit`. Who has none is left out.

        Takes time with the logarithm of the chain, for each different depth; where columns are ragged, with a 16th of the chain.
        """

    def add(
        self, memory: Memory, prints: Prints, noted: Places | None, begin: int, column: int
    ) -> int:
        """Adds `column` to the sets of the prints, or of those at the places `noted`, from the one numbered `begin` on;
        returns the first one for which there is no place.
        """

    def discard(self, memory: Memory, prints: Prints, column: int) -> None:
        """Takes `column` out of the sets of all prints; empty sets are forgotten."""

    def split(self, memory: Memory, split: Split) -> None:
        """Moves what one more bit of its name says to the new buckets; each entry keeps its place within the bucket."""


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
        most_buckets = _FIRST_BUCKETS
        while _roomy(most_buckets) < max_blocks:
            most_buckets *= 2
        self.memory = Memory(
            num_buckets=_FIRST_BUCKETS,
            most_buckets=most_buckets,
            num_words=num_columns // WORD_BITS,
        )
        self._allow(_roomy(_FIRST_BUCKETS))

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
        self.memory.reset(num_buckets=_FIRST_BUCKETS, num_words=self.memory.num_words)
        self._allow(_roomy(_FIRST_BUCKETS))

    def widen(self) -> None:
        """Makes room for 64 more columns. Moves the whole table."""
        memory = self.memory
        prints, sets, used, limit = memory.prints, memory.sets, memory.used, memory.limit
        memory.reset(num_buckets=memory.num_buckets, num_words=memory.num_words + 1)
        memory.prints[:], memory.sets[:, :, :-1] = prints, sets
        memory.used, memory.limit = used, limit

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
        first, second = memory.buckets_of(prints), memory.buckets_of(prints >> np.uint64(32))
        if not ((buckets == first) | (buckets == second)).all():
            raise InvariantError("a block lies in a bucket that is not its own")
        if len(prints) != memory.used or len(np.unique(prints)) != memory.used:
            raise InvariantError(f"{len(prints)} blocks, counted {memory.used}")
        if not np.array_equal(memory.sets.any(axis=2), memory.prints != 0):
            raise InvariantError("a block without holder, or a holder without block")

    def _allow(self, limit: int) -> None:
        self.memory.limit = min(limit, self._max_blocks)

    def _grow(self) -> bool:
        """Splits the next few buckets if there is need and room for it. Keys that are not random cannot make it."""
        memory = self.memory
        if memory.used < memory.limit or memory.used >= self._max_blocks or not memory.may_split:
            return False
        self._hot.split(memory, memory.extend(_STRIDE))
        is_done = memory.num_buckets == memory.num_unsplit
        self._allow(_roomy(memory.num_buckets) if is_done else memory.used + _STRIDE // _PACE)
        return True


def _roomy(num_buckets: int) -> int:
    """Blocks that so many buckets hold without being crowded."""
    return int(num_buckets * WIDTH * _MAX_FILL)
