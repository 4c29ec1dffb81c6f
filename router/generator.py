"""The asyncio shell of the request machine: a `router.ports.Generator` around admission,
the dispatcher and clients' inboxes.

Calls of clients and frames of workers become events for the dispatcher; its actions go to workers and into inboxes.
Belongs to one event loop. `router.service.compose` wires its parts.
"""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Protocol

from baton.clock import Clock
from baton.errors import (
    DeadlineError,
    DrainingError,
    InvariantError,
    OverloadedError,
    UnavailableError,
)
from baton.ids import RequestId
from baton.story import StoryEntry
from baton.telemetry.logs import get_logger
from router.admission.admission import Admission
from router.dispatch.actions import (
    Action,
    Emit,
    Fail,
    Finish,
    PairRestored,
    PairSuspected,
    RefuseWorker,
    SendAction,
    WorkerSuspected,
)
from router.dispatch.dispatcher import Dispatcher
from router.dispatch.events import (
    ClientGone,
    Event,
    HandedOff,
    Heard,
    LegFailed,
    LoadReported,
    Pooled,
    Prefilled,
    RoleChanged,
    StepTokens,
    StopSample,
    TimePassed,
    WorkerJoined,
    WorkerLost,
)
from router.dispatch.retry import Fallback
from router.inboxes import Inboxes
from router.model_discovery import ModelDiscovery
from router.ports import GenerationEvent, GenerationRequest, ServedModel, Timing
from router.routing.chains import PromptHasher
from router.slo import Slo
from router.tenants.tenant import Tenant

_FREES_CAPACITY = (
    ClientGone,
    Prefilled,
    HandedOff,
    Pooled,
    LegFailed,
    LoadReported,
    WorkerJoined,
    WorkerLost,
)
"""Events after which workers may have room for a queued request. A request that ends is followed by `ClientGone`."""

_LOOK_PAUSE = 10.0
"""After a look for room that found none the next one is this many times as far away as it took, or at the next tick:
with a queue nearly every event of a worker asks for one, and one is as long as there are workers.
"""

_log = get_logger(__name__)


class WorkerCommands(Protocol):
    """Where commands to workers go."""

    def send(self, action: SendAction) -> None:
        """Queues a command for its worker."""

    def refuse(self, action: RefuseWorker) -> None:
        """Disconnects from a worker."""


