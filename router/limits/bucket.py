"""A token bucket: a long-run rate with bursts. The in-process twin of the one in `limits.lua`.

A request may take more than is left when it settles, even more than the bucket holds: the level goes below zero, and
nothing more is given until time has paid the debt. So the long-run rate holds whatever was estimated.
"""

from dataclasses import dataclass

from router.limits.ports import Level


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketSize:
    """What one bucket gives.

    Attributes:
        rate_per_s: Refill.
        capacity: What it holds when it is full.
    """

    rate_per_s: float
    capacity: float

    @classmethod
    def of(cls, per_minute: float | None, burst: float | None, share: float) -> "BucketSize | None":
        """The bucket of a limit, or of this `share` of it; None without one."""
        if per_minute is None:
            return None
        capacity = max(1.0, (burst if burst is not None else per_minute) * share)
        return cls(rate_per_s=per_minute * share / 60, capacity=capacity)


class TokenBucket:
    """One bucket; full at first. Its size may change between two calls."""

    __slots__ = ("_level", "_stamp_s")

    def __init__(self) -> None:
        self._level: float | None = None
        self._stamp_s = 0.0

    def level(self, size: BucketSize, now_s: float) -> Level:
        """How full it is."""
        remaining = self._refilled(size, now_s)
        reset_s = (size.capacity - remaining) / size.rate_per_s
        return Level(limit=size.capacity, remaining=remaining, reset_s=reset_s)

    def take(self, amount: float, size: BucketSize, now_s: float) -> float:
        """Takes `amount` and returns 0, or takes nothing and returns the seconds to wait for it."""
        remaining = self._refilled(size, now_s)
        missing = min(amount, size.capacity) - remaining
        if missing > 1e-9:
            return missing / size.rate_per_s
        self._set(remaining - amount, now_s)
        return 0.0

    def give_back(self, amount: float, size: BucketSize, now_s: float) -> None:
        """Returns what was not used; a negative amount takes more, and is never refused."""
        self._set(min(self._refilled(size, now_s) + amount, size.capacity), now_s)

    def full(self, size: BucketSize, now_s: float) -> bool:
        """Whether it is as if it had never been used."""
        return self._refilled(size, now_s) >= size.capacity

    def _refilled(self, size: BucketSize, now_s: float) -> float:
        if self._level is None:
            return size.capacity
        gained = max(0.0, now_s - self._stamp_s) * size.rate_per_s
        return min(self._level + gained, size.capacity)

    def _set(self, level: float, now_s: float) -> None:
        self._level, self._stamp_s = level, now_s
