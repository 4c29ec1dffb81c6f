"""The `Generator` behind the HTTP face: an asyncio shell around the dispatcher, its clients and its links."""

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import replace
from random import Random

from baton.clock import Clock, MonotonicClock
from baton.config.schema import RouterConfig
from baton.errors import DeadlineError, DrainingError, InvariantError, OverloadedError
from baton.ids import RequestId
from baton.telemetry.logs import get_logger
from router.admission.admission import Admission, queue_limits
from router.admission.capacity import MeasuredSpeed, WorkerCapacity
from router.dispatch.actions import Action, Emit, Fail, Finish, RefuseWorker, WorkerSuspected
from router.dispatch.dispatcher import Dispatcher
from router.dispatch.placement import Placement
from router.dispatch.retry import RetryCounters, RetryPolicy
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
from router.links import LinkTiming
from router.membership import Membership
from router.model_discovery import ModelDiscovery
from router.ports import GenerationEvent, GenerationRequest, ServedModel, Timing, WorkerReport
from router.routing.explanation import DecisionLog
from router.routing.index import PrefixIndex
from router.routing.local import LocalPrefill
from router.routing.policies import policy_named
from router.routing.view import ClusterView
from router.slo import Slo
from router.tenants.tenant import Tenant
from router.timer import PeriodicTimer

