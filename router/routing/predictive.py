"""The policy `predictive`: prefill and decode worker chosen together, by the time that the request and others will wait.

The cost of a choice is in seconds:

    TTFT            P's queue + fetching from the pool + computing the rest + what of the hand-off computing does not hide
    + output * TBT  D's step with the request in its batch, for as many tokens as it will probably draw
    + room          waiting until D has pages, and a place in its batch
    + harm          what others lose whose tokens wait while a worker that decodes computes this prompt

The cheapest choice wins; within a millisecond the lighter one, and then chance. A short or mostly cached prompt may so be
computed by the decode worker itself, within the bounds of `LocalPrefill`.

One look at each worker gives both sides' costs (`router.routing.shortlist`). The link from P to D is charged for the best few of
either side only, in ascending order, until no pair can become cheaper: a link can but add. So a decision takes time in
proportion to the number of workers, not of pairs.
"""

from collections.abc import Collection, Iterator, Sequence, Set
from dataclasses import dataclass, replace
from random import Random

from baton.ids import WorkerIdentity
from router.routing.costs import Entry, predict, prompt_parts
from router.routing.local import ANYWHERE, LocalPrefill
from router.routing.policy import Considered, Demand, Pair, RouteKind, Unavailable
from router.routing.separable import NO_DECODER, Rank
from router.routing.shortlist import Shortlister
from router.routing.shortlist import shortlister as fastest_shortlister
from router.routing.side import Side
from router.routing.view import WorkerView

_RESOLUTION_S = 0.001


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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Choice:
    """The best choice of one kind within one layout."""

    rank: Rank
    prefill: WorkerView
    decode: WorkerView
    kind: RouteKind
    grounds: Weighed

    def dearer(self, seconds: float) -> "_Choice":
        """The same for so much more."""
        rank = (self.rank[0] + _rounded(seconds), *self.rank[1:])
        return replace(self, rank=rank)

    def pair(self, demand: Demand) -> Pair:
        """The choice with all that is expected of it."""
        return Pair(
            prefill=self.prefill,
            decode=self.decode,
            kind=self.kind,
            predicted=predict(self.prefill, self.decode, demand),
            grounds=self.grounds,
        )


class _Field:
    """The workers of one layout by what they can do, prepared for many decisions."""

    __slots__ = ("decoders", "prefillers", "takers")

    def __init__(self, members: Sequence[WorkerView], full: Set[WorkerIdentity]) -> None:
        decoders = [w for w in members if w.can_decode and w.identity not in full]
        self.prefillers = Side(tuple(worker for worker in members if worker.can_prefill))
        self.decoders = Side(tuple(decoders))
        self.takers = Side(tuple(worker for worker in decoders if worker.takes_kv))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Known:
    """What was prepared for the workers of the last decision: mostly the next one is among the same."""

    workers: Collection[WorkerView]
    full: Set[WorkerIdentity]
    fields: Sequence[_Field]

    def fits(self, workers: Collection[WorkerView], demand: Demand) -> bool:
        """Whether it can be used again. Only what cannot change is known again."""
        same = workers is self.workers and isinstance(workers, tuple)
        return same and demand.full == self.full


