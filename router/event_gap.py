"""How far apart a stream's events are: wider while this router has more to do than it can, so that it catches up.

A reply that is woken for every token costs several times what was done for the token before. Tokens that wait for each other
a little share that cost, so a router that falls behind gives out the same tokens in fewer events instead of ever later ones.
"""

LEAST_GAP_S = 0.004
"""No engine is that fast with a batch worth speaking of."""

MOST_GAP_S = 0.05
"""Twenty events per second still read as a flow."""

_WINDOW_S = 0.1
_BUSY_SHARE = 0.5
"""Above it the gap widens. What is measured begins when a frame has been read: at 0.7, a router without a moment to spare."""

_CALM_SHARE = 0.3
"""Below it the gap narrows. In between it stays: an event costs enough to swing from one to the other."""

_FACTOR = 1.5


class EventGap:
    """Learns from how long the event loop works at a time.

    Pure: time comes in as an argument.

    Args:
        least_s: The gap of a router that keeps up.
        most_s: The widest.

    Attributes:
        gap_s: The least time between two events of a stream.
    """

    __slots__ = ("_begun_s", "_busy_s", "_least_s", "_most_s", "gap_s")

    def __init__(self, least_s: float = LEAST_GAP_S, most_s: float = MOST_GAP_S) -> None:
        self._least_s = self.gap_s = least_s
        self._most_s = max(least_s, most_s)
        self._busy_s = self._begun_s = 0.0

    def worked(self, begun_s: float, ended_s: float) -> None:
        """The loop was busy with a step's tokens from then to then; times never overlap, and ascend."""
        self._busy_s += ended_s - begun_s
        elapsed_s = ended_s - self._begun_s
        if elapsed_s < _WINDOW_S:
            return
        share = self._busy_s / elapsed_s
        if share > _BUSY_SHARE:
            self.gap_s = min(self._most_s, self.gap_s * _FACTOR)
        elif share < _CALM_SHARE:
            self.gap_s = max(self._least_s, self.gap_s / _FACTOR)
        self._busy_s, self._begun_s = 0.0, ended_s
