"""The life of every leg on a worker: from a router's command to its one end.

 PREFILL    QUEUED ── first chunk ── PREFILLING ── first tokens ── HANDING_OFF ── committed, or in the pool ── DONE
                                          └─ every sample ended with its first token ───────────────────────┘
 RECEIVE    RECEIVING ── pages reserved, written, committed ── RUNNING ── every sample finished ── DONE
 GENERATE   QUEUED ── first chunk ── PREFILLING ── first token ── RUNNING ── every sample finished ── DONE

 any state of any kind ── FAILED (engine, hand-off) or CANCELLED (router)

Here stand the states, the table of legs, and the moves that routers and the engine cause. What a hand-off causes is the
business of the worker's two halves (`HandOffs`): prefill_worker sends pages, decode_worker receives them.
"""

from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Generic, Protocol, TypeVar

from baton.errors import (
    BatonError,
    CancelledByPeerError,
    DrainingError,
    EngineError,
    InvalidRequestError,
    InvariantError,
    WrongRoleError,
)
from baton.generation import Prompt, TokenSample
from baton.ids import LegId, LegKind, RequestId, Role, SeqId, XferId
from baton.layout import KvLayout
from baton.story import StoryEntry, StoryLog
from baton_engine.messages import (
    Abort,
    Failed,
    Generate,
    PrefillStarted,
    Release,
    Released,
    Reserved,
    SampledTokens,
)
from baton_engine.ports import LayerReady
from baton_worker.messages import (
    KINDS_OF_ROLE,
    FailedMessage,
    LegAsked,
    LegBroken,
    LegCancelled,
    LegKey,
    LegMessage,
    PrefilledMessage,
    PromptPut,
    ReceivingEvent,
    SendingEvent,
    StreamGone,
    StreamId,
    TokensMessage,
    WorkerAction,
    WorkerEvent,
)
from kv_transfer.ledger.outbox import FirstTokensDrawn, FromDecode, PeerDown, PeerUp, PushDone
from kv_transfer.ticket import Permit, refuse_holder

_MAX_REQUESTS = 1024
"""Requests of which it is remembered which legs they had here."""


class LegState(Enum):
    """Where one leg stands."""

    RECEIVING = "receiving"
    QUEUED = "queued"
    PREFILLING = "prefilling"
    HANDING_OFF = "handing_off"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


_S = LegState
_EARLY_ENDS = frozenset({_S.FAILED, _S.CANCELLED})
ENDS = frozenset({_S.DONE}) | _EARLY_ENDS
FIRST_STATE = {
    LegKind.PREFILL: _S.QUEUED,
    LegKind.RECEIVE: _S.RECEIVING,
    LegKind.GENERATE: _S.QUEUED,
}
TRANSITIONS: dict[LegKind, dict[LegState, frozenset[LegState]]] = {
    LegKind.PREFILL: {
        _S.QUEUED: frozenset({_S.PREFILLING}) | _EARLY_ENDS,
        _S.PREFILLING: frozenset({_S.HANDING_OFF, _S.DONE}) | _EARLY_ENDS,
        _S.HANDING_OFF: frozenset({_S.DONE}) | _EARLY_ENDS,
    },
    LegKind.RECEIVE: {
        _S.RECEIVING: frozenset({_S.RUNNING}) | _EARLY_ENDS,
        _S.RUNNING: frozenset({_S.DONE}) | _EARLY_ENDS,
    },
    LegKind.GENERATE: {
        _S.QUEUED: frozenset({_S.PREFILLING}) | _EARLY_ENDS,
        _S.PREFILLING: frozenset({_S.RUNNING}) | _EARLY_ENDS,
        _S.RUNNING: frozenset({_S.DONE}) | _EARLY_ENDS,
    },
}
"""Where a leg of each kind may go from each state; from the others, nowhere."""


@dataclass(slots=True, eq=False)
class WorkerLeg:
    """One leg.

    Attributes:
        xfer_id: Of its hand-off; None for a leg of kind generate.
        unfinished: Its samples that go on.
        started_s: When its first chunk was scheduled.
    """

    stream: StreamId
    leg_id: LegId
    kind: LegKind
    seq_id: SeqId
    prompt: Prompt
    xfer_id: XferId | None
    state: LegState
    arrived_s: float
    unfinished: int = field(init=False)
    started_s: float = 0.0
    cached_tokens: int = 0
    pooled_tokens: int = 0

    def __post_init__(self) -> None:
        self.unfinished = len(self.prompt.samples)

    @property
    def key(self) -> LegKey:
        """How its router names it."""
        return self.stream, self.leg_id

    @property
    def over(self) -> bool:
        """Whether its router has been told its end, or has cancelled it."""
        return self.state in ENDS


