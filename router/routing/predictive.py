"""The policy `predictive`: prefill and decode worker chosen together, by the time that the request and others will wait.

The cost of a choice is in seconds:

    TTFT            P's queue + fetching from the pool + computing the rest + what of the hand-off computing does not hide
    + output * TBT  D's step with the request in its batch, for as many tokens as it will probably draw
    + room          waiting until D has pages, and a place in its batch
    + harm          what others lose whose tokens wait while a worker that decodes computes this prompt

The cheapest choice wins; within a millisecond the lighter one, and then chance. A short or mostly cached prompt may so be
computed by the decode worker itself, within the bounds of `LocalPrefill`.

One look at each worker gives both sides' costs (`router.routing.costs`). The link from P to D is charged for the best few of
either side only, in ascending order, until no pair can become cheaper: a link can but add. So a decision takes time in
proportion to the number of workers, not of pairs.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from random import Random

from router.routing.costs import (
    Entry,
    both_costs,
    decode_costs,
    predict,
    prefill_costs,
    prompt_parts,
    queue_s,
    unhidden_s,
)
from router.routing.policy import Considered, Demand, Pair, RouteKind, Unavailable
from router.routing.separable import NO_DECODER, Rank
from router.routing.view import WorkerView

_RESOLUTION_S = 0.001
_SHORTLIST = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalPrefill:
    """When a decode worker may compute a prompt although there are prefill workers.

    Attributes:
        max_tokens: Most tokens that it computes of a prompt; 0 forbids it.
        max_stall_s: Longest time for which sequences that decode there may be held up, by this prompt and those that
            wait there to be computed.
        margin_s: What has to be gained by it: whoever joins the batch next is not asked.
    """

    max_tokens: int = 512
    max_stall_s: float = 0.05
    margin_s: float = 0.01


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


class Predictive:
    """See the module (a `router.routing.policy.Policy`). Keeps nothing: what it predicts from hangs on the views.

    Args:
        local: When a decode worker may compute a prompt.
    """

    uses_prefix = True
    uses_session = False

    def __init__(self, local: LocalPrefill) -> None:
        self._local = local

    def pair(
        self, workers: Collection[WorkerView], demand: Demand, rng: Random
    ) -> Pair | Unavailable:
        """The pair, or the single worker, whose cost is least."""
        decoders = demand.decoders(workers)
        if not decoders:
            return NO_DECODER
        choices: list[_Choice] = []
        for members in _groups(workers):
            choices += self._choices(members, demand, rng)
        if not choices:
            grounds = Weighed(alone=both_costs(decoders, demand, rng)[:_SHORTLIST])
            choices = [_alone(grounds, RouteKind.NO_PREFILLER)]
        return min(choices, key=lambda choice: choice.rank).pair(demand)

    def prefiller(
        self, workers: Collection[WorkerView], decode: WorkerView, demand: Demand, rng: Random
    ) -> Pair:
        """The P whose cost is least with this D, link included."""
        taker: Entry = (0, 0, 0.0, 0.0, decode)
        ranked = prefill_costs(workers, demand, rng)[:_SHORTLIST]
        choice = _handed_over(Weighed(prefillers=ranked, decoders=[taker]), demand)
        assert choice is not None
        return replace(choice, kind=RouteKind.TAKE_OVER).pair(demand)

    def _choices(
        self, members: Sequence[WorkerView], demand: Demand, rng: Random
    ) -> Iterator[_Choice]:
        """At most two: the best pair, and the best worker that would do both. None if nobody prefills for others."""
        prefillers = [worker for worker in members if worker.can_prefill]
        decoders = demand.decoders(members)
        takers = [worker for worker in decoders if worker.takes_kv]
        if not prefillers:
            return
        alone = self._self_sufficient(decoders, demand)
        grounds = Weighed(
            prefillers=prefill_costs(prefillers, demand, rng)[:_SHORTLIST],
            decoders=decode_costs(takers, demand, rng)[:_SHORTLIST],
            alone=both_costs(alone, demand, rng)[:_SHORTLIST],
        )
        pair = _handed_over(grounds, demand)
        if pair is not None:
            yield pair
        if alone:
            choice = _alone(grounds, RouteKind.ON_DECODE)
            yield choice if choice.prefill.can_prefill else choice.dearer(self._local.margin_s)

    def _self_sufficient(self, decoders: Sequence[WorkerView], demand: Demand) -> list[WorkerView]:
        """Those that may compute the prompt themselves: hybrid workers always, decode workers if little is to be computed
        and those who decode there can bear it.
        """
        held, enough = demand.held, demand.tokens - self._local.max_tokens
        return [
            worker
            for worker in decoders
            if worker.can_prefill
            or (held.get(worker.slot, 0) >= enough and self._bears(worker, demand))
        ]

    def _bears(self, decode: WorkerView, demand: Demand) -> bool:
        if demand.uncached(decode) > self._local.max_tokens:
            return False  # of a prompt that is held whole, the last token is computed all the same
        if decode.sequences == 0:
            return True
        stall_s = queue_s(decode, demand.now_s) + prompt_parts(decode, demand)[1]
        return stall_s <= self._local.max_stall_s


def _groups(workers: Collection[WorkerView]) -> Collection[list[WorkerView]]:
    """The workers by layout."""
    groups: dict[int, list[WorkerView]] = {}
    for worker in workers:
        if worker.layout_group in groups:
            groups[worker.layout_group].append(worker)
        else:
            groups[worker.layout_group] = [worker]
    return groups.values()


def _handed_over(grounds: Weighed, demand: Demand) -> _Choice | None:
    """The best pair, links included; both sides come best first."""
    best: tuple[Rank, WorkerView, WorkerView] | None = None
    bound_s = float("inf")
    for _, p_legs, _, p_s, prefill in grounds.prefillers:
        for _, d_legs, chance, d_s, decode in grounds.decoders:
            if p_s + d_s > bound_s:
                break
            if prefill is decode:
                continue  # that is no pair; who would do both is weighed apart
            cost_s = p_s + d_s + unhidden_s(prefill, decode, demand)
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
