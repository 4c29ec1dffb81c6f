"""What probes, balancers and dashboards ask for: /health, /ping, /ready, /load, /metrics, /version."""

from collections.abc import Callable

from fastapi import FastAPI, Response
from fastapi.responses import PlainTextResponse
from prometheus_client import CollectorRegistry
from pydantic import BaseModel

from baton.errors import UnavailableError
from baton.telemetry.logs import get_logger
from baton.telemetry.metrics import render_in_turns
from router.http.errors import error_response, error_responses
from router.ports import RouterStatus, WorkerReport
from router.tenants.directory import UNREAD, TenantDirectory

_log = get_logger(__name__)


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
    """Reply of GET /load. `waiting` are queued requests, by the name of their class; `in_flight` counts them too.
    `server_load` is the same number under vLLM's name.
    """

    in_flight: int
    server_load: int
    waiting: dict[str, int]
    workers: list[WorkerLoadReply]


def load(status: RouterStatus) -> LoadReply:
    """What is going on now."""
    in_flight = status.in_flight()
    return LoadReply(
        in_flight=in_flight,
        server_load=in_flight,
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


class Probe:
    """What an orchestrator asks every few seconds. A change of the answer is logged, not every answer.

    Args:
        path: Where it asks.
        fault: What is wrong; None while all is well.
    """

    def __init__(self, path: str, fault: Callable[[], str | None]) -> None:
        self._path = path
        self._fault = fault
        self._said: str | None = None

    def failure(self) -> Response | None:
        """The answer 503 if all is not well now."""
        fault = self._fault()
        if fault != self._said:
            self._said = fault
            if fault is None:
                _log.info("a probe succeeds again", path=self._path)
            else:
                _log.warning("a probe fails", path=self._path, why=fault)
        return None if fault is None else error_response(UnavailableError(fault))


def install(
    app: FastAPI,
    status: RouterStatus,
    directory: TenantDirectory,
    version: str,
    registry: CollectorRegistry,
) -> None:
    """Adds the paths that probes, balancers and dashboards ask for."""

    def sickness() -> str | None:
        return None if status.healthy() else "The links to the workers make no progress."

    def unreadiness() -> str | None:
        if not directory.is_read:
            return UNREAD
        return None if status.ready() else "No worker is ready."

    health, ready = Probe("/health", sickness), Probe("/ready", unreadiness)

    @app.head("/health", response_model=dict[str, str], include_in_schema=False)
    @app.get("/health", response_model=dict[str, str], responses=error_responses(503))
    async def get_health() -> Response | dict[str, str]:
        """Alive, and what the workers send is being moved. Says nothing about whether there are workers."""
        return health.failure() or {"status": "ok"}

    @app.head("/ping", response_model=dict[str, str], include_in_schema=False)
    @app.get("/ping", response_model=dict[str, str], responses=error_responses(503))
    @app.post("/ping", response_model=dict[str, str], responses=error_responses(503))
    async def ping() -> Response | dict[str, str]:
        """The same as /health, where SageMaker asks."""
        return health.failure() or {"status": "ok"}

    @app.head("/ready", response_model=dict[str, str], include_in_schema=False)
    @app.get("/ready", response_model=dict[str, str], responses=error_responses(503))
    async def get_ready() -> Response | dict[str, str]:
        """Whether a request could be served now."""
        return ready.failure() or {"status": "ready"}

    @app.get("/load", responses=error_responses())
    async def get_load() -> LoadReply:
        return load(status)

    @app.get("/metrics", response_class=PlainTextResponse)
    async def get_metrics() -> Response:
        text, content_type = await render_in_turns(registry)
        return Response(text, headers={"Content-Type": content_type})

    @app.get("/version")
    async def get_version() -> dict[str, str]:
        return {"version": version}
