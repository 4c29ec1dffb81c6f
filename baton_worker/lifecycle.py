"""What routers and the engine do to a worker's legs: from a router's command to a leg's one end.

The states stand in `legs.py`. What a hand-off does to a leg is the business of prefill_worker, which sends pages, and
of decode_worker, which receives them (`ports.HandOffs`).
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence

from baton.errors import (
    BatonError,
    CancelledByPeerError,
    DrainingError,
    EngineError,
    InvalidRequestError,
    InvariantError,
    WrongRoleError,
)
from baton.generation import Prompt, TokenLogprobs, TokenSample
from baton.ids import LegKind, RequestId, Role, SeqId
from baton.layout import KvLayout
from baton.story import StoryEntry
from baton_engine.messages import (
    Abort,
    Failed,
    Generate,
    PrefillStarted,
    PromptComputed,
    Release,
    Released,
    Reserved,
    SampledTokens,
    SeqEvent,
)
from baton_engine.ports import LayerReady
from baton_worker.legs import LegKey, LegNames, LegState, StreamId, WorkerLeg, WorkerLegTable
from baton_worker.messages import (
    KINDS_OF_ROLE,
    STANDS_IN,
    FailedMessage,
    LegBroken,
    LegCancelled,
    LegMessage,
    LinkProbe,
    PrefilledMessage,
    PromptPut,
    ReceivingEvent,
    SendingEvent,
    StreamGone,
    TokensMessage,
    WorkerAction,
    WorkerEvent,
)
from baton_worker.ports import HandOffCore
from kv_transfer.ledger.outbox import FirstTokensDrawn, FromDecode, PeerDown, PeerUp, PushDone
from kv_transfer.ticket import Permit, refuse_holder

_S = LegState
_MAX_REQUESTS = 1024
"""Requests of which it is remembered which legs they had here."""


class LegLifecycle:
    """Pure: no sockets, no clock, no engine. Time comes in as `now_s` (monotonic seconds).

    `handle` and `tick` return the actions that the shell must carry out, in order. Not thread-safe: one owner.

    Args:
        legs: Shared with `sending` and `receiving`.
        layout: Of this worker's pages.
        role: What it serves at first.
        sending: Hand-offs of prefill legs; None where this worker cannot send pages.
        receiving: Hand-offs of receive legs; None where it cannot receive them.

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
        sending: HandOffCore[SendingEvent] | None = None,
        receiving: HandOffCore[ReceivingEvent] | None = None,
    ) -> None:
        self._legs = legs
        self._layout = layout
        self._sending = sending
        self._receiving = receiving
        self._hand_offs: dict[LegKind, HandOffCore[SendingEvent] | HandOffCore[ReceivingEvent]] = {}
        if sending is not None:
            self._hand_offs[LegKind.PREFILL] = sending
        if receiving is not None:
            self._hand_offs[LegKind.RECEIVE] = receiving
        self.takes = KINDS_OF_ROLE[role] | STANDS_IN
        self.draining = False
        self._asked_for: OrderedDict[RequestId, list[LegNames]] = OrderedDict()
        """The legs of the last requests, ended or not."""

    def handle(self, event: WorkerEvent, now_s: float) -> list[WorkerAction]:
        """Applies one event; what names an unknown leg or sequence has no effect."""
        match event:
            case SampledTokens():  # first: by far the most frequent
                return self._sampled(event, now_s)
            case WorkerLeg():
                return self._asked(event, now_s)
            case LegCancelled():
                leg = self._legs.get((event.stream, event.leg_id))
                return [] if leg is None else self._cancel(leg, event, now_s)
            case StreamGone():
                legs = self._legs.of_stream(event.stream)
                return [action for leg in legs for action in self._cancel(leg, event, now_s)]
            case PrefillStarted() | Reserved() | PromptComputed() | Released() | Failed():
                return self._engine_said(event, now_s)
            case LayerReady() | PromptPut() | FromDecode() | PushDone():
                actions = [] if self._sending is None else self._sending.handle(event, now_s)
            case PeerUp() | PeerDown() | LinkProbe():
                actions = [] if self._sending is None else self._sending.handle(event, now_s)
            case _:
                actions = [] if self._receiving is None else self._receiving.handle(event, now_s)
        self._log(event, actions, now_s)
        return actions

    def tick(self, now_s: float) -> list[WorkerAction]:
        """Checks what waits, and every deadline."""
        actions = [
            action for hand_offs in self._hand_offs.values() for action in hand_offs.tick(now_s)
        ]
        self._log("time passed", actions, now_s)
        return actions

    def has_leg(self, key: LegKey) -> bool:
        """Whether that leg of a router has not ended."""
        return key in self._legs

    def leg_of(self, seq_id: SeqId) -> LegKey | None:
        """The leg that one of the engine's sequences is drawn for."""
        leg = self._legs.seqs.get(seq_id)
        return None if leg is None else leg.key

    @property
    def can_take(self) -> frozenset[LegKind]:
        """Kinds of legs that this worker can take in some role."""
        return frozenset({LegKind.GENERATE, *self._hand_offs})

    def in_flight(self, kinds: frozenset[LegKind] = frozenset(LegKind)) -> int:
        """Legs of these kinds that have not ended, and sequences and hand-offs that are left of others."""
        held = [leg for leg in self._legs.held() if leg.kind in kinds]
        left = [each.left_over() for kind, each in self._hand_offs.items() if kind in kinds]
        return len(held) + sum(left)

    def transfers_in_flight(self) -> int:
        """Hand-offs that are not over, those that no router has announced yet included."""
        return sum(hand_offs.in_flight() for hand_offs in self._hand_offs.values())

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
        hand_offs = self._hand_offs.get(names.kind)
        moved: tuple[StoryEntry, ...] = ()
        if hand_offs is not None and names.xfer_id is not None:
            moved = hand_offs.story(names.xfer_id)
        return (*self._legs.story.story(names.key), *moved)

    def check_integrity(self) -> None:
        """Raises InvariantError if the tables contradict each other."""
        self._legs.check_integrity()
        for hand_offs in self._hand_offs.values():
            hand_offs.check_integrity()

    def _asked(self, leg: WorkerLeg, now_s: float) -> list[WorkerAction]:
        if leg.key in self._legs:
            return []  # a repetition; failing it would end the leg that runs
        refusal = self._refusal(leg)
        actions = self._refuse(leg, refusal, now_s) if refusal else self._admit(leg, now_s)
        what = f"asked to {leg.kind.value} for {leg.request_id}"
        self._legs.story.record(leg.key, now_s, what, actions)
        self._remember(leg)
        return actions

    def _admit(self, leg: WorkerLeg, now_s: float) -> list[WorkerAction]:
        self._legs.admit(leg, now_s)
        hand_offs = self._hand_offs.get(leg.kind)
        if hand_offs is not None:
            return hand_offs.begin(leg, now_s)
        self._legs.seqs[leg.seq_id] = leg
        return [Generate(seq_id=leg.seq_id, prompt=leg.prompt)]

    def _refuse(self, leg: WorkerLeg, refusal: BatonError, now_s: float) -> list[WorkerAction]:
        refused = FailedMessage.of(leg, refusal)
        hand_offs, permit = self._hand_offs.get(leg.kind), leg.permit
        if hand_offs is None or permit is None or not permit.xfer_id or hand_offs.refusal(permit):
            return [refused]
        # The sending worker may have asked for pages already, or will: let it know.
        return [refused, *hand_offs.withdraw(permit.xfer_id, refusal, now_s)]

    def _remember(self, leg: WorkerLeg) -> None:
        names = LegNames(key=leg.key, kind=leg.kind, seq_id=leg.seq_id, xfer_id=leg.xfer_id)
        legs = self._asked_for.setdefault(leg.request_id, [])
        if names not in legs:
            legs.append(names)
        if len(self._asked_for) > _MAX_REQUESTS:
            self._asked_for.popitem(last=False)

    def _refusal(self, leg: WorkerLeg) -> BatonError | None:
        """Why a leg is not taken up; None for one that is."""
        if self.draining:
            return DrainingError("this worker is leaving")
        if leg.kind not in self.takes:
            return WrongRoleError(f"this worker takes no {leg.kind.value} legs now")
        if not leg.prompt.tokens or not leg.prompt.samples:
            return InvalidRequestError("a prompt needs a token and a sample", param="prompt")
        hand_offs = self._hand_offs.get(leg.kind)
        if hand_offs is None:
            return None
        permit = leg.permit
        if permit is None or not permit.xfer_id:
            return InvalidRequestError("a hand-off needs a transfer id", param="xfer_id")
        if leg.kind is LegKind.PREFILL and not leg.address:
            return InvalidRequestError("a prefill leg needs a target", param="target")
        return hand_offs.refusal(permit) or self._misfit(leg.prompt, permit)

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

    def _engine_said(self, event: SeqEvent, now_s: float) -> list[WorkerAction]:
        leg = self._legs.seqs.get(event.seq_id)
        if leg is None:
            return []
        match event:
            case PrefillStarted():
                actions = self._started(leg, event, now_s)
            case Reserved():
                actions = self._advance(leg, event, now_s)
            case PromptComputed():
                actions = self._computed(leg, event, now_s)
            case Released() | Failed():
                del self._legs.seqs[leg.seq_id]
                actions = self._gone(leg, event, now_s)
        self._legs.story.record(leg.key, now_s, event, actions)
        return actions

    def _started(self, leg: WorkerLeg, event: PrefillStarted, now_s: float) -> list[WorkerAction]:
        if leg.ended:
            return []
        if leg.state is _S.QUEUED:  # else it was preempted, and starts again
            self._legs.move(leg, _S.PREFILLING)
            leg.started_s = now_s
            leg.cached_tokens, leg.pooled_tokens = event.cached_tokens, event.pooled_tokens
        return self._advance(leg, event, now_s)

    def _computed(self, leg: WorkerLeg, event: PromptComputed, now_s: float) -> list[WorkerAction]:
        """A prompt is computed, and no token is told with it."""
        if leg.kind is LegKind.PREFILL and not leg.ended:
            return self._hand_off(leg, (), event.prompt_logprobs, now_s)
        if leg.state is not _S.PREFILLING:
            return []  # what was received or preempted was computed again
        self._legs.move(leg, _S.RUNNING)
        return [_prefilled(leg, (), event.prompt_logprobs, now_s)]

    def _gone(self, leg: WorkerLeg, event: Released | Failed, now_s: float) -> list[WorkerAction]:
        """The engine has let go of a sequence."""
        if leg.kind is LegKind.RECEIVE and (leg.ended or leg.state is _S.RECEIVING):
            return self._advance(leg, event, now_s)  # the hand-off decides what becomes of the leg
        if leg.ended:
            return []
        error = (
            event.error
            if isinstance(event, Failed)
            else EngineError("the engine dropped the sequence")
        )
        self._legs.end(leg, _S.FAILED)
        return [FailedMessage.of(leg, error), *self._advance(leg, event, now_s)]

    def _sampled(self, sampled: SampledTokens, now_s: float) -> list[WorkerAction]:
        """Sorts the step's tokens into columns for each router.
        A prompt's first and a sample's last token move their leg on.
        """
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
            if leg.ended or is_later_sample:  # the first sample's token took the others along
                return False, []
            return False, self._first_tokens(leg, sampled, place, now_s)
        leg.unfinished -= sampled.finish_reasons[place] is not None
        if leg.unfinished == 0:
            del self._legs.seqs[leg.seq_id]
        if leg.ended:
            return False, []
        actions: list[WorkerAction] = []
        if leg.state is _S.PREFILLING:
            self._legs.move(leg, _S.RUNNING)
            told = sampled.prompt_logprobs.get(leg.seq_id)
            actions.append(_prefilled(leg, (), told, now_s))
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
        prompt_logprobs = sampled.prompt_logprobs.get(leg.seq_id)
        actions = self._hand_off(leg, first_tokens, prompt_logprobs, now_s)
        self._legs.story.record(leg.key, now_s, "first tokens", actions)
        return actions

    def _hand_off(
        self,
        leg: WorkerLeg,
        first_tokens: tuple[TokenSample, ...],
        prompt_logprobs: tuple[TokenLogprobs, ...] | None,
        now_s: float,
    ) -> list[WorkerAction]:
        """A prompt is computed. Without first tokens the receiving worker draws them."""
        prefilled = _prefilled(leg, first_tokens, prompt_logprobs, now_s)
        if first_tokens and all(sample.finish is not None for sample in first_tokens):
            # Nothing is left to decode: the router is told to its end here, and the pages are not needed.
            self._legs.end(leg, _S.DONE)
            withdrawn = self._withdraw(
                leg, CancelledByPeerError("nothing is left to decode"), now_s
            )
            return [prefilled, *withdrawn, Release(seq_id=leg.seq_id)]
        self._legs.move(leg, _S.HANDING_OFF)
        assert leg.xfer_id is not None
        drawn = FirstTokensDrawn(xfer_id=leg.xfer_id, first_tokens=first_tokens)
        return [prefilled, *self._advance(leg, drawn, now_s)]

    def _advance(
        self, leg: WorkerLeg, event: SeqEvent | FirstTokensDrawn, now_s: float
    ) -> list[WorkerAction]:
        """Tells the hand-offs that move the leg's pages, if any do."""
        hand_offs = self._hand_offs.get(leg.kind)
        return [] if hand_offs is None else hand_offs.advance(leg, event, now_s)

    def _withdraw(self, leg: WorkerLeg, error: BatonError, now_s: float) -> list[WorkerAction]:
        assert leg.xfer_id is not None
        return self._hand_offs[leg.kind].withdraw(leg.xfer_id, error, now_s)

    def _log(self, event: object, actions: list[WorkerAction], now_s: float) -> None:
        """Logs only the actions that are messages to a router; the hand-offs' own cores log the rest, by transfer."""
        for action in actions:
            if isinstance(action, LegMessage):
                key = (action.stream, action.leg_id)
                self._legs.story.record(key, now_s, event, (action,))


def _prefilled(
    leg: WorkerLeg,
    first_tokens: tuple[TokenSample, ...],
    prompt_logprobs: tuple[TokenLogprobs, ...] | None,
    now_s: float,
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
        prompt_logprobs=prompt_logprobs,
    )
