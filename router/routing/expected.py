"""What this router has just sent where: blocks that a worker is about to hold, until its own report says so."""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from router.routing.table import Prints, bits_of

_EVERY = 32
_LIFE_S = 30.0
_MAX_NOTED = 200_000


class ExpectedBlocks:
    """Chains on their way, by the columns of the workers they were sent to.

    Of a chain only some blocks are noted: the first ones, every 32nd and the last. Depths are found by bisection over
    these, in time that grows with the logarithm of the chain, and are too small by 31 blocks at most. A note lives for 30 to 60
    seconds, or until the worker reports that it gave the block up: by then it has computed the prompt and reported it,
    or it never will.
    """

    def __init__(self) -> None:
        self._recent: dict[int, int] = {}
        self._older: dict[int, int] = {}
        self._since_s = float("-inf")

    def note(self, prints: Prints, columns: int, now_s: float) -> None:
        """The whole chain is expected at every worker in the set `columns`."""
        if now_s - self._since_s >= _LIFE_S or len(self._recent) > _MAX_NOTED:
            self._older = self._recent if now_s - self._since_s < 2 * _LIFE_S else {}
            self._recent, self._since_s = {}, now_s
        recent = self._recent
        for block in prints[_noted(len(prints))].tolist():
            recent[block] = recent.get(block, 0) | columns

    def withdraw(self, blocks: Sequence[int], column: int) -> None:
        """A worker has given blocks up."""
        keep = ~(1 << column)
        for notes in (self._recent, self._older):
            if notes:
                for block in blocks:
                    if block in notes:
                        notes[block] &= keep

    def forget(self, columns: int) -> None:
        """Nothing is expected of the set `columns` any more. Looks at every note."""
        for notes in (self._recent, self._older):
            for block in notes:
                notes[block] &= ~columns

    def depths(self, prints: Prints, live: int, now_s: float) -> dict[int, int]:
        """How many leading blocks are expected at each worker of the set `live`, by column; those with none are left out."""
        if now_s - self._since_s >= 2 * _LIFE_S:
            return {}
        positions = _noted(len(prints))
        blocks = prints[positions].tolist()
        depths: dict[int, int] = {}
        # Spans (low, high] of noted positions with the sets at both ends; -1 stands for the empty chain.
        spans = [(-1, len(blocks), live, 0)]
        while spans:
            low, high, at_low, at_high = spans.pop()
            lost = at_low & ~at_high
            if not lost or high == 0:
                continue
            if high - low == 1:
                depth = int(positions[low]) + 1
                depths.update(dict.fromkeys(bits_of(lost), depth))
                continue
            middle = (low + high) // 2
            block = blocks[middle]
            at_middle = (self._recent.get(block, 0) | self._older.get(block, 0)) & live
            spans.append((low, middle, at_low, at_middle))
            spans.append((middle, high, at_middle, at_high))
        return depths


@lru_cache(maxsize=1024)
def _noted(num_blocks: int) -> NDArray[np.intp]:
    """Positions of a chain that are noted; which they are does not depend on its length, but for the last."""
    if num_blocks <= _EVERY:
        return np.arange(num_blocks)
    noted = [*range(_EVERY), *range(2 * _EVERY - 1, num_blocks, _EVERY)]
    if noted[-1] != num_blocks - 1:
        noted.append(num_blocks - 1)
    return np.array(noted)
