"""What a worker process offers besides its roles' services: health that looks at progress, status, drain, shutdown.

One process holds one engine and one or two services over it; `WorkerServer` holds them together. It knows the engine only
as something that makes progress or has failed.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from baton.config.schema import WorkerConfig
from baton.errors import EngineError
from baton.generation import WorkerLoad
from baton.rpc.channel import bind, new_server
from baton.rpc.control import ControlService, WorkerState
from baton.rpc.hello import WorkerHello
from baton.rpc.v1 import control_pb2_grpc
from baton.telemetry.logs import get_logger
from baton.telemetry.metrics import render
from baton.telemetry.scrape import ScrapeServer
from baton.telemetry.worker import WorkerMetrics

CHECK_INTERVAL_S = 0.1
LIVE = "live"
"""The name under which health tells whether the process should go on; under no name, whether it takes new work."""

_STOP_GRACE_S = 0.5

_log = get_logger(__name__)


class Progress(Protocol):
    """The part of an engine that tells whether it is well."""

    def progress_s(self) -> float | None:
        """Seconds since it last made progress while it has work; None when idle."""

    def failure(self) -> BaseException | None:
        """What ended it, or None while it lives."""


class WorkerService(Protocol):
    """One role's service in this process."""

    def add_to(self, server: grpc.aio.Server) -> None:
        """Registers its gRPC services."""

    async def start(self) -> None:
        """Begins to serve; called on the event loop before the server opens."""

    def tick(self) -> None:
        """Called every `CHECK_INTERVAL_S`: deadlines, load reports."""

    def refuse_new(self) -> None:
        """Takes no new legs from now on and tells the routers so."""

    def in_flight(self) -> int:
        """Legs, sequences and transfers that are not over."""

    def transfers_in_flight(self) -> int:
        """Hand-offs that are not over."""

    def load(self) -> WorkerLoad:
        """The last load that the engine reported to it."""

    async def close(self) -> None:
        """Cancels what is left and lets everything go."""


class WorkerServer:
    """A worker process's gRPC server with everything on it."""

    def __init__(
        self,
        *,
        config: WorkerConfig,
        hello: WorkerHello,
        engine: Progress,
        services: Sequence[WorkerService],
        metrics: WorkerMetrics,
        version: str = "",
        model: str = "",
    ) -> None:
        self._config = config
        self._hello = hello
        self._engine = engine
        self._services = services
        self._metrics = metrics
        self._scraped: ScrapeServer | None = None
        self._server = new_server()
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]  # missing in the stubs
        self._control = ControlService(
            state=self.state, drain=self.drain, left=self.in_flight, version=version, model=model
        )
        self._draining = False
        self._checking: asyncio.Task[None] | None = None
        self._checked = asyncio.Event()
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Ends with `EngineError` when the engine's loop died: the process should end too, so that it is restarted."""

    async def start(self) -> None:
        """Binds the address and serves.

        Raises:
            OSError: The address is taken or cannot be bound.
        """
        for service in self._services:
            await service.start()
            service.add_to(self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        control_pb2_grpc.add_ControlServicer_to_server(self._control, self._server)
        bind(self._server, self._config.address)
        if self._config.metrics_address:
            self._scraped = ScrapeServer(self._config.metrics_address, self._metrics.registry)
        await self._set_health(self.state())
        await self._server.start()
        self._checking = asyncio.create_task(self._check_forever(), name="worker-checks")

    async def drain(self, timeout_s: float) -> bool:
        """Refuses what is new and waits for what is here; whether all of it ended in time.

        A prefill worker is drained only when everything that it prefilled is committed or cancelled.
        """
        if not self._draining:
            self._draining = True
            for service in self._services:
                service.refuse_new()
            await self._set_health(self.state())
        try:
            async with asyncio.timeout(timeout_s):
                await self.idle()
        except TimeoutError:
            _log.warning("drained too slowly", left=self.in_flight())
        return self.in_flight() == 0

    async def idle(self) -> None:
        """Waits until nothing is in flight, or the engine has died."""
        while self.in_flight() and not self.failed.done():
            self._checked.clear()
            await self._checked.wait()

    async def close(self) -> None:
        """Stops serving; streams that are left are cut."""
        if self._checking is not None:
            self._checking.cancel()
            await asyncio.wait([self._checking])
        if self._scraped is not None:
            await asyncio.to_thread(self._scraped.close)
        await self._health.enter_graceful_shutdown()
        await self._server.stop(_STOP_GRACE_S)
        for service in self._services:
            await service.close()
        if self.failed.done():
            self.failed.exception()  # seen, whether or not anybody waited for it
        else:
            self.failed.cancel()

    def collect(self) -> bytes:
        """This worker's metrics in Prometheus' text format."""
        return render(self._metrics.registry)[0]

    def in_flight(self) -> int:
        """Legs, sequences and transfers in this process that are not over."""
        return sum(service.in_flight() for service in self._services)

    def state(self) -> WorkerState:
        """How this worker is, as `Control.Status` and health tell it."""
        waited_s = self._engine.progress_s()
        if self._engine.failure() is not None:
            word = "lost"
        elif waited_s is not None and waited_s > self._config.stall_timeout_s:
            word = "stalled"
        else:
            word = "draining" if self._draining else "ready"
        loads = [service.load() for service in self._services]
        latest = max(loads, key=lambda load: load.steps, default=WorkerLoad())
        return WorkerState(
            hello=self._hello,
            address=self._config.address,
            word=word,
            load=replace(latest, draining=self._draining),
            in_flight=self.in_flight(),
            transfers_in_flight=sum(s.transfers_in_flight() for s in self._services),
            seconds_since_progress=waited_s or 0.0,
        )

    async def _check_forever(self) -> None:
        """Sweeps whether or not there is new work. Without it leases would never end: a fault in it ends the process."""
        while True:
            await asyncio.sleep(CHECK_INTERVAL_S)
            try:
                await self.check()
            except Exception as error:  # noqa: BLE001  # whatever it is, a worker that cannot sweep must not go on
                _log.error("the worker's checks failed", cause=error)
                self._fail(EngineError(f"the worker's checks failed: {error!r}"))
                return

    def _fail(self, error: EngineError) -> None:
        if not self.failed.done():
            self.failed.set_exception(error)

    async def check(self) -> None:
        """One look at the engine and all deadlines; runs by itself several times per second."""
        for service in self._services:
            service.tick()
        state = self.state()
        self._metrics.observe(state.load, transfers_in_flight=state.transfers_in_flight)
        await self._set_health(state)
        self._checked.set()
        failure = self._engine.failure()
        if failure is not None and not self.failed.done():
            _log.error("the engine's loop died", cause=failure)
            self._fail(EngineError(f"the engine's loop died: {failure!r}"))

    async def _set_health(self, state: WorkerState) -> None:
        yes = health_pb2.HealthCheckResponse.SERVING
        no = health_pb2.HealthCheckResponse.NOT_SERVING
        await self._health.set("", yes if state.ready else no)
        await self._health.set(LIVE, yes if state.alive else no)
