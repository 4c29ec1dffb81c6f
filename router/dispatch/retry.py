"""Starts the attempts at each request, retries the ones that fail on other workers, and ends the request.

A request is served by one or more attempts (`router.dispatch.attempt`). When one fails, its other leg is cancelled at
once and new attempts continue what its samples still want, from the token logs (`router.dispatch.request`). The
dispatcher says when an attempt has failed; here it is decided what follows, and for how long it is worth trying.
"""

from collections import Counter
from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from enum import Enum
from itertools import islice

from baton.backoff import Backoff
from baton.errors import (
    BatonError,
    DeadlineError,
    InvalidRequestError,
    InvariantError,
    UnavailableError,
)
from baton.ids import RequestId, WorkerIdentity, new_xfer_id
from baton.story import StoryLog
from router.dispatch.actions import Action, Fail, Finish
from router.dispatch.attempt import Attempt, AttemptState, LegTable
from router.dispatch.placement import Placement
from router.dispatch.request import RequestState
from router.ports import GenerationRequest
from router.routing.policy import Unavailable
from router.routing.view import ClusterView

MOVED_AT_ONCE = 64
"""About so many attempts are moved to other workers in one tick, of those whose workers fell silent and of those that
wait: more would keep the router from all else.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """Bounds of retrying and waiting.

    Attributes:
        max_attempts: How often a sample's legs may be started; once more for each drain that it outlasted.
        worker_wait_s: How long a request waits for a worker to appear: about what a restart takes. One whose client has
            some of its tokens waits until its deadline: nobody else can go on with it. One that waits for room gets a
            worker then.
        retry_backoff: How long workers that failed a request are avoided when there are no others. A worker that was
            silent for the longest of these waits gets no new legs anyway.
        recompute_tokens: Up to so many tokens of a prompt are computed by D itself when no P can take over.
        report_wait_s: How long a request whose tokens are all out waits for P's report of the hand-off.
    """

    max_attempts: int = 3
    worker_wait_s: float = 15.0
    retry_backoff: Backoff = Backoff(first_s=0.5, max_s=5.0, factor=4.0)
    recompute_tokens: int = 2048
    report_wait_s: float = 1.0

    def pause_s(self, number: int) -> float:
        """How long the attempt of this number waits before it uses workers that failed it;
        2 is the first after a failure.

        A worker that hangs fails every attempt at once, since its stream is known to be broken: attempts that followed
        each other closely would be used up before it is known whether the worker is lost.
        """
        return self.retry_backoff.wait_s(max(number - 1, 1))


class Fallback(Enum):
    """What is done about a hand-off that does not complete, from the best to the last; the values are metric labels."""

    ANOTHER_PREFILL_WORKER = "another_prefill_worker"  # onto the same reservation
    NO_ROOM = "no_room"  # D had no room: P left the prompt in the pool, D fetches it when it has
    POOL = "pool"  # P was lost: D fetches what the pool has, and computes the rest
    RECOMPUTE = "recompute"  # D computes the prompt
    ANOTHER_PAIR = "another_pair"  # another attempt on any pair of workers
    REFUSED = "refused"  # 503 with Retry-After, or the error itself after too many attempts


@dataclass(slots=True, eq=False)
class RetryCounters:
    """How often attempts were lost and others took their places, counted as it happens,
    whatever becomes of the request.

    Attributes:
        retries: Before their first token.
        resumptions: After it.
        fallbacks: What was done instead.
    """

    retries: int = 0
    resumptions: int = 0
    fallbacks: Counter[Fallback] = field(default_factory=Counter)


class RetryController:
    """All requests of this router and the attempts at them.

    Pure, as the dispatcher, its one owner. Every method returns the actions the shell must carry out, in order.

    Args:
        view: The workers.
        placement: Chooses among them.
        legs: The open ones; opened and closed here.
        policy: Bounds of retrying and waiting.
        story: Told what is decided about each request.

    Attributes:
        counters: Counted since the start.
        waits_for_room: Whether attempts wait that no worker was asked about: the first of them has no room, or there
            are more than a tick moves.
    """

    def __init__(
        self,
        *,
        view: ClusterView,
        placement: Placement,
        legs: LegTable,
        policy: RetryPolicy,
        story: StoryLog,
    ) -> None:
        self._view = view
        self._placement = placement
        self._legs = legs
        self._policy = policy
        self._story = story
        self._requests: dict[RequestId, RequestState] = {}
        self._attempts: dict[RequestId, list[Attempt]] = {}
        self._waiting: dict[Attempt, Unavailable] = {}
        self._awaiting_report: dict[Attempt, None] = {}
        self.waits_for_room = False
        self.counters = RetryCounters()

    @property
    def num_requests(self) -> int:
        """Requests begun and not ended."""
        return len(self._requests)

    def request(self, request_id: RequestId) -> RequestState | None:
        """The request of that name, until it has ended."""
        return self._requests.get(request_id)

    def attempt_at(self, request: RequestState, sample: int) -> Attempt:
        """The attempt that carries an unfinished sample."""
        attempts = self._attempts[request.request_id]
        return next(attempt for attempt in attempts if sample in attempt.samples)

    def begin(self, asked: GenerationRequest, now_s: float) -> list[Action]:
        """The first attempt at a new request.

        Raises:
            InvariantError: A request of this name is in flight.
        """
        request_id = asked.request_id
        if request_id in self._requests:
            story = self._story.story(request_id)
            raise InvariantError(f"{request_id} is in flight already", story=story)
        request = RequestState(asked, now_s)
        self._requests[request_id] = request
        self._attempts[request_id] = []
        samples = request.prompt.samples
        return self._launch(Attempt(request=request, samples=samples, since_s=now_s), now_s)

    def await_report(self, attempt: Attempt, now_s: float) -> None:
        """D is done and P has not reported the hand-off: its report is worth a short wait."""
        attempt.move(AttemptState.AWAITING_REPORT, now_s)
        self._awaiting_report[attempt] = None

    def end(self, attempt: Attempt, now_s: float) -> list[Action]:
        """Ends an attempt whose samples want nothing more, and the request with its last attempt."""
        actions = self._cancel_legs(attempt, now_s)
        request = attempt.request
        if not request.unfinished and not self._attempts[request.request_id]:
            self._forget(request)
            timing = request.timing(now_s)
            self._placement.ended(request, timing)
            actions.append(Finish(request_id=request.request_id, timing=timing))
        return actions

    def replace_prefill(
        self, attempt: Attempt, error: BatonError, blamed: Set[WorkerIdentity], now_s: float
    ) -> list[Action]:
        """P is lost before the hand-off was complete, and D keeps the pages.

        In this order (`Fallback`): another P writes into the same reservation; D fetches what the pool has of the
        prompt and computes the rest, if that is short; any other pair of workers; the error.
        """
        request, decode, permit = attempt.request, attempt.decode, attempt.permit
        assert decode is not None
        assert permit is not None
        prompt = decode.sent.prompt
        attempt.avoid |= blamed
        may_take_over = not attempt.took_over and attempt.number < self._policy.max_attempts
        pair = None
        if may_take_over:
            pair = self._placement.another_pair(
                request, prompt, decode.worker, attempt.avoid, now_s
            )
        if pair is not None:
            attempt.number += 1
            attempt.took_over = True
            request.watch.placed(pair, now_s)
            self._count(request, Fallback.ANOTHER_PREFILL_WORKER, resumed=False)
            permit = self._placement.permit(prompt, pair, permit.xfer_id, attempt.number)
            attempt.move(AttemptState.PREFILLING, now_s)
            actions: list[Action] = [*self._legs.take_over(attempt, pair, permit, now_s)]
            self._record(attempt, now_s, "another prefill worker takes over", actions)
            return actions
        pooled = self._placement.pooled_tokens(request, prompt, decode.worker, now_s)
        short = prompt.num_tokens - pooled <= self._policy.recompute_tokens
        if short or not self._placement.has_another_pair(attempt.avoid, now_s):
            fallback = Fallback.POOL if pooled else Fallback.RECOMPUTE
            return self.retry(
                attempt, error, blamed, now_s, fallback, pinned=decode.worker.identity
            )
        return self.retry(attempt, error, blamed, now_s)

    def retry(
        self,
        attempt: Attempt,
        error: BatonError,
        blamed: Set[WorkerIdentity],
        now_s: float,
        fallback: Fallback = Fallback.ANOTHER_PAIR,
        *,
        pinned: WorkerIdentity | None = None,
    ) -> list[Action]:
        """Ends a failed attempt and continues what its samples still want, from the token logs,
        unless that was tried too often.

        Args:
            attempt: It has lost a leg that it cannot do without.
            error: Why.
            blamed: Workers that may be at fault; avoided by the next attempt.
            now_s: The time.
            fallback: What the next attempt is, for the counters.
            pinned: The worker that is to prefill and decode by itself.
        """
        request = attempt.request
        actions = self._cancel_legs(attempt, now_s)
        own_fault = isinstance(error, InvalidRequestError)
        number = attempt.number + (not attempt.outlasted)
        if own_fault or number > self._policy.max_attempts:
            self.counters.fallbacks[Fallback.REFUSED] += not own_fault
            return actions + self.fail(request.request_id, error, now_s)
        self._record(attempt, now_s, f"retried: {fallback.value}: {error.message}", actions)
        self._count(request, fallback, resumed=request.has_tokens(attempt.unfinished))
        return actions + self._continue(
            attempt,
            now_s,
            number=number,
            avoid=attempt.avoid | blamed,
            cause=error,
            pinned=pinned,
        )

    def leave_to_pool(
        self, attempt: Attempt, reader: WorkerIdentity | None, now_s: float
    ) -> list[Action]:
        """D had no room, and the prompt lies in the pool, from which D can fetch it (then it is the `reader`) or not.

        D fetches it when it has room, and holds nothing until then. Out of reach, D would compute the prompt among the
        requests that decode there: another pair is better, P has the prompt in its cache.
        """
        fallback = Fallback.NO_ROOM if reader else Fallback.ANOTHER_PAIR
        self.counters.fallbacks[fallback] += 1
        actions = self._cancel_legs(attempt, now_s)
        self._record(attempt, now_s, f"left in the pool: {fallback.value}", actions)
        return actions + self._continue(
            attempt, now_s, number=attempt.number, avoid=attempt.avoid, cause=None, pinned=reader
        )

    def fail(self, request_id: RequestId, error: BatonError, now_s: float) -> list[Action]:
        """Ends a request with an error; nothing for one that has ended."""
        request = self._requests.get(request_id)
        if request is None:
            return []
        actions: list[Action] = []
        for attempt in tuple(self._attempts[request_id]):
            actions += self._cancel_legs(attempt, now_s)
        self._forget(request)
        actions.append(Fail(request_id=request_id, error=error))
        self._story.record(request_id, now_s, "failed", actions)
        return actions

    def end_late(self, request_id: RequestId, now_s: float) -> list[Action]:
        """Ends a request whose deadline has passed: with an error, or, where all its tokens are out, without P's report
        of the hand-off.
        """
        request = self._requests[request_id]
        if request.unfinished:
            return self.fail(request_id, DeadlineError("the request's deadline passed"), now_s)
        attempts = tuple(self._attempts[request_id])
        return [action for attempt in attempts for action in self._end_unreported(attempt, now_s)]

    def place_waiting(self, now_s: float) -> list[Action]:
        """Looks again for workers for the attempts that wait for some; fails those that have waited for too long. To be
        called several times per second.

        They are placed as there is room for them, like requests in the admission queue, and each that was tried in vain
        is tried behind the others: the first worker that is heard again after a long silence is not sent all that the
        others had. One that has waited for room as long as it would for a worker is placed all the same, one in each
        call: other routers may fill each place before this one hears of it.
        """
        self.waits_for_room = False
        if not self._waiting:
            return []
        if not self._placement.has_workers(now_s):
            self.waits_for_room = True
            return self._give_up_late(tuple(self._waiting), now_s)
        self.waits_for_room = len(self._waiting) > MOVED_AT_ONCE
        actions: list[Action] = []
        tried: list[Attempt] = []
        for attempt in tuple(islice(self._waiting, MOVED_AT_ONCE)):
            overdue = not tried and now_s - attempt.since_s >= self._policy.worker_wait_s
            if not overdue and not self._placement.has_room(
                attempt.request, attempt.prompt(), now_s
            ):
                self.waits_for_room = True
                break
            tried.append(attempt)
            self._waiting[attempt] = self._waiting.pop(attempt)  # behind those that are not tried
            actions += self._place(attempt, now_s)
        return actions + self._give_up_late(tried, now_s)

    def end_unreported(self, now_s: float) -> list[Action]:
        """Ends the attempts that have waited long enough for P's report of the hand-off."""
        report_wait_s = self._policy.report_wait_s
        late = [a for a in self._awaiting_report if now_s - a.since_s >= report_wait_s]
        return [action for attempt in late for action in self._end_unreported(attempt, now_s)]

    def check_integrity(self) -> None:
        """Raises `InvariantError` unless requests, attempts, legs and the workers' counts agree."""
        attempts = [attempt for group in self._attempts.values() for attempt in group]
        if self._requests.keys() != self._attempts.keys() or not all(self._attempts.values()):
            raise InvariantError("a request without an attempt, or the other way round")
        for state, members in (
            (AttemptState.WAITING, self._waiting),
            (AttemptState.AWAITING_REPORT, self._awaiting_report),
        ):
            if {attempt for attempt in attempts if attempt.state is state} != members.keys():
                raise InvariantError(f"attempts that are {state} are not those on the list")
        self._legs.check_integrity(attempts, self._view.workers)

    def _launch(self, attempt: Attempt, now_s: float) -> list[Action]:
        self._attempts[attempt.request.request_id].append(attempt)
        return self._place(attempt, now_s)

    def _place(self, attempt: Attempt, now_s: float) -> list[Action]:
        """Starts the legs of a waiting attempt, or leaves it waiting."""
        request = attempt.request
        prompt = attempt.prompt()
        pinned = attempt.pinned and self._placement.single_worker(
            request, prompt, attempt.pinned, now_s
        )
        chosen = pinned or self._placement.choose(request, prompt, attempt.avoid, now_s)
        paused = now_s - attempt.since_s >= self._policy.pause_s(attempt.number)
        if isinstance(chosen, Unavailable) and attempt.avoid and paused:
            chosen = self._placement.choose(request, prompt, frozenset(), now_s)
        if isinstance(chosen, Unavailable):
            if attempt not in self._waiting:
                self._record(attempt, now_s, f"waits: {chosen.reason}", ())
            self._waiting[attempt] = chosen
            return []
        self._waiting.pop(attempt, None)
        request.watch.placed(chosen, now_s)
        actions: list[Action]
        if chosen.local:
            attempt.decoding = set(attempt.samples)
            attempt.move(AttemptState.GENERATING, now_s)
            actions = [self._legs.start_generate(attempt, chosen, now_s)]
        else:
            attempt.move(AttemptState.PREFILLING, now_s)
            permit = self._placement.permit(prompt, chosen, new_xfer_id(), attempt.number)
            actions = [*self._legs.start_hand_off(attempt, chosen, permit, now_s)]
        self._record(attempt, now_s, "placed", actions)
        return actions

    def _give_up_late(self, attempts: Sequence[Attempt], now_s: float) -> list[Action]:
        """Fails those of `attempts` that still wait and have for too long, but for those whose clients have tokens."""
        actions: list[Action] = []
        since_s = now_s - self._policy.worker_wait_s
        for attempt in attempts:
            # Another sample of the same request may have failed it a moment ago.
            late = attempt in self._waiting and attempt.since_s <= since_s
            if late and not attempt.request.has_tokens(attempt.samples):
                self.counters.fallbacks[Fallback.REFUSED] += 1
                error = self._unavailable(attempt)
                actions += self.fail(attempt.request.request_id, error, now_s)
        return actions

    def _continue(
        self,
        attempt: Attempt,
        now_s: float,
        *,
        number: int,
        avoid: frozenset[WorkerIdentity],
        cause: BatonError | None,
        pinned: WorkerIdentity | None,
    ) -> list[Action]:
        """New attempts at what the samples of an ended one still want;
        samples that have tokens get one attempt each.
        """
        request, wanted = attempt.request, attempt.unfinished
        groups = [(sample,) for sample in wanted] if request.has_tokens(wanted) else [wanted]
        actions: list[Action] = []
        for samples in groups:
            successor = Attempt(
                request=request,
                samples=samples,
                since_s=now_s,
                number=number,
                avoid=avoid,
                cause=cause,
                pinned=pinned,
            )
            actions += self._launch(successor, now_s)
        return actions

    def _end_unreported(self, attempt: Attempt, now_s: float) -> list[Action]:
        actions = self.end(attempt, now_s)
        self._record(attempt, now_s, "ended without the hand-off's report", actions)
        return actions

    def _count(self, request: RequestState, fallback: Fallback, *, resumed: bool) -> None:
        self.counters.fallbacks[fallback] += 1
        request.watch.retried(resumed=resumed)
        self.counters.resumptions += resumed
        self.counters.retries += not resumed

    def _cancel_legs(self, attempt: Attempt, now_s: float) -> list[Action]:
        """Cancels every open leg of an attempt, which has ended, and takes it off all lists."""
        actions: list[Action] = []
        for leg in attempt.legs:
            self._legs.abandon(leg, now_s)
            actions.append(leg.cancel())
        attempt.move(AttemptState.ENDED, now_s)
        self._waiting.pop(attempt, None)
        self._awaiting_report.pop(attempt, None)
        self._attempts[attempt.request.request_id].remove(attempt)
        return actions

    def _forget(self, request: RequestState) -> None:
        del self._requests[request.request_id]
        del self._attempts[request.request_id]

    def _unavailable(self, attempt: Attempt) -> UnavailableError:
        message = self._waiting[attempt].reason
        if attempt.cause is not None:
            message += f" (earlier: {attempt.cause.message})"
        return UnavailableError(message)

    def _record(self, attempt: Attempt, now_s: float, what: str, actions: Sequence[Action]) -> None:
        told = f"attempt {attempt.number} at samples {attempt.samples}: {what}"
        self._story.record(attempt.request.request_id, now_s, told, actions)