class ClusterGenerator:
    """Turns prompts into tokens with the workers that are connected (a `router.ports.Generator`).

    Args:
        dispatcher: The pure core.
        admission: Says which requests are begun, and when.
        commands: Takes the dispatcher's commands to workers.
        hasher: Hashes long prompts before they are dispatched; None where routing does not look at prompts.
        inboxes: Take what clients are sent.
        discovery: Told of workers that join and are lost; knows the served model.
        clock: Monotonic.
    """

    def __init__(
        self,
        *,
        dispatcher: Dispatcher,
        admission: Admission,
        commands: WorkerCommands,
        hasher: PromptHasher | None,
        inboxes: Inboxes,
        discovery: ModelDiscovery,
        clock: Clock,
    ) -> None:
        self._dispatcher = dispatcher
        self._admission = admission
        self._commands = commands
        self._hasher = hasher
        self._inboxes = inboxes
        self._discovery = discovery
        self._clock = clock
        self._placing_s: dict[RequestId, float] = {}
        self._look_s = float("-inf")  # when it is worth looking for room again
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()

    def end_requests(self) -> None:
        """Ends every request with an error."""
        for request_id in self._inboxes.open_ids():
            self._inboxes.end(request_id, DrainingError("the router is stopping"))
            self._admission.leave(request_id)
            self._feed(ClientGone(request_id=request_id))

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
        self._admission.check_capacity(tenant, slo)

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[GenerationEvent, None]:
        """See `router.ports.Generator`."""
        if self._draining:
            raise DrainingError("the router is stopping")
        if request.request_id in self._inboxes:
            story = self.story(request.request_id)
            raise InvariantError(f"{request.request_id} is in flight already", story=story)
        inbox = self._inboxes.open(request.request_id)
        self._idle.clear()
        try:
            if self._hasher is not None and (chains := await self._hasher.chains(request.prompt)):
                request = replace(request, chains=chains)
            self._admission.offer(request)
            self._admit()
            while True:
                event = await inbox.next()
                if isinstance(event, Timing):
                    self._admission.finished(request, event.output_tokens)
                    yield replace(
                        event, route_s=event.route_s + self._placing_s[request.request_id]
                    )
                    return
                yield event
        finally:
            self._inboxes.close(request.request_id)
            self._placing_s.pop(request.request_id, None)
            self._admission.leave(request.request_id)
            self._feed(ClientGone(request_id=request.request_id))
            if not self._inboxes:
                self._rest()

    def stop_sample(self, request_id: RequestId, sample: int) -> None:
        """See `router.ports.Generator`."""
        self._feed(StopSample(request_id=request_id, sample=sample))

    async def model(self, *, wait: bool = False) -> ServedModel | None:
        """What the connected workers can all serve, or the last ones could."""
        return await self._discovery.model(wait=wait)

    @property
    def draining(self) -> bool:
        """Whether no new requests are taken any more."""
        return self._draining

    def in_flight(self) -> int:
        """Requests accepted and not finished, queued ones included."""
        return self._dispatcher.in_flight + sum(self._admission.waiting().values())

    def story(self, request_id: RequestId) -> tuple[StoryEntry, ...]:
        """What happened to a request here, as far as it is remembered: in the admission queue and after it."""
        return (*self._admission.story(request_id), *self._dispatcher.story(request_id))

    def hear(self, heard: Heard) -> None:
        """Takes what a worker said: a step's tokens to `advance`, everything else as an event."""
        if not isinstance(heard, StepTokens):
            self._feed(heard)
            return
        now_s = self._clock.now_s()
        moved = self._dispatcher.advance(heard, now_s)
        for request_id in self._inboxes.put_step(moved, now_s):
            self._give_up_reader(request_id)
        for other in moved.others:
            self._feed(other)

    def tick(self) -> None:
        """Looks at deadlines and waits; to be called several times per second."""
        self._feed(TimePassed())
        for request_id in self._admission.expire():
            late = DeadlineError("The request's deadline passed, or was about to, while it waited.")
            self._inboxes.end(request_id, late)
        for request_id in self._admission.abandon():
            self._dispatcher.retry_counters.fallbacks[Fallback.REFUSED] += 1
            self._inboxes.end(request_id, UnavailableError("no worker is available"))
        self._look_s = float("-inf")
        self._admit()

    def check_integrity(self) -> None:
        """Raises `InvariantError` unless requests, legs and the workers' counts agree."""
        self._dispatcher.check_integrity()
        self._admission.check_integrity()

    def _rest(self) -> None:
        """Nothing is in flight: time to check that all counts agree."""
        self._idle.set()
        try:
            self.check_integrity()
        except InvariantError as error:
            _log.error("an invariant is broken at rest", cause=error)

    def _admit(self) -> None:
        """Begins the queued requests that there is room for; none before those that were begun and wait for room, to
        which the tick gives it.
        """
        now_s = self._clock.now_s()
        if now_s < self._look_s or self._dispatcher.waits_for_room:
            return
        for request in self._admission.admissible():
            self._submit(request)
            now_s = self._clock.now_s()
        if any(self._admission.waiting().values()):
            look_s = self._clock.now_s() - now_s  # the last look, which found no room
            self._look_s = now_s + look_s * (1 + _LOOK_PAUSE)

    def _submit(self, request: GenerationRequest) -> None:
        started_s = self._clock.now_s()
        self._feed(request)
        self._placing_s[request.request_id] = self._clock.now_s() - started_s

    def _feed(self, event: Event) -> None:
        """Lets the dispatcher handle an event and carries out what it wants done."""
        try:
            actions = self._dispatcher.handle(event, self._clock.now_s())
        except InvariantError as error:
            _log.error("an invariant is broken", cause=error, story=error.story_text)
            actions = self._dispatcher.fail_request(event, error, self._clock.now_s())
        for action in actions:
            self._perform(action)
        if isinstance(event, WorkerJoined):
            self._discovery.worker_joined(event.hello)
        elif isinstance(event, WorkerLost | RoleChanged):
            self._discovery.workers_changed()
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
                self._commands.refuse(action)
            case WorkerSuspected():
                _log.warning(
                    "worker fell silent, its requests continue elsewhere",
                    worker=str(action.worker),
                    silent_s=round(action.silent_s, 1),
                )
            case PairSuspected():
                _log.warning(
                    "two workers cannot hand KV over, other pairs or the decode worker alone take their requests",
                    prefill=str(action.prefill),
                    decode=str(action.decode),
                    code=action.error.code,
                    reason=action.error.message,
                    probed_in_s=round(action.pause_s, 1),
                )
            case PairRestored():
                _log.info(
                    "two workers can hand KV over again",
                    prefill=str(action.prefill),
                    decode=str(action.decode),
                )
            case _:
                self._commands.send(action)

    def _give_up_reader(self, request_id: RequestId) -> None:
        error = OverloadedError("the client reads too slowly", reason="slow_reader")
        self._inboxes.end(request_id, error)
        self._feed(ClientGone(request_id=request_id))
