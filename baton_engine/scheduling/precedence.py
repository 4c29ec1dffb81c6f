"""Who keeps his pages when they run out. Pure.

A precedence is an order of branches that does not change while they live: the last in it gives its pages up. So the first of
all that run is never preempted and ends some day, then the next, whatever the order is. The samples of one request must stand
next to each other in it (see `StepPlanner`).
"""

from collections.abc import Callable

from baton_engine.scheduling.request import Branch

Precedence = Callable[[Branch], tuple[float, ...]]
"""Smaller keeps its pages longer."""


def by_arrival(branch: Branch) -> tuple[float, ...]:
    """The last arrived goes first: least was computed for it, as a rule."""
    return branch.rank


def by_priority(branch: Branch) -> tuple[float, ...]:
    """The lowest priority goes first; of equal ones the last arrived."""
    return -branch.slo.priority, *branch.rank


def by_slo(branch: Branch) -> tuple[float, ...]:
    """Who was promised the longest time between tokens goes first, and before him who was promised none: they have the most
    slack. Then as `by_priority`.
    """
    tbt_s = branch.slo.tbt_s
    return float("inf") if tbt_s is None else tbt_s, *by_priority(branch)


PRECEDENCES: dict[str, Precedence] = {
    "arrival": by_arrival,
    "priority": by_priority,
    "slo": by_slo,
}
"""By their names in the configuration (`engine.preemption`)."""
