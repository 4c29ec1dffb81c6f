"""What this router has just sent where: blocks that a worker is about to hold, until its own report says so."""

from array import array
from collections.abc import Iterable
from functools import lru_cache

from router.routing.memory import Places, Prints, Words
from router.routing.table import BlockTable, HotPart

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
        self._recent, self._older = (
            BlockTable(max_blocks=2 * _MAX_NOTED, hot=hot, num_columns=num_columns)
            for _ in range(2)
        )
        self.tables = self._recent, self._older
        """Both tables, in an order that lasts."""
        self._since_s = float("-inf")

    def note(self, prints: Prints, columns: Iterable[int], now_s: float) -> None:
        """The whole chain is expected at every worker of `columns`."""
        age_s = now_s - self._since_s
        if age_s >= _LIFE_S or len(self._recent) > _MAX_NOTED:
            self._turn_over(keep=age_s < 2 * _LIFE_S)
            self._since_s = now_s
        noted = _noted(len(prints))
        for column in columns:
            self._recent.add(prints, column, noted)

    def noted(self, prints: Prints, now_s: float) -> Places | None:
        """Which positions of a chain may have been noted; None where nothing is expected of anybody."""
        is_over = now_s - self._since_s >= 2 * _LIFE_S
        return None if is_over else _noted(len(prints))

    def withdraw(self, prints: Prints, column: int) -> None:
        """A worker has given blocks up."""
        for notes in self.tables:
            if len(notes):
                notes.discard(prints, column)

    def keep_columns(self, live: Words) -> None:
        """Nothing is expected of other columns than `live` any more. Looks at every note."""
        for notes in self.tables:
            notes.keep_columns(live)

    def widen(self) -> None:
        """Makes room for 64 more columns."""
        for notes in self.tables:
            notes.widen()

    def check_integrity(self) -> None:
        """Raises `InvariantError` when a table of notes is broken."""
        for notes in self.tables:
            notes.check_integrity()

    def _turn_over(self, *, keep: bool) -> None:
        """What is recent becomes older, if it is to be kept; what was older is forgotten."""
        self._recent, self._older = self._older, self._recent
        self._recent.clear()
        if not keep:
            self._older.clear()


@lru_cache(maxsize=1024)
def _noted(num_blocks: int) -> Places:
    """Positions of a chain that are noted; which they are does not depend on its length, but for the last."""
    noted = [*range(min(_EVERY, num_blocks)), *range(2 * _EVERY - 1, num_blocks, _EVERY)]
    if num_blocks > _EVERY and noted[-1] != num_blocks - 1:
        noted.append(num_blocks - 1)
    return array("q", noted)
