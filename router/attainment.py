"""How many of the requests that were promised something did not get it lately, by class of service: what the planner's
predictions are held against. Pure.
"""

import math
from collections import defaultdict
from dataclasses import dataclass
from enum import StrEnum

_LEAST = 5.0
"""Requests of a class, those of long ago counting less, of which a share says something."""


class Target(StrEnum):
    """What a class of service promises."""

    TTFT = "ttft"
    TBT = "tbt"


@dataclass(frozen=True, slots=True, kw_only=True)
class Missed:
    """Shares of requests that did not get what they were promised, in the class where that is most.

    Attributes:
        ttft: Of those with a promised time to first token.
        tbt: Of those with a promised time between tokens.
    """

    ttft: float = 0.0
    tbt: float = 0.0


NOTHING_MISSED = Missed()


class Attainment:
    """Counts promises, and forgets them by and by. Not thread-safe.

    Args:
        memory_s: Time constant of forgetting.
    """

    def __init__(self, memory_s: float = 60.0) -> None:
        self._memory_s = memory_s
        self._looked_s: float | None = None
        self._all: dict[tuple[str, Target], float] = defaultdict(float)
        self._missed: dict[tuple[str, Target], float] = defaultdict(float)

    def note(self, slo_class: str, target: Target, *, kept: bool) -> None:
        """A request of that class is over, and got what it was promised, or not."""
        self._all[slo_class, target] += 1.0
        self._missed[slo_class, target] += not kept

    def missed(self, now_s: float) -> Missed:
        """What was missed until `now_s`, which never goes back."""
        passed_s = 0.0 if self._looked_s is None else now_s - self._looked_s
        self._looked_s = now_s
        found = Missed(ttft=self._worst(Target.TTFT), tbt=self._worst(Target.TBT))
        left = math.exp(-passed_s / self._memory_s)
        for counts in (self._all, self._missed):
            for key in counts:
                counts[key] *= left
        return found

    def _worst(self, target: Target) -> float:
        shares = (
            self._missed[key] / count
            for key, count in self._all.items()
            if key[1] is target and count >= _LEAST
        )
        return max(shares, default=0.0)
