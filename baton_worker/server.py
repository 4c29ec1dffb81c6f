"""What a worker process offers besides its legs: health that looks at progress, status, drain,
change of role, shutdown.

It knows the engine only as something that makes progress or has failed.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from baton.config.schema import WorkerConfig
from baton.errors import BatonError, DrainingError, EngineError, disposition
from baton.generation import WorkerLoad
from baton.ids import Role
from baton.rpc.admission import asker
from baton.rpc.bounds import worker_bounds
from baton.rpc.channel import bind, new_server
from baton.rpc.credentials import ClusterCredentials
from baton.rpc.hello import WorkerHello, identity_to_proto, role_from_proto, role_to_proto
from baton.rpc.reports import load_to_proto
from baton.rpc.stories import story_to_proto
from baton.rpc.v1 import common_pb2, control_pb2_grpc
from baton.rpc.v1 import control_pb2 as pb
from baton.story import StoryEntry, StoryLog
from baton.telemetry.logs import get_logger
from baton.telemetry.metrics import render
from baton.telemetry.scrape import ScrapeServer
from baton_worker.metrics import WorkerMetrics

CHECK_INTERVAL_S = 0.1
LIVE_PATH, READY_PATH = "/live", "/ready"
"""The same over HTTP, beside the metrics."""
LIVE = "live"
"""The name under which health tells whether the process should go on; under no name, whether it takes new work."""

_CHECKED_WITHIN_S = 5.0
_STOP_GRACE_S = 0.5
_REMEMBERED = 256

_log = get_logger(__name__)


class EngineProgress(Protocol):
    """The part of an engine that tells whether it is well."""

    def progress_s(self) -> float | None:
        """Seconds since it last made progress while it has work; None when idle."""

    def failure(self) -> BaseException | None:
        """What ended it, or None while it lives."""


class Service(Protocol):
    """What runs over the engine; see `baton_worker.service.WorkerService`."""

    hello: WorkerHello

    def add_to(self, server: grpc.aio.Server) -> None:
        """Registers its gRPC services."""

    async def start(self) -> None:
        """Begins to serve; called on the event loop before the server opens."""

    def tick(self) -> None:
        """Called every `CHECK_INTERVAL_S`: deadlines, load reports."""

    def story_of(self, name: str) -> Sequence[StoryEntry]:
        """What happened to the legs of a request, or to a block of the engine's cache, in order of time."""

    def now_s(self) -> float:
        """The time on the clock of its stories."""

    def refuse_new(self, by: str) -> None:
        """Takes no new legs from now on and tells the routers so, and who had it drained."""

    def take_new(self) -> None:
        """Takes new legs again and tells the routers so."""

    def narrow_role(self, role: Role) -> None:
        """Takes only those legs from now on that its role and `role` have in common, and tells the routers so."""

    def take_role(self, role: Role) -> None:
        """Takes the legs of `role` from now on, and tells the routers so."""

    def in_flight(self, *, outside: Role | None = None) -> int:
        """Legs, sequences and transfers that are not over: all of them, or those that `outside` would not take."""

    def transfers_in_flight(self) -> int:
        """Hand-offs that are not over."""

    def load(self) -> WorkerLoad:
        """The last load that the engine reported to it."""

    async def close(self) -> None:
        """Cancels what is left and lets everything go."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerState:
    """A worker at one moment; `word` is one of ready, draining, stalled, lost."""

    hello: WorkerHello
    address: str
    word: str
    load: WorkerLoad
    in_flight: int
    transfers_in_flight: int
    seconds_since_progress: float

    @property
    def ready(self) -> bool:
        """Whether it takes new work."""
        return self.word == "ready"

    @property
    def alive(self) -> bool:
        """Whether it makes progress, if it has work. A draining worker does."""
        return self.word in ("ready", "draining")


class WorkerServer:
    """A worker process's gRPC server with everything on it."""

    def __init__(
        self,
        *,
        config: WorkerConfig,
        engine: EngineProgress,
        service: Service,
        metrics: WorkerMetrics,
        credentials: ClusterCredentials | None = None,
        version: str = "",
        model: str = "",
    ) -> None:
        self._config = config
        self._engine = engine
        self._service = service
        self._metrics = metrics
        self._scraped: ScrapeServer | None = None
        self._credentials = credentials
        self._server = new_server(credentials, worker_bounds(service.hello))
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]  # missing in the stubs
        self._control = _Control(self, version=version, model=model)
        self._draining = self._stopping = False
        self._told = StoryLog("control", _REMEMBERED)
        self._seen: tuple[WorkerState, float] | None = None
        self._changing_role = asyncio.Lock()
        self._checking: asyncio.Task[None] | None = None
        self._checked = asyncio.Event()
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Ends with `EngineError` when the engine's loop died: the process should end too, so that it is restarted."""

    async def start(self) -> None:
        """Binds the address and serves.

        Raises:
            ConfigError: The address is taken or cannot be bound.
        """
        await self._service.start()
        self._service.add_to(self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        control_pb2_grpc.add_ControlServicer_to_server(self._control, self._server)
        bind(self._server, self._config.address, self._credentials)
        if self._config.metrics_address:
            self._scraped = ScrapeServer(
                self._config.metrics_address,
                self._metrics.registry,
                {LIVE_PATH: self._probed_alive, READY_PATH: self._probed_ready},
            )
        await self._set_health(self.state())
        await self._server.start()
        self._checking = asyncio.create_task(self._check_forever(), name="worker-checks")

    async def drain(self, timeout_s: float, *, by: str = "") -> bool:
        """Refuses what is new and waits for what is here; whether all of it ended in time.

        A worker is drained only when everything that it prefilled for others is committed or cancelled.

        Args:
            timeout_s: How long it waits.
            by: Who asked, where `undrain` may take it back; nobody if the process is to end.
        """
        self._stopping = self._stopping or not by
        if not self._draining:
            self._draining = True
            self._tell("draining", by=by or "the end of the process")
            self._service.refuse_new(by)
            await self._set_health(self.state())
        try:
            async with asyncio.timeout(timeout_s):
                while self._draining and self.in_flight() and not self.failed.done():
                    self._checked.clear()
                    await self._checked.wait()
        except TimeoutError:
            _log.warning("drained too slowly", left=self.in_flight())
        return self._draining and self.in_flight() == 0

    async def undrain(self, *, by: str) -> None:
        """Takes new work again.

        Raises:
            DrainingError: The process is about to end.
        """
        if self._stopping:
            raise DrainingError("this worker is about to end")
        if self._draining:
            self._draining = False
            self._tell("takes new work again", by=by)
            self._service.take_new()
            self._checked.set()
            await self._set_health(self.state())

    async def set_role(self, role: Role, timeout_s: float, *, by: str) -> int:
        """Changes what this worker advertises, once it has finished what the new role does not take.

        Pages and prefix cache stay, and so does the incarnation. One change at a time. Cancelled, the worker is what it
        was before.

        Args:
            role: The one to take.
            timeout_s: How long what it gives up may take to end.
            by: Who asked.

        Returns:
            Legs that are in the way when the time is over: the worker is then what it was before. 0: it has the role.

        Raises:
            DrainingError: The worker is leaving.
            InvalidRequestError: It can never have this role.
        """
        async with self._changing_role:
            if self._draining:
                raise DrainingError("this worker is leaving")
            after = self._service.hello.role
            self._service.narrow_role(role)
            self._tell(f"to be a {role.value} worker", by=by)
            try:
                try:
                    async with asyncio.timeout(timeout_s):
                        await self.idle(outside=role)
                except TimeoutError:
                    _log.warning("the role was not changed in time", role=role.value)
                left = self._service.in_flight(outside=role)
                after = after if left else role
            finally:  # also if whoever asked goes away: gRPC cancels this then
                self._service.take_role(after)
                self._tell(f"a {after.value} worker now", by=by)
            return left

    async def idle(self, *, outside: Role | None = None) -> None:
        """Waits until nothing is in flight, or nothing that `outside` would not take; or until the engine has died."""
        while self._service.in_flight(outside=outside) and not self.failed.done():
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
        await self._service.close()
        if self.failed.done():
            self.failed.exception()  # retrieved, so that asyncio does not complain where it was not awaited
        else:
            self.failed.cancel()

    def collect(self) -> bytes:
        """This worker's metrics in Prometheus' text format."""
        return render(self._metrics.registry)[0]

    def in_flight(self) -> int:
        """Legs, sequences and transfers in this process that are not over."""
        return self._service.in_flight()

    def story_of(self, name: str) -> common_pb2.StoryReply:
        """What happened here to the legs of a request, or to the block with that key, as far as it is remembered; by
        this worker's own name what operators had it do.
        """
        return story_to_proto(
            self._service.hello.identity.worker_id,
            [*self._told.story(name), *self._service.story_of(name)],
            now_s=self._service.now_s(),
        )

    def state(self) -> WorkerState:
        """How this worker is, as `Control.Status` and health tell it."""
        waited_s = self._engine.progress_s()
        if self._engine.failure() is not None:
            word = "lost"
        elif waited_s is not None and waited_s > self._config.stall_timeout_s:
            word = "stalled"
        else:
            word = "draining" if self._draining else "ready"
        return WorkerState(
            hello=self._service.hello,
            address=self._config.address,
            word=word,
            load=replace(self._service.load(), draining=self._draining),
            in_flight=self.in_flight(),
            transfers_in_flight=self._service.transfers_in_flight(),
            seconds_since_progress=waited_s or 0.0,
        )

    def _tell(self, what: str, *, by: str) -> None:
        """Logs and remembers what an operator had this worker do."""
        _log.info(what, by=by)
        worker = self._service.hello.identity.worker_id
        self._told.record(worker, self._service.now_s(), f"{what}, by {by}")

    async def _check_forever(self) -> None:
        """Sweeps whether or not there is new work. Without it leases would never end:
        a fault in it ends the process.
        """
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
        self._service.tick()
        state = self.state()
        self._metrics.observe(state.load, transfers_in_flight=state.transfers_in_flight)
        await self._set_health(state)
        self._checked.set()
        failure = self._engine.failure()
        if failure is not None and not self.failed.done():
            _log.error("the engine's loop died", cause=failure)
            self._fail(EngineError(f"the engine's loop died: {failure!r}"))

    def _probed_alive(self) -> bool:
        """On the thread that answers probes: an event loop that stands still does not look alive."""
        if self._seen is None:
            return False
        state, seen_s = self._seen
        return state.alive and time.monotonic() - seen_s < _CHECKED_WITHIN_S

    def _probed_ready(self) -> bool:
        return self._probed_alive() and self._seen is not None and self._seen[0].ready

    async def _set_health(self, state: WorkerState) -> None:
        self._seen = state, time.monotonic()
        yes = health_pb2.HealthCheckResponse.SERVING
        no = health_pb2.HealthCheckResponse.NOT_SERVING
        await self._health.set("", yes if state.ready else no)
        await self._health.set(LIVE, yes if state.alive else no)


class _Control(control_pb2_grpc.ControlServicer):
    """Answers operators about this worker."""

    def __init__(self, server: WorkerServer, *, version: str, model: str) -> None:
        self._server = server
        self._version = version
        self._model = model

    async def Status(  # noqa: N802  # the stub's name
        self,
        request: pb.StatusRequest,  # noqa: ARG002  # the stub's signature
        context: grpc.aio.ServicerContext[pb.StatusRequest, pb.StatusReply],  # noqa: ARG002
    ) -> pb.StatusReply:
        """This worker's state."""
        state = self._server.state()
        return pb.StatusReply(
            workers=[_status(state)],
            requests_in_flight=state.in_flight,
            version=self._version,
            model=self._model,
        )

    async def Drain(  # noqa: N802
        self,
        request: pb.DrainRequest,
        context: grpc.aio.ServicerContext[pb.DrainRequest, pb.DrainReply],
    ) -> pb.DrainReply:
        """Drains, then answers."""
        drained = await self._server.drain(request.timeout_s, by=asker(context, request.by))
        return pb.DrainReply(drained=drained, left=self._server.in_flight())

    async def Undrain(  # noqa: N802
        self,
        request: pb.UndrainRequest,  # noqa: ARG002
        context: grpc.aio.ServicerContext[pb.UndrainRequest, pb.UndrainReply],
    ) -> pb.UndrainReply:
        """Takes new work again."""
        try:
            await self._server.undrain(by=asker(context))
        except DrainingError as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, error.message)
        return pb.UndrainReply()

    async def SetRole(  # noqa: N802
        self,
        request: pb.SetRoleRequest,
        context: grpc.aio.ServicerContext[pb.SetRoleRequest, pb.SetRoleReply],
    ) -> pb.SetRoleReply:
        """Changes the role, then answers."""
        try:
            role = role_from_proto(request.role)
        except KeyError:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "no such role")
        try:
            left = await self._server.set_role(
                role, request.timeout_s, by=asker(context, request.by)
            )
        except BatonError as error:
            code: grpc.StatusCode = getattr(grpc.StatusCode, disposition(error).grpc)
            await context.abort(code, error.message)
        told = role_to_proto(self._server.state().hello.role)
        return pb.SetRoleReply(role=told, changed=left == 0, left=left)

    async def Story(  # noqa: N802
        self,
        request: pb.StoryRequest,
        context: grpc.aio.ServicerContext[pb.StoryRequest, common_pb2.StoryReply],  # noqa: ARG002
    ) -> common_pb2.StoryReply:
        """What happened here to the legs of a request, or to a block."""
        return self._server.story_of(request.request_id)

    async def HoldPlanner(  # noqa: N802
        self,
        request: pb.HoldPlannerRequest,  # noqa: ARG002
        context: grpc.aio.ServicerContext[pb.HoldPlannerRequest, pb.HoldPlannerReply],
    ) -> pb.HoldPlannerReply:
        """Refused: only routers plan."""
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "a worker plans nothing: ask a router")

    async def Scale(  # noqa: N802
        self,
        request: pb.ScaleRequest,  # noqa: ARG002
        context: grpc.aio.ServicerContext[pb.ScaleRequest, pb.ScaleReply],
    ) -> pb.ScaleReply:
        """Refused: only routers know a launcher."""
        await context.abort(
            grpc.StatusCode.UNIMPLEMENTED, "a worker starts no others: ask a router"
        )

    async def Explain(  # noqa: N802
        self,
        request: pb.ExplainRequest,  # noqa: ARG002
        context: grpc.aio.ServicerContext[pb.ExplainRequest, pb.ExplainReply],
    ) -> pb.ExplainReply:
        """Refused: only routers choose workers for requests."""
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "a worker decides nothing: ask a router")


def _status(state: WorkerState) -> pb.WorkerStatus:
    return pb.WorkerStatus(
        identity=identity_to_proto(state.hello.identity),
        role=role_to_proto(state.hello.role),
        load=load_to_proto(state.load),
        ready=state.ready,
        address=state.address,
        transfers_in_flight=state.transfers_in_flight,
        seconds_since_progress=state.seconds_since_progress,
        state=state.word,
        drained_by=state.load.drained_by,
    )
