"""Whether a node's memory is to be trusted with new blocks: one whose blocks come out other than they were put takes none for a while."""

from collections import deque

_MOST_BLOCKS = 16
_WINDOW_S = 600.0


class MemoryHealth:
    """Counts blocks that readers found altered. Pure, one owner.

    A block now and then is a miss; many of them mean memory, or somebody who writes where he should not.
    """

    def __init__(self) -> None:
        self._found_s: deque[float] = deque(maxlen=_MOST_BLOCKS)

    def corrupt(self, blocks: int, now_s: float) -> None:
        """So many blocks were found to have other bytes than were put."""
        self._found_s.extend([now_s] * min(blocks, _MOST_BLOCKS))

    def sick(self, now_s: float) -> bool:
        """Whether there were too many of late."""
        return len(self._found_s) == _MOST_BLOCKS and now_s - self._found_s[0] < _WINDOW_S