@dataclass(frozen=True, slots=True, kw_only=True)
class LegNames:
    """Under which names the cores of a worker know one leg, which may be over.

    Attributes:
        key: The leg's own.
        kind: Which half has its hand-off.
        seq_id: The engine's; None for a leg that was refused.
        xfer_id: Of its hand-off; None where it has none.
    """

    key: LegKey
    kind: LegKind
    seq_id: SeqId | None
    xfer_id: XferId | None


class WorkerLegTable:
    """Every leg that its router or the engine still knows. Pure; one owner.

    Attributes:
        seqs: Legs whose sequence the engine still has; ended ones included.
        outcomes: How many legs have ended in which way, by kind.
        story: What happened to legs, by `LegKey`.
    """

    def __init__(self) -> None:
        self._live: dict[LegKey, WorkerLeg] = {}
        self._next = 0
        self.seqs: dict[SeqId, WorkerLeg] = {}
        self.outcomes: Counter[tuple[LegKind, LegState]] = Counter()
        self.story = StoryLog("leg")

    def __contains__(self, key: LegKey) -> bool:
        """Whether that leg is not over."""
        return key in self._live

    def get(self, key: LegKey) -> WorkerLeg | None:
        """That leg, unless it is over."""
        return self._live.get(key)

    def of_stream(self, stream: StreamId) -> list[WorkerLeg]:
        """A router's legs that are not over."""
        return [leg for leg in self._live.values() if leg.stream == stream]

    def of_seq(self, seq_id: SeqId) -> WorkerLeg | None:
        """The leg that one of the engine's sequences is computed for, unless it is over."""
        leg = self.seqs.get(seq_id)
        return None if leg is None or leg.over else leg

    def held(self) -> set[WorkerLeg]:
        """Legs that are not over, and those whose sequence the engine still has."""
        return {*self._live.values(), *self.seqs.values()}

    def admit(self, asked: LegAsked, now_s: float) -> WorkerLeg:
        """Takes up a leg that a router has just sent."""
        self._next += 1
        leg = WorkerLeg(
            stream=asked.stream,
            leg_id=asked.leg_id,
            kind=asked.kind,
            seq_id=SeqId(f"leg-{self._next}"),
            prompt=asked.prompt,
            xfer_id=None if asked.permit is None else asked.permit.xfer_id,
            state=FIRST_STATE[asked.kind],
            arrived_s=now_s,
        )
        self._live[leg.key] = leg
        return leg

    def move(self, leg: WorkerLeg, state: LegState) -> None:
        """Takes a step of `TRANSITIONS`.

        Raises:
            InvariantError: It is none.
        """
        if state not in TRANSITIONS[leg.kind].get(leg.state, ()):
            story = self.story.story(leg.key)
            raise InvariantError(f"leg {leg.key}: {leg.state} to {state}", story=story)
        leg.state = state

    def end(self, leg: WorkerLeg, state: LegState) -> None:
        """It is over for its router; the engine and a half may still have something of it."""
        self.move(leg, state)
        self.outcomes[leg.kind, state] += 1
        del self._live[leg.key]

    def check_integrity(self) -> None:
        """Raises InvariantError if the tables contradict each other."""
        for key, leg in self._live.items():
            known = leg.seq_id in self.seqs or leg.state is _S.RECEIVING
            if key != leg.key or leg.over or not known:
                raise InvariantError(
                    f"leg {key} is inconsistent: {leg!r}", story=self.story.story(key)
                )


Event = TypeVar("Event", contravariant=True)


class Transfers(Protocol):
    """What one half of a worker holds."""

    def transfers(self) -> Mapping[XferId, WorkerLeg]:
        """Hand-offs that are not over, with their legs, ended ones included."""

    def story(self, xfer_id: XferId) -> tuple[StoryEntry, ...]:
        """What is left of the events about one hand-off, over or not, oldest first."""

    def in_flight(self) -> int:
        """Hand-offs that are not over, those without a leg included."""

    def check_integrity(self) -> None:
        """Raises InvariantError if its hand-offs and the legs contradict each other."""


