"""What this router has just sent where: blocks that a worker is about to hold, until its own report says so."""

from collections.abc import Iterable
from functools import lru_cache

import numpy as np

from router.routing.table import BlockTable, Depths, HotPart, Places, Prints, Words

_EVERY = 32
_LIFE_S = 30.0
_MAX_NOTED = 200_000


class ExpectedBlocks:
    """Chains on their way, by the columns of the workers they were sent to.

    Of a chain only some blocks are noted: the first ones, every 32nd and the last. Depths are found by bisection over
    these, in time that grows with the logarithm of the chain, and are too small by 31 blocks at most. A note lives for 30 to 60
    seconds, or until the worker reports that it gave the block up: by then it has computed the prompt and reported it,
    or it never will.

    Args:
        hot: Who does the hot part of the two tables, of recent and of older notes.
        num_columns: Columns to begin with, a multiple of 64.
    """

    def __init__(self, *, hot: HotPart, num_columns: int) -> None:
        self._hot = hot
        self._recent = self._empty(num_columns)
        self._older = self._empty(num_columns)
        self._since_s = float("-inf")

    def note(self, prints: Prints, columns: Iterable[int], now_s: float) -> None:
        """The whole chain is expected at every worker of `columns`."""
        if now_s - self._since_s >= _LIFE_S or len(self._recent) > _MAX_NOTED:
            width, is_old = self._recent.num_columns, now_s - self._since_s < 2 * _LIFE_S
            self._older = self._recent if is_old else self._empty(width)
            self._recent, self._since_s = self._empty(width), now_s
        noted = prints[_noted(len(prints))]
        for column in columns:
            self._recent.add(noted, column)

    def withdraw(self, prints: Prints, column: int) -> None:
        """A worker has given blocks up."""
        for notes in (self._recent, self._older):
            if len(notes):
                notes.discard(prints, column)

    def keep_columns(self, live: Words) -> None:
        """Nothing is expected of other columns than `live` any more. Looks at every note."""
        for notes in (self._recent, self._older):
            notes.keep_columns(live)

    def widen(self) -> None:
        """Makes room for 64 more columns."""
        for notes in (self._recent, self._older):
            notes.widen()

    def deepen(self, depths: Depths, prints: Prints, live: Words, now_s: float) -> None:
        """Raises `depths`, by column, to how many leading blocks are expected at each worker of the set `live`."""
        if now_s - self._since_s >= 2 * _LIFE_S:
            return
        places = _noted(len(prints))
        for notes in (self._recent, self._older):
            if len(notes):
                notes.deepen(depths, prints, live, places)

    def check_integrity(self) -> None:
        """Raises `InvariantError` when a table of notes is broken."""
        for notes in (self._recent, self._older):
            notes.check_integrity()

    def _empty(self, num_columns: int) -> BlockTable:
        return BlockTable(max_blocks=2 * _MAX_NOTED, hot=self._hot, num_columns=num_columns)


@lru_cache(maxsize=1024)
def _noted(num_blocks: int) -> Places:
    """Positions of a chain that are noted; which they are does not depend on its length, but for the last."""
    noted = [*range(min(_EVERY, num_blocks)), *range(2 * _EVERY - 1, num_blocks, _EVERY)]
    if num_blocks > _EVERY and noted[-1] != num_blocks - 1:
        noted.append(num_blocks - 1)
    return np.array(noted, np.int64)
