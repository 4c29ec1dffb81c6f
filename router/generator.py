"""The `Generator` behind the HTTP face: an asyncio shell around the dispatcher, its clients and its links."""

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import replace
from random import Random

from baton.clock import Clock, MonotonicClock
from baton.config.schema import RouterConfig
from baton.errors import DrainingError, InvariantError, OverloadedError
from baton.ids import RequestId
from baton.telemetry.logs import get_logger
from router.actions import Action, Emit, Fail, Finish, RefuseWorker, WorkerSuspected
from router.admission.pace import LearnedPace
from router.admission.room import WorkerRoom
from router.arrivals import Arrivals
from router.clockwork import Clockwork
from router.dispatch import Dispatcher
from router.events import (
    ClientGone,
    Event,
    FirstTokensArrived,
    HandedOff,
    Heard,
    LegFailed,
    LoadReported,
    LocallyPrefilled,
    PutInPool,
    StepTokens,
    StopSample,
    Submitted,
    TimePassed,
    WorkerJoined,
    WorkerLost,
)
from router.inboxes import Inboxes
from router.intake import Doors, Intake, line_limits
from router.links import LinkTiming
from router.membership import Membership
from router.placement import Placement
from router.ports import GenerationEvent, GenerationJob, ServedModel, Timing, WorkerReport
from router.restarts import Patience, Restarts
from router.routing.explanation import DecisionLog
from router.routing.index import PrefixIndex
from router.routing.policies import policy_named
from router.routing.predictive import LocalPrefill
from router.routing.view import ClusterView
from router.slo import Slo
from router.tenants.tenant import Tenant

_MAKE_ROOM = (
    ClientGone,
    FirstTokensArrived,
    LocallyPrefilled,
    HandedOff,
    PutInPool,
    LegFailed,
    LoadReported,
    WorkerJoined,
    WorkerLost,
)
"""Events after which workers may have room for who waits. A job that ends is followed by its client's leaving."""

_log = get_logger(__name__)


