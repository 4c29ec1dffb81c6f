"""Runs a whole cluster on this machine: binds the HTTP port, starts router and workers as processes, supervises them.

The decisions are `supervisor.py`'s; here they become processes and signals. Used by `baton serve` and `baton demo`, and
by tests and benchmarks:

    async with LocalCluster(config) as cluster:
        await client.post(f"{cluster.url}/v1/completions", json=...)
"""

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from baton.backoff import Backoff
from baton.config.schema import BatonConfig
from baton.errors import BatonError, InvalidRequestError, UnavailableError
from baton.ids import Incarnation, Role, new_incarnation
from baton.telemetry.logs import get_logger
from baton_cluster.launch import listener
from baton_cluster.launch.assignment import Assignment
from baton_cluster.launch.child_process import ChildProcess, ScaleAsked
from baton_cluster.launch.child_stories import serve_stories
from baton_cluster.launch.fleet import WorkerFleet
from baton_cluster.launch.lifeline import WorkersChanged
from baton_cluster.launch.machine import own_cores, usable_cores
from baton_cluster.launch.plan import (
    ROUTER,
    ChildPlan,
    assignment_of,
    plan_children,
    plan_worker,
    resolve,
    resolve_model,
)
from baton_cluster.launch.runtime_dir import RuntimeDir, default_dir
from baton_cluster.launch.standby import StandbyProcess
from baton_cluster.launch.supervisor import (
    Action,
    AnnounceJoined,
    AnnounceLeft,
    Announcement,
    AnnounceReady,
    AnnounceRecovered,
    AnnounceRestart,
    ChildAdded,
    ChildExited,
    ChildFatal,
    ChildProgress,
    ChildRetired,
    ChildState,
    Event,
    GiveUp,
    Kill,
    Member,
    StartProcess,
    Stop,
    StopRequested,
    Supervisor,
    SupervisorPolicy,
    Tick,
)
from kv_transfer.memory.cuda import devices

_log = get_logger(__name__)


class Observer(Protocol):
    """Told what happens, to show it. Must not block."""

    def progress(self, event: ChildProgress) -> None:
        """A child gets on with its start."""

    def announce(self, announcement: Announcement) -> None:
        """Something that an operator wants to read."""


class RunningChild(Protocol):
    """A child that was started, wherever it runs."""

    @property
    def pid(self) -> int:
        """Where it runs."""

    @property
    def incarnation(self) -> Incarnation:
        """Of this start."""

    def events(self) -> AsyncIterator[Event | ScaleAsked]:
        """What happens to it, up to its exit, which is always the last."""

    def terminate(self) -> None:
        """Asks it to end."""

    def kill(self) -> None:
        """Ends it now."""


class WorkerPlaces(Protocol):
    """Runs workers elsewhere. They register with discovery, since only there their addresses are known."""

    async def start(self, plan: ChildPlan, assignment: Assignment) -> RunningChild:
        """Starts a worker. Raises `OSError` where that cannot even be tried."""

    def release(self, name: str) -> None:
        """The worker of that name is gone, and was not wanted any more: its place is free. Must not block."""