class Predictive:
    """See the module (a `router.routing.policy.Policy`). What it predicts from hangs on the views.

    Args:
        local: When a decode worker may compute a prompt.
        shortlister: Who prices the workers; the fastest there is if None.
    """

    uses_prefix = True
    uses_session = False

    def __init__(self, local: LocalPrefill, shortlister: Shortlister | None = None) -> None:
        self._local = local
        self._best = shortlister or fastest_shortlister()
        self._known = _Known(workers=(), full=frozenset(), fields=())

    def pair(
        self, workers: Collection[WorkerView], demand: Demand, rng: Random
    ) -> Pair | Unavailable:
        """The pair, or the single worker, whose cost is least."""
        if not self._known.fits(workers, demand):
            prepared = [_Field(members, demand.full) for members in _groups(workers)]
            self._known = _Known(workers=workers, full=demand.full, fields=prepared)
        fields = self._known.fields
        if not any(len(field.decoders) for field in fields):
            return NO_DECODER
        choices = [c for field in fields for c in self._choices(field, demand, rng)]
        if not choices:
            everywhere = Side(tuple(demand.decoders(workers)))
            grounds = Weighed(alone=self._best.both(everywhere, demand, rng, ANYWHERE))
            choices = [_alone(grounds, RouteKind.NO_PREFILLER)]
        return min(choices, key=lambda choice: choice.rank).pair(demand)

    def prefiller(
        self, workers: Collection[WorkerView], decode: WorkerView, demand: Demand, rng: Random
    ) -> Pair:
        """The P whose cost is least with this D, link included."""
        taker: Entry = (0, 0, 0.0, 0.0, decode)
        ranked = self._best.prefill(Side(tuple(workers)), demand, rng)
        choice = _handed_over(Weighed(prefillers=ranked, decoders=[taker]), demand)
        assert choice is not None
        return replace(choice, kind=RouteKind.TAKE_OVER).pair(demand)

    def _choices(self, field: _Field, demand: Demand, rng: Random) -> Iterator[_Choice]:
        """At most two: the best pair, and the best worker that would do both. None if nobody prefills for others."""
        if not len(field.prefillers):
            return
        grounds = Weighed(
            prefillers=self._best.prefill(field.prefillers, demand, rng),
            decoders=self._best.decode(field.takers, demand, rng),
            alone=self._best.both(field.decoders, demand, rng, self._local),
        )
        pair = _handed_over(grounds, demand)
        if pair is not None:
            yield pair
        if grounds.alone:
            choice = _alone(grounds, RouteKind.ON_DECODE)
            yield choice if choice.prefill.can_prefill else choice.dearer(self._local.margin_s)


def _groups(workers: Collection[WorkerView]) -> Collection[list[WorkerView]]:
    """The workers by layout."""
    groups: dict[int, list[WorkerView]] = {}
    for worker in workers:
        groups.setdefault(worker.layout_group, []).append(worker)
    return groups.values()


def _handed_over(grounds: Weighed, demand: Demand) -> _Choice | None:
    """The best pair, links included; both sides come best first."""
    best: tuple[Rank, WorkerView, WorkerView] | None = None
    bound_s = float("inf")
    decoders = grounds.decoders
    sizes = [demand.uncached(entry[-1]) * entry[-1].kv_token_bytes for entry in decoders]
    for _, p_legs, _, p_s, prefill in grounds.prefillers:
        if not decoders or p_s + decoders[0][3] > bound_s:
            continue
        window_s, forecast = prompt_parts(prefill, demand)[1], prefill.forecast
        for (_, d_legs, chance, d_s, decode), size_bytes in zip(decoders, sizes, strict=True):
            if p_s + d_s > bound_s:
                break
            if prefill is decode:
                continue  # that is no pair; who would do both is weighed apart
            link = forecast.link_to(decode.slot)
            cost_s = p_s + d_s + link.unhidden_s(size_bytes, window_s)
            rank = (_rounded(cost_s), p_legs + d_legs, chance)
            if best is None or rank < best[0]:
                best = rank, prefill, decode
                bound_s = cost_s + _RESOLUTION_S
    if best is None:
        return None
    return _Choice(
        rank=best[0], prefill=best[1], decode=best[2], kind=RouteKind.PAIR, grounds=grounds
    )


def _alone(grounds: Weighed, kind: RouteKind) -> _Choice:
    _, legs, chance, cost_s, worker = grounds.alone[0]
    return _Choice(
        rank=(_rounded(cost_s), legs, chance),
        prefill=worker,
        decode=worker,
        kind=RouteKind.HYBRID if worker.can_prefill else kind,
        grounds=grounds,
    )


def _rounded(cost_s: float) -> int:
    return int(cost_s / _RESOLUTION_S)


def _considered(prefill: Entry, decode: Entry) -> Considered:
    return Considered(
        prefill=prefill[-1].identity.worker_id,
        decode=decode[-1].identity.worker_id,
        cost=prefill[3] + decode[3],
    )
