"""One attempt at some samples of a request: its states, and its legs on one pair of workers or on a single worker.

    WAITING ──► PREFILLING ──► HANDING_OFF ──► DECODING ─────► ENDED
       │          ▲ P lost, another on D's pages ┤               ▲
       │          └──────────────────────────────┤               │
       │                                         └► AWAITING_REPORT
       └──────► GENERATING ──────────────────────────────────────┘

P is the prefill worker and D the decode worker. An attempt that fails is ENDED; whatever its samples still want is
continued by new attempts at the same request (`router.dispatch.retry`).
Which event makes which move: `router.dispatch.dispatcher`.

A leg is what one worker does for an attempt. It is open from its command until the worker ends it, the worker is lost,
or the router cancels it. Whatever a worker says about a leg that is not open is out of date and is ignored.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from itertools import count

from baton.errors import BatonError, InvariantError
from baton.generation import Prompt, TokenSample
from baton.ids import LegId, LegKind, WorkerIdentity
from kv_transfer.ticket import Permit
from router.dispatch.actions import SendCancel, SendLeg, SendReassign
from router.dispatch.events import DecodeTokens, HandedOff, LegEvent, Prefilled, SampleFinished
from router.dispatch.request import RequestState
from router.routing.policy import Pair
from router.routing.view import WorkerView


class AttemptState(Enum):
    """Where an attempt stands."""

    WAITING = "no pair of workers yet"
    PREFILLING = "both legs open, the prompt is being computed"
    HANDING_OFF = "the prompt is computed, P has not reported the hand-off"
    DECODING = "P is done"
    AWAITING_REPORT = "D is done, P has not reported the hand-off"
    GENERATING = "one worker does both"
    ENDED = "no leg left"


_S = AttemptState
TRANSITIONS: dict[AttemptState, frozenset[AttemptState]] = {
    _S.WAITING: frozenset({_S.PREFILLING, _S.GENERATING, _S.ENDED}),
    _S.PREFILLING: frozenset({_S.PREFILLING, _S.HANDING_OFF, _S.ENDED}),
    _S.HANDING_OFF: frozenset({_S.PREFILLING, _S.DECODING, _S.AWAITING_REPORT, _S.ENDED}),
    _S.DECODING: frozenset({_S.ENDED}),
    _S.AWAITING_REPORT: frozenset({_S.ENDED}),
    _S.GENERATING: frozenset({_S.ENDED}),
    _S.ENDED: frozenset(),
}


@dataclass(slots=True, eq=False)
class Attempt:
    """See the module. Changed by the dispatcher and its retry controller only.

    Attributes:
        request: Whose samples these are.
        samples: The samples of this attempt.
        since_s: When it entered its state.
        number: 1 for the first attempt at these samples.
        avoid: Workers that failed an earlier attempt; used again only when there is no other.
        cause: What ended the attempt before.
        pinned: The worker that is to prefill and decode by itself.
        permit: What its legs are tied by.
        took_over: Whether a second P writes into the pages that D reserved for the first.
        first_tokens: Those that P drew, once the prompt is computed: the client has them. None of them where D draws.
        prefill: P's leg while it is open.
        decode: D's leg while it is open.
        decoding: Samples that D has not finished; known once the first tokens are.
        decoded: Whether D has sent a token.
        outlasted: Whether it had got somewhere on a worker that drained and has left: none is used up by that.
        early: What D sent before P's first tokens arrived, held back.
    """

    request: RequestState
    samples: tuple[int, ...]
    since_s: float
    number: int = 1
    avoid: frozenset[WorkerIdentity] = frozenset()
    cause: BatonError | None = None
    pinned: WorkerIdentity | None = None
    permit: Permit | None = None
    took_over: bool = False
    first_tokens: tuple[TokenSample, ...] | None = None
    state: AttemptState = AttemptState.WAITING
    prefill: "Leg | None" = None
    decode: "Leg | None" = None
    decoding: set[int] = field(default_factory=set)
    decoded: bool = False
    outlasted: bool = False
    early: list[DecodeTokens | SampleFinished] = field(default_factory=list)

    @property
    def legs(self) -> "list[Leg]":
        """The open ones."""
        return [leg for leg in (self.prefill, self.decode) if leg is not None]

    @property
    def unfinished(self) -> tuple[int, ...]:
        """Its samples that still want tokens."""
        return tuple(sample for sample in self.samples if not self.request.finished(sample))

    def prompt(self) -> Prompt:
        """The request's prompt as this attempt asks for it."""
        return self.request.prompt_for(self.samples)

    def begin_decoding(self, now_s: float) -> None:
        """D has sent its first token."""
        self.decoded = True
        self.request.watch.decode_began(now_s)

    def move(self, state: AttemptState, now_s: float) -> None:
        """Enters `state`.

        Raises:
            InvariantError: The table has no such transition.
        """
        if state not in TRANSITIONS[self.state]:
            message = f"{self.request.request_id}: attempt {self.state} to {state}"
            raise InvariantError(message)
        self.state = state
        self.since_s = now_s


