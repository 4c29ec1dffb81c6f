"""When a decode worker may compute a prompt itself although there are prefill workers."""

from dataclasses import dataclass

from router.routing.costs import queue_s, work_of
from router.routing.policy import Demand
from router.routing.worker_view import WorkerView


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalPrefill:
    """The bounds.

    Attributes:
        max_tokens: Most tokens that it computes of a prompt; 0 forbids it.
        max_stall_s: Longest time for which sequences that decode there may be held up, by this prompt and those that
            wait there to be computed.
        margin_s: What has to be gained by it: whoever joins the batch next is not asked.
    """

    max_tokens: int = 512
    max_stall_s: float = 0.05
    margin_s: float = 0.01

    def allows(self, worker: WorkerView, demand: Demand) -> bool:
        """Whether `worker` may do both: a hybrid one always, a decode worker if little is to be computed and those who
        decode there can bear it.
        """
        if worker.can_prefill:
            return True
        # Of a prompt that is held whole, the last token is computed all the same.
        work = work_of(worker, demand)
        if work.computed_tokens > self.max_tokens:
            return False
        return worker.sequences == 0 or (
            queue_s(worker, demand.now_s) + work.busy_s <= self.max_stall_s
        )


ANYWHERE = LocalPrefill(max_tokens=1 << 62, max_stall_s=float("inf"))
"""No bounds: for when nobody prefills for others."""
