"""The policy `predictive`: prefill and decode worker chosen together, by the time that the request and others will wait.

The cost of a choice is in seconds:

    TTFT            P's queue + fetching from the pool + computing the rest + what of the hand-off computing does not hide
    + output * TBT  D's step with the request in its batch, for as many tokens as it will probably draw
    + room          waiting until D has pages, and a place in its batch
    + harm          what others lose whose tokens wait while a worker that decodes computes this prompt

The cheapest choice wins; within a millisecond the lighter one, and then chance. A short or mostly cached prompt may so be
computed by the decode worker itself, within the bounds of `LocalPrefill`.

One look at each worker gives both sides' costs (`router.routing.weighing`, and the same in C). The link from P to D is charged for the best few of
either side only, in ascending order, until no pair can become cheaper: a link can but add. So a decision takes time in
proportion to the number of workers, not of pairs.
"""

from collections.abc import Collection, Sequence, Set
from dataclasses import dataclass
from random import Random

from baton.ids import WorkerIdentity
from router.routing.costs import Entry, prefill_costs
from router.routing.local import ANYWHERE, LocalPrefill
from router.routing.native_weighing import fastest_weigher
from router.routing.policy import Demand, Grounds, Pair, RouteKind, Unavailable
from router.routing.separable import NO_DECODER, Rank
from router.routing.weighing import (
    SHORTLIST,
    Field,
    Option,
    Weighed,
    Weigher,
    foreseen,
    handed_over,
    rounded,
)
from router.routing.worker_view import WorkerView

_Choice = tuple[Rank, Option, RouteKind, Grounds]
"""The best option of one kind within one layout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Known:
    """What was prepared for the workers of the last decision: mostly the next one is among the same."""

    workers: Collection[WorkerView]
    full: Set[WorkerIdentity]
    fields: Sequence[Field]

    def fits(self, workers: Collection[WorkerView], demand: Demand) -> bool:
        """Whether it can be used again: only what cannot change is known by who it is."""
        same = workers is self.workers and isinstance(workers, tuple)
        return same and demand.full == self.full


class Predictive:
    """See the module (a `router.routing.policy.Policy`). What it predicts from hangs on the views.

    Args:
        local: When a decode worker may compute a prompt.
        weigher: Who prices the workers; the fastest there is if None.
    """

    uses_prefix = True
    uses_session = False

    def __init__(self, local: LocalPrefill, weigher: Weigher | None = None) -> None:
        self._local = local
        self._weigher = weigher or fastest_weigher()
        self._known = _Known(workers=(), full=frozenset(), fields=())

    def pair(
        self, workers: Collection[WorkerView], demand: Demand, rng: Random
    ) -> Pair | Unavailable:
        """The pair, or the single worker, whose cost is least."""
        fields = self._fields(workers, demand)
        choices: list[_Choice] = []
        for field in fields:
            if field.prefillers.workers:
                choices += self._choices(field, demand, rng)
        if not choices:
            choices = self._helpless(fields, demand, rng)
        if not choices:
            return NO_DECODER
        # Nearly always there is one; `min` would call for its key all the same.
        best = choices[0] if len(choices) == 1 else min(choices, key=lambda choice: choice[0])
        return _pair(*best[1:])

    def prefiller(
        self, workers: Collection[WorkerView], decode: WorkerView, demand: Demand, rng: Random
    ) -> Pair:
        """The P whose cost is least with this D, link included."""
        taker: Entry = (0, 0, 0.0, 0.0, decode)
        ranked = prefill_costs(workers, demand, rng)[:SHORTLIST]
        option = handed_over(ranked, [taker], demand)
        assert option is not None
        grounds = Weighed(prefillers=ranked, decoders=[taker], pair=foreseen(option, demand))
        return _pair(option, RouteKind.TAKE_OVER, grounds)

    def _fields(self, workers: Collection[WorkerView], demand: Demand) -> Sequence[Field]:
        if not self._known.fits(workers, demand):
            fields = [Field(members, demand.full) for members in _groups(workers)]
            self._known = _Known(workers=workers, full=demand.full, fields=fields)
        return self._known.fields

    def _choices(self, field: Field, demand: Demand, rng: Random) -> list[_Choice]:
        """At most two: the best pair, and the best worker that would do both."""
        found, choices = self._weigher.weigh(field, demand, rng, self._local), []
        if found.pair is not None:
            choices.append((found.pair.rank, found.pair, RouteKind.PAIR, found.grounds))
        if (alone := found.alone) is not None:
            rank, kind = alone.rank, RouteKind.HYBRID
            if not alone.prefill.can_prefill:
                rank = (rank[0] + rounded(self._local.margin_s), *rank[1:])
                kind = RouteKind.ON_DECODE
            choices.append((rank, alone, kind, found.grounds))
        return choices

    def _helpless(self, fields: Sequence[Field], demand: Demand, rng: Random) -> list[_Choice]:
        """Where nobody prefills for others, whoever decodes computes the prompt."""
        choices: list[_Choice] = []
        for field in fields:
            found = self._weigher.weigh(field, demand, rng, ANYWHERE)
            if found.alone is not None:
                kind = (
                    RouteKind.HYBRID if found.alone.prefill.can_prefill else RouteKind.NO_PREFILLER
                )
                choices.append((found.alone.rank, found.alone, kind, found.grounds))
        return choices


def _pair(option: Option, kind: RouteKind, grounds: Grounds) -> Pair:
    return Pair(prefill=option.prefill, decode=option.decode, kind=kind, grounds=grounds)


def _groups(workers: Collection[WorkerView]) -> Collection[list[WorkerView]]:
    """The workers by layout."""
    groups: dict[int, list[WorkerView]] = {}
    for worker in workers:
        groups.setdefault(worker.layout_group, []).append(worker)
    return groups.values()