class HandOffs(Transfers, Protocol, Generic[Event]):
    """The pure core of one half: hand-offs of legs, on the side that sends pages or on the one that receives them.

    It is told of legs by the core, and of its peers by `handle`. Where a hand-off decides what becomes of a leg, it moves
    the leg in the worker's `WorkerLegTable`.
    """

    def refusal(self, permit: Permit) -> BatonError | None:
        """Why a hand-off cannot begin; None where it can."""

    def begin(self, leg: WorkerLeg, asked: LegAsked, now_s: float) -> list[WorkerAction]:
        """A leg was admitted: has the engine, or its peer, begin."""

    def advance(
        self,
        leg: WorkerLeg,
        event: PrefillStarted | Reserved | FirstTokensDrawn | Released | Failed,
        now_s: float,
    ) -> list[WorkerAction]:
        """The engine said something about a leg of this half: the half's own part in it."""

    def withdraw(self, xfer_id: XferId, error: BatonError, now_s: float) -> list[WorkerAction]:
        """The leg of a hand-off ended, or never began: its peer has to stop."""

    def handle(self, event: Event, now_s: float) -> list[WorkerAction]:
        """A peer, a push or the pool said something."""

    def tick(self, now_s: float) -> list[WorkerAction]:
        """Checks what waits, and every deadline."""


Half = HandOffs[SendingEvent] | HandOffs[ReceivingEvent]


