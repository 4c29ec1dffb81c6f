"""The policies an operator can choose by name (`router.policy`), and the prices of those that look at one worker at a time.

`predictive` has a module of its own (`router.routing.predictive`).
"""

from collections.abc import Callable
from functools import lru_cache
from hashlib import blake2b
from random import Random

from baton.errors import ConfigError
from baton.ids import WorkerId
from router.routing.local import LocalPrefill
from router.routing.policy import Demand, Policy
from router.routing.predictive import Predictive
from router.routing.separable import Separable
from router.routing.worker_view import WorkerView

_SEQUENCE_TOKENS = 64
"""What one more running sequence costs beside its context: about a page's worth of reading per step."""

_CONTEXT_WEIGHT = 0.1
"""A token of context read at every step of a decode against a token prefilled once."""

_HANDOVER_WEIGHT = 0.05
"""A token's KV moved against a token prefilled. Its purpose is that a hybrid worker that is as good keeps both legs."""


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

    def handover_cost(self, decoder: WorkerView, demand: Demand) -> float:
        """In proportion to what is not held there yet."""
        return _HANDOVER_WEIGHT * demand.uncached(decoder)


class LeastLoaded:
    """Least load, whoever holds which prefix."""

    uses_prefix = False
    uses_session = False

    def prefill_cost(self, worker: WorkerView, demand: Demand) -> float:
        """Tokens queued before the prompt, and the prompt."""
        return worker.queued_prefill_tokens + demand.tokens

    def decode_cost(self, worker: WorkerView, demand: Demand) -> float:
        """What every step reads there."""
        context = worker.decode_tokens + demand.tokens
        return _SEQUENCE_TOKENS * worker.sequences + _CONTEXT_WEIGHT * context

    def handover_cost(self, decoder: WorkerView, demand: Demand) -> float:  # noqa: ARG002  # port
        """In proportion to the prompt."""
        return _HANDOVER_WEIGHT * demand.tokens


class RoundRobin:
    """Whoever was chosen longest ago."""

    uses_prefix = False
    uses_session = False

    def prefill_cost(self, worker: WorkerView, demand: Demand) -> float:  # noqa: ARG002  # port
        """Number of the last decision that chose it."""
        return worker.last_pick

    def decode_cost(self, worker: WorkerView, demand: Demand) -> float:  # noqa: ARG002  # port
        """Number of the last decision that chose it."""
        return worker.last_pick

    def handover_cost(self, decoder: WorkerView, demand: Demand) -> float:  # noqa: ARG002  # port
        """Nothing."""
        return 0.0


class AtRandom:
    """Anybody."""

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

    def handover_cost(self, decoder: WorkerView, demand: Demand) -> float:  # noqa: ARG002  # port
        """Nothing."""
        return 0.0


class Session:
    """The same workers for every request of a session, whatever their load, as long as they are there.

    A session is what the request's `X-Baton-Session` header names, else its `user` field, both within the tenant's scope;
    a request with neither is of the session of its first tokens (`router.dispatch.placement`), so that prompts that begin alike
    stay together. Rendezvous hashing: all routers choose alike without talking to each other, and a worker that comes
    or goes moves only its own share.
    """

    uses_prefix = False
    uses_session = True

    def prefill_cost(self, worker: WorkerView, demand: Demand) -> float:
        """A number that depends on session and worker only."""
        return _rendezvous(demand.session, worker.identity.worker_id)

    def decode_cost(self, worker: WorkerView, demand: Demand) -> float:
        """The same number."""
        return _rendezvous(demand.session, worker.identity.worker_id)

    def handover_cost(self, decoder: WorkerView, demand: Demand) -> float:  # noqa: ARG002  # port
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
    """The policy of that name.

    Args:
        name: As in the configuration.
        local_prefill: When `predictive` may have a decode worker compute a prompt.
        rng: What `random` draws from; one of its own if None.

    Raises:
        ConfigError: There is none.
    """
    if name == "predictive":
        return Predictive(local_prefill or LocalPrefill())
    if name == "random":
        return Separable(AtRandom(rng))
    if name not in _PRICES:
        names = ", ".join(("predictive", "random", *_PRICES))
        raise ConfigError(f"unknown policy {name!r}; there are {names}", param="router.policy")
    return Separable(_PRICES[name]())


def _rendezvous(session: int, worker_id: WorkerId) -> float:
    # The hash of a tuple of numbers is the same in every process; only texts are hashed with a seed.
    return hash((session, _number(worker_id))) / 2**63


@lru_cache(maxsize=4096)
def _number(worker_id: WorkerId) -> int:
    return int.from_bytes(blake2b(worker_id.encode(), digest_size=7).digest())


def _lacking_tokens(worker: WorkerView, demand: Demand) -> int:
    if worker.load.blocks_total == 0:
        return 0
    room = worker.load.blocks_free + worker.load.blocks_cached
    return max(0, demand.uncached(worker) - room * worker.hello.layout.block_tokens)
