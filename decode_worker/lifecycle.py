"""The life of every leg on a decode worker: from the router's announcement to the last token.

    EXPECTING ── pages reserved, written, committed ──┐
    QUEUED ── first chunk ── PREFILLING ── first token ──── RUNNING ── every sample finished ── DONE
       └──────────────────────────┴───────────────────────────┴── FAILED (engine, hand-off) or CANCELLED (router)

Pure: events in, actions out. What a transfer may do and when its pages are freed is the ledger's business
(kv_transfer/ledger.py); this core owns one and joins it with the engine's word on the sequence.
"""

from collections import Counter
from dataclasses import dataclass
from enum import Enum

from baton.errors import (
    BatonError,
    CancelledByPeerError,
    DrainingError,
    EngineError,
    InvalidRequestError,
    InvariantError,
)
from baton.generation import Prompt, TokenSample
from baton.ids import LegId, SeqId, XferId
from baton.layout import KvLayout
from baton.rpc.frames import StreamId
from decode_worker.messages import (
    Cancel,
    DecodeAction,
    DecodeEvent,
    ExpectLeg,
    GenerateLeg,
    ReassignLeg,
    StreamGone,
    TellFailed,
    TellPrefilled,
    TellTokens,
    TellWriterLost,
)
from engine.messages import (
    Abort,
    Failed,
    Generate,
    PrefillStarted,
    Released,
    Reserve,
    Reserved,
    Sampled,
    Start,
)
from kv_transfer.deadlines import LedgerLimits
from kv_transfer.ledger import TransferLedger
from kv_transfer.ledger_messages import (
    EndSession,
    Expected,
    FreePages,
    FromPeer,
    LedgerAction,
    LedgerEvent,
    PagesGone,
    PagesReserved,
    PagesVerified,
    PeerFenced,
    Reassigned,
    ReservePages,
    SessionLost,
    SessionOpened,
    StartDecoding,
    ToPeer,
    TransferFailed,
    VerifyPages,
    Withdrawn,
    WriterLost,
)
from kv_transfer.plan import Grant
from kv_transfer.ticket import refuse_holder

OWNER = "decode"


class LegState(Enum):
    """Where one leg stands."""

    EXPECTING = "expecting"
    QUEUED = "queued"
    PREFILLING = "prefilling"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


_L = LegState
_LOST = frozenset({_L.FAILED, _L.CANCELLED})
TRANSITIONS: dict[LegState, frozenset[LegState]] = {
    _L.EXPECTING: frozenset({_L.RUNNING}) | _LOST,
    _L.QUEUED: frozenset({_L.PREFILLING}) | _LOST,
    _L.PREFILLING: frozenset({_L.RUNNING, _L.DONE}) | _LOST,
    _L.RUNNING: frozenset({_L.DONE}) | _LOST,
    _L.DONE: frozenset(),
    _L.FAILED: frozenset(),
    _L.CANCELLED: frozenset(),
}
ENDS = frozenset({_L.DONE, _L.FAILED, _L.CANCELLED})


@dataclass(slots=True, eq=False)
class _Leg:
    stream: StreamId
    leg_id: LegId
    seq_id: SeqId
    prompt: Prompt
    state: LegState
    arrived_s: float
    unfinished: int
    xfer_id: XferId | None = None
    started_s: float = 0.0
    cached_tokens: int = 0


