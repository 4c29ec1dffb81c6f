"""How fast KV gets from one worker to another, learned from the hand-offs that were made."""

from math import exp, log

from baton.errors import InvariantError
from router.routing.numbers import LinkNumbers

_PRIOR_BYTES_PER_S = 10e9
_PRIOR_LATENCY_S = 0.002
_SLOWEST, _FASTEST = 1e4, 1e13
_LONGEST_LATENCY_S = 10.0
_MOST_BYTES, _LONGEST_S = 1e15, 3600.0
_GAIN = 0.2
_LARGEST_MOVE = log(4.0)
"""How far one hand-off can move an estimate: a stall is no news about the link."""


class Link(LinkNumbers):
    """Bandwidth and fixed cost of handing KV over, for one pair of workers or for all of them.

    Pages leave layer by layer while the prompt is computed, so mostly only the last ones are seen to take time: such a
    hand-off says what the fixed cost is and that the bandwidth is at least so high. One that outlasted the computing says
    what the bandwidth is.

    Args:
        like: Where to begin; an ordinary fast network if None.
    """

    __slots__ = ("_log_bandwidth", "measured")

    def __init__(self, like: "Link | None" = None) -> None:
        super().__init__()
        self.bytes_per_s = _PRIOR_BYTES_PER_S if like is None else like.bytes_per_s
        self.latency_s = _PRIOR_LATENCY_S if like is None else like.latency_s
        self.measured = 0
        self._log_bandwidth = log(self.bytes_per_s)

    def unhidden_s(self, size_bytes: float, window_s: float) -> float:
        """How long the hand-off of `size_bytes` goes on after `window_s` of computing."""
        return self.latency_s + max(0.0, size_bytes / self.bytes_per_s - window_s)

    def handed_off(self, size_bytes: float, window_s: float, unhidden_s: float) -> None:
        """Takes one measurement; what cannot be one is ignored.

        Args:
            size_bytes: Sent.
            window_s: Time from the grant of pages to the first token: sending could be hidden behind it.
            unhidden_s: Time from the first token to the commit.
        """
        if not (
            1.0 <= size_bytes <= _MOST_BYTES
            and 0.0 <= window_s <= _LONGEST_S
            and 0.0 <= unhidden_s <= _LONGEST_S
        ):
            return
        self.measured += 1
        hidden = unhidden_s <= 2.0 * self.latency_s or window_s > 50.0 * unhidden_s
        if hidden:
            self._learn_latency(unhidden_s)
        sending_s = window_s + max(unhidden_s - self.latency_s, 0.1 * unhidden_s)
        seen = log(size_bytes / max(sending_s, 1e-6))
        if hidden and seen <= self._log_bandwidth:
            return  # it may well be faster: nothing kept it busy all the time
        move = min(max(seen - self._log_bandwidth, -_LARGEST_MOVE), _LARGEST_MOVE)
        self._log_bandwidth += move * (1.0 if hidden else self._gain())
        self._log_bandwidth = min(max(self._log_bandwidth, log(_SLOWEST)), log(_FASTEST))
        self.bytes_per_s = exp(self._log_bandwidth)

    def check_integrity(self) -> None:
        """Raises `InvariantError` when an estimate is out of all bounds."""
        if not (_SLOWEST * 0.99 <= self.bytes_per_s <= _FASTEST * 1.01):
            raise InvariantError(f"{self.bytes_per_s} bytes/s")
        if not 0.0 <= self.latency_s <= _LONGEST_LATENCY_S:
            raise InvariantError(f"latency of {self.latency_s} s")

    def _gain(self) -> float:
        return max(_GAIN, 1.0 / self.measured)

    def _learn_latency(self, unhidden_s: float) -> None:
        believed = min(unhidden_s, 4.0 * self.latency_s + 1e-3, _LONGEST_LATENCY_S)
        self.latency_s += _GAIN * (believed - self.latency_s)
