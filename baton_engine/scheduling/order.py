"""Whose prompt comes next. Pure."""

from collections.abc import Callable, Iterable
from itertools import islice
from typing import Protocol

from baton_engine.scheduling.request import Branch
from baton_engine.scheduling.step_cost import StepCost

WINDOW = 64
"""So many of a line are looked at for the most urgent, from its front."""

MOST_OVERTAKEN = 16
"""Who was overtaken so often is not overtaken again."""


class PrefillOrder(Protocol):
    """Orders texts that want to be computed, or wait for room."""

    def first(self, line: Iterable[Branch]) -> Branch | None:
        """Who is next in a line; None if it is empty."""

    def sorted(self, branches: Iterable[Branch]) -> list[Branch]:
        """All of them, the next one first."""

    def precedes(self, branch: Branch, other: Branch) -> bool:
        """Whether `branch` comes before `other`."""

    def served(self, served: Iterable[Branch], left: Iterable[Branch]) -> None:
        """Some got their turn while those who are `left` did not."""


class ByArrival:
    """First come, first served."""

    def first(self, line: Iterable[Branch]) -> Branch | None:
        """See PrefillOrder: the front of the line."""
        return next(iter(line), None)

    def sorted(self, branches: Iterable[Branch]) -> list[Branch]:
        """See PrefillOrder: in the order in which they were let in."""
        return list(branches)

    def precedes(self, branch: Branch, other: Branch) -> bool:
        """See PrefillOrder."""
        return branch.rank < other.rank

    def served(self, served: Iterable[Branch], left: Iterable[Branch]) -> None:
        """See PrefillOrder: nobody is overtaken who would mind."""


class BySlack:
    """By priority, then by slack: the time of the promised first token less what computing the text is predicted to take, so
    that of two with the same deadline the longer one begins first. Who was promised nothing comes after who was.

    Nobody starves: who has been overtaken `MOST_OVERTAKEN` times comes before all others, by arrival; so does who held pages
    already and lost them.

    Args:
        cost: Predicts how long prompts take.
    """

    def __init__(self, cost: StepCost) -> None:
        self._cost = cost

    def first(self, line: Iterable[Branch]) -> Branch | None:
        """See PrefillOrder."""
        return min(islice(line, WINDOW), key=self._key, default=None)

    def sorted(self, branches: Iterable[Branch]) -> list[Branch]:
        """See PrefillOrder."""
        return sorted(branches, key=self._key)

    def precedes(self, branch: Branch, other: Branch) -> bool:
        """See PrefillOrder."""
        return self._key(branch) < self._key(other)

    def served(self, served: Iterable[Branch], left: Iterable[Branch]) -> None:
        """See PrefillOrder: whoever arrived before the last of those served was overtaken."""
        last = max((branch.rank for branch in served), default=None)
        if last is None:
            return
        for branch in islice(left, WINDOW):
            if branch.rank < last:
                branch.overtaken += 1

    def _key(self, branch: Branch) -> tuple[bool, int, float, tuple[int, int]]:
        if branch.overtaken >= MOST_OVERTAKEN or branch.lost_pages:
            return False, 0, 0.0, branch.rank
        return True, -branch.slo.priority, self._latest_start_s(branch), branch.rank

    def _latest_start_s(self, branch: Branch) -> float:
        deadline_s = branch.request.deadline_s
        if deadline_s is None:
            return float("inf")
        if branch.awaits_kv:
            return deadline_s
        start = branch.seq.num_computed
        return deadline_s - self._cost.prompts_s(len(branch.seq.tokens) - start, start)


ORDERS: dict[str, Callable[[StepCost], PrefillOrder]] = {
    "slack": BySlack,
    "arrival": lambda _: ByArrival(),
}
"""By their names in the configuration (`engine.prefill_order`)."""
