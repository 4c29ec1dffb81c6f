"""The columns of the prefix index's tables: which are free, and the clearing of those whose holders are gone."""

import heapq
from collections.abc import Sequence

import numpy as np

from baton.errors import InvariantError
from router.routing.table import WORD_BITS, BlockTable, Words

_ROWS_PER_BLOCK = 512
"""Rows (a word of a bucket's sets) that are cleared for each block that is stored meanwhile. The blocks of one holder
that is gone, spread over four million, make room faster than they are replaced.
"""

_MOST_ROWS = 1 << 15
"""Rows that are cleared with one report at most: about half a millisecond."""

_TAKEN_MEANWHILE = 4
"""While some columns are cleared a quarter as many as there are can be taken at most."""


class Columns:
    """Each is taken, or free, or dead: given up, but its bits still stand in the tables. Those that are dead are
    cleared together, some buckets with each report and with each column that is taken, so that nothing waits for it.
    Those that die meanwhile are next.

    Args:
        tables: That have them; equally many each. A column may be added to their sets while it is taken.
    """

    def __init__(self, tables: Sequence[BlockTable]) -> None:
        self._tables = tables
        self._free = list(range(len(self)))
        self._dead: list[int] = []
        self._cleared: list[int] = []  # those that are being cleared
        self._words = self._words_of([])
        self._table = self._bucket = 0  # so far they are

    def __len__(self) -> int:
        return self._tables[0].num_columns

    def take(self) -> int:
        """A free one; the tables widen if there is none."""
        rows = sum(table.num_buckets * table.memory.num_words for table in self._tables)
        self._clear(rows * _TAKEN_MEANWHILE // len(self))
        if not self._free:
            self._widen()
        return heapq.heappop(self._free)

    def give_up(self, column: int) -> None:
        """It is dead from now on."""
        self._dead.append(column)

    def make_room(self, num_blocks: int) -> None:
        """Goes on clearing, since so many blocks are about to be stored."""
        self._clear(min(num_blocks * _ROWS_PER_BLOCK, _MOST_ROWS))

    def check_integrity(self, taken: Sequence[int]) -> None:
        """Raises `InvariantError` when a column is lost or twice there, or a free one stands in a table."""
        columns = sorted([*taken, *self._free, *self._dead, *self._cleared])
        if columns != list(range(len(self))):
            raise InvariantError(f"columns {columns}")
        free = self._words_of(self._free)
        for table in self._tables:
            sets = zip(table.memory.sets, free, strict=True)
            if any((words & columns).any() for words, columns in sets):
                raise InvariantError("a free column holds blocks")

    def _widen(self) -> None:
        before = len(self)
        for table in self._tables:
            table.widen()
        self._free.extend(range(before, len(self)))
        self._words = self._words_of(self._cleared)

    def _clear(self, rows: int) -> None:
        """Clears about so many rows of those that have a column to be cleared."""
        if not self._cleared:
            if not self._dead:
                return
            self._cleared, self._dead = self._dead, []
            self._words = self._words_of(self._cleared)
            self._table = self._bucket = 0
        buckets = max(1, rows // int(np.count_nonzero(self._words)))
        # What a table splits off meanwhile comes after the place that this has reached, or is clear.
        while buckets > 0 and self._table < len(self._tables):
            table = self._tables[self._table]
            last = min(self._bucket + buckets, table.num_buckets)
            if last > self._bucket:
                table.clear_columns(self._words, self._bucket, last)
                buckets -= last - self._bucket
                self._bucket = last
            if last == table.num_buckets:
                self._table, self._bucket = self._table + 1, 0
        if self._table == len(self._tables):
            for column in self._cleared:
                heapq.heappush(self._free, column)
            self._cleared = []

    def _words_of(self, columns: Sequence[int]) -> Words:
        """A set of columns."""
        words: Words = np.zeros(len(self) // WORD_BITS, np.uint64)
        numbers = np.array(columns, np.int64)
        np.bitwise_or.at(
            words, numbers // WORD_BITS, np.uint64(1) << (numbers % WORD_BITS).astype(np.uint64)
        )
        return words
