"""The policies an operator can choose by name (`router.policy`)."""

from baton.errors import ConfigError
from router.routing.policy import Demand, Policy
from router.routing.view import WorkerView

_SEQUENCE_TOKENS = 64
"""What one more running sequence costs beside its context: about a page's worth of reading per step."""

_CONTEXT_WEIGHT = 0.1
"""A token of context read at every step of a decode against a token prefilled once."""

_HANDOVER_WEIGHT = 0.05
"""A token's KV moved against a token prefilled. Its purpose is that a hybrid worker that is as good keeps both legs."""


class PrefixAffinity:
    """Least load, less what the held prefix saves: P by tokens left to compute, D by what its steps already read."""

    uses_prefix = True

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

    def prefill_cost(self, worker: WorkerView, demand: Demand) -> float:  # noqa: ARG002  # port
        """Number of the last decision that chose it."""
        return worker.last_pick

    def decode_cost(self, worker: WorkerView, demand: Demand) -> float:  # noqa: ARG002  # port
        """Number of the last decision that chose it."""
        return worker.last_pick

    def handover_cost(self, decoder: WorkerView, demand: Demand) -> float:  # noqa: ARG002  # port
        """Nothing."""
        return 0.0


_POLICIES: dict[str, type[Policy]] = {
    "prefix_affinity": PrefixAffinity,
    "least_loaded": LeastLoaded,
    "round_robin": RoundRobin,
}


def policy_named(name: str) -> Policy:
    """The policy of that name.

    Raises:
        ConfigError: There is none.
    """
    if name not in _POLICIES:
        raise ConfigError(
            f"unknown policy {name!r}; there are {', '.join(_POLICIES)}", param="router.policy"
        )
    return _POLICIES[name]()


def _lacking_tokens(worker: WorkerView, demand: Demand) -> int:
    if worker.load.blocks_total == 0:
        return 0
    room = worker.load.blocks_free + worker.load.blocks_cached
    return max(0, demand.uncached(worker) - room * worker.hello.layout.block_tokens)
