"""The router's core: carries each request over its legs to exactly one end, whichever worker dies on the way.

Reads from top to bottom: what clients and the clock say, what workers say of themselves, what they say of a leg, and
what follows when a leg is lost. The states that an attempt goes through stand in `router.dispatch.attempt`; what is
tried after a failure is decided in `router.dispatch.retry`. One file:
whatever happens to a worker ends in what happens to its legs.
"""

from collections.abc import Iterable, Set
from dataclasses import dataclass

from baton.errors import (
    BatonError,
    CancelledByPeerError,
    DrainingError,
    EngineError,
    IncompatibleError,
    InvariantError,
    UnreachableError,
    WorkerLostError,
)
from baton.generation import FinishReason, TokenSample, plain_token
from baton.ids import LegId, LegKind, RequestId, Role, WorkerId, WorkerIdentity
from baton.story import StoryEntry, StoryLog
from router.deadlines import Deadlines
from router.dispatch.actions import (
    Action,
    AskForSnapshot,
    Emit,
    PairRestored,
    PairSuspected,
    RefuseWorker,
    SendProbe,
    WorkerSuspected,
)
from router.dispatch.attempt import Attempt, AttemptState, Leg, LegTable
from router.dispatch.events import (
    BlocksReported,
    ClientGone,
    DecodeTokens,
    Event,
    HandedOff,
    LegEvent,
    LegFailed,
    LegWriterLost,
    LinkProbed,
    LoadReported,
    Pooled,
    Prefilled,
    RoleChanged,
    SampleFinished,
    StepTokens,
    StopSample,
    TimePassed,
    WorkerJoined,
    WorkerLost,
)
from router.dispatch.faults import (
    NO_WORKERS_FAULT,
    PREFILL_WORKERS_OWN_FAULT,
    given_up_by_prefill,
    has_pages,
    suspects,
)
from router.dispatch.placement import Placement
from router.dispatch.retry import MOVED_AT_ONCE, RetryController, RetryCounters, RetryPolicy
from router.ports import GenerationRequest
from router.routing.pools import node_of
from router.routing.view import ClusterView, WorkerView

_STALL_S = 1.0
"""After such a pause between two ticks this router cannot tell which worker was silent: it read from none."""

_HEARD_S = 1.5
"""A worker that said something in this time is there: one that is well reports twice per second."""

_HANDOFF_OPEN = (AttemptState.PREFILLING, AttemptState.HANDING_OFF)
"""States in which another P may still take over."""

