"""What a router's planner looks at: what the workers have to do, by their reports,
by this router's own legs and by its forecasts.
"""

from baton.ids import Role
from router.attainment import NOTHING_MISSED, Missed
from router.roles.planner import Look, WorkerLook
from router.routing.predictive import queue_s
from router.routing.view import ClusterView, WorkerView


def look_at(
    view: ClusterView, now_s: float, *, waiting: int = 0, missed: Missed = NOTHING_MISSED
) -> Look:
    """The cluster of `view` at this moment.

    Args:
        view: The connected workers.
        now_s: The time.
        waiting: Requests in the router's line. While every prefill worker has a prompt they wait for one of those, else
            for a place on a decode worker; where no worker is usable, for any.
        missed: What requests were promised lately and did not get.
    """
    usable = set(view.usable(now_s))
    promised = [w.tightest_tbt_s for w in view.workers if w.tightest_tbt_s is not None]
    workers = [_look_at(worker, worker in usable, now_s) for worker in view.workers]
    prefilling = [w for w in workers if w.usable and w.role is Role.PREFILL]
    for_prefill = bool(prefilling) and all(worker.backlog_s > 0.0 for worker in prefilling)
    prompts = sum(worker.prefills for worker in view.workers)
    prompt_s = sum(worker.backlog_s for worker in prefilling) / max(1, prompts)
    return Look(
        workers=workers,
        waiting=0 if for_prefill or not usable else waiting,
        waiting_s=waiting * prompt_s if for_prefill else 0.0,
        tbt_s=min(promised, default=None),
        missed=missed,
    )


def _look_at(worker: WorkerView, usable: bool, now_s: float) -> WorkerLook:
    step_s, sequence_s, context_s = worker.forecast.step_costs
    return WorkerLook(
        identity=worker.identity,
        role=worker.hello.role,
        usable=usable,
        backlog_s=queue_s(worker, now_s),
        sequences=worker.sequences,
        context_tokens=max(worker.decode_tokens, worker.reported_context_tokens),
        places=worker.max_sequences,
        pages_used=worker.used_tokens / worker.capacity_tokens if worker.capacity_tokens else 0.0,
        step_s=step_s,
        sequence_s=sequence_s,
        context_s=context_s,
    )
