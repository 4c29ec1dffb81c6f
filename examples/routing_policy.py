"""A routing policy: prompts go where fewest sequences run,
but a worker whose name begins with `spot-` only when it must.

A router takes it by its name in the configuration, from the Python path, without a change to Baton:

    PYTHONPATH=examples baton serve --policy routing_policy:SpotLast

The contract is `WorkerPrices` in `router/routing/policies.py`;
docs/guides/add-a-routing-policy.md says what else it takes.
"""

from router.routing.policy import Demand
from router.routing.view import WorkerView

_SPOT = 1e6
"""More than any number of sequences: such a worker is chosen only where there is no other."""


class SpotLast:
    """Prices single workers; Baton takes the pair whose sum is least."""

    uses_prefix = False
    uses_session = False

    def prefill_cost(self, worker: WorkerView, demand: Demand) -> float:  # noqa: ARG002  # the contract's
        """Prompt tokens that wait there, in thousands."""
        return worker.queued_prefill_tokens / 1000 + _surcharge(worker)

    def decode_cost(self, worker: WorkerView, demand: Demand) -> float:  # noqa: ARG002
        """Sequences that decode there."""
        return worker.sequences + _surcharge(worker)

    def hand_off_cost(self, decoder: WorkerView, demand: Demand) -> float:  # noqa: ARG002
        """A hybrid worker that is as good keeps both legs."""
        return 0.1


def _surcharge(worker: WorkerView) -> float:
    return _SPOT if worker.identity.worker_id.startswith("spot-") else 0.0