_DECODES = frozenset({LegKind.RECEIVE, LegKind.GENERATE})
_KINDS_OF: dict[type[LegEvent], frozenset[LegKind]] = {
    DecodeTokens: _DECODES,
    SampleFinished: _DECODES,
    Prefilled: frozenset({LegKind.PREFILL, LegKind.GENERATE}),
    HandedOff: frozenset({LegKind.PREFILL}),
    Pooled: frozenset({LegKind.PREFILL}),
    LegWriterLost: frozenset({LegKind.RECEIVE}),
}
"""Of which kinds of legs a worker may say what."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Advance:
    """What a step gave the clients, in columns of equal length, and what of it needs a closer look.

    Attributes:
        request_ids: Whose token.
        samples: Of which sample.
        tokens: The token.
        others: The rest of the step, as events for `handle`.
    """

    request_ids: list[RequestId]
    samples: list[int]
    tokens: list[int]
    others: list[DecodeTokens]


class Dispatcher:
    """All requests of this router and their legs.

    Pure: no sockets, no clock. Time comes in as `now_s` (monotonic seconds). `handle` returns the actions the shell
    must carry out, in order. Not thread-safe: one owner.

    Args:
        view: The workers; the dispatcher adds and removes them and counts its legs there.
        placement: Chooses among them.
        policy: Bounds of retrying and waiting.
    """

    def __init__(self, *, view: ClusterView, placement: Placement, policy: RetryPolicy) -> None:
        self._view = view
        self._placement = placement
        self._legs = LegTable()
        self._story = StoryLog("dispatch")
        self._retry = RetryController(
            view=view, placement=placement, legs=self._legs, policy=policy, story=self._story
        )
        self._deadlines = Deadlines(self._retry.request, lambda: self.in_flight)
        self._ticked_s = float("-inf")

    @property
    def in_flight(self) -> int:
        """Requests accepted and not ended."""
        return self._retry.num_requests

    @property
    def waits_for_room(self) -> bool:
        """Whether requests that were begun wait for room on a worker: none is to be begun before them."""
        return self._retry.waits_for_room

    @property
    def retry_counters(self) -> RetryCounters:
        """How often attempts were lost and made again."""
        return self._retry.counters

    def story(self, about: RequestId | WorkerId) -> tuple[StoryEntry, ...]:
        """What happened to a request, plain tokens left out, or to a worker: joined, lost, suspected, left out. As far
        as it is remembered.
        """
        return self._story.story(about)

    def handle(self, event: Event, now_s: float) -> list[Action]:
        """What to do about `event`.

        Raises:
            InvariantError: A bug of ours; `fail_request` ends the request it belongs to.
        """
        try:
            return self._handle(event, now_s)
        except InvariantError as error:
            request_id = self.request_of(event)
            if request_id is None or error.story_text:
                raise
            raise InvariantError(error.message, story=self.story(request_id)) from error

    def advance(self, step: StepTokens, now_s: float) -> Advance:
        """Logs the tokens of a step that do nothing but lengthen the log of a sample: nearly all of them.

        What could be more comes back in `others`, in its order, for `handle`.
        """
        moved = Advance(request_ids=[], samples=[], tokens=[], others=[])
        held_back: set[int] = set()
        for leg_id, sample, token in zip(step.leg_ids, step.samples, step.tokens, strict=True):
            leg = self._legs.at(LegId(leg_id), step.worker)
            if leg is None:
                continue
            if leg_id in held_back or not _only_advances(leg, sample):
                held_back.add(leg_id)
                moved.others.append(_single(leg, sample, token))
                continue
            leg.worker.progress_s = leg.worker.heard_s = now_s
            if not leg.attempt.decoded:
                leg.attempt.begin_decoding(now_s)
            leg.grew(1)
            if leg.attempt.request.log(sample, token, now_s):
                moved.request_ids.append(leg.attempt.request.request_id)
                moved.samples.append(sample)
                moved.tokens.append(token)
        return moved

    def fail_request(self, event: Event, error: InvariantError, now_s: float) -> list[Action]:
        """Ends the request that `event` belongs to, after `handle` raised `error` for it."""
        request_id = self.request_of(event)
        return [] if request_id is None else self._retry.fail(request_id, error, now_s)

    def request_of(self, event: Event) -> RequestId | None:
        """The request that `event` belongs to; None for events about workers and the clock,
        and for legs that are over.
        """
        match event:
            case GenerationRequest() | StopSample() | ClientGone():
                return event.request_id
            case TimePassed() | WorkerJoined() | WorkerLost() | RoleChanged():
                return None
            case LoadReported() | BlocksReported() | LinkProbed():
                return None
            case _:
                leg = self._legs.find(event)
                return None if leg is None else leg.attempt.request.request_id

    def check_integrity(self) -> None:
        """Raises `InvariantError` unless requests, attempts, legs and the workers' counts agree."""
        self._retry.check_integrity()
        self._view.check_integrity()

    def _handle(self, event: Event, now_s: float) -> list[Action]:
        match event:
            case DecodeTokens():  # first, for there may be one for every token
                return self._leg_event(event, now_s)
            case GenerationRequest():
                return self._submit(event, now_s)
            case StopSample():
                return self._stop_sample(event, now_s)
            case ClientGone():
                error = CancelledByPeerError("the client is gone")
                return self._retry.fail(event.request_id, error, now_s)
            case TimePassed():
                return self._time_passed(now_s)
            case WorkerJoined():
                return self._join(event, now_s)
            case RoleChanged():
                self._view.change_role(event.worker, event.role)
                self._story.record(event.worker.worker_id, now_s, event)
                return []
            case WorkerLost():
                return self._on_worker_lost(event.worker, event.reason, now_s)
            case LoadReported():
                self._report(event, now_s)
                return []
            case BlocksReported():
                return self._blocks(event)
            case LinkProbed():
                return self._link_probed(event, now_s)
            case _:
                return self._leg_event(event, now_s)

    # What clients and the clock say.

    def _submit(self, asked: GenerationRequest, now_s: float) -> list[Action]:
        actions = self._retry.begin(asked, now_s)
        self._deadlines.add(asked.deadline_s, asked.request_id)
        self._deadlines.forget_ended()
        return actions

    def _stop_sample(self, event: StopSample, now_s: float) -> list[Action]:
        request = self._retry.request(event.request_id)
        if request is None or request.finished(event.sample):
            return []
        request.stop(event.sample)
        attempt = self._retry.attempt_at(request, event.sample)
        actions = self._end_if_done(attempt, now_s)
        self._story.record(event.request_id, now_s, event, actions)
        return actions

    def _time_passed(self, now_s: float) -> list[Action]:
        actions = self._look_for_silent_workers(now_s)
        while (first := self._deadlines.earliest()) is not None and first.deadline_s <= now_s:
            actions += self._retry.end_late(first.request_id, now_s)
        actions += self._retry.end_unreported(now_s)
        actions += self._probe_links(now_s)
        return actions + self._retry.place_waiting(now_s)

    def _look_for_silent_workers(self, now_s: float) -> list[Action]:
        """Of many that fell silent at once some wait for the next tick: what else this router has to do, and hear, goes
        on in between.
        """
        since_s = now_s - self._ticked_s
        if since_s > _STALL_S:
            self._view.excuse_silence(since_s, now_s)
        self._ticked_s = now_s
        actions: list[Action] = []
        moved = 0
        for worker in self._view.workers:
            if worker.legs and self._view.suspected(worker, now_s):
                if moved >= MOVED_AT_ONCE:
                    break
                moved += worker.legs
                actions += self._suspect(worker, now_s)
        return actions

    def _probe_links(self, now_s: float) -> list[Action]:
        """Has the links of broken pairs tried that are due."""
        actions: list[Action] = []
        for prefill, decode in self._view.broken_pairs.due(now_s):
            target = self._view.find(decode.worker_id)
            if target is not None:
                address = target.hello.transfer_address
                actions.append(SendProbe(worker=prefill, target=decode, transfer_address=address))
        return actions

    # What workers say of themselves.

    def _join(self, event: WorkerJoined, now_s: float) -> list[Action]:
        identity = event.hello.identity
        actions: list[Action] = []
        older = self._view.find(identity.worker_id)
        if older is not None and older.identity != identity:
            moved = older.address != event.address
            # A process that was only given the name of one that is well is refused, by the view.
            if not moved or self._view.suspected(older, now_s):
                actions += self._on_worker_lost(older.identity, "it was started anew", now_s)
                if moved:  # its link asks there again
                    lost = WorkerLostError(f"{older.identity} was started anew at {event.address}")
                    actions.append(RefuseWorker(address=older.address, error=lost))
        try:
            self._view.join(event.hello, event.address, now_s)
        except IncompatibleError as error:
            refusal = RefuseWorker(address=event.address, error=error)
            self._story.record(identity.worker_id, now_s, f"{identity} joined", (refusal,))
            return [*actions, refusal]
        self._story.record(
            identity.worker_id, now_s, f"{identity} joined as {event.hello.role.value}"
        )
        return actions

    def _report(self, event: LoadReported, now_s: float) -> None:
        worker = self._view.find(event.worker.worker_id)
        if worker is None or worker.identity != event.worker:
            return
        was_draining = worker.draining
        was_unusable = was_draining or self._view.suspected(worker, now_s)
        worker.report(event.load, now_s)
        if was_unusable and not worker.draining:
            self._story.record(event.worker.worker_id, now_s, f"{event.worker} is usable again")
        elif worker.draining and not was_draining:
            self._story.record(event.worker.worker_id, now_s, f"{event.worker} takes nothing new")
        self._view.pools.attach(worker)

    def _blocks(self, event: BlocksReported) -> list[Action]:
        if not self._view.report_blocks(event.worker, event.report):
            return []
        return [AskForSnapshot(worker=event.worker)]

    def _link_probed(self, event: LinkProbed, now_s: float) -> list[Action]:
        prefill, decode = event.worker, event.target
        self._story.record(prefill.worker_id, now_s, event)
        if not self._view.link_probed(prefill, decode, event.error, now_s):
            return []
        return self._pair_restored(prefill, decode, now_s)

    def _pair_restored(
        self, prefill: WorkerIdentity, decode: WorkerIdentity, now_s: float
    ) -> list[Action]:
        restored = PairRestored(prefill=prefill, decode=decode)
        for worker in (prefill, decode):
            self._story.record(worker.worker_id, now_s, restored)
        return [restored]

    def _on_worker_lost(self, identity: WorkerIdentity, reason: str, now_s: float) -> list[Action]:
        worker = self._view.lose(identity)
        if worker is None:
            return []
        return self._fail_worker_legs(worker, reason, now_s)

    def _suspect(self, worker: WorkerView, now_s: float) -> list[Action]:
        """Continues without a worker that fell silent. It stays a member, gets nothing new until it is heard from, and
        finds the cancellation of its legs among the commands that wait for it.
        """
        silent_s = now_s - worker.heard_s
        cancels = [leg.cancel() for leg in self._legs.on_worker(worker)]
        suspected = WorkerSuspected(worker=worker.identity, silent_s=silent_s)
        reason = f"silent for {silent_s:.1f} s"
        return [suspected, *cancels, *self._fail_worker_legs(worker, reason, now_s)]

    def _fail_worker_legs(self, worker: WorkerView, reason: str, now_s: float) -> list[Action]:
        """Closes every leg on `worker` and continues their attempts elsewhere."""
        identity = worker.identity
        error = WorkerLostError(f"worker {identity} was lost: {reason}")
        leaving = worker.load.draining and not worker.load.changing_role
        gone = self._legs.on_worker(worker)
        self._story.record(identity.worker_id, now_s, f"{error.message}; {len(gone)} legs go on")
        if gone:
            self._blame(worker, now_s)
        for leg in gone:
            self._legs.close(leg)
        actions: list[Action] = []
        for attempt in dict.fromkeys(leg.attempt for leg in gone):
            if attempt.state is AttemptState.ENDED:
                continue  # another attempt at its request was the last one allowed, a moment ago
            self._story.record(attempt.request.request_id, now_s, error.message)
            attempt.outlasted = attempt.decoded and leaving
            actions += self._recover_attempt(attempt, error, frozenset({identity}), now_s)
        return actions

    def _blame(self, worker: WorkerView, now_s: float) -> None:
        """A leg of the worker failed: it may be left out for a while."""
        before = worker.breaker.circuit(now_s)
        worker.breaker.failed(now_s)
        after = worker.breaker.circuit(now_s)
        if after is not before:
            told = f"{worker.identity}: its circuit is {after.value}"
            self._story.record(worker.identity.worker_id, now_s, told)

    # What workers say of a leg.

    def _leg_event(self, event: LegEvent, now_s: float) -> list[Action]:
        """Applies an event to the leg it is about; one about a leg that is not open is out of date and does nothing."""
        leg = self._legs.find(event)
        if leg is None:
            return []
        leg.worker.progress_s = leg.worker.heard_s = now_s
        actions = self._apply(leg, event, now_s)
        if not isinstance(event, DecodeTokens):
            self._story.record(leg.attempt.request.request_id, now_s, event, actions)
        return actions

    def _apply(self, leg: Leg, event: LegEvent, now_s: float) -> list[Action]:
        if isinstance(event, LegFailed):
            return self._on_leg_failed(leg, event.error, now_s)
        if leg.kind not in _KINDS_OF[type(event)]:
            return self._breach(
                leg, f"said {type(event).__name__} of a {leg.kind.value} leg", now_s
            )
        match event:
            case DecodeTokens():
                return self._decode_tokens(leg, event, now_s)
            case Prefilled() if leg.kind is LegKind.GENERATE:
                return self._prefilled_here(leg, event, now_s)
            case Prefilled():
                return self._first_tokens(leg, event, now_s)
            case HandedOff():
                return self._handed_off(leg, event, now_s)
            case Pooled():
                return self._put_in_pool(leg, now_s)
            case LegWriterLost():
                return self._writer_lost(leg, event, now_s)
            case SampleFinished():
                return self._sample_finished(leg, event, now_s)

    def _first_tokens(self, leg: Leg, event: Prefilled, now_s: float) -> list[Action]:
        attempt = leg.attempt
        drawn = {token.sample for token in event.first_tokens}
        asked = set(attempt.samples)
        # Without any, the decode worker draws them.
        if attempt.state is not AttemptState.PREFILLING or (drawn and drawn != asked):
            return self._breach(leg, "sent first tokens that were not asked for", now_s)
        if _aborted(event.first_tokens):
            return self._breach(leg, "aborted a sample", now_s)
        leg.computed(event, now_s)
        known = attempt.first_tokens is not None
        if attempt.first_tokens is not None and not _same(attempt.first_tokens, event.first_tokens):
            # Two logits were all but equal. The client has the other token: continue from what it has.
            error = EngineError("the prompt was computed again and gave another token")
            return self._retry.retry(attempt, error, frozenset(), now_s)
        attempt.first_tokens = event.first_tokens
        attempt.request.watch.prefilled(event)
        ended = {token.sample for token in event.first_tokens if token.finish is not None}
        attempt.decoding = asked - ended
        attempt.move(AttemptState.HANDING_OFF, now_s)
        if not known:
            attempt.request.prompt_logprobs = event.prompt_logprobs
        actions = [] if known else _emit(attempt, event.first_tokens, now_s)
        actions += self._end_if_done(attempt, now_s)
        return actions + self._apply_early(attempt, now_s)

    def _apply_early(self, attempt: Attempt, now_s: float) -> list[Action]:
        """What D sent before the first tokens were known; of an attempt that has ended no leg is open."""
        held_back, attempt.early = attempt.early, []
        return [action for early in held_back for action in self._leg_event(early, now_s)]

    def _decode_tokens(self, leg: Leg, event: DecodeTokens, now_s: float) -> list[Action]:
        attempt = leg.attempt
        if attempt.state is AttemptState.PREFILLING:
            attempt.early.append(event)
            return []
        if not attempt.decoded:
            attempt.begin_decoding(now_s)
        leg.grew(len(event.tokens))
        ended = False
        for token in event.tokens:
            if token.sample not in attempt.samples:
                return self._breach(leg, f"sent a token of sample {token.sample}", now_s)
            if token.finish is not None:
                ended = True
                attempt.decoding.discard(token.sample)
        if ended and _aborted(event.tokens):
            return self._breach(leg, "aborted a sample", now_s)
        actions = _emit(attempt, event.tokens, now_s)
        if ended:
            actions += self._end_if_done(attempt, now_s)
            self._story.record(attempt.request.request_id, now_s, event, actions)
        return actions

    def _sample_finished(self, leg: Leg, event: SampleFinished, now_s: float) -> list[Action]:
        attempt = leg.attempt
        if attempt.state is AttemptState.PREFILLING:
            attempt.early.append(event)
            return []
        attempt.decoding.discard(event.sample)
        if not attempt.request.finished(event.sample):
            return self._breach(leg, f"ended sample {event.sample} without a token", now_s)
        return self._end_if_done(attempt, now_s)

    def _prefilled_here(self, leg: Leg, event: Prefilled, now_s: float) -> list[Action]:
        """Where it is decoded: the first tokens are a step's like all others."""
        if event.first_tokens:
            return self._breach(leg, "sent first tokens that were not asked for", now_s)
        leg.computed(event, now_s)
        leg.attempt.request.watch.prefilled(event)
        leg.attempt.request.prompt_logprobs = event.prompt_logprobs
        return []

    def _handed_off(self, leg: Leg, event: HandedOff, now_s: float) -> list[Action]:
        attempt = leg.attempt
        if attempt.state is AttemptState.PREFILLING:
            return self._breach(leg, "handed off before its first tokens", now_s)
        if attempt.decode is None and attempt.state is not AttemptState.AWAITING_REPORT:
            return self._breach(leg, "handed off what it had given up", now_s)
        actions: list[Action] = []
        attempt.request.watch.handed_off(event)
        leg.worker.breaker.succeeded(now_s)
        if attempt.decode is not None:
            leg.handed_to(attempt.decode.worker, event)
            prefill, decode = leg.worker.identity, attempt.decode.worker.identity
            if self._view.link_carries(prefill, decode):
                actions += self._pair_restored(prefill, decode, now_s)
        self._legs.close(leg)
        return actions + self._continue_on_decode_only(attempt, now_s)

    def _put_in_pool(self, leg: Leg, now_s: float) -> list[Action]:
        attempt = leg.attempt
        if attempt.state is AttemptState.PREFILLING:
            return self._breach(leg, "put a prompt into the pool before its first tokens", now_s)
        if attempt.decoded:
            return self._breach(leg, "put a prompt into the pool that was handed off", now_s)
        leg.worker.breaker.succeeded(now_s)
        self._legs.close(leg)
        node, decode = node_of(leg.worker.load), attempt.decode
        reader: WorkerIdentity | None = None
        if decode is not None and node is not None and node == node_of(decode.worker.load):
            reader = decode.worker.identity
        return self._retry.leave_to_pool(attempt, reader, now_s)

    def _writer_lost(self, leg: Leg, event: LegWriterLost, now_s: float) -> list[Action]:
        attempt = leg.attempt
        current = attempt.permit is not None and attempt.permit.attempt == event.attempt
        handed_off = attempt.decoded or attempt.early or attempt.state not in _HANDOFF_OPEN
        if not current or handed_off or given_up_by_prefill(leg, event.error):
            return []
        actions: list[Action] = []
        blamed: frozenset[WorkerIdentity] = frozenset()
        if attempt.prefill is not None:
            blamed = frozenset({attempt.prefill.worker.identity})
            if isinstance(event.error, UnreachableError):
                actions += self._pair_failed(attempt.prefill, event.error, now_s)
            actions.append(attempt.prefill.cancel())
            self._legs.abandon(attempt.prefill, now_s)
        return actions + self._retry.replace_prefill(attempt, event.error, blamed, now_s)

    # What follows from it.

    def _end_if_done(self, attempt: Attempt, now_s: float) -> list[Action]:
        """After a sample has ended: ends the attempt, or has it await P's report,
        unless it still has something to do.
        """
        if attempt.unfinished:
            return []
        if attempt.decode is not None and attempt.decoded:
            attempt.decode.worker.breaker.succeeded(now_s)
        ran_out = attempt.decoded and not attempt.decoding
        if ran_out and attempt.decode is not None:
            self._legs.close(attempt.decode)
        if ran_out and attempt.state is AttemptState.HANDING_OFF:
            self._retry.await_report(attempt, now_s)
            return []
        return self._retry.end(attempt, now_s)

    def _continue_on_decode_only(self, attempt: Attempt, now_s: float) -> list[Action]:
        """P has nothing more to say: D continues alone, or the attempt is over."""
        if attempt.state is AttemptState.AWAITING_REPORT:
            return self._retry.end(attempt, now_s)
        attempt.move(AttemptState.DECODING, now_s)
        return []

    def _resume_on_decode(self, attempt: Attempt, now_s: float) -> list[Action]:
        """P took over what was handed off already, and is done: what D sends, or sent, follows what the client has."""
        if attempt.state is AttemptState.PREFILLING:
            attempt.move(AttemptState.HANDING_OFF, now_s)
        attempt.move(AttemptState.DECODING, now_s)
        return self._apply_early(attempt, now_s)

    def _breach(self, leg: Leg, what: str, now_s: float) -> list[Action]:
        """The worker broke the contract for this leg: cancels it and continues elsewhere."""
        error = EngineError(f"worker {leg.worker.identity} {what}")
        return [leg.cancel(), *self._on_leg_failed(leg, error, now_s)]

    def _on_leg_failed(self, leg: Leg, error: BatonError, now_s: float) -> list[Action]:
        attempt = leg.attempt
        if leg.kind is LegKind.PREFILL and isinstance(error, UnreachableError | IncompatibleError):
            return self._on_pair_failed(leg, error, now_s)
        # That of a P which took over may be about the P before it.
        if given_up_by_prefill(leg, error) and not attempt.took_over:
            self._legs.abandon(leg, now_s)
            return []
        suspected = suspects(leg, error)
        blamed = frozenset(worker.identity for worker in suspected)
        if isinstance(error, NO_WORKERS_FAULT):
            leg.worker.breaker.abandoned(now_s)
        else:
            for worker in suspected:
                self._blame(worker, now_s)
        if isinstance(error, DrainingError):
            leg.worker.draining = True
        self._legs.close(leg)
        reservation_intact = isinstance(error, PREFILL_WORKERS_OWN_FAULT)
        return self._recover_attempt(
            attempt, error, blamed, now_s, reservation_intact=reservation_intact
        )

    def _on_pair_failed(self, leg: Leg, error: BatonError, now_s: float) -> list[Action]:
        """P cannot reach D, or the two do not fit. As long as D is heard here neither is at fault: another P can write
        to the pages that D keeps, and D can compute the prompt itself. Where that P cannot either, another D may do.
        """
        attempt = leg.attempt
        actions = self._pair_failed(leg, error, now_s)
        self._legs.abandon(leg, now_s)
        decode = None if attempt.decode is None else attempt.decode.worker
        heard = decode is not None and not decode.silent(now_s, _HEARD_S)
        blamed: frozenset[WorkerIdentity] = frozenset()
        if decode is not None and (attempt.took_over or not heard):
            blamed = frozenset({decode.identity})
        return actions + self._recover_attempt(
            attempt, error, blamed, now_s, reservation_intact=heard
        )

    def _pair_failed(self, leg: Leg, error: BatonError, now_s: float) -> list[Action]:
        """Leaves P and D alone as a pair until their link is known to work."""
        if leg.attempt.decode is None:
            return []
        prefill, decode = leg.worker.identity, leg.attempt.decode.worker.identity
        self._placement.handed_nothing(leg.attempt.request, leg.attempt.decode.worker)
        pause_s = self._view.link_failed(prefill, decode, error, now_s)
        if pause_s is None:
            return []
        suspected = PairSuspected(prefill=prefill, decode=decode, error=error, pause_s=pause_s)
        for worker, side in ((prefill, Role.PREFILL), (decode, Role.DECODE)):
            self._story.record(worker.worker_id, now_s, suspected)
            if self._view.broken_pairs.cuts_off(worker, side):
                told = f"{worker} is cut off: no pair has it to {side.value}"
                self._story.record(worker.worker_id, now_s, told)
        return [suspected]

    def _recover_attempt(
        self,
        attempt: Attempt,
        error: BatonError,
        blamed: Set[WorkerIdentity],
        now_s: float,
        *,
        reservation_intact: bool = True,
    ) -> list[Action]:
        """Some legs of `attempt` were closed by a failure. Continues with what is left, if that is enough.

        Args:
            attempt: It may have an open leg left.
            error: Why the others were closed.
            blamed: Workers that may be at fault.
            now_s: The time.
            reservation_intact: Whether D's reserved pages, if its leg is open, can still be written to by another P.
        """
        if attempt.state is AttemptState.AWAITING_REPORT:
            return self._retry.end(attempt, now_s)
        if attempt.decode is not None and attempt.decoded:
            # D decodes, so it has the KV: P was done except for its report.
            return self._continue_on_decode_only(attempt, now_s)
        if attempt.decode is not None and has_pages(attempt, error):
            return self._resume_on_decode(attempt, now_s)
        decode_waits = attempt.decode is not None and not attempt.early
        if decode_waits and attempt.state in _HANDOFF_OPEN and reservation_intact:
            return self._retry.replace_prefill(attempt, error, blamed, now_s)
        return self._retry.retry(attempt, error, blamed, now_s)


