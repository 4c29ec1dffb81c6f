"""Policies that price single workers: the pair's price is the sum, so the best pair is the best P with the best D.

Choosing takes one look at each worker. Pairs are made among workers of one layout.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Protocol

from router.routing.policy import Considered, Demand, Pair, RouteKind, Unavailable
from router.routing.worker_view import WorkerView

Rank = tuple[float, int, float]
"""Cost, then lighter, then at random."""

NO_DECODER = Unavailable(reason="no decode worker is available")


class Prices(Protocol):
    """Prices one worker for a demand; less is better."""

    uses_prefix: bool
    """Whether `Demand.held` matters."""

    uses_session: bool
    """Whether `Demand.session` matters."""

    def prefill_cost(self, worker: WorkerView, demand: Demand) -> float:
        """Of prefilling on `worker`."""

    def decode_cost(self, worker: WorkerView, demand: Demand) -> float:
        """Of decoding on `worker`."""

    def handover_cost(self, decoder: WorkerView, demand: Demand) -> float:
        """Of moving the KV that `decoder` lacks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Option:
    """A possible pair and its rank."""

    rank: Rank
    pair: Pair


@dataclass(frozen=True, slots=True, kw_only=True)
class SummedUp:
    """The grounds of a separable choice: the best option of each kind (`Grounds`)."""

    options: Sequence[_Option]

    def predicted(self, *, alone: bool) -> None:
        """Nothing: prices are no times."""

    def considered(self) -> list[Considered]:
        """The best pair and the best single worker of each layout."""
        return [
            Considered(
                prefill=option.pair.prefill.identity.worker_id,
                decode=option.pair.decode.identity.worker_id,
                cost=option.rank[0],
            )
            for option in sorted(self.options, key=lambda option: option.rank)
        ]

    def why(self) -> str:
        """The rule."""
        return "the least sum of both workers' prices; ties to the lighter, then at random"


class Separable:
    """A policy that adds up prices (a `router.routing.policy.Policy`).

    Args:
        prices: Of single workers.
    """

    def __init__(self, prices: Prices) -> None:
        self.prices = prices
        self.uses_prefix = prices.uses_prefix
        self.uses_session = prices.uses_session

    def pair(
        self, workers: Collection[WorkerView], demand: Demand, rng: Random
    ) -> Pair | Unavailable:
        """The cheapest way. A decode worker prefills for itself only when nobody else can; a hybrid one whenever that
        is cheaper.
        """
        decoders = demand.decoders(workers)
        if not decoders:
            return NO_DECODER
        options = list(self._options(workers, decoders, demand, rng))
        if not options:
            options = [self._local(decoders, RouteKind.NO_PREFILLER, demand, rng)]
        best = min(options, key=lambda option: option.rank).pair
        grounds = SummedUp(options=options)
        return Pair(prefill=best.prefill, decode=best.decode, kind=best.kind, grounds=grounds)

    def prefiller(
        self, workers: Collection[WorkerView], decode: WorkerView, demand: Demand, rng: Random
    ) -> Pair:
        """The cheapest P."""
        worker = _cheapest(workers, lambda w: self.prices.prefill_cost(w, demand), rng)[1]
        return Pair(prefill=worker, decode=decode, kind=RouteKind.TAKE_OVER)

    def _options(
        self,
        workers: Collection[WorkerView],
        decoders: Collection[WorkerView],
        demand: Demand,
        rng: Random,
    ) -> Iterator[_Option]:
        for group in {worker.layout_group for worker in workers}:
            members = [worker for worker in workers if worker.layout_group == group]
            prefillers = [worker for worker in members if worker.can_prefill]
            here = [worker for worker in decoders if worker.layout_group == group]
            takers = [worker for worker in here if worker.takes_kv]
            both = [worker for worker in here if worker.can_prefill]
            if prefillers and takers:
                yield self._handed_over(prefillers, takers, demand, rng)
            if both:
                yield self._local(both, RouteKind.HYBRID, demand, rng)

    def _handed_over(
        self,
        prefillers: Collection[WorkerView],
        takers: Collection[WorkerView],
        demand: Demand,
        rng: Random,
    ) -> _Option:
        prices = self.prices
        p_rank, p = _cheapest(prefillers, lambda w: prices.prefill_cost(w, demand), rng)
        d_rank, d = _cheapest(
            takers, lambda w: prices.decode_cost(w, demand) + prices.handover_cost(w, demand), rng
        )
        rank = (p_rank[0] + d_rank[0], p_rank[1] + d_rank[1], d_rank[2])
        kind = RouteKind.HYBRID if p is d else RouteKind.PAIR
        return _Option(rank=rank, pair=Pair(prefill=p, decode=d, kind=kind))

    def _local(
        self, workers: Collection[WorkerView], kind: RouteKind, demand: Demand, rng: Random
    ) -> _Option:
        prices = self.prices
        rank, worker = _cheapest(
            workers,
            lambda w: prices.prefill_cost(w, demand) + prices.decode_cost(w, demand),
            rng,
        )
        return _Option(rank=rank, pair=Pair(prefill=worker, decode=worker, kind=kind))


def _cheapest(
    workers: Collection[WorkerView], cost: Callable[[WorkerView], float], rng: Random
) -> tuple[Rank, WorkerView]:
    ranked = ((cost(worker), worker.legs, rng.random()) for worker in workers)
    return min(zip(ranked, workers, strict=True), key=lambda entry: entry[0])