class ClusterGenerator:
    """Turns prompts into tokens with the workers at some addresses (a `router.ports.Generator`).

    Args:
        config: The router's section.
        worker_addresses: gRPC addresses of workers.
        secret: The cluster secret, 32 bytes.
        clock: Monotonic.
        patience: Bounds of retrying and waiting; `config.max_attempts` holds unless given.
        link_timing: How links wait.

    Raises:
        ConfigError: There is no policy of the configured name.
    """

    def __init__(
        self,
        config: RouterConfig,
        worker_addresses: Sequence[str],
        secret: bytes,
        *,
        clock: Clock | None = None,
        patience: Patience | None = None,
        link_timing: LinkTiming | None = None,
    ) -> None:
        self._clock = clock or MonotonicClock()
        self.index = PrefixIndex()
        self.view = ClusterView(self.index, silence_timeout_s=config.silence_timeout_s)
        local_prefill = LocalPrefill(
            max_tokens=config.local_prefill_tokens, max_stall_s=config.local_prefill_stall_s
        )
        self.decisions = DecisionLog(config.policy)
        room = WorkerRoom(
            self.view, LearnedPace(), prefill_window_tokens=config.prefill_window_tokens
        )
        placement = Placement(
            view=self.view,
            index=self.index,
            policy=policy_named(config.policy, local_prefill),
            secret=secret,
            rng=Random(),
            log=self.decisions,
            room=room,
        )
        patience = patience or Patience(max_attempts=config.max_attempts)
        self._dispatcher = Dispatcher(view=self.view, placement=placement, patience=patience)
        self._arrivals = Arrivals(patience.worker_wait_s)
        self.membership = Membership(worker_addresses, self._hear, timing=link_timing)
        self._inboxes = Inboxes(max_bytes=config.max_queued_bytes_per_client, clock=self._clock)
        doors = Doors(submit=self._submit, refuse=self._inboxes.end)
        self.intake = Intake(room, line_limits(config), doors, self._clock)
        self._choosing_s: dict[RequestId, float] = {}
        self._draining = False
        self._idle = asyncio.Event()
        self._clockwork = Clockwork(self._tick, self._clock)

    def start(self) -> None:
        """Connects to the workers in the background."""
        self._idle.set()
        self._clockwork.start()
        self.membership.start()

    def end_jobs(self) -> None:
        """Ends every job with an error."""
        for request_id in self._inboxes.open_ids():
            self._inboxes.end(request_id, DrainingError("the router is stopping"))
            self.intake.leave(request_id)
            self._feed(ClientGone(request_id=request_id))

    async def close(self) -> None:
        """Ends what is left and hangs up."""
        self.end_jobs()
        await self.membership.close()
        await self._clockwork.close()

    async def worker_joined(self) -> None:
        """Returns when the next worker has joined, or none is worth waiting for because the router stops."""
        await self._arrivals.next()

    async def drain(self, timeout_s: float) -> bool:
        """Takes no new jobs and waits for those in flight; whether all ended in time."""
        self._draining = True
        self._arrivals.end()
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    def knock(self, tenant: Tenant, slo: Slo) -> None:
        """See `router.ports.Generator`."""
        if self._draining:
            raise DrainingError("the router is stopping")
        self.intake.knock(tenant, slo)

    async def generate(self, job: GenerationJob) -> AsyncGenerator[GenerationEvent, None]:
        """See `router.ports.Generator`."""
        if self._draining:
            raise DrainingError("the router is stopping")
        if job.request_id in self._inboxes:
            raise InvariantError(f"{job.request_id} is in flight already")
        inbox = self._inboxes.open(job.request_id)
        self._idle.clear()
        try:
            self.intake.offer(job)
            while True:
                event = await inbox.next()
                if isinstance(event, Timing):
                    self.intake.finished(job, event.output_tokens)
                    yield replace(event, route_s=event.route_s + self._choosing_s[job.request_id])
                    return
                yield event
        finally:
            self._inboxes.close(job.request_id)
            self._choosing_s.pop(job.request_id, None)
            self.intake.leave(job.request_id)
            self._feed(ClientGone(request_id=job.request_id))
            if not self._inboxes:
                self._rest()

    def stop_sample(self, request_id: RequestId, sample: int) -> None:
        """See `router.ports.Generator`."""
        self._feed(StopSample(request_id=request_id, sample=sample))

    async def model(self, *, wait: bool = False) -> ServedModel | None:
        """What the connected workers can all serve, or the last ones could."""
        return await self._arrivals.model(wait=wait)

    def ready(self) -> bool:
        """Whether a worker that decodes takes new jobs; where nobody else prefills, it does."""
        usable = self.view.usable(self._clock.now_s())
        return not self._draining and any(worker.hello.role.decodes for worker in usable)

    def healthy(self) -> bool:
        """Whether the clockwork of waits and deadlines runs and every link is looked after."""
        return self._clockwork.healthy() and self.membership.healthy()

    def in_flight(self) -> int:
        """Jobs accepted and not finished, those in line included."""
        return self._dispatcher.in_flight + sum(self.intake.waiting().values())

    def waiting(self) -> Mapping[str, int]:
        """Jobs in line, by the name of their SLO class."""
        return self.intake.waiting()

    @property
    def restarts(self) -> Restarts:
        """How often attempts at jobs were lost and made again."""
        return self._dispatcher.restarts

    def workers(self) -> list[WorkerReport]:
        """See `router.ports.Overview`."""
        now_s = self._clock.now_s()
        return [
            WorkerReport(
                worker_id=worker.identity.worker_id,
                role=worker.hello.role,
                state=self.view.state(worker, now_s),
                in_flight=worker.legs,
                load=worker.load,
            )
            for worker in self.view.workers
        ]

    def check_integrity(self) -> None:
        """Raises `InvariantError` unless jobs, legs and the workers' counts agree."""
        self._dispatcher.check_integrity()
        self.intake.check_integrity()

    def _rest(self) -> None:
        """Nothing is in flight: time to look whether the books are in order."""
        self._idle.set()
        try:
            self.check_integrity()
        except InvariantError as error:
            _log.error("an invariant is broken at rest", cause=error)

    def _tick(self) -> None:
        self._feed(TimePassed())
        self.intake.time_passed()

    def _submit(self, job: GenerationJob) -> None:
        started_s = self._clock.now_s()
        self._feed(Submitted(job=job))
        self._choosing_s[job.request_id] = self._clock.now_s() - started_s

    def _hear(self, heard: Heard) -> None:
        """What links say: steps the short way, everything else as events."""
        if not isinstance(heard, StepTokens):
            self._feed(heard)
            return
        now_s = self._clock.now_s()
        moved = self._dispatcher.advance(heard, now_s)
        for request_id in self._inboxes.put_step(moved, now_s):
            self._give_up_reader(request_id)
        for other in moved.others:
            self._feed(other)

    def _feed(self, event: Event) -> None:
        """Lets the dispatcher handle an event and carries out what it wants done."""
        try:
            actions = self._dispatcher.handle(event, self._clock.now_s())
        except InvariantError as error:
            _log.error("an invariant is broken", cause=error)
            actions = self._dispatcher.give_up(event, error)
        for action in actions:
            self._perform(action)
        if isinstance(event, WorkerJoined):
            self._arrivals.joined([worker.hello for worker in self.view.workers] or [event.hello])
        if isinstance(event, _MAKE_ROOM):
            self.intake.let_in()

    def _perform(self, action: Action) -> None:
        match action:
            case Emit():
                if not self._inboxes.put(action):
                    self._give_up_reader(action.request_id)
            case Finish(request_id=request_id, timing=end) | Fail(request_id=request_id, error=end):
                self._inboxes.end(request_id, end)
            case RefuseWorker():
                self.membership.refuse(action)
            case WorkerSuspected():
                _log.warning(
                    "worker fell silent, its requests go on elsewhere",
                    worker=str(action.worker),
                    silent_s=round(action.silent_s, 1),
                )
            case _:
                self.membership.send(action)

    def _give_up_reader(self, request_id: RequestId) -> None:
        error = OverloadedError("the client reads too slowly", reason="slow_reader")
        self._inboxes.end(request_id, error)
        self._feed(ClientGone(request_id=request_id))