def _only_advances(leg: Leg, sample: int) -> bool:
    """Whether a plain token of `leg` does nothing but lengthen the log of `sample`.
    A request's first token does more.
    """
    attempt = leg.attempt
    return (
        leg.sent.kind in _DECODES
        and attempt.state is not AttemptState.PREFILLING
        and sample in attempt.samples
        and attempt.request.watch.first_token_s is not None
    )


def _single(leg: Leg, sample: int, token: int) -> DecodeTokens:
    drawn = (plain_token(sample, token),)
    return DecodeTokens(worker=leg.sent.worker, leg_id=leg.sent.leg_id, tokens=drawn)


def _emit(attempt: Attempt, tokens: tuple[TokenSample, ...], now_s: float) -> list[Action]:
    request = attempt.request
    fresh = request.accept(tokens, now_s)
    if not fresh:
        return []
    scores = None if request.prompt_logprobs is None else request.take_prompt_logprobs()
    return [Emit(request_id=request.request_id, tokens=fresh, prompt_logprobs=scores)]


def _same(first: Iterable[TokenSample], again: Iterable[TokenSample]) -> bool:
    return {t.sample: t.token for t in first} == {t.sample: t.token for t in again}


def _aborted(tokens: Iterable[TokenSample]) -> bool:
    return any(token.finish is FinishReason.ABORT for token in tokens)
