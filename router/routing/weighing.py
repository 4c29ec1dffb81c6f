"""Weighing the workers of one layout: the best pair, and the best worker that would do all of it alone.

This is the plain way, in Python; `router.routing.native_weighing` gives the same costs to the last bit within
microseconds, and only the chance that decides between equals is another.
"""

from collections.abc import Sequence, Set
from dataclasses import dataclass
from random import Random
from typing import NamedTuple, Protocol

from baton.ids import WorkerIdentity
from router.routing.costs import (
    Entry,
    both_costs,
    decode_costs,
    predict,
    prefill_costs,
    work_of,
)
from router.routing.local import LocalPrefill
from router.routing.policy import Considered, Demand, Grounds, Predicted
from router.routing.separable import Rank
from router.routing.side import Side
from router.routing.view import WorkerView

SHORTLIST = 8
"""So many of each kind are looked at more closely."""

RESOLUTION_S = 0.001


class Field:
    """The workers of one layout by what they can do, prepared for many decisions.

    Args:
        members: All of them.
        full: Those that should decode nothing more.
    """

    __slots__ = ("decoders", "prefillers", "slots", "takers")

    def __init__(self, members: Sequence[WorkerView], full: Set[WorkerIdentity]) -> None:
        decoders = [w for w in members if w.can_decode and w.identity not in full]
        self.prefillers = Side(tuple(worker for worker in members if worker.can_prefill))
        self.decoders = Side(tuple(decoders))
        self.takers = Side(tuple(worker for worker in decoders if worker.takes_kv))
        self.slots = max(side.slots for side in (self.prefillers, self.decoders))


class Option(NamedTuple):
    """One way to run a request, and what is expected of it."""

    rank: Rank
    prefill: WorkerView
    decode: WorkerView
    predicted: Predicted


class Weighing(NamedTuple):
    """The best way of each kind, where there is one, and why."""

    pair: Option | None
    alone: Option | None
    grounds: Grounds


class Weigher(Protocol):
    """Weighs the workers of one layout."""

    def weigh(self, field: Field, demand: Demand, rng: Random, local: LocalPrefill) -> Weighing:
        """The cheapest ways; alone only those to whom `local` allows it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weighed:
    """The grounds of a predicted choice: the best of either side, and of those that would do both (`Grounds`)."""

    prefillers: Sequence[Entry] = ()
    decoders: Sequence[Entry] = ()
    alone: Sequence[Entry] = ()

    def considered(self) -> list[Considered]:
        """Each of the best P's with the best D and the other way round, and who would do both. Without links' costs."""
        options = [_considered(p, d) for p in self.prefillers for d in self.decoders[:1]]
        options += [_considered(p, d) for d in self.decoders[1:] for p in self.prefillers[:1]]
        for _, _, _, cost_s, worker in self.alone:
            name = worker.identity.worker_id
            options.append(Considered(prefill=name, decode=name, cost=cost_s))
        return sorted(options, key=lambda option: option.cost)

    def why(self) -> str:
        """The rule."""
        return (
            "the least predicted seconds: TTFT, as many TBT as tokens are expected, waiting for room, what others"
            " lose; within a millisecond the lighter, then chance"
        )


class PlainWeigher:
    """In Python (a `Weigher`)."""

    def weigh(self, field: Field, demand: Demand, rng: Random, local: LocalPrefill) -> Weighing:
        """See Weigher."""
        alone = [worker for worker in field.decoders.workers if local.allows(worker, demand)]
        grounds = Weighed(
            prefillers=prefill_costs(field.prefillers.workers, demand, rng)[:SHORTLIST],
            decoders=decode_costs(field.takers.workers, demand, rng)[:SHORTLIST],
            alone=both_costs(alone, demand, rng)[:SHORTLIST],
        )
        pair = handed_over(grounds, demand)
        return Weighing(pair=pair, alone=_alone(grounds, demand), grounds=grounds)


def handed_over(grounds: Weighed, demand: Demand) -> Option | None:
    """The best pair, links included; both sides come best first."""
    best: tuple[Rank, WorkerView, WorkerView] | None = None
    bound_s = float("inf")
    decoders = grounds.decoders
    sizes = [demand.uncached(entry[-1]) * entry[-1].kv_token_bytes for entry in decoders]
    for _, p_legs, _, p_s, prefill in grounds.prefillers:
        if not decoders or p_s + decoders[0][3] > bound_s:
            continue
        window_s, forecast = work_of(prefill, demand).busy_s, prefill.forecast
        for (_, d_legs, chance, d_s, decode), size_bytes in zip(decoders, sizes, strict=True):
            if p_s + d_s > bound_s:
                break
            if prefill is decode:
                continue  # that is no pair; who would do both is weighed apart
            link = forecast.link_to(decode.slot)
            cost_s = p_s + d_s + link.unhidden_s(size_bytes, window_s)
            rank: Rank = (rounded(cost_s), p_legs + d_legs, chance)
            if best is None or rank < best[0]:
                best = rank, prefill, decode
                bound_s = cost_s + RESOLUTION_S
    if best is None:
        return None
    cheapest, prefill, decode = best
    return Option(
        rank=cheapest, prefill=prefill, decode=decode, predicted=predict(prefill, decode, demand)
    )


def _alone(grounds: Weighed, demand: Demand) -> Option | None:
    if not grounds.alone:
        return None
    _, legs, chance, cost_s, worker = grounds.alone[0]
    return Option(
        rank=(rounded(cost_s), legs, chance),
        prefill=worker,
        decode=worker,
        predicted=predict(worker, worker, demand),
    )


def rounded(cost_s: float) -> int:
    """In units of what makes a difference."""
    return int(cost_s / RESOLUTION_S)


def _considered(prefill: Entry, decode: Entry) -> Considered:
    return Considered(
        prefill=prefill[-1].identity.worker_id,
        decode=decode[-1].identity.worker_id,
        cost=prefill[3] + decode[3],
    )
