"""Which prompt is computed next, and which sequence is preempted when pages run out. Pure.

A preemption order does not change while its sequences live: the last in it gives its pages up. So the first of all that
run is never preempted and ends some day, then the next, whatever the order is. The samples of one request must stand
next to each other in it (see `StepPlanner`).
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

from baton_engine.scheduling.request import Sequence
from baton_engine.scheduling.step_cost import StepCost

WINDOW = 64
"""So many of a queue are looked at for the most urgent, from its front."""

MOST_OVERTAKEN = 16
"""A sequence that was overtaken so often is not overtaken again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulingPolicy:
    """What an operator chooses of how an engine schedules;
    `baton.config.schema.EngineConfig` says what it means to users.

    Attributes:
        tbt_s: Time between tokens that is kept for decodes without a target of their own while prompts are computed
            beside them; None for no bound.
        prefill_order: One of `PREFILL_ORDERINGS`.
        preemption: One of `PREEMPTION_ORDERS`.
        output_headroom: Share of the pages that all outputs may still take for which there must be room when another
            sequence is admitted. At 1 nothing that asks for a single sample is ever preempted.
    """

    tbt_s: float | None = None
    prefill_order: str = "slack"
    preemption: str = "arrival"
    output_headroom: float = 0.0


class PrefillOrder(Protocol):
    """Orders sequences that wait to be computed, or for room."""

    def first(self, queue: Iterable[Sequence]) -> Sequence | None:
        """Which of a queue is next; None if it is empty."""

    def sorted(self, sequences: Iterable[Sequence]) -> list[Sequence]:
        """All of them, the next one first."""

    def precedes(self, sequence: Sequence, other: Sequence) -> bool:
        """Whether `sequence` comes before `other`."""

    def served(self, served: Iterable[Sequence], left: Iterable[Sequence]) -> None:
        """Some had their turn while those that are `left` had none."""


class FirstComeFirstServed:
    """By arrival."""

    def first(self, queue: Iterable[Sequence]) -> Sequence | None:
        """See PrefillOrder: the front of the queue."""
        return next(iter(queue), None)

    def sorted(self, sequences: Iterable[Sequence]) -> list[Sequence]:
        """See PrefillOrder: in the order in which they were admitted."""
        return list(sequences)

    def precedes(self, sequence: Sequence, other: Sequence) -> bool:
        """See PrefillOrder."""
        return sequence.arrival < other.arrival

    def served(self, served: Iterable[Sequence], left: Iterable[Sequence]) -> None:
        """See PrefillOrder: nothing is overtaken in this order."""


class LeastSlackFirst:
    """By priority, then by slack: the deadline of the first token less what computing the prompt is predicted to take,
    so that of two with the same deadline the longer one begins first. Without a deadline comes after with one.

    Nothing starves: what has been overtaken `MOST_OVERTAKEN` times comes before all others, by arrival; so does what
    held pages already and was preempted.

    Args:
        cost: Predicts how long prompts take.
    """

    def __init__(self, cost: StepCost) -> None:
        self._cost = cost

    def first(self, queue: Iterable[Sequence]) -> Sequence | None:
        """See PrefillOrder."""
        return min(islice(queue, WINDOW), key=self._key, default=None)

    def sorted(self, sequences: Iterable[Sequence]) -> list[Sequence]:
        """See PrefillOrder."""
        return sorted(sequences, key=self._key)

    def precedes(self, sequence: Sequence, other: Sequence) -> bool:
        """See PrefillOrder."""
        return self._key(sequence) < self._key(other)

    def served(self, served: Iterable[Sequence], left: Iterable[Sequence]) -> None:
        """See PrefillOrder: whatever arrived before the last of those served was overtaken."""
        last = max((sequence.arrival for sequence in served), default=None)
        if last is None:
            return
        for sequence in islice(left, WINDOW):
            if sequence.arrival < last:
                sequence.overtaken += 1

    def _key(self, sequence: Sequence) -> tuple[bool, int, float, tuple[int, int]]:
        if sequence.overtaken >= MOST_OVERTAKEN or sequence.was_preempted:
            return False, 0, 0.0, sequence.arrival
        return True, -sequence.slo.priority, self._latest_start_s(sequence), sequence.arrival

    def _latest_start_s(self, sequence: Sequence) -> float:
        deadline_s = sequence.request.deadline_s
        if deadline_s is None:
            return float("inf")
        if sequence.awaits_kv:
            return deadline_s
        start = sequence.num_computed
        return deadline_s - self._cost.prompts_s(len(sequence.tokens) - start, start)


PREFILL_ORDERINGS: dict[str, Callable[[StepCost], PrefillOrder]] = {
    "slack": LeastSlackFirst,
    "arrival": lambda _: FirstComeFirstServed(),
}
"""By their names in the configuration (`engine.prefill_order`)."""

PreemptionOrder = Callable[[Sequence], tuple[float, ...]]
"""Smaller keeps its pages longer."""


def by_arrival(sequence: Sequence) -> tuple[float, ...]:
    """The last arrived goes first: least was computed for it, as a rule."""
    return sequence.arrival


def by_priority(sequence: Sequence) -> tuple[float, ...]:
    """The lowest priority goes first; of equal ones the last arrived."""
    return -sequence.slo.priority, *sequence.arrival


def by_slo(sequence: Sequence) -> tuple[float, ...]:
    """The longest target of time between tokens goes first, and none before any: these have the most slack.
    Then as `by_priority`.
    """
    tbt_s = sequence.slo.tbt_s
    return float("inf") if tbt_s is None else tbt_s, *by_priority(sequence)


PREEMPTION_ORDERS: dict[str, PreemptionOrder] = {
    "arrival": by_arrival,
    "priority": by_priority,
    "slo": by_slo,
}
"""By their names in the configuration (`engine.preemption`)."""
