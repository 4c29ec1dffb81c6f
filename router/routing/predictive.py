"""The policy `predictive`: prefill and decode worker chosen together,
by the time that the request and others will wait.

The cost of a choice is in seconds:

    TTFT            P's queue + fetching from the pool + computing the rest + what of the hand-off computing does not hide
    + output * TBT  D's step with the request in its batch, for as many tokens as it will probably draw
    + room          waiting until D has pages, and a place in its batch
    + harm          what others lose whose tokens wait while a worker that decodes computes this prompt

The cheapest choice wins; within a millisecond the one with fewer legs, and then chance. A short or mostly cached prompt
may be computed by the decode worker itself, within the bounds of `LocalPrefill`.

One look at each worker gives both sides' costs. The link from P to D is charged for the best few of either side only,
in ascending order, until no pair can become cheaper: a link can but add. So a decision takes time in proportion to the
number of workers, not of pairs.

This module is the policy in Python, from the terms of the cost to the choice. `router.routing.pricing` computes the
same costs in C, to the last bit; a change to one is a change to both, and a test compares them.
"""

from collections.abc import Callable, Collection, Iterable, Sequence, Set
from dataclasses import dataclass
from random import Random
from typing import NamedTuple, Protocol

import msgspec

from baton.ids import WorkerIdentity
from router.routing.policy import (
    NO_DECODER,
    Considered,
    Demand,
    Pair,
    Predicted,
    Rank,
    Rationale,
    RouteKind,
    Unavailable,
)
from router.routing.view import WorkerView, may_hand_off

SHORTLIST = 8
"""So many workers of each side are looked at more closely."""

RESOLUTION_S = 0.001
"""Smaller differences decide nothing."""

_NEVER_S = 1e6

_MOST_PREPARED = 8
"""Sets of full workers: of requests of other lengths and other promises others are full."""


class PrefillWork(NamedTuple):
    """How a worker comes by the KV of a prompt that it does not hold.

    Attributes:
        fetch_s: Fetching from the pool.
        compute_s: Computing the rest.
        computed_tokens: The rest.
    """

    fetch_s: float
    compute_s: float
    computed_tokens: int

    @property
    def busy_s(self) -> float:
        """How long sequences that decode there are held up by it."""
        return self.fetch_s + self.compute_s


def prefill_work(worker: WorkerView, demand: Demand) -> PrefillWork:
    """Computing all, or fetching what the pool has beyond the worker's own and computing the rest: the quicker."""
    forecast, tokens = worker.forecast, demand.tokens
    held, pooled = demand.held_by(worker), demand.pooled_for(worker)
    compute_s = forecast.prefill_s(tokens - held, held)
    if pooled > held:
        fetch_s = forecast.fetching_s(pooled - held)
        rest_s = forecast.prefill_s(tokens - pooled, pooled)
        if fetch_s + rest_s < compute_s:
            return PrefillWork(fetch_s, rest_s, tokens - pooled)
    return PrefillWork(0.0, compute_s, tokens - held)


def queue_s(worker: WorkerView, now_s: float) -> float:
    """Until the prompts that stand before a new one are computed, those of other routers included."""
    forecast = worker.forecast
    return forecast.queue_s(now_s) + forecast.token_s * worker.foreign_prefill_tokens


def prefill_s(worker: WorkerView, demand: Demand) -> float:
    """Until the prompt is computed there, and what sequences lose that decode there meanwhile."""
    busy_s = prefill_work(worker, demand).busy_s
    return queue_s(worker, demand.now_s) + busy_s + busy_s * worker.sequences


def tbt_s(worker: WorkerView, demand: Demand) -> float:
    """A decode step there once the request has joined."""
    sequences = worker.sequences + demand.samples
    context = max(worker.decode_tokens, worker.reported_context_tokens) + demand.tokens
    return worker.forecast.tbt_s(sequences, context)


def room_s(worker: WorkerView, demand: Demand) -> float:
    """Until the worker has pages and a place in its batch for the request, at the rate at which others end there."""
    used = max(worker.decode_tokens, worker.used_tokens)
    lacking = used + demand.uncached(worker) - worker.capacity_tokens
    crowd = worker.sequences + demand.samples - worker.max_sequences
    if lacking <= 0 and crowd <= 0:
        return 0.0
    running = worker.sequences
    if not running or not used:
        return _NEVER_S
    lasting_s = demand.output_tokens * tbt_s(worker, demand)
    return lasting_s * max(lacking / used, crowd / running)


def decode_s(worker: WorkerView, demand: Demand) -> float:
    """The request's own steps, and waiting for room."""
    return demand.output_tokens * tbt_s(worker, demand) + room_s(worker, demand)


