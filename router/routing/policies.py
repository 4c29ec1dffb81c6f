"""The policies that an operator can choose (`router.policy`): by name, or one of its own as `package.module:Class`.

Most price one worker at a time, and the pair's price is the sum, so that the best pair is the best P with the best D
(`AdditivePolicy`). `predictive`, the default, has a module of its own (`router.routing.predictive`).
"""

import importlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from random import Random
from typing import Any, Protocol

from baton.config.rules import POLICIES
from baton.errors import ConfigError
from baton.ids import WorkerId
from router.routing.policy import (
    NO_DECODER,
    Considered,
    Demand,
    Pair,
    Policy,
    Rank,
    RouteKind,
    Unavailable,
)
from router.routing.predictive import LocalPrefill, Predictive
from router.routing.pricing import fastest_pricing
from router.routing.view import WorkerView, may_hand_off

_SEQUENCE_TOKENS = 64
"""What one more running sequence costs beside its context: about a page's worth of reading per step."""

_CONTEXT_WEIGHT = 0.1
"""A token of context read at every step of a decode against a token prefilled once."""

_HAND_OFF_WEIGHT = 0.05
"""A token's KV moved against a token prefilled. Its purpose is that a hybrid worker that is as good keeps both legs."""


class WorkerPrices(Protocol):
    """Prices one worker for a demand; less is better."""

    uses_prefix: bool
    """Whether `Demand.held` matters."""

    uses_session: bool
    """Whether `Demand.session` matters."""

    def prefill_cost(self, worker: WorkerView, demand: Demand) -> float:
        """Of prefilling on `worker`."""

    def decode_cost(self, worker: WorkerView, demand: Demand) -> float:
        """Of decoding on `worker`."""

    def hand_off_cost(self, decoder: WorkerView, demand: Demand) -> float:
        """Of moving the KV that `decoder` lacks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Option:
    """A possible pair and its rank."""

    rank: Rank
    pair: Pair


@dataclass(frozen=True, slots=True, kw_only=True)
class SummedRationale:
    """Why an additive policy chose: the best option of each kind (a `Rationale`)."""

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


class AdditivePolicy:
    """A policy that adds up prices (a `router.routing.policy.Policy`).

    Args:
        prices: Of single workers.
    """

    def __init__(self, prices: WorkerPrices) -> None:
        self.prices = prices
        self.uses_prefix = prices.uses_prefix
        self.uses_session = prices.uses_session

    def pair(
        self, workers: Collection[WorkerView], demand: Demand, rng: Random
    ) -> Pair | Unavailable:
        """The cheapest way. A decode worker prefills for itself only when no other worker can, a prefill worker decodes
        only then; a hybrid one does both whenever that is cheaper.
        """
        decoders = demand.decoders(workers)
        if not decoders:
            return NO_DECODER
        options = list(self._options(workers, decoders, demand, rng))
        if not options:
            options = [self._local(decoders, RouteKind.NO_PREFILLER, demand, rng)]
        best = min(options, key=lambda option: option.rank).pair
        rationale = SummedRationale(options=options)
        return Pair(prefill=best.prefill, decode=best.decode, kind=best.kind, rationale=rationale)

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
            here = [worker for worker in decoders if worker.layout_group == group]
            takers = [worker for worker in here if worker.takes_kv]
            prefillers = [
                worker
                for worker in members
                if worker.can_prefill and any(may_hand_off(worker, taker) for taker in takers)
            ]
            both = [worker for worker in here if worker.can_prefill]
            if prefillers:
                yield self._handed_off(prefillers, takers, demand, rng)
            if both:
                kind = RouteKind.HYBRID if both[0].can_decode else RouteKind.NO_DECODER
                yield self._local(both, kind, demand, rng)

    def _handed_off(
        self,
        prefillers: Collection[WorkerView],
        takers: Collection[WorkerView],
        demand: Demand,
        rng: Random,
    ) -> _Option:
        prices = self.prices
        p_rank, p = _cheapest(prefillers, lambda w: prices.prefill_cost(w, demand), rng)
        may_take = [worker for worker in takers if may_hand_off(p, worker)]
        d_rank, d = _cheapest(
            may_take, lambda w: prices.decode_cost(w, demand) + prices.hand_off_cost(w, demand), rng
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


class PrefixAffinity:
    """Least load, less what the held prefix saves: P by tokens left to compute, D by what its steps already read."""

    uses_prefix = True
    uses_session = False

    def prefill_cost(self, worker: WorkerView, demand: Demand) -> float:
        """Tokens queued before the prompt and tokens of the prompt to compute."""
        return worker.queued_prefill_tokens + demand.uncached(worker)

    def decode_cost(self, worker: WorkerView, demand: Demand) -> float:
        """What every step reads there, and the tokens for which there are no pages."""
        context = worker.decode_tokens + demand.uncached(worker)
        load = _SEQUENCE_TOKENS * worker.sequences + _CONTEXT_WEIGHT * context
        return load + _lacking_tokens(worker, demand)

    def hand_off_cost(self, decoder: WorkerView, demand: Demand) -> float:
        """In proportion to what is not held there yet."""
        return _HAND_OFF_WEIGHT * demand.uncached(decoder)


class LeastLoaded:
    """Least load, whichever worker holds the prefix."""

    uses_prefix = False
    uses_session = False

    def prefill_cost(self, worker: WorkerView, demand: Demand) -> float:
        """Tokens queued before the prompt, and the prompt."""
        return worker.queued_prefill_tokens + demand.tokens

    def decode_cost(self, worker: WorkerView, demand: Demand) -> float:
        """What every step reads there."""
        context = worker.decode_tokens + demand.tokens
        return _SEQUENCE_TOKENS * worker.sequences + _CONTEXT_WEIGHT * context

    def hand_off_cost(self, decoder: WorkerView, demand: Demand) -> float:  # noqa: ARG002  # port
        """In proportion to the prompt."""
        return _HAND_OFF_WEIGHT * demand.tokens


class RoundRobin:
    """The worker that was chosen longest ago."""

    uses_prefix = False
    uses_session = False

    def prefill_cost(self, worker: WorkerView, demand: Demand) -> float:  # noqa: ARG002  # port
        """Number of the last decision that chose it."""
        return worker.last_pick

    def decode_cost(self, worker: WorkerView, demand: Demand) -> float:  # noqa: ARG002  # port
        """Number of the last decision that chose it."""
        return worker.last_pick

    def hand_off_cost(self, decoder: WorkerView, demand: Demand) -> float:  # noqa: ARG002  # port
        """Nothing."""
        return 0.0


class AtRandom:
    """Any worker, at random."""

    uses_prefix = False
    uses_session = False

    def __init__(self, rng: Random | None = None) -> None:
        self._rng = rng or Random()

    def prefill_cost(self, worker: WorkerView, demand: Demand) -> float:  # noqa: ARG002  # port
        """Drawn anew each time."""
        return self._rng.random()

    def decode_cost(self, worker: WorkerView, demand: Demand) -> float:  # noqa: ARG002  # port
        """Drawn anew each time."""
        return self._rng.random()

    def hand_off_cost(self, decoder: WorkerView, demand: Demand) -> float:  # noqa: ARG002  # port
        """Nothing."""
        return 0.0


class Session:
    """The same workers for every request of a session, whatever their load, as long as they are there.

    A session is what the request's `X-Baton-Session` header names, else its `user` field, both within the tenant's
    scope; a request with neither is of the session of its first tokens (`router.dispatch.placement`), so that prompts
    that begin alike stay together. Rendezvous hashing: all routers choose alike without talking to each other, and a
    worker that comes or goes moves only its own share.
    """

    uses_prefix = False
    uses_session = True

    def prefill_cost(self, worker: WorkerView, demand: Demand) -> float:
        """A number that depends on session and worker only."""
        return _rendezvous(demand.session, worker.identity.worker_id)

    def decode_cost(self, worker: WorkerView, demand: Demand) -> float:
        """The same number."""
        return _rendezvous(demand.session, worker.identity.worker_id)

    def hand_off_cost(self, decoder: WorkerView, demand: Demand) -> float:  # noqa: ARG002  # port
        """Nothing."""
        return 0.0


_PRICES: dict[str, Callable[[], PrefixAffinity | LeastLoaded | RoundRobin | Session]] = {
    "prefix_affinity": PrefixAffinity,
    "least_loaded": LeastLoaded,
    "round_robin": RoundRobin,
    "session": Session,
}


def policy_named(
    name: str, local_prefill: LocalPrefill | None = None, rng: Random | None = None
) -> Policy:
    """The policy of that name, or one of the operator's own.

    Args:
        name: As in the configuration: a name, or `package.module:Class` of a `Policy` or of `WorkerPrices`. The class
            is imported and called without arguments, once.
        local_prefill: When `predictive` may have a decode worker compute a prompt.
        rng: What `random` draws from; one of its own if None.

    Raises:
        ConfigError: There is none, or it cannot be made.
    """
    if name == "predictive":
        return Predictive(local_prefill or LocalPrefill(), fastest_pricing())
    if name == "random":
        return AdditivePolicy(AtRandom(rng))
    if name in _PRICES:
        return AdditivePolicy(_PRICES[name]())
    if ":" in name:
        return _loaded(name)
    raise _unusable(name, "there is no such policy")


def _loaded(name: str) -> Policy:
    """The operator's own policy: `package.module:Class`."""
    module, _, attribute = name.partition(":")
    try:
        factory: Callable[[], Policy | WorkerPrices] = getattr(
            importlib.import_module(module), attribute
        )
    except (ImportError, AttributeError, ValueError) as error:
        raise _unusable(name, f"there is no such class ({error})") from error
    try:
        made: Any = factory()
    except Exception as error:
        raise _unusable(name, f"it cannot be made: {error}") from error
    if not _has(made, "uses_prefix", "uses_session"):
        raise _unusable(name, "it has no uses_prefix and uses_session")
    if _has(made, "pair", "prefiller"):
        policy: Policy = made
        return policy
    if _has(made, "prefill_cost", "decode_cost", "hand_off_cost"):
        return AdditivePolicy(made)
    raise _unusable(
        name, "it has neither pair and prefiller nor prefill_cost, decode_cost and hand_off_cost"
    )


def _has(made: object, *names: str) -> bool:
    return all(hasattr(made, name) for name in names)


def _unusable(name: str, why: str) -> ConfigError:
    known = ", ".join(POLICIES)
    return ConfigError(
        f"router.policy: {name}: {why}; there are {known}, or package.module:Class",
        param="router.policy",
    )


def _rendezvous(session: int, worker_id: WorkerId) -> float:
    # The hash of a tuple of numbers is the same in every process; only texts are hashed with a seed.
    return hash((session, _number(worker_id))) / 2**63


@lru_cache(maxsize=4096)
def _number(worker_id: WorkerId) -> int:
    return int.from_bytes(blake2b(worker_id.encode(), digest_size=7).digest())


def _lacking_tokens(worker: WorkerView, demand: Demand) -> int:
    if worker.load.blocks_total == 0:
        return 0
    layout = worker.hello.layout
    room = (worker.load.blocks_free + worker.load.blocks_cached) // layout.pages_per_block
    return max(0, demand.uncached(worker) - room * layout.block_tokens)
