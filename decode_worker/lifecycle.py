"""The life of every leg on a decode worker: from the router's announcement to the last token.

Pure: events in, actions out. Where a leg may stand is drawn in `legs.py`; what comes of its hand-off is the business of
`hand_offs.py`; here both are joined with the engine's word on the sequence.
"""

from collections.abc import Mapping

from baton.errors import (
    BatonError,
    CancelledByPeerError,
    DrainingError,
    EngineError,
    InvalidRequestError,
)
from baton.generation import Prompt
from baton.ids import SeqId
from baton.layout import KvLayout
from baton.rpc.frames import LegKey
from baton_engine.messages import (
    Abort,
    Failed,
    Generate,
    PrefillStarted,
    Released,
    Reserved,
    Sampled,
)
from decode_worker.hand_offs import HandOffs
from decode_worker.legs import Leg, LegState, LegTable
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
)
from kv_transfer.ledger.ledger import (
    Expected,
    FromPeer,
    PagesGone,
    PagesVerified,
    PeerFenced,
    Reassigned,
    SessionLost,
    SessionOpened,
    TransferLedger,
    Withdrawn,
)
from kv_transfer.ledger.transfer import LedgerLimits
from kv_transfer.ticket import refuse_holder


class DecodeLifecycle:
    """Pure: no sockets, no clock, no engine. Time comes in as `now_s` (monotonic seconds).

    `handle` and `tick` return the actions the shell must carry out, in order. Not thread-safe: one owner.
    """

    def __init__(self, layout: KvLayout, limits: LedgerLimits) -> None:
        self._layout = layout
        self._ledger = TransferLedger(limits)
        self._legs = LegTable()
        self._hand_offs = HandOffs(self._ledger, self._legs)
        self.draining = False

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
                legs = self._legs.of_stream(event.stream)
                return [action for leg in legs for action in self._cancel(leg, now_s)]
            case FromPeer() | SessionOpened() | PagesVerified() | SessionLost() | PeerFenced():
                return self._hand_offs.handle(event, now_s)
            case ReassignLeg():
                return self._reassign(event, now_s)
            case Reserved():
                return self._hand_offs.reserved(event, now_s)
            case PrefillStarted():
                self._started(event, now_s)
                return []
            case Released() | Failed():
                return self._gone(event, now_s)

    def tick(self, now_s: float) -> list[DecodeAction]:
        """Checks every deadline."""
        return self._hand_offs.tick(now_s)

    def has_leg(self, key: LegKey) -> bool:
        """Whether that leg of a router is not over."""
        return key in self._legs

    def leg_of(self, seq_id: SeqId) -> LegKey | None:
        """The leg that one of the engine's sequences is drawn for."""
        leg = self._legs.seqs.get(seq_id)
        return None if leg is None else leg.key

    def in_flight(self) -> int:
        """Legs that are not over, and sequences and transfers that are left of others."""
        unannounced = self._ledger.in_flight() - len(self._legs.transfers)
        return self._legs.left() + unannounced

    def transfers_in_flight(self) -> int:
        """Hand-offs that are not over, those that no router has announced yet included."""
        return self._ledger.in_flight()

    @property
    def outcomes(self) -> Mapping[LegState, int]:
        """How many legs have ended in which way."""
        return self._legs.outcomes

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
        self._hand_offs.check_integrity()
        self._legs.check_integrity()

    def _expect(self, event: ExpectLeg, now_s: float) -> list[DecodeAction]:
        if (event.stream, event.leg_id) in self._legs:
            return []  # a repetition; failing it would end the leg that runs
        xfer_id = event.permit.xfer_id
        if xfer_id in self._legs.transfers:
            in_use = InvalidRequestError("the transfer id is in use", param="xfer_id")
            return [_failed(event, in_use)]
        refusal = self._refusal(event.prompt) or self._misfit(event)
        if refusal is not None:
            # The prefill worker may have asked for pages already, or will: let it know.
            withdrawn = Withdrawn(xfer_id=xfer_id, error=refusal)
            return [_failed(event, refusal), *self._hand_offs.handle(withdrawn, now_s)]
        leg = self._legs.admit(event, LegState.EXPECTING, now_s)
        leg.xfer_id = xfer_id
        self._legs.transfers[xfer_id] = leg
        return self._hand_offs.handle(Expected(permit=event.permit), now_s)

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
        return self._hand_offs.handle(Reassigned(permit=event.permit), now_s)

    def _generate(self, event: GenerateLeg, now_s: float) -> list[DecodeAction]:
        if (event.stream, event.leg_id) in self._legs:
            return []
        refusal = self._refusal(event.prompt)
        if refusal is not None:
            return [_failed(event, refusal)]
        leg = self._legs.admit(event, LegState.QUEUED, now_s)
        self._legs.seqs[leg.seq_id] = leg
        return [Generate(seq_id=leg.seq_id, prompt=event.prompt)]

    def _refusal(self, prompt: Prompt) -> BatonError | None:
        if self.draining:
            return DrainingError("this decode worker is leaving")
        if not prompt.tokens or not prompt.samples:
            return InvalidRequestError("a prompt needs a token and a sample", param="prompt")
        return None

    def _cancel(self, leg: Leg, now_s: float) -> list[DecodeAction]:
        expecting = leg.state is LegState.EXPECTING
        self._legs.end(leg, LegState.CANCELLED)
        if not expecting:
            return [Abort(seq_id=leg.seq_id)]
        assert leg.xfer_id is not None
        error = CancelledByPeerError("the router cancelled this leg")
        return self._hand_offs.handle(Withdrawn(xfer_id=leg.xfer_id, error=error), now_s)

    def _started(self, event: PrefillStarted, now_s: float) -> None:
        leg = self._legs.seqs.get(event.seq_id)
        if leg is not None and leg.state is LegState.QUEUED:
            self._legs.move(leg, LegState.PREFILLING)
            leg.started_s = now_s
            leg.cached_tokens, leg.pooled_tokens = event.cached_tokens, event.pooled_tokens

    def _sampled(self, event: Sampled, now_s: float) -> list[DecodeAction]:
        leg = self._legs.seqs.get(event.seq_id)
        if leg is None:
            return []
        leg.unfinished -= sum(sample.finish is not None for sample in event.tokens)
        if leg.unfinished == 0:
            del self._legs.seqs[leg.seq_id]
        if leg.over:
            return []
        tell = TellTokens(stream=leg.stream, leg_id=leg.leg_id, tokens=event.tokens)
        actions: list[DecodeAction] = [tell]
        if leg.state is LegState.PREFILLING:
            actions.insert(0, self._prefilled(leg, event, now_s))
        if leg.unfinished == 0:
            self._legs.end(leg, LegState.DONE)
        return actions

    def _prefilled(self, leg: Leg, event: Sampled, now_s: float) -> TellPrefilled:
        self._legs.move(leg, LegState.RUNNING)
        return TellPrefilled(
            stream=leg.stream,
            leg_id=leg.leg_id,
            prompt_tokens=len(leg.prompt.tokens),
            cached_tokens=leg.cached_tokens,
            pooled_tokens=leg.pooled_tokens,
            queue_s=leg.started_s - leg.arrived_s,
            prefill_s=now_s - leg.started_s,
            prompt_logprobs=event.prompt_logprobs,
        )

    def _gone(self, event: Released | Failed, now_s: float) -> list[DecodeAction]:
        leg = self._legs.seqs.pop(event.seq_id, None)
        if leg is None:
            return []
        error = event.error if isinstance(event, Failed) else None
        if leg.xfer_id in self._legs.transfers:
            assert leg.xfer_id is not None
            return self._hand_offs.handle(PagesGone(xfer_id=leg.xfer_id, error=error), now_s)
        if leg.over:
            return []
        if error is None:
            error = EngineError("the engine dropped the sequence")
        self._legs.end(leg, LegState.FAILED)
        return [TellFailed(stream=leg.stream, leg_id=leg.leg_id, error=error)]


def _failed(event: ExpectLeg | GenerateLeg, error: BatonError) -> TellFailed:
    return TellFailed(stream=event.stream, leg_id=event.leg_id, error=error)