class Unobserved:
    """An observer that ignores everything."""

    def progress(self, event: ChildProgress) -> None:
        """Nothing."""

    def announce(self, announcement: Announcement) -> None:
        """Nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildInfo:
    """One child at this moment; `pid` and `incarnation` are None while it has no process."""

    name: str
    role: str
    state: ChildState
    pid: int | None
    incarnation: Incarnation | None


class LocalCluster:
    """A cluster of processes on this machine, from `__aenter__` (it can serve) to `__aexit__` (all gone).

    Args:
        config: As loaded; what it leaves open is decided here.
        observer: Told of progress and accidents.
        child_module: Module that children run; speaks the protocol of `baton_cluster.launch.child`.
        places: Where workers run, if not on this machine.
    """

    def __init__(
        self,
        config: BatonConfig,
        *,
        observer: Observer | None = None,
        child_module: str = "baton_cluster.roles",
        places: WorkerPlaces | None = None,
    ) -> None:
        self._given = config
        self._observer = observer or Unobserved()
        self._child_module = child_module
        self._places = places
        self._events: asyncio.Queue[Event | ScaleAsked] = asyncio.Queue()
        self._processes: dict[str, RunningChild] = {}
        self._listening_to: set[asyncio.Task[None]] = set()
        self._ready = asyncio.Event()
        self._failure: BatonError | None = None

    @property
    def config(self) -> BatonConfig:
        """The configuration with everything decided."""
        return self._config

    @property
    def url(self) -> str:
        """Base URL of the HTTP surface."""
        return self._url

    @property
    def is_ready(self) -> bool:
        """Whether every child that is needed has been ready once and no stop was asked for during the start."""
        return self._ready.is_set()

    @property
    def runtime_dir(self) -> Path:
        """Directory of the cluster's sockets."""
        return self._runtime.path

    @property
    def children(self) -> list[ChildInfo]:
        """Every child at this moment."""
        return [self._info(plan) for plan in self._plans]

    @property
    def standby_pid(self) -> int | None:
        """Of the process that waits to become the next worker; None while there is none."""
        return None if self._standby is None else self._standby.pid

    def kill(self, name: str) -> int:
        """Kills the child's process as a crash would, and returns its pid. The supervisor starts it again."""
        process = self._processes[name]
        process.kill()
        return process.pid

    def request_stop(self) -> None:
        """Begins the stop; asked a second time, kills. Returns at once."""
        self._events.put_nowait(StopRequested())

    async def wait(self) -> None:
        """Returns when every process is gone.

        Raises:
            BatonError: The launch failed; this is why.
        """
        await asyncio.shield(self._supervising)
        if self._failure is not None:
            raise self._failure

    async def __aenter__(self) -> Self:
        """Returns when all children that are needed are ready, or a stop was asked for meanwhile (`is_ready` tells).

        Raises:
            ConfigError: The port is taken, or the runtime directory belongs to another cluster.
            BatonError: A child could not start; everything is stopped again.
        """
        self._prepare()
        self._supervising = asyncio.create_task(self._supervise(), name="supervise")
        ready = asyncio.create_task(self._ready.wait())
        try:
            await asyncio.wait({self._supervising, ready}, return_when=asyncio.FIRST_COMPLETED)
            if self._supervising.done():
                await self.wait()
        except BaseException:
            await self._end(at_once=True)
            raise
        finally:
            ready.cancel()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stops what still runs and returns when nothing is left."""
        await self._end(at_once=False)

    def _prepare(self) -> None:
        given = replace(self._given, model=resolve_model(self._given.model))
        router = given.router
        self._listener: socket.socket | None = listener.bind(router.host, router.port)
        port = self._listener.getsockname()[1]
        self._url = listener.url_of(self._listener)
        wanted = given.cluster.runtime_dir
        try:
            self._runtime = RuntimeDir.claim(
                Path(wanted).absolute() if wanted else default_dir(port)
            )
        except BatonError:
            self._listener.close()
            raise
        try:
            self._decide(given, port)
        except BaseException:
            self._listener.close()
            self._runtime.release()
            raise

    def _decide(self, given: BatonConfig, port: int) -> None:
        self._config = resolve(
            given, runtime_dir=self._runtime.path, port=port, cores=usable_cores()
        )
        if self._config.pool.enabled:
            self._runtime.note_pool(self._config.pool.address)
        on_cpu = self._config.engine.device == "cpu"
        gpus = 0 if on_cpu or self._places is not None else len(devices())
        cores = own_cores() if self._places is None else ()
        plans = plan_children(self._config, self._runtime, gpus, cores)
        self._beside = [plan for plan in plans if plan.worker is None]
        self._fleet = self._fleet_of(plans, gpus, cores)
        self._standby = self._standby_for(plans)
        self._core = self._supervisor(plans)

    def _standby_for(self, plans: Sequence[ChildPlan]) -> StandbyProcess | None:
        """None where there is no worker whose imports it could have done."""
        workers = [plan for plan in plans if plan.worker is not None]
        if not self._config.cluster.standby or self._config.engine.kind != "baton" or not workers:
            return None
        if self._places is not None:
            return None
        return StandbyProcess(
            workers[0],
            config=self._config,
            lock_fd=self._runtime.lock_fd,
            module=self._child_module,
        )

    def _fleet_of(self, plans: Sequence[ChildPlan], gpus: int, cores: Sequence[int]) -> WorkerFleet:
        config, runtime = self._config, self._runtime

        def plan(role: Role, index: int, number: int) -> ChildPlan:
            return plan_worker(role, index, number, config, runtime, gpus, cores)

        return WorkerFleet(
            [each for each in plans if each.worker is not None],
            plan,
            most=config.cluster.max_workers,
            gpus=gpus,
            others=bool(config.cluster.workers),
        )

    @property
    def _plans(self) -> list[ChildPlan]:
        """Of all children."""
        return [*self._fleet.plans, *self._beside]

    def _listed(self) -> list[ChildPlan]:
        """Of those that a router is told of by their addresses: workers elsewhere register with discovery."""
        return self._plans if self._places is None else self._beside

    def _supervisor(self, plans: Sequence[ChildPlan]) -> Supervisor:
        cluster = self._config.cluster
        policy = SupervisorPolicy(
            restart_backoff=Backoff(
                first_s=cluster.restart_backoff_s, max_s=cluster.restart_backoff_max_s
            ),
            startup_timeout_s=cluster.startup_timeout_s,
            drain_timeout_s=cluster.drain_timeout_s,
        )
        members = [
            Member(name=plan.name, stop_rank=plan.stop_rank, is_needed=plan.is_needed)
            for plan in plans
        ]
        return Supervisor(members, policy, new_incarnation=new_incarnation, now_s=time.monotonic())

    async def _supervise(self) -> None:
        try:
            with contextlib.closing(await serve_stories(self._runtime.path, self._core.story)):
                while not self._core.finished:
                    event = await self._next_event()
                    if isinstance(event, ScaleAsked):
                        await self._scale(event)
                        continue
                    self._note(event)
                    for action in self._core.handle(event, time.monotonic()):
                        await self._act(action)
        finally:
            if self._standby is not None:
                await self._standby.close()
            self._stop_listening()
            self._runtime.release()

    async def _scale(self, asked: ScaleAsked) -> None:
        request, refusal = asked.request, ""
        try:
            if self._listener is None:
                raise InvalidRequestError("the cluster is stopping")
            if not self.is_ready:
                raise InvalidRequestError("the cluster is starting: ask again once it is ready")
            change = self._fleet.scale(request.pools)
        except InvalidRequestError as error:
            refusal = error.message
        else:
            _log.warning("the numbers of workers change", by=request.by, **self._fleet.pools)
            events: list[Event] = [ChildRetired(name=name) for name in change.retired]
            events += [ChildAdded(name=one.name, stop_rank=one.stop_rank) for one in change.added]
            for event in events:
                for action in self._core.handle(event, time.monotonic()):
                    await self._act(action)
        self._tell_router(answers=request.number, refusal=refusal)

    def _tell_router(self, *, answers: int = 0, refusal: str = "") -> None:
        router = self._processes.get(ROUTER)
        if not isinstance(router, ChildProcess):
            return  # it is told when it starts
        here = [plan.worker.address for plan in self._listed() if plan.worker is not None]
        news = WorkersChanged(
            addresses=(*here, *self._config.cluster.workers),
            pools=self._fleet.pools,
            answers=answers,
            refusal=refusal,
        )
        router.tell(news)

    async def _next_event(self) -> Event | ScaleAsked:
        deadline_s = self._core.next_deadline_s()
        wait_s = None if deadline_s is None else max(0.0, deadline_s - time.monotonic())
        try:
            return await asyncio.wait_for(self._events.get(), wait_s)
        except TimeoutError:
            return Tick()

    def _note(self, event: Event) -> None:
        match event:
            case ChildExited():
                self._processes.pop(event.name, None)
                self._runtime.forget(event.name)
            case ChildProgress():
                self._observer.progress(event)
            case StopRequested():
                # With our copy open too, clients would wait in a queue from which no process accepts any more.
                self._stop_listening()
            case _:
                return

    async def _act(self, action: Action) -> None:
        match action:
            case StartProcess():
                await self._start(action)
            # One that could not be started has no process; the supervisor is about to hear of it.
            case Stop():
                if process := self._processes.get(action.name):
                    process.terminate()
            case Kill():
                if process := self._processes.get(action.name):
                    process.kill()
            case GiveUp():
                self._failure = action.error
                self._stop_listening()
            case AnnounceReady():
                self._ready.set()
                self._observer.announce(action)
                self._have_standby()
            case AnnounceRecovered() | AnnounceJoined():
                self._observer.announce(action)
                self._have_standby()
            case AnnounceLeft():
                self._forget(action.name)
                self._observer.announce(action)
            case AnnounceRestart():
                self._observer.announce(action)

    def _forget(self, name: str) -> None:
        self._fleet.gone(name)
        if self._places is not None:
            self._places.release(name)
        self._tell_router()

    def _have_standby(self) -> None:
        """Begins the next one once what was to start serves: until then every core is needed for that."""
        if self._standby is not None:
            self._standby.begin()

    async def _start(self, action: StartProcess) -> None:
        plan = next(plan for plan in self._plans if plan.name == action.name)
        assert self._listener is not None, "a stopping cluster starts nothing"
        assignment = assignment_of(
            plan,
            self._listed(),
            config=self._config,
            incarnation=action.incarnation,
            http_fd=self._listener.fileno(),
            lock_fd=self._runtime.lock_fd,
            pools=self._fleet.pools,
        )
        try:
            process = await self._run(plan, assignment)
        except OSError as error:
            self._never_started(action, error)
            return
        self._processes[action.name] = process
        listening = asyncio.create_task(self._listen_to(process), name=f"listen {action.name}")
        self._listening_to.add(listening)
        listening.add_done_callback(self._listening_to.discard)

    async def _run(self, plan: ChildPlan, assignment: Assignment) -> RunningChild:
        if self._places is not None and plan.worker is not None:
            return await self._places.start(plan, assignment)
        return await self._become(plan, assignment) or await ChildProcess.start(
            plan, assignment, module=self._child_module
        )

    async def _become(self, plan: ChildPlan, assignment: Assignment) -> ChildProcess | None:
        if self._standby is None or plan.worker is None:
            return None
        return await self._standby.become(plan, assignment)

    def _never_started(self, start: StartProcess, error: OSError) -> None:
        reason = UnavailableError(f"cannot start {start.name}: {error.strerror or error}")
        name, incarnation = start.name, start.incarnation
        self._events.put_nowait(ChildFatal(name=name, incarnation=incarnation, error=reason))
        self._events.put_nowait(ChildExited(name=name, incarnation=incarnation, returncode=1))

    async def _listen_to(self, process: RunningChild) -> None:
        async for event in process.events():
            self._events.put_nowait(event)

    async def _end(self, *, at_once: bool) -> None:
        if not self._supervising.done():
            self.request_stop()
            if at_once:
                self.request_stop()
        await asyncio.shield(self._supervising)

    def _stop_listening(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def _info(self, plan: ChildPlan) -> ChildInfo:
        process = self._processes.get(plan.name)
        return ChildInfo(
            name=plan.name,
            role=plan.role,
            state=self._core.state(plan.name),
            pid=process.pid if process is not None else None,
            incarnation=process.incarnation if process is not None else None,
        )
