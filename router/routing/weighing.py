"""Weighing the workers of one layout: the best pair, and the best worker that would do all of it alone.

This is the plain way, in Python; `router.routing.native_weighing` gives the same costs to the last bit within
microseconds, and only the chance that decides between equals is another.
"""

from collections.abc import Sequence, Set
from dataclasses import dataclass
from random import Random
from typing import Protocol

import msgspec

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
from router.routing.worker_view import WorkerView

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


class Option(msgspec.Struct, frozen=True):
    """One way to run a request."""

    rank: Rank
    prefill: WorkerView
    decode: WorkerView


class Weighing(msgspec.Struct, frozen=True, kw_only=True):
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
    """The grounds of a predicted choice (`Grounds`).

    Attributes:
        prefillers: The best of that side, best first.
        decoders: Of the other side.
        alone: Of those that would do both.
        pair: What is expected of the best pair, if there is one.
        single: The same of the best of `alone`.
    """

    prefillers: Sequence[Entry] = ()
    decoders: Sequence[Entry] = ()
    alone: Sequence[Entry] = ()
    pair: Predicted | None = None
    single: Predicted | None = None

    def predicted(self, *, alone: bool) -> Predicted | None:
        """See Grounds."""
        return self.single if alone else self.pair

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
        allowed = [worker for worker in field.decoders.workers if local.allows(worker, demand)]
        prefillers = prefill_costs(field.prefillers.workers, demand, rng)[:SHORTLIST]
        decoders = decode_costs(field.takers.workers, demand, rng)[:SHORTLIST]
        alone = both_costs(allowed, demand, rng)[:SHORTLIST]
        pair, single = handed_over(prefillers, decoders, demand), _alone(alone)
        grounds = Weighed(
            prefillers=prefillers,
            decoders=decoders,
            alone=alone,
            pair=foreseen(pair, demand),
            single=foreseen(single, demand),
        )
        return Weighing(pair=pair, alone=single, grounds=grounds)


def handed_over(
    prefillers: Sequence[Entry], decoders: Sequence[Entry], demand: Demand
) -> Option | None:
    """The best pair, links included; both sides come best first."""
    best: tuple[Rank, WorkerView, WorkerView] | None = None
    bound_s = float("inf")
    sizes = [demand.uncached(entry[-1]) * entry[-1].kv_token_bytes for entry in decoders]
    for _, p_legs, _, p_s, prefill in prefillers:
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
    return None if best is None else Option(*best)


def foreseen(option: Option | None, demand: Demand) -> Predicted | None:
    """What is expected of it."""
    return None if option is None else predict(option.prefill, option.decode, demand)


def _alone(ranked: Sequence[Entry]) -> Option | None:
    if not ranked:
        return None
    _, legs, chance, cost_s, worker = ranked[0]
    return Option(rank=(rounded(cost_s), legs, chance), prefill=worker, decode=worker)


def rounded(cost_s: float) -> int:
    """In units of what makes a difference."""
    return int(cost_s / RESOLUTION_S)


def _considered(prefill: Entry, decode: Entry) -> Considered:
    return Considered(
        prefill=prefill[-1].identity.worker_id,
        decode=decode[-1].identity.worker_id,
        cost=prefill[3] + decode[3],
    )
