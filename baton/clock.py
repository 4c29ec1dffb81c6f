"""Time as an argument: pure cores get `now_s`, shells hold a `Clock`."""

import time
from typing import Protocol


class Clock(Protocol):
    """A monotonic clock in seconds; its zero means nothing."""

    def now_s(self) -> float:
        """Seconds since some fixed moment; never goes back."""


class MonotonicClock:
    """The machine's monotonic clock; jumps of the wall clock do not touch it."""

    def now_s(self) -> float:
        """Seconds of `time.monotonic`."""
        return time.monotonic()


class ManualClock:
    """A clock that tests move by hand."""

    def __init__(self, now_s: float = 0.0) -> None:
        self._now_s = now_s

    def now_s(self) -> float:
        """The time it was last moved to."""
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Moves forward; a negative step is a test's mistake."""
        if seconds < 0:
            raise ValueError(f"a monotonic clock cannot go back by {-seconds} s")
        self._now_s += seconds