@dataclass(slots=True, eq=False)
class Leg:
    """One leg on one worker, and what it adds to the worker's counts while it is open.

    Attributes:
        sent: What its worker was asked.
        worker: Its worker, as this router sees it.
        attempt: What it is a leg of.
        prompt_tokens: Tokens of the prompt that is computed there; 0 where none is.
        compute_s: Predicted time to compute it.
        computed_s: Time that computing it took, by the worker's own clock.
    """

    sent: SendLeg
    worker: WorkerView
    attempt: Attempt
    prefill_tokens: int = 0
    sequences: int = 0
    context_tokens: int = 0
    prompt_tokens: int = 0
    compute_s: float = 0.0
    computed_s: float = 0.0
    tbt_s: float | None = None

    @property
    def leg_id(self) -> LegId:
        """Its name; unique in this router."""
        return self.sent.leg_id

    @property
    def kind(self) -> LegKind:
        """What its worker does."""
        return self.sent.kind

    def open(self, now_s: float) -> None:
        """Counts it on its worker."""
        worker = self.worker
        worker.breaker.started(now_s)
        if worker.legs == 0:
            worker.progress_s = now_s
        worker.legs += 1
        worker.prefills += self.prefill_tokens > 0
        worker.prefill_tokens += self.prefill_tokens
        worker.decode_sequences += self.sequences
        worker.decode_tokens += self.context_tokens
        if self.prompt_tokens:
            worker.forecast.queued(self.leg_id, self.compute_s, now_s)
        if self.tbt_s is not None:
            targets = worker.tbt_targets
            targets[self.tbt_s] = targets.get(self.tbt_s, 0) + 1

    def computed(self, event: Prefilled, now_s: float) -> None:
        """The prompt's KV is there, by the worker's own account."""
        self._count_prompt_out()
        self.computed_s = event.prefill_s
        forecast = self.worker.forecast
        forecast.left(self.leg_id, now_s)
        if event.pooled_tokens:
            return  # fetching and computing overlapped: the worker does not say what either took alone
        cached_tokens = min(event.cached_tokens, self.prompt_tokens)
        forecast.prefilled(self.prompt_tokens - cached_tokens, cached_tokens, event.prefill_s)

    def grew(self, num_tokens: int) -> None:
        """The context got longer."""
        self.context_tokens += num_tokens
        self.worker.decode_tokens += num_tokens

    def handed_to(self, decode: WorkerView, event: HandedOff) -> None:
        """The KV is with `decode`: a measurement of the link."""
        # Pages can be sent once they are granted; what is sent before the first token delays nothing.
        window_s = max(0.0, self.computed_s - event.reserve_wait_s)
        self.worker.forecast.handed_off(decode.slot, event.bytes_sent, window_s, event.unhidden_s)

    def close(self) -> None:
        """Takes all it counted off its worker."""
        self._count_prompt_out()
        worker = self.worker
        worker.legs -= 1
        worker.decode_sequences -= self.sequences
        worker.decode_tokens -= self.context_tokens
        worker.forecast.left(self.leg_id)
        if self.tbt_s is not None:
            worker.tbt_targets[self.tbt_s] -= 1
            if not worker.tbt_targets[self.tbt_s]:
                del worker.tbt_targets[self.tbt_s]

    def cancel(self) -> SendCancel:
        """The command that makes its worker forget it."""
        return SendCancel(worker=self.sent.worker, leg_id=self.sent.leg_id)

    def _count_prompt_out(self) -> None:
        self.worker.prefills -= self.prefill_tokens > 0
        self.worker.prefill_tokens -= self.prefill_tokens
        self.prefill_tokens = 0