def prefill_and_decode_s(worker: WorkerView, demand: Demand) -> float:
    """Doing both on one worker."""
    return prefill_s(worker, demand) + decode_s(worker, demand)


def unhidden_s(prefill: WorkerView, decode: WorkerView, demand: Demand) -> float:
    """What of the hand-off computing does not hide."""
    if prefill is decode:
        return 0.0
    link = prefill.forecast.link_to(decode.slot)
    size_bytes = demand.uncached(decode) * decode.kv_token_bytes
    return link.unhidden_s(size_bytes, prefill_work(prefill, demand).busy_s)


def predict(prefill: WorkerView, decode: WorkerView, demand: Demand) -> Predicted:
    """All terms of one choice."""
    work = prefill_work(prefill, demand)
    return Predicted(
        queue_s=queue_s(prefill, demand.now_s),
        fetch_s=work.fetch_s,
        prefill_s=work.compute_s,
        unhidden_s=unhidden_s(prefill, decode, demand),
        room_s=room_s(decode, demand),
        tbt_s=tbt_s(decode, demand),
        harm_s=work.busy_s * prefill.sequences,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalPrefill:
    """When a decode worker may compute a prompt itself although there are prefill workers.

    Attributes:
        max_tokens: Most tokens that it computes of a prompt; 0 forbids it.
        max_stall_s: Longest time for which sequences that decode there may be held up, by this prompt and those that
            wait there to be computed.
        margin_s: What has to be gained by it: what joins the batch next is not in the price.
    """

    max_tokens: int = 512
    max_stall_s: float = 0.05
    margin_s: float = 0.01

    def allows(self, worker: WorkerView, demand: Demand) -> bool:
        """Whether `worker` may do both: a hybrid one always, a decode worker if little is to be computed and the
        sequences that decode there can bear it.
        """
        if worker.can_prefill:
            return True
        # Of a prompt that is held whole, the last token is computed all the same.
        work = prefill_work(worker, demand)
        if work.computed_tokens > self.max_tokens:
            return False
        return worker.sequences == 0 or (
            queue_s(worker, demand.now_s) + work.busy_s <= self.max_stall_s
        )


UNBOUNDED = LocalPrefill(max_tokens=1 << 62, max_stall_s=float("inf"))
"""No bounds: for when no worker prefills for others."""


class Candidates:
    """The workers of one layout by what they can do, prepared for many decisions.

    Args:
        members: All of them.
        stand_in: No worker of any layout decodes by its role, so that all of them may.

    Attributes:
        prefillers: Those that compute prompts for others.
        decoders: Those that decode.
        receivers: Those of `decoders` that others can hand KV off to.
        slots: The slots of all are below this.
    """

    __slots__ = ("__weakref__", "decoders", "prefillers", "receivers", "slots")

    def __init__(self, members: Sequence[WorkerView], *, stand_in: bool = False) -> None:
        self.prefillers = tuple(worker for worker in members if worker.can_prefill)
        self.decoders = tuple(worker for worker in members if stand_in or worker.can_decode)
        self.receivers = tuple(worker for worker in self.decoders if worker.takes_kv)
        self.slots = 1 + max((worker.slot for worker in members), default=-1)

    def without(self, full: Set[WorkerIdentity]) -> "Candidates":
        """The same, but `full` are to decode nothing more."""
        rest = Candidates(())
        rest.prefillers, rest.slots = self.prefillers, self.slots
        rest.decoders = tuple(worker for worker in self.decoders if worker.identity not in full)
        rest.receivers = tuple(worker for worker in rest.decoders if worker.takes_kv)
        return rest


Priced = tuple[int, int, float, float, WorkerView]
"""Whole milliseconds, legs, chance: so they sort by cost, then fewer legs, then at random. Then the cost itself,
and the worker.
"""


class Option(msgspec.Struct, frozen=True):
    """One way to run a request."""

    rank: Rank
    prefill: WorkerView
    decode: WorkerView


class Cheapest(msgspec.Struct, frozen=True, kw_only=True):
    """The cheapest pair and the cheapest single worker, where there is one, and why."""

    pair: Option | None
    single: Option | None
    rationale: Rationale


class Pricing(Protocol):
    """Prices the workers of one layout."""

    def cheapest(
        self, candidates: Candidates, demand: Demand, rng: Random, local: LocalPrefill
    ) -> Cheapest:
        """The cheapest ways; single workers only where `local` allows it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedRationale:
    """Why a predicted choice was made (a `Rationale`).

    Attributes:
        prefillers: The best of that side, best first.
        receivers: The best of the other side.
        singles: The best of those that would do both.
        pair: What is expected of the best pair, if there is one.
        single: What is expected of the best of `singles`.
    """

    prefillers: Sequence[Priced] = ()
    receivers: Sequence[Priced] = ()
    singles: Sequence[Priced] = ()
    pair: Predicted | None = None
    single: Predicted | None = None

    def predicted(self, *, alone: bool) -> Predicted | None:
        """See Rationale."""
        return self.single if alone else self.pair

    def considered(self) -> list[Considered]:
        """Each of the best P's with the best D and the other way round, and single workers. Without links' costs."""
        pairs = [(p, d) for p in self.prefillers for d in self.receivers[:1]]
        pairs += [(p, d) for d in self.receivers[1:] for p in self.prefillers[:1]]
        options = [
            Considered(
                prefill=prefill.identity.worker_id,
                decode=decode.identity.worker_id,
                cost=p_cost_s + d_cost_s,
            )
            for (*_, p_cost_s, prefill), (*_, d_cost_s, decode) in pairs
        ]
        for *_, cost_s, worker in self.singles:
            name = worker.identity.worker_id
            options.append(Considered(prefill=name, decode=name, cost=cost_s))
        return sorted(options, key=lambda option: option.cost)

    def why(self) -> str:
        """The rule."""
        return (
            "the least predicted seconds: TTFT, as many TBT as tokens are expected, waiting for room, what others"
            " lose; within a millisecond the lighter, then chance"
        )


class PythonPricing:
    """Prices in Python (a `Pricing`): for machines without the C function, and what that is compared with."""

    def cheapest(
        self, candidates: Candidates, demand: Demand, rng: Random, local: LocalPrefill
    ) -> Cheapest:
        """See Pricing."""
        allowed = [worker for worker in candidates.decoders if local.allows(worker, demand)]
        prefillers = shortlist(candidates.prefillers, prefill_s, demand, rng)
        receivers = shortlist(candidates.receivers, decode_s, demand, rng)
        singles = shortlist(allowed, prefill_and_decode_s, demand, rng)
        pair = best_pair(prefillers, receivers, demand)
        single = None
        if singles:
            _, legs, chance, cost_s, worker = singles[0]
            single = Option((_rounded(cost_s), legs, chance), worker, worker)
        rationale = PredictedRationale(
            prefillers=prefillers,
            receivers=receivers,
            singles=singles,
            pair=None if pair is None else predict(pair.prefill, pair.decode, demand),
            single=None if single is None else predict(single.prefill, single.decode, demand),
        )
        return Cheapest(pair=pair, single=single, rationale=rationale)


def shortlist(
    workers: Iterable[WorkerView],
    cost: Callable[[WorkerView, Demand], float],
    demand: Demand,
    rng: Random,
) -> list[Priced]:
    """The cheapest few of `workers`, best first."""
    priced = []
    for worker in workers:
        cost_s = cost(worker, demand)
        priced.append((int(1000.0 * cost_s), worker.legs, rng.random(), cost_s, worker))
    return sorted(priced)[:SHORTLIST]


def best_pair(
    prefillers: Sequence[Priced],
    receivers: Sequence[Priced],
    demand: Demand,
    *,
    has_pages: bool = False,
) -> Option | None:
    """The best pair, links included; both sides come best first. With `has_pages` no prompt would wait for them at the
    receivers.
    """
    best: Option | None = None
    bound_s = float("inf")
    sizes = [demand.uncached(worker) * worker.kv_token_bytes for *_, worker in receivers]
    for _, p_legs, _, p_s, prefill in prefillers:
        if not receivers or p_s + receivers[0][3] > bound_s:
            continue
        busy_s, forecast = prefill_work(prefill, demand).busy_s, prefill.forecast
        for (_, d_legs, chance, d_s, decode), size_bytes in zip(receivers, sizes, strict=True):
            if p_s + d_s > bound_s:
                break
            if prefill is decode:
                continue  # one worker that does both is no pair, and is priced apart
            if not has_pages and not may_hand_off(prefill, decode):
                continue
            link = forecast.link_to(decode.slot)
            cost_s = p_s + d_s + link.unhidden_s(size_bytes, busy_s)
            rank: Rank = (_rounded(cost_s), p_legs + d_legs, chance)
            if best is None or rank < best.rank:
                best = Option(rank, prefill, decode)
                bound_s = cost_s + RESOLUTION_S
    return best


def _rounded(cost_s: float) -> int:
    """In units of what makes a difference."""
    return int(cost_s / RESOLUTION_S)


_Choice = tuple[Rank, Option, RouteKind, Rationale]
"""The best option of one kind within one layout."""


class Predictive:
    """See the module (a `router.routing.policy.Policy`). What it predicts from is on the views.

    Args:
        local: When a decode worker may compute a prompt.
        pricing: Prices the workers.
    """

    uses_prefix = True
    uses_session = False

    def __init__(self, local: LocalPrefill, pricing: Pricing) -> None:
        self._local = local
        self._pricing = pricing
        # What was prepared for the workers of the last decision: mostly the next one is among the same.
        self._workers: Collection[WorkerView] = ()
        self._groups: Sequence[Candidates] = ()
        self._groups_without: dict[Set[WorkerIdentity], Sequence[Candidates]] = {}

    def pair(
        self, workers: Collection[WorkerView], demand: Demand, rng: Random
    ) -> Pair | Unavailable:
        """The pair, or the single worker, whose cost is least."""
        groups = self._candidates(workers, demand.full)
        choices: list[_Choice] = []
        for candidates in groups:
            if candidates.prefillers:
                choices += self._choices(candidates, demand, rng)
        if not choices:
            choices = self._without_prefillers(groups, demand, rng)
        if not choices:
            return NO_DECODER
        # Nearly always there is one; `min` would call its key all the same.
        best = choices[0] if len(choices) == 1 else min(choices, key=lambda choice: choice[0])
        return _pair(*best[1:])

    def prefiller(
        self, workers: Collection[WorkerView], decode: WorkerView, demand: Demand, rng: Random
    ) -> Pair:
        """The P whose cost is least with this D, link included."""
        receiver: Priced = (0, 0, 0.0, 0.0, decode)
        prefillers = shortlist(workers, prefill_s, demand, rng)
        option = best_pair(prefillers, [receiver], demand, has_pages=True)
        assert option is not None
        predicted = predict(option.prefill, option.decode, demand)
        rationale = PredictedRationale(prefillers=prefillers, receivers=[receiver], pair=predicted)
        return _pair(option, RouteKind.TAKE_OVER, rationale)

    def _candidates(
        self, workers: Collection[WorkerView], full: Set[WorkerIdentity]
    ) -> Sequence[Candidates]:
        """Of each layout."""
        # Only of a tuple is it known that it still has the same members.
        if not isinstance(workers, tuple):
            return [candidates.without(full) for candidates in _by_layout(workers)]
        if workers is not self._workers:
            self._workers, self._groups = workers, _by_layout(workers)
            self._groups_without = {}
        if not full:
            return self._groups
        # Beside those for whom nobody is full: a request is mostly placed among all, and again where the best is full.
        groups = self._groups_without.get(full := frozenset(full))
        if groups is None:
            if len(self._groups_without) == _MOST_PREPARED:
                self._groups_without.clear()
            groups = [candidates.without(full) for candidates in self._groups]
            self._groups_without[full] = groups
        return groups

    def _choices(self, candidates: Candidates, demand: Demand, rng: Random) -> list[_Choice]:
        """At most two: the best pair, and the best worker that would do both."""
        found = self._pricing.cheapest(candidates, demand, rng, self._local)
        choices = []
        if found.pair is not None:
            choices.append((found.pair.rank, found.pair, RouteKind.PAIR, found.rationale))
        if (single := found.single) is not None:
            rank, kind = single.rank, RouteKind.HYBRID
            if not single.prefill.can_prefill:
                rank = (rank[0] + _rounded(self._local.margin_s), *rank[1:])
                kind = RouteKind.ON_DECODE
            elif not single.prefill.can_decode:
                kind = RouteKind.NO_DECODER
            choices.append((rank, single, kind, found.rationale))
        return choices

    def _without_prefillers(
        self, groups: Sequence[Candidates], demand: Demand, rng: Random
    ) -> list[_Choice]:
        """Where no worker prefills for others, the one that decodes computes the prompt."""
        choices: list[_Choice] = []
        for candidates in groups:
            found = self._pricing.cheapest(candidates, demand, rng, UNBOUNDED)
            if (single := found.single) is not None:
                hybrid = single.prefill.can_prefill
                kind = RouteKind.HYBRID if hybrid else RouteKind.NO_PREFILLER
                choices.append((single.rank, single, kind, found.rationale))
        return choices


def _by_layout(workers: Collection[WorkerView]) -> list[Candidates]:
    members: dict[int, list[WorkerView]] = {}
    for worker in workers:
        members.setdefault(worker.layout_group, []).append(worker)
    stand_in = not any(worker.can_decode for worker in workers)
    return [Candidates(group, stand_in=stand_in) for group in members.values()]


def _pair(option: Option, kind: RouteKind, rationale: Rationale) -> Pair:
    return Pair(prefill=option.prefill, decode=option.decode, kind=kind, rationale=rationale)