_FREES_CAPACITY = (
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
"""Events after which workers may have room for a queued request. A request that ends is followed by `ClientGone`."""

_log = get_logger(__name__)


class ClusterGenerator:
    """Turns prompts into tokens with the workers at some addresses (a `router.ports.Generator`).

    Args:
        config: The router's section.
        worker_addresses: gRPC addresses of workers.
        secret: The cluster secret, 32 bytes.
        clock: Monotonic.
        retry_policy: Bounds of retrying and waiting; `config.max_attempts` holds unless given.
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
        retry_policy: RetryPolicy | None = None,
        link_timing: LinkTiming | None = None,
    ) -> None:
        self._clock = clock or MonotonicClock()
        self.index = PrefixIndex()
        self.view = ClusterView(self.index, silence_timeout_s=config.silence_timeout_s)
        local_prefill = LocalPrefill(
            max_tokens=config.local_prefill_tokens, max_stall_s=config.local_prefill_stall_s
        )
        self.decisions = DecisionLog(config.policy)
        capacity = WorkerCapacity(
            self.view, MeasuredSpeed(), prefill_window_tokens=config.prefill_window_tokens
        )
        placement = Placement(
            view=self.view,
            index=self.index,
            policy=policy_named(config.policy, local_prefill),
            secret=secret,
            rng=Random(),
            log=self.decisions,
            capacity=capacity,
        )
        policy = retry_policy or RetryPolicy(max_attempts=config.max_attempts)
        self._dispatcher = Dispatcher(view=self.view, placement=placement, policy=policy)
        self._discovery = ModelDiscovery(policy.worker_wait_s)
        self.membership = Membership(worker_addresses, self._hear, timing=link_timing)
        self._inboxes = Inboxes(max_bytes=config.max_queued_bytes_per_client, clock=self._clock)
        self.admission = Admission(capacity, queue_limits(config), self._clock)
        self._choosing_s: dict[RequestId, float] = {}
        self._draining = False
        self._idle = asyncio.Event()
        self._timer = PeriodicTimer(self._tick, self._clock)

    def start(self) -> None:
        """Connects to the workers in the background."""
        self._idle.set()
        self._timer.start()
        self.membership.start()

    def end_requests(self) -> None:
        """Ends every request with an error."""
        for request_id in self._inboxes.open_ids():
            self._inboxes.end(request_id, DrainingError("the router is stopping"))
            self.admission.leave(request_id)
            self._feed(ClientGone(request_id=request_id))

    async def close(self) -> None:
        """Ends what is left and disconnects."""
        self.end_requests()
        await self.membership.close()
        await self._timer.close()

    async def worker_joined(self) -> None:
        """Returns when the next worker has joined, or none is worth waiting for because the router stops."""
        await self._discovery.next_worker()

    async def drain(self, timeout_s: float) -> bool:
        """Takes no new requests and waits for those in flight; whether all ended in time."""
        self._draining = True
        self._discovery.end()
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    def check_capacity(self, tenant: Tenant, slo: Slo) -> None:
        """See `router.ports.Generator`."""
        if self._draining:
            raise DrainingError("the router is stopping")
        self.admission.check_capacity(tenant, slo)

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[GenerationEvent, None]:
        """See `router.ports.Generator`."""
        if self._draining:
            raise DrainingError("the router is stopping")
        if request.request_id in self._inboxes:
            raise InvariantError(f"{request.request_id} is in flight already")
        inbox = self._inboxes.open(request.request_id)
        self._idle.clear()
        try:
            self.admission.offer(request)
            self._admit()
            while True:
                event = await inbox.next()
                if isinstance(event, Timing):
                    self.admission.finished(request, event.output_tokens)
                    yield replace(
                        event, route_s=event.route_s + self._choosing_s[request.request_id]
                    )
                    return
                yield event
        finally:
            self._inboxes.close(request.request_id)
            self._choosing_s.pop(request.request_id, None)
            self.admission.leave(request.request_id)
            self._feed(ClientGone(request_id=request.request_id))
            if not self._inboxes:
                self._rest()

    def stop_sample(self, request_id: RequestId, sample: int) -> None:
        """See `router.ports.Generator`."""
        self._feed(StopSample(request_id=request_id, sample=sample))

    async def model(self, *, wait: bool = False) -> ServedModel | None:
        """What the connected workers can all serve, or the last ones could."""
        return await self._discovery.model(wait=wait)

    def ready(self) -> bool:
        """Whether a worker that decodes takes new requests; where no other prefills, it does."""
        usable = self.view.usable(self._clock.now_s())
        return not self._draining and any(worker.hello.role.decodes for worker in usable)

    def healthy(self) -> bool:
        """Whether the timer of waits and deadlines runs and so does every link."""
        return self._timer.healthy() and self.membership.healthy()

    def in_flight(self) -> int:
        """Requests accepted and not finished, queued ones included."""
        return self._dispatcher.in_flight + sum(self.admission.waiting().values())

    def waiting(self) -> Mapping[str, int]:
        """Queued requests, by the name of their SLO class."""
        return self.admission.waiting()

    @property
    def retry_counters(self) -> RetryCounters:
        """How often attempts were lost and made again."""
        return self._dispatcher.retry_counters

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
        """Raises `InvariantError` unless requests, legs and the workers' counts agree."""
        self._dispatcher.check_integrity()
        self.admission.check_integrity()

    def _rest(self) -> None:
        """Nothing is in flight: time to check that all counts agree."""
        self._idle.set()
        try:
            self.check_integrity()
        except InvariantError as error:
            _log.error("an invariant is broken at rest", cause=error)

    def _tick(self) -> None:
        self._feed(TimePassed())
        for request_id in self.admission.expire():
            late = DeadlineError("The request's deadline passed, or was about to, while it waited.")
            self._inboxes.end(request_id, late)
        self._admit()

    def _admit(self) -> None:
        """Begins the queued requests that there is room for."""
        for request in self.admission.admissible():
            self._submit(request)

    def _submit(self, request: GenerationRequest) -> None:
        started_s = self._clock.now_s()
        self._feed(Submitted(request=request))
        self._choosing_s[request.request_id] = self._clock.now_s() - started_s

    def _hear(self, heard: Heard) -> None:
        """What links say: steps to `advance`, everything else as events."""
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
            _log.error("an invariant is broken", cause=error, story=error.story_text)
            actions = self._dispatcher.give_up(event, error, self._clock.now_s())
        for action in actions:
            self._perform(action)
        if isinstance(event, WorkerJoined):
            self._discovery.worker_joined(
                [worker.hello for worker in self.view.workers] or [event.hello]
            )
        if isinstance(event, _FREES_CAPACITY):
            self._admit()

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
                    "worker fell silent, its requests continue elsewhere",
                    worker=str(action.worker),
                    silent_s=round(action.silent_s, 1),
                )
            case _:
                self.membership.send(action)

    def _give_up_reader(self, request_id: RequestId) -> None:
        error = OverloadedError("the client reads too slowly", reason="slow_reader")
        self._inboxes.end(request_id, error)
        self._feed(ClientGone(request_id=request_id))