class LegTable:
    """Every open leg of this router. Ids are never used twice."""

    def __init__(self) -> None:
        self._legs: dict[LegId, Leg] = {}
        self._by_worker: dict[WorkerView, dict[LegId, Leg]] = {}
        self._ids = count(1)

    def find(self, event: LegEvent) -> Leg | None:
        """The open leg that `event` is about; None when it is over, or another worker's."""
        return self.at(event.leg_id, event.worker)

    def at(self, leg_id: LegId, worker: WorkerIdentity) -> Leg | None:
        """The open leg of that id on that worker, if there is one."""
        leg = self._legs.get(leg_id)
        if leg is None:
            return None
        identity = leg.sent.worker
        # Nearly always the same object, and this is asked for every token.
        return leg if identity is worker or identity == worker else None

    def on_worker(self, worker: WorkerView) -> list[Leg]:
        """The open legs that `worker` runs."""
        return list(self._by_worker.get(worker, {}).values())

    def start_generate(self, attempt: Attempt, pair: Pair, now_s: float) -> SendLeg:
        """One leg that prefills and decodes."""
        prompt = attempt.prompt()
        leg = self._new(LegKind.GENERATE, attempt, pair.decode, prompt)
        leg.prefill_tokens = leg.context_tokens = leg.prompt_tokens = prompt.num_tokens
        leg.compute_s = pair.compute_s
        leg.sequences = len(prompt.samples)
        leg.tbt_s = attempt.request.slo.tbt_s
        leg.open(now_s)
        attempt.decode = leg
        return leg.sent

    def start_hand_off(
        self, attempt: Attempt, pair: Pair, permit: Permit, now_s: float
    ) -> tuple[SendLeg, SendLeg]:
        """A leg on each of two workers, tied by a transfer: D's, then P's."""
        prompt = attempt.prompt()
        leg = self._new(LegKind.RECEIVE, attempt, pair.decode, prompt, permit)
        leg.context_tokens, leg.sequences = prompt.num_tokens, len(prompt.samples)
        leg.tbt_s = attempt.request.slo.tbt_s
        leg.open(now_s)
        attempt.decode = leg
        return leg.sent, self._start_prefill(attempt, pair, prompt, permit, now_s)

    def take_over(
        self, attempt: Attempt, pair: Pair, permit: Permit, now_s: float
    ) -> tuple[SendReassign, SendLeg]:
        """A new leg on another P for D's leg as it stands: the same prompt, the same pages."""
        assert attempt.decode is not None
        received = attempt.decode.sent
        reassign = SendReassign(worker=received.worker, leg_id=received.leg_id, permit=permit)
        return reassign, self._start_prefill(attempt, pair, received.prompt, permit, now_s)

    def close(self, leg: Leg) -> None:
        """The leg is over."""
        leg.close()
        del self._legs[leg.leg_id]
        others = self._by_worker[leg.worker]
        del others[leg.leg_id]
        if not others:
            del self._by_worker[leg.worker]
        if leg.kind is LegKind.PREFILL:
            leg.attempt.prefill = None
        else:
            leg.attempt.decode = None

    def abandon(self, leg: Leg, now_s: float) -> None:
        """The leg is over, and its end says nothing of its worker's health."""
        leg.worker.breaker.abandoned(now_s)
        self.close(leg)

    def check_integrity(self, attempts: Iterable[Attempt], workers: Iterable[WorkerView]) -> None:
        """Raises `InvariantError` unless these are the legs of `attempts`, and `workers` count them."""
        if {leg.leg_id: leg for attempt in attempts for leg in attempt.legs} != self._legs:
            raise InvariantError("the open legs are not those of the attempts")
        grouped = {leg_id: leg for legs in self._by_worker.values() for leg_id, leg in legs.items()}
        if grouped != self._legs or not all(self._by_worker.values()):
            raise InvariantError("the open legs are not those of their workers")
        for worker in workers:
            mine = self.on_worker(worker)
            counted = (worker.legs, worker.prefill_tokens, worker.decode_sequences)
            prefill_tokens = sum(leg.prefill_tokens for leg in mine)
            expected = (len(mine), prefill_tokens, sum(leg.sequences for leg in mine))
            if counted != expected:
                raise InvariantError(f"{worker.identity} counts {counted}, has {expected}")

    def _start_prefill(
        self, attempt: Attempt, pair: Pair, prompt: Prompt, permit: Permit, now_s: float
    ) -> SendLeg:
        address = pair.decode.hello.transfer_address
        leg = self._new(LegKind.PREFILL, attempt, pair.prefill, prompt, permit, address)
        leg.prefill_tokens = leg.prompt_tokens = prompt.num_tokens
        leg.compute_s = pair.compute_s
        leg.open(now_s)
        attempt.prefill, attempt.permit = leg, permit
        return leg.sent

    def _new(
        self,
        kind: LegKind,
        attempt: Attempt,
        worker: WorkerView,
        prompt: Prompt,
        permit: Permit | None = None,
        transfer_address: str = "",
    ) -> Leg:
        sent = SendLeg(
            worker=worker.identity,
            leg_id=LegId(next(self._ids)),
            kind=kind,
            request_id=attempt.request.request_id,
            prompt=prompt,
            permit=permit,
            transfer_address=transfer_address,
            trace_parent=attempt.request.trace_parent,
        )
        leg = self._legs[sent.leg_id] = Leg(sent=sent, worker=worker, attempt=attempt)
        self._by_worker.setdefault(worker, {})[sent.leg_id] = leg
        return leg
