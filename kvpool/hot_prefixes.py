"""Which texts a node is asked for most, by their first block: for `baton pool top`. Keys only, never what stands in them."""

from collections import Counter

from baton.ids import BlockKey

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
