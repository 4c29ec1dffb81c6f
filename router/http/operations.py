"""GET /load: what is going on, for balancers in front of several routers and for people."""

from pydantic import BaseModel

from router.ports import RouterStatus, WorkerReport


class WorkerLoadReply(BaseModel):
    """One worker, as this router sees it.

    `in_flight` counts this router's own legs; the rest is the worker's last report, about all routers' work.
    """

    worker_id: str
    role: str
    state: str
    in_flight: int
    running: int
    waiting: int
    prefill_tokens_pending: int
    blocks_total: int
    blocks_free: int
    blocks_cached: int


class LoadReply(BaseModel):
    """Reply of GET /load. `waiting` are queued requests, by the name of their class; `in_flight` counts them too."""

    in_flight: int
    waiting: dict[str, int]
    workers: list[WorkerLoadReply]


def load(status: RouterStatus) -> LoadReply:
    """What is going on now."""
    return LoadReply(
        in_flight=status.in_flight(),
        waiting=dict(status.waiting()),
        workers=[_worker(report) for report in status.workers()],
    )


def _worker(report: WorkerReport) -> WorkerLoadReply:
    reported = report.load
    return WorkerLoadReply(
        worker_id=report.worker_id,
        role=report.role.value,
        state=report.state,
        in_flight=report.in_flight,
        running=reported.running,
        waiting=reported.waiting,
        prefill_tokens_pending=reported.prefill_tokens_pending,
        blocks_total=reported.blocks_total,
        blocks_free=reported.blocks_free,
        blocks_cached=reported.blocks_cached,
    )
