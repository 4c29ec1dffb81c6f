"""How long to wait before the next try: exponential backoff, the one rule of everything that tries again.

The supervisor waits so before it restarts a process, the router before it reconnects to a worker or offers it a request
again, a circuit breaker before its next trial, a pool client before it attaches again.

Without jitter: each wait belongs to one process or one link of one process, so there is no crowd to spread out.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Backoff:
    """The waits before the first, second, third … retry: `first_s`, `first_s * factor`,
    `first_s * factor**2` … up to `max_s`.

    Pure: it knows no clock and counts nothing. The caller counts the failures in a row and starts again at one after a
    success.

    Attributes:
        first_s: Seconds before the first retry; 0 stays 0.
        max_s: The longest wait, at least `first_s`.
        factor: How much longer each wait is than the one before it, at least 1.
    """

    first_s: float
    max_s: float
    factor: float = 2.0

    def __post_init__(self) -> None:
        """Raises `ValueError` if the waits would be negative or shrink."""
        if not 0.0 <= self.first_s <= self.max_s:
            raise ValueError(f"a first wait of {self.first_s} s and a longest of {self.max_s} s")
        if self.factor < 1.0:
            raise ValueError(f"waits that shrink by a factor of {self.factor}")

    def wait_s(self, failures: int) -> float:
        """Seconds to wait after this many failures in a row; 0 without any."""
        if failures < 1:
            return 0.0
        try:
            return min(self.first_s * self.factor ** (failures - 1), self.max_s)
        except OverflowError:
            return self.max_s if self.first_s else 0.0
