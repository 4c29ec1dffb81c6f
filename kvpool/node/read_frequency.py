"""How often the blocks of a node were read of late: replication and the eviction of cold copies go by it."""

from collections import Counter
from collections.abc import Sequence
from itertools import compress

import numpy as np

from baton.ids import BlockKey

HALF_LIFE_S = 60.0
_COLD_READS = 0.5
"""A block that was read less than this of late, once a minute ago, is cold."""

_COUNTED_EVERY_S = 2.0
_MAX_DEPTH = 1024
"""Blocks of a text that are counted: what many texts have in common is at their beginning."""

_MAX_BLOCKS = 65_536
_LONGEST_LIVES = 64.0


class ReadFrequency:
    """Reads per block, each of which counts half as much a minute later. Pure;
    when there are too many blocks the coldest are forgotten.

    All counts would have to shrink all the time; instead a later read weighs more:

        time           0    1 min    2 min
        a read adds    1    2        4         and `of` divides by what a read adds now
    """

    def __init__(self) -> None:
        self._counts: dict[BlockKey, float] = {}
        self._began_s = 0.0
        self._num_warm = 0
        self._counted_s = float("-inf")

    def __len__(self) -> int:
        return len(self._counts)

    def read(self, keys: Sequence[BlockKey], now_s: float) -> None:
        """The beginning of a text was read."""
        weight = self._weight(now_s)
        counts = self._counts
        for key in keys[:_MAX_DEPTH]:
            counts[key] = counts.get(key, 0.0) + weight
        if len(counts) > 2 * _MAX_BLOCKS:
            self._counts = _hottest(counts)

    def of(self, key: BlockKey, now_s: float) -> float:
        """Reads of late; 0 for a block that was not read."""
        return self._counts.get(key, 0.0) / self._weight(now_s)

    def is_cold(self, key: BlockKey, now_s: float) -> bool:
        """Whether a block was hardly read of late, or not at all."""
        return self.of(key, now_s) < _COLD_READS

    def num_warm(self, now_s: float) -> int:
        """About how many blocks are not cold, some of which may have gone; counted anew every few seconds."""
        if now_s - self._counted_s >= _COUNTED_EVERY_S:
            least = _COLD_READS * self._weight(now_s)
            counts = np.fromiter(self._counts.values(), np.float64, count=len(self._counts))
            self._num_warm, self._counted_s = int(np.count_nonzero(counts >= least)), now_s
        return self._num_warm

    def _weight(self, now_s: float) -> float:
        """What a read adds now."""
        lives = (now_s - self._began_s) / HALF_LIFE_S
        if lives <= _LONGEST_LIVES:
            return float(2.0**lives)
        shrunk = 2.0 ** -min(lives, 1000.0)
        self._counts = {
            k: left for k, count in self._counts.items() if (left := count * shrunk) > 1e-6
        }
        self._began_s = now_s
        return 1.0


def _hottest(counts: dict[BlockKey, float]) -> dict[BlockKey, float]:
    """The `_MAX_BLOCKS` that were read most. A reader waits meanwhile: a heap would take several times as long."""
    reads = np.fromiter(counts.values(), dtype=np.float64, count=len(counts))
    stays = np.zeros(len(counts), dtype=bool)
    stays[np.argpartition(reads, -_MAX_BLOCKS)[-_MAX_BLOCKS:]] = True
    return dict(compress(counts.items(), stays.tolist()))


_MAX_PREFIXES = 4096


class HotPrefixes:
    """Counts since the node started. When there are too many texts, those that were asked for least are forgotten."""

    def __init__(self) -> None:
        self._hits: Counter[BlockKey] = Counter()

    def note(self, root: BlockKey) -> None:
        """A text that begins with block `root` was asked for, and found."""
        self._hits[root] += 1
        if len(self._hits) > 2 * _MAX_PREFIXES:
            self._hits = Counter(dict(self._hits.most_common(_MAX_PREFIXES)))

    def hottest(self, most: int) -> list[tuple[BlockKey, int]]:
        """First blocks with how often they were asked for, at most `most` of them, the hottest first."""
        return self._hits.most_common(most)