class DecodeLifecycle:
    """Pure: no sockets, no clock, no engine. Time comes in as `now_s` (monotonic seconds).

    `handle` and `tick` return the actions the shell must carry out, in order. Not thread-safe: one owner.
    """

    def __init__(self, layout: KvLayout, limits: LedgerLimits) -> None:
        self._layout = layout
        self._ledger = TransferLedger(limits)
        self._legs: dict[tuple[StreamId, LegId], _Leg] = {}
        # Legs whose transfer the ledger still has, and whose sequence the engine still has; ended ones included.
        self._transfers: dict[XferId, _Leg] = {}
        self._seqs: dict[SeqId, _Leg] = {}
        self._next = 0
        self.draining = False
        self.outcomes: Counter[LegState] = Counter()

    def handle(self, event: DecodeEvent, now_s: float) -> list[DecodeAction]:
        """Applies one event; what names an unknown leg or sequence has no effect."""
        match event:
            case Sampled():  # first: by far the most frequent
                return self._sampled(event, now_s)
            case ExpectLeg():
                return self._expect(event, now_s)
            case GenerateLeg():
                return self._generate(event, now_s)
            case Cancel():
                leg = self._legs.get((event.stream, event.leg_id))
                return [] if leg is None else self._cancel(leg, now_s)
            case StreamGone():
                legs = [leg for leg in self._legs.values() if leg.stream == event.stream]
                return [action for leg in legs for action in self._cancel(leg, now_s)]
            case FromPeer() | SessionOpened() | PagesVerified() | SessionLost() | PeerFenced():
                return self._transfer(event, now_s)
            case ReassignLeg():
                return self._reassign(event, now_s)
            case Reserved():
                return self._reserved(event, now_s)
            case PrefillStarted():
                self._started(event, now_s)
                return []
            case Released() | Failed():
                return self._gone(event, now_s)

    def tick(self, now_s: float) -> list[DecodeAction]:
        """Checks every deadline."""
        return self._carry_out(self._ledger.tick(now_s))

    def has_leg(self, key: tuple[StreamId, LegId]) -> bool:
        """Whether that leg of a router is not over."""
        return key in self._legs

    def leg_of(self, seq_id: SeqId) -> tuple[StreamId, LegId] | None:
        """The leg that one of the engine's sequences is drawn for."""
        leg = self._seqs.get(seq_id)
        return None if leg is None else (leg.stream, leg.leg_id)

    def in_flight(self) -> int:
        """Legs that are not over, and sequences and transfers that are left of others."""
        left = {*self._legs.values(), *self._seqs.values(), *self._transfers.values()}
        unannounced = self._ledger.in_flight() - len(self._transfers)
        return len(left) + unannounced

    def transfers_in_flight(self) -> int:
        """Hand-offs that are not over, those that no router has announced yet included."""
        return self._ledger.in_flight()

    @property
    def refused_messages(self) -> int:
        """Peers' messages that fitted nothing."""
        return self._ledger.refused

    @property
    def corrupted_transfers(self) -> int:
        """Hand-offs whose pages had other checksums than their sender's."""
        return self._ledger.corrupted

    def quarantined_pages(self) -> int:
        """Pages that nobody may use because a lost prefill worker may still write there."""
        return self._ledger.quarantined()

    def check_integrity(self) -> None:
        """Raises InvariantError if the tables contradict each other."""
        self._ledger.check_integrity()
        for key, leg in self._legs.items():
            expecting = leg.state is _L.EXPECTING
            consistent = (
                key == (leg.stream, leg.leg_id)
                and leg.state not in ENDS
                and (self._has(leg) or expecting)
                and (leg.xfer_id in self._transfers) == expecting
            )
            if not consistent:
                raise InvariantError(f"leg {key} is inconsistent: {leg!r}")
        for xfer_id in self._transfers:
            if self._ledger.state(xfer_id) is None:
                raise InvariantError(f"transfer {xfer_id} is over and still mapped")

    def _expect(self, event: ExpectLeg, now_s: float) -> list[DecodeAction]:
        if (event.stream, event.leg_id) in self._legs:
            return []  # a repetition; failing it would end the leg that runs
        refusal = self._refusal(event.prompt) or self._misfit(event)
        if event.permit.xfer_id in self._transfers:
            refusal = InvalidRequestError("the transfer id is in use", param="xfer_id")
        elif refusal is not None:
            # The prefill worker may have asked for pages already, or will: let it know.
            withdrawn = self._transfer(
                Withdrawn(xfer_id=event.permit.xfer_id, error=refusal), now_s
            )
            return [_failed(event, refusal), *withdrawn]
        if refusal is not None:
            return [_failed(event, refusal)]
        leg = self._admit(event, _L.EXPECTING, now_s)
        leg.xfer_id = event.permit.xfer_id
        self._transfers[leg.xfer_id] = leg
        return self._transfer(Expected(permit=event.permit), now_s)

    def _misfit(self, event: ExpectLeg) -> BatonError | None:
        """Why the permit is not one for this prompt."""
        blocks, permit = self._layout.num_blocks_for(len(event.prompt.tokens)), event.permit
        if permit.num_blocks != blocks:
            return refuse_holder(f"prompt: it takes {blocks} pages, not {permit.num_blocks}")
        if permit.cache_scope != event.prompt.cache_scope:
            return refuse_holder("cache_scope")
        return None

    def _reassign(self, event: ReassignLeg, now_s: float) -> list[DecodeAction]:
        leg = self._legs.get((event.stream, event.leg_id))
        if leg is None or leg.xfer_id != event.permit.xfer_id:
            return []  # over: the router is told so already
        return self._transfer(Reassigned(permit=event.permit), now_s)

    def _generate(self, event: GenerateLeg, now_s: float) -> list[DecodeAction]:
        if (event.stream, event.leg_id) in self._legs:
            return []
        refusal = self._refusal(event.prompt)
        if refusal is not None:
            return [_failed(event, refusal)]
        leg = self._admit(event, _L.QUEUED, now_s)
        self._seqs[leg.seq_id] = leg
        return [Generate(seq_id=leg.seq_id, prompt=event.prompt)]

    def _refusal(self, prompt: Prompt) -> BatonError | None:
        if self.draining:
            return DrainingError("this decode worker is leaving")
        if not prompt.tokens or not prompt.samples:
            return InvalidRequestError("a prompt needs a token and a sample", param="prompt")
        return None

    def _admit(self, event: ExpectLeg | GenerateLeg, state: LegState, now_s: float) -> _Leg:
        self._next += 1
        leg = _Leg(
            stream=event.stream,
            leg_id=event.leg_id,
            seq_id=SeqId(f"{OWNER}/{self._next}"),
            prompt=event.prompt,
            state=state,
            arrived_s=now_s,
            unfinished=len(event.prompt.samples),
        )
        self._legs[event.stream, event.leg_id] = leg
        return leg

    def _cancel(self, leg: _Leg, now_s: float) -> list[DecodeAction]:
        expecting = leg.state is _L.EXPECTING
        self._end(leg, _L.CANCELLED)
        if not expecting:
            return [Abort(seq_id=leg.seq_id)]
        assert leg.xfer_id is not None
        error = CancelledByPeerError("the router cancelled this leg")
        return self._transfer(Withdrawn(xfer_id=leg.xfer_id, error=error), now_s)

    def _reserved(self, event: Reserved, now_s: float) -> list[DecodeAction]:
        leg = self._seqs.get(event.seq_id)
        if leg is None or leg.xfer_id is None:
            return []
        grant = Grant(held_blocks=event.held_blocks, blocks=event.blocks[event.held_blocks :])
        return self._transfer(PagesReserved(xfer_id=leg.xfer_id, grant=grant), now_s)

    def _started(self, event: PrefillStarted, now_s: float) -> None:
        leg = self._seqs.get(event.seq_id)
        if leg is not None and leg.state is _L.QUEUED:
            self._move(leg, _L.PREFILLING)
            leg.started_s, leg.cached_tokens = now_s, event.cached_tokens

    def _sampled(self, event: Sampled, now_s: float) -> list[DecodeAction]:
        leg = self._seqs.get(event.seq_id)
        if leg is None:
            return []
        leg.unfinished -= sum(sample.finish is not None for sample in event.tokens)
        if leg.unfinished == 0:
            del self._seqs[leg.seq_id]
        if leg.state in ENDS:
            return []
        tell = TellTokens(stream=leg.stream, leg_id=leg.leg_id, tokens=event.tokens)
        actions: list[DecodeAction] = [tell]
        if leg.state is _L.PREFILLING:
            actions.insert(0, self._prefilled(leg, event, now_s))
        if leg.unfinished == 0:
            self._end(leg, _L.DONE)
        return actions

    def _prefilled(self, leg: _Leg, event: Sampled, now_s: float) -> TellPrefilled:
        self._move(leg, _L.RUNNING)
        return TellPrefilled(
            stream=leg.stream,
            leg_id=leg.leg_id,
            prompt_tokens=len(leg.prompt.tokens),
            cached_tokens=leg.cached_tokens,
            queue_s=leg.started_s - leg.arrived_s,
            prefill_s=now_s - leg.started_s,
            prompt_logprobs=event.prompt_logprobs,
        )

    def _gone(self, event: Released | Failed, now_s: float) -> list[DecodeAction]:
        leg = self._seqs.pop(event.seq_id, None)
        if leg is None:
            return []
        error = event.error if isinstance(event, Failed) else None
        if leg.xfer_id in self._transfers:
            assert leg.xfer_id is not None
            return self._transfer(PagesGone(xfer_id=leg.xfer_id, error=error), now_s)
        if leg.state in ENDS:
            return []
        if error is None:
            error = EngineError("the engine dropped the sequence")
        self._end(leg, _L.FAILED)
        return [TellFailed(stream=leg.stream, leg_id=leg.leg_id, error=error)]

    def _transfer(self, event: LedgerEvent, now_s: float) -> list[DecodeAction]:
        actions = self._carry_out(self._ledger.handle(event, now_s))
        match event:
            case Expected():
                self._forget(event.permit.xfer_id)
            case Withdrawn() | PagesGone():
                self._forget(event.xfer_id)
        return actions

    def _carry_out(self, decided: list[LedgerAction]) -> list[DecodeAction]:
        actions: list[DecodeAction] = []
        for action in decided:
            match action:
                case ReservePages():
                    leg = self._transfers[action.xfer_id]
                    self._seqs[leg.seq_id] = leg
                    actions.append(Reserve(seq_id=leg.seq_id, prompt=leg.prompt))
                case StartDecoding():
                    actions.append(self._start(action.xfer_id, action.first_tokens))
                case FreePages():
                    actions.append(Abort(seq_id=self._transfers[action.xfer_id].seq_id))
                case TransferFailed():
                    actions += self._not_given(action)
                case WriterLost():
                    actions += self._writer_lost(action)
                case ToPeer() | EndSession() | VerifyPages():
                    actions.append(action)
        return actions

    def _start(self, xfer_id: XferId, first_tokens: tuple[TokenSample, ...]) -> DecodeAction:
        """The prefill worker told the router of the first tokens; what follows is told from here."""
        leg = self._transfers.pop(xfer_id)
        self._move(leg, _L.RUNNING)
        leg.unfinished -= sum(sample.finish is not None for sample in first_tokens)
        if leg.unfinished == 0:
            self._end(leg, _L.DONE)
        return Start(seq_id=leg.seq_id, first_tokens=first_tokens)

    def _writer_lost(self, lost: WriterLost) -> list[DecodeAction]:
        leg = self._transfers.get(lost.xfer_id)
        if leg is None or leg.state in ENDS:
            return []
        tell = TellWriterLost(
            stream=leg.stream, leg_id=leg.leg_id, attempt=lost.attempt, error=lost.error
        )
        return [tell]

    def _not_given(self, failed: TransferFailed) -> list[DecodeAction]:
        leg = self._transfers[failed.xfer_id]
        self._forget(failed.xfer_id)
        if leg.state in ENDS:
            return []
        self._end(leg, _L.FAILED)
        return [TellFailed(stream=leg.stream, leg_id=leg.leg_id, error=failed.error)]

    def _forget(self, xfer_id: XferId) -> None:
        if self._ledger.state(xfer_id) is None:
            self._transfers.pop(xfer_id, None)

    def _has(self, leg: _Leg) -> bool:
        return leg.seq_id in self._seqs

    def _end(self, leg: _Leg, state: LegState) -> None:
        self._move(leg, state)
        self.outcomes[state] += 1
        del self._legs[leg.stream, leg.leg_id]

    def _move(self, leg: _Leg, state: LegState) -> None:
        if state not in TRANSITIONS[leg.state]:
            raise InvariantError(f"leg {leg.leg_id}: {leg.state} to {state}")
        leg.state = state


def _failed(event: ExpectLeg | GenerateLeg, error: BatonError) -> TellFailed:
    return TellFailed(stream=event.stream, leg_id=event.leg_id, error=error)
