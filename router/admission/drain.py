"""How fast the line moves: measured from what is let in while somebody waits, and nothing else."""

from math import exp

_ENOUGH_S = 0.5
"""Below this the first few let in would count for more than they tell."""


class DrainMeter:
    """Tokens of cost per second, as an average that forgets.

    Pure. Time in which nobody waits says nothing of what the workers could do, and is left out.

    Args:
        memory_s: How long back the average looks, in seconds with a line.
    """

    def __init__(self, *, memory_s: float = 10.0) -> None:
        self._memory_s = memory_s
        self._tokens = 0.0
        self._seconds = 0.0
        self._since_s: float | None = None

    @property
    def tokens_per_s(self) -> float | None:
        """The rate; None while too little was seen to say."""
        if self._seconds < _ENOUGH_S or self._tokens <= 0:
            return None
        return self._tokens / self._seconds

    def observe(self, cost: int, *, waiting: bool, now_s: float) -> None:
        """Something was let in, or (with cost 0) time passed; `waiting` tells whether somebody still waits."""
        if self._since_s is not None:
            passed_s = max(0.0, now_s - self._since_s)
            faded = exp(-passed_s / self._memory_s)
            self._tokens = self._tokens * faded + cost
            self._seconds = self._seconds * faded + passed_s
        self._since_s = now_s if waiting else None