class LegLifecycle:
    """Pure: no sockets, no clock, no engine. Time comes in as `now_s` (monotonic seconds).

    `handle` and `tick` return the actions that the shell must carry out, in order. Not thread-safe: one owner.

    Args:
        legs: Shared with the halves.
        layout: Of this worker's pages.
        role: What it serves at first.
        sending: The half for prefill legs; None where this worker cannot send pages.
        receiving: The half for receive legs; None where it cannot receive them.

    Attributes:
        takes: Kinds of legs that are taken now.
        draining: Whether nothing new is taken: the worker is leaving.
    """

    def __init__(
        self,
        legs: WorkerLegTable,
        layout: KvLayout,
        role: Role,
        *,
        sending: HandOffs[SendingEvent] | None = None,
        receiving: HandOffs[ReceivingEvent] | None = None,
    ) -> None:
        self._legs = legs
        self._layout = layout
        self._sending = sending
        self._receiving = receiving
        self._halves: dict[LegKind, Half] = {}
        if sending is not None:
            self._halves[LegKind.PREFILL] = sending
        if receiving is not None:
            self._halves[LegKind.RECEIVE] = receiving
        self.takes = KINDS_OF_ROLE[role]
        self.draining = False
        self._asked_for: OrderedDict[RequestId, list[LegNames]] = OrderedDict()
        """The legs of the last requests, over or not."""

    def handle(self, event: WorkerEvent, now_s: float) -> list[WorkerAction]:
        """Applies one event; what names an unknown leg or sequence has no effect."""
        match event:
            case SampledTokens():  # first: by far the most frequent
                return self._sampled(event, now_s)
            case LegAsked():
                actions = self._asked(event, now_s)
                key = (event.stream, event.leg_id)
                self._legs.story.record(key, now_s, event, actions)
                self._remember(event)
                return actions
            case LegCancelled():
                leg = self._legs.get((event.stream, event.leg_id))
                return [] if leg is None else self._cancel(leg, event, now_s)
            case StreamGone():
                legs = self._legs.of_stream(event.stream)
                return [action for leg in legs for action in self._cancel(leg, event, now_s)]
            case PrefillStarted() | Reserved() | Released() | Failed():
                return self._engine_said(event, now_s)
            case LayerReady() | PromptPut() | PeerUp() | PeerDown() | FromDecode() | PushDone():
                actions = [] if self._sending is None else self._sending.handle(event, now_s)
            case _:
                actions = [] if self._receiving is None else self._receiving.handle(event, now_s)
        self._log(event, actions, now_s)
        return actions

    def tick(self, now_s: float) -> list[WorkerAction]:
        """Checks what waits, and every deadline."""
        actions = [action for half in self._halves.values() for action in half.tick(now_s)]
        self._log("time passed", actions, now_s)
        return actions

    def has_leg(self, key: LegKey) -> bool:
        """Whether that leg of a router is not over."""
        return key in self._legs

    def leg_of(self, seq_id: SeqId) -> LegKey | None:
        """The leg that one of the engine's sequences is drawn for."""
        leg = self._legs.seqs.get(seq_id)
        return None if leg is None else leg.key

    @property
    def can_take(self) -> frozenset[LegKind]:
        """Kinds of legs that this worker can take in some role."""
        return frozenset({LegKind.GENERATE, *self._halves})

    def in_flight(self, kinds: frozenset[LegKind] = frozenset(LegKind)) -> int:
        """Legs of these kinds that are not over, and sequences and hand-offs that are left of others."""
        held = {leg for leg in self._legs.held() if leg.kind in kinds}
        unannounced = 0
        for kind in kinds:
            half = self._halves.get(kind)
            if half is not None:
                legs = half.transfers()
                held.update(legs.values())
                unannounced += half.in_flight() - len(legs)
        return len(held) + unannounced

    def transfers_in_flight(self) -> int:
        """Hand-offs that are not over, those that no router has announced yet included."""
        return sum(half.in_flight() for half in self._halves.values())

    @property
    def outcomes(self) -> Mapping[tuple[LegKind, LegState], int]:
        """How many legs have ended in which way, by kind."""
        return self._legs.outcomes

    def story(self, key: LegKey) -> tuple[StoryEntry, ...]:
        """What is left of the events about one leg, oldest first."""
        return self._legs.story.story(key)

    def legs_of(self, request_id: RequestId) -> Sequence[LegNames]:
        """The legs that a request has had here, as far as it is remembered."""
        return self._asked_for.get(request_id, ())

    def story_of(self, names: LegNames) -> tuple[StoryEntry, ...]:
        """What is left of the events about one leg and its hand-off, each oldest first."""
        half = self._halves.get(names.kind)
        handed = () if half is None or names.xfer_id is None else half.story(names.xfer_id)
        return (*self._legs.story.story(names.key), *handed)

    def check_integrity(self) -> None:
        """Raises InvariantError if the tables contradict each other."""
        self._legs.check_integrity()
        for half in self._halves.values():
            half.check_integrity()

    def _remember(self, asked: LegAsked) -> None:
        leg = self._legs.get((asked.stream, asked.leg_id))
        names = LegNames(
            key=(asked.stream, asked.leg_id),
            kind=asked.kind,
            seq_id=None if leg is None else leg.seq_id,
            xfer_id=None if asked.permit is None else asked.permit.xfer_id,
        )
        legs = self._asked_for.setdefault(asked.request_id, [])
        if names not in legs:
            legs.append(names)
        if len(self._asked_for) > _MAX_REQUESTS:
            self._asked_for.popitem(last=False)

    def _asked(self, asked: LegAsked, now_s: float) -> list[WorkerAction]:
        if (asked.stream, asked.leg_id) in self._legs:
            return []  # a repetition; failing it would end the leg that runs
        half = self._halves.get(asked.kind)
        refusal = self._refusal(asked)
        if refusal is not None:
            refused = FailedMessage(
                stream=asked.stream, leg_id=asked.leg_id, kind=asked.kind, error=refusal
            )
            permit = asked.permit
            if half is None or permit is None or not permit.xfer_id or half.refusal(permit):
                return [refused]
            # The sending worker may have asked for pages already, or will: let it know.
            return [refused, *half.withdraw(permit.xfer_id, refusal, now_s)]
        leg = self._legs.admit(asked, now_s)
        if half is not None:
            return half.begin(leg, asked, now_s)
        self._legs.seqs[leg.seq_id] = leg
        return [Generate(seq_id=leg.seq_id, prompt=leg.prompt)]

    def _refusal(self, asked: LegAsked) -> BatonError | None:
        """Why a leg is not taken up; None for one that is."""
        if self.draining:
            return DrainingError("this worker is leaving")
        if asked.kind not in self.takes:
            return WrongRoleError(f"this worker takes no {asked.kind.value} legs now")
        if not asked.prompt.tokens or not asked.prompt.samples:
            return InvalidRequestError("a prompt needs a token and a sample", param="prompt")
        half = self._halves.get(asked.kind)
        if half is None:
            return None
        permit = asked.permit
        if permit is None or not permit.xfer_id:
            return InvalidRequestError("a hand-off needs a transfer id", param="xfer_id")
        if asked.kind is LegKind.PREFILL and not asked.address:
            return InvalidRequestError("a prefill leg needs a target", param="target")
        return half.refusal(permit) or self._misfit(asked.prompt, permit)

    def _misfit(self, prompt: Prompt, permit: Permit) -> BatonError | None:
        """Why the permit is not one for this prompt."""
        blocks = self._layout.num_blocks_for(len(prompt.tokens))
        if permit.num_blocks != blocks:
            return refuse_holder(f"prompt: it takes {blocks} pages, not {permit.num_blocks}")
        if permit.cache_scope != prompt.cache_scope:
            return refuse_holder("cache_scope")
        return None

    def _cancel(
        self, leg: WorkerLeg, event: LegCancelled | StreamGone, now_s: float
    ) -> list[WorkerAction]:
        receiving = leg.state is _S.RECEIVING
        self._legs.end(leg, _S.CANCELLED)
        actions: list[WorkerAction] = []
        if leg.kind is LegKind.PREFILL or receiving:
            error = CancelledByPeerError("the router cancelled this leg")
            actions += self._withdraw(leg, error, now_s)
        if not receiving:  # else the ledger says when its pages may go
            actions.append(Abort(seq_id=leg.seq_id))
        self._legs.story.record(leg.key, now_s, event, actions)
        return actions

    def _engine_said(
        self, event: PrefillStarted | Reserved | Released | Failed, now_s: float
    ) -> list[WorkerAction]:
        leg = self._legs.seqs.get(event.seq_id)
        if leg is None:
            return []
        match event:
            case PrefillStarted():
                actions = self._started(leg, event, now_s)
            case Reserved():
                actions = self._advance(leg, event, now_s)
            case Released() | Failed():
                del self._legs.seqs[leg.seq_id]
                actions = self._gone(leg, event, now_s)
        self._legs.story.record(leg.key, now_s, event, actions)
        return actions

    def _started(self, leg: WorkerLeg, event: PrefillStarted, now_s: float) -> list[WorkerAction]:
        if leg.over:
            return []
        if leg.state is _S.QUEUED:  # else it was preempted, and starts again
            self._legs.move(leg, _S.PREFILLING)
            leg.started_s = now_s
            leg.cached_tokens, leg.pooled_tokens = event.cached_tokens, event.pooled_tokens
        return self._advance(leg, event, now_s)

    def _gone(self, leg: WorkerLeg, event: Released | Failed, now_s: float) -> list[WorkerAction]:
        """The engine has let go of a sequence."""
        if leg.kind is LegKind.RECEIVE and (leg.over or leg.state is _S.RECEIVING):
            return self._advance(leg, event, now_s)  # the hand-off decides what becomes of the leg
        if leg.over:
            return []
        error = (
            event.error
            if isinstance(event, Failed)
            else EngineError("the engine dropped the sequence")
        )
        self._legs.end(leg, _S.FAILED)
        return [failed(leg, error), *self._advance(leg, event, now_s)]

    def _sampled(self, sampled: SampledTokens, now_s: float) -> list[WorkerAction]:
        """Sorts the step's tokens into columns for each router. A prompt's first and a sample's last token move their leg on."""
        actions: list[WorkerAction] = []
        columns: dict[StreamId, TokensMessage] = {}
        for place, (seq_id, finish) in enumerate(
            zip(sampled.seq_ids, sampled.finish_reasons, strict=True)
        ):
            leg = self._legs.seqs.get(seq_id)
            if leg is None:
                continue
            if leg.state is not _S.RUNNING or finish is not None:
                try:
                    is_told, more = self._first_or_last(leg, sampled, place, now_s)
                except InvariantError as error:
                    is_told, more = False, [LegBroken(error=error)]
                actions += more
                if not is_told:
                    continue
            message = columns.get(leg.stream)
            if message is None:
                message = columns[leg.stream] = TokensMessage(stream=leg.stream)
            if finish is not None:
                message.finish_reasons[len(message.tokens)] = finish
            if place in sampled.logprobs:
                message.logprobs[len(message.tokens)] = sampled.logprobs[place]
            message.leg_ids.append(leg.leg_id)
            message.samples.append(sampled.samples[place])
            message.tokens.append(sampled.tokens[place])
        return [*actions, *columns.values()]

    def _first_or_last(
        self, leg: WorkerLeg, sampled: SampledTokens, place: int, now_s: float
    ) -> tuple[bool, list[WorkerAction]]:
        """The token at `place` is a prompt's first, or its sample's last.

        Returns:
            Whether its router gets it in the columns, and the actions before that.
        """
        if leg.kind is LegKind.PREFILL:
            is_later_sample = place > 0 and sampled.seq_ids[place - 1] == leg.seq_id
            if leg.over or is_later_sample:  # the first sample's token took the others along
                return False, []
            return False, self._first_tokens(leg, sampled, place, now_s)
        leg.unfinished -= sampled.finish_reasons[place] is not None
        if leg.unfinished == 0:
            del self._legs.seqs[leg.seq_id]
        if leg.over:
            return False, []
        actions: list[WorkerAction] = []
        if leg.state is _S.PREFILLING:
            self._legs.move(leg, _S.RUNNING)
            actions.append(_prefilled(leg, sampled, (), now_s))
            self._legs.story.record(leg.key, now_s, "first tokens", actions)
        if leg.unfinished == 0:
            self._legs.end(leg, _S.DONE)
            self._legs.story.record(leg.key, now_s, "every sample finished")
        return True, actions

    def _first_tokens(
        self, leg: WorkerLeg, sampled: SampledTokens, first: int, now_s: float
    ) -> list[WorkerAction]:
        """Of a prefill leg: its router gets them at once, the hand-off takes them along."""
        first_tokens = tuple(
            TokenSample(
                sample=sampled.samples[place],
                token=sampled.tokens[place],
                logprobs=sampled.logprobs.get(place),
                finish=sampled.finish_reasons[place],
            )
            for place in range(first, first + len(leg.prompt.samples))
        )
        prefilled = _prefilled(leg, sampled, first_tokens, now_s)
        if all(sample.finish is not None for sample in first_tokens):
            # Nothing is left to decode: the router is told to its end here, and the pages are not needed.
            self._legs.end(leg, _S.DONE)
            withdrawn = self._withdraw(
                leg, CancelledByPeerError("nothing is left to decode"), now_s
            )
            actions = [prefilled, *withdrawn, Release(seq_id=leg.seq_id)]
        else:
            self._legs.move(leg, _S.HANDING_OFF)
            assert leg.xfer_id is not None
            drawn = FirstTokensDrawn(xfer_id=leg.xfer_id, first_tokens=first_tokens)
            actions = [prefilled, *self._advance(leg, drawn, now_s)]
        self._legs.story.record(leg.key, now_s, "first tokens", actions)
        return actions

    def _advance(
        self,
        leg: WorkerLeg,
        event: PrefillStarted | Reserved | FirstTokensDrawn | Released | Failed,
        now_s: float,
    ) -> list[WorkerAction]:
        """Forwards the engine's event to the half that moves the leg's pages, if one does."""
        half = self._halves.get(leg.kind)
        return [] if half is None else half.advance(leg, event, now_s)

    def _withdraw(self, leg: WorkerLeg, error: BatonError, now_s: float) -> list[WorkerAction]:
        assert leg.xfer_id is not None
        return self._halves[leg.kind].withdraw(leg.xfer_id, error, now_s)

    def _log(self, event: object, actions: list[WorkerAction], now_s: float) -> None:
        """Logs only the actions that are messages to a router; the halves' own cores log the rest, by transfer."""
        for action in actions:
            if isinstance(action, LegMessage):
                key = (action.stream, action.leg_id)
                self._legs.story.record(key, now_s, event, (action,))


def failed(leg: WorkerLeg, error: BatonError) -> FailedMessage:
    """What its router is told of a leg that ends with a fault."""
    return FailedMessage(stream=leg.stream, leg_id=leg.leg_id, kind=leg.kind, error=error)


def _prefilled(
    leg: WorkerLeg, sampled: SampledTokens, first_tokens: tuple[TokenSample, ...], now_s: float
) -> PrefilledMessage:
    return PrefilledMessage(
        stream=leg.stream,
        leg_id=leg.leg_id,
        first_tokens=first_tokens,
        prompt_tokens=len(leg.prompt.tokens),
        cached_tokens=leg.cached_tokens,
        pooled_tokens=leg.pooled_tokens,
        queue_s=leg.started_s - leg.arrived_s,
        prefill_s=now_s - leg.started_s,
        prompt_logprobs=sampled.prompt_logprobs.get(leg.seq_id),
    )
