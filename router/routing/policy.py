"""Chooses who runs which leg of a request: the pair (P, D) with the lowest cost, or one worker for both.

A `Policy` only prices single workers; which pairs are possible is decided here, once for all policies. Costs of P and D
add up, so the best pair is the best P with the best D among workers of one layout, and choosing takes one look at each
worker. Costs are in tokens of prefill.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Set
from dataclasses import dataclass
from random import Random
from typing import Protocol

from baton.ids import WorkerIdentity
from router.routing.view import WorkerView


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What a request asks of its workers.

    Attributes:
        tokens: Tokens whose KV must exist before the next one is drawn.
        samples: Sequences to decode.
        held: Leading tokens whose KV a worker holds already, by its slot.
    """

    tokens: int
    samples: int
    held: Mapping[int, int]

    def uncached(self, worker: WorkerView) -> int:
        """Tokens that `worker` would have to compute, or be sent; the last one is always computed."""
        return self.tokens - min(self.held.get(worker.slot, 0), self.tokens - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Who prefills and who decodes; one and the same when no KV is handed over."""

    prefill: WorkerView
    decode: WorkerView

    @property
    def local(self) -> bool:
        """Whether one worker does both."""
        return self.prefill is self.decode


@dataclass(frozen=True, slots=True, kw_only=True)
class Unavailable:
    """No worker can take the request now, and why."""

    reason: str


class Policy(Protocol):
    """Prices workers for a demand; less is better."""

    uses_prefix: bool
    """Whether `Demand.held` matters; without it the prompt need not be hashed."""

    def prefill_cost(self, worker: WorkerView, demand: Demand) -> float:
        """Of prefilling on `worker`."""

    def decode_cost(self, worker: WorkerView, demand: Demand) -> float:
        """Of decoding on `worker`."""

    def handover_cost(self, decoder: WorkerView, demand: Demand) -> float:
        """Of moving the KV that `decoder` lacks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Priced:
    """A possible pair; `rank` orders by cost, then lighter, then at random."""

    rank: tuple[float, int, float]
    pair: Pair


def choose(
    policy: Policy,
    workers: Collection[WorkerView],
    demand: Demand,
    rng: Random,
    *,
    full: Set[WorkerIdentity] = frozenset(),
) -> Pair | Unavailable:
    """The cheapest way to run `demand` on `workers`, where those that are `full` decode nothing more.

    A decode worker prefills for itself only when nobody else can; a hybrid one whenever that is cheaper.
    """
    decoders = [w for w in workers if w.hello.role.decodes and w.identity not in full]
    if not decoders:
        return Unavailable(reason="no decode worker is available")
    options = list(_options(policy, workers, decoders, demand, rng))
    if not options:
        options = [_local(policy, decoders, demand, rng)]
    return min(options, key=lambda option: option.rank).pair


def choose_prefiller(
    policy: Policy, workers: Collection[WorkerView], demand: Demand, rng: Random
) -> WorkerView:
    """The cheapest P of `workers`, at least one, where D is settled already."""
    return _cheapest(workers, lambda worker: policy.prefill_cost(worker, demand), rng)[1]


def _options(
    policy: Policy,
    workers: Collection[WorkerView],
    decoders: Collection[WorkerView],
    demand: Demand,
    rng: Random,
) -> Iterator[_Priced]:
    for group in {worker.layout_group for worker in workers}:
        members = [worker for worker in workers if worker.layout_group == group]
        prefillers = [worker for worker in members if worker.hello.role.prefills_for_others]
        # Without a transfer address nobody can send it KV.
        here = [worker for worker in decoders if worker.layout_group == group]
        takers = [worker for worker in here if worker.hello.transfer_address]
        both = [worker for worker in here if worker.hello.role.prefills_for_others]
        if prefillers and takers:
            yield _handed_over(policy, prefillers, takers, demand, rng)
        if both:
            yield _local(policy, both, demand, rng)


def _handed_over(
    policy: Policy,
    prefillers: Collection[WorkerView],
    takers: Collection[WorkerView],
    demand: Demand,
    rng: Random,
) -> _Priced:
    p_rank, p = _cheapest(prefillers, lambda w: policy.prefill_cost(w, demand), rng)
    d_rank, d = _cheapest(
        takers, lambda w: policy.decode_cost(w, demand) + policy.handover_cost(w, demand), rng
    )
    rank = (p_rank[0] + d_rank[0], p_rank[1] + d_rank[1], d_rank[2])
    return _Priced(rank=rank, pair=Pair(prefill=p, decode=d))


def _local(policy: Policy, workers: Collection[WorkerView], demand: Demand, rng: Random) -> _Priced:
    rank, worker = _cheapest(
        workers, lambda w: policy.prefill_cost(w, demand) + policy.decode_cost(w, demand), rng
    )
    return _Priced(rank=rank, pair=Pair(prefill=worker, decode=worker))


def _cheapest(
    workers: Collection[WorkerView], cost: Callable[[WorkerView], float], rng: Random
) -> tuple[tuple[float, int, float], WorkerView]:
    ranked = ((cost(worker), worker.legs, rng.random()) for worker in workers)
    return min(zip(ranked, workers, strict=True), key=lambda entry: entry[0])
