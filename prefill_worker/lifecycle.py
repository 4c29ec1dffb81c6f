"""The life of every leg on a prefill worker: from the router's submit to pages that the decode worker holds.

Pure: events in, actions out. Where a leg may stand is drawn in `legs.py`; the hand-off itself is the outbox's business
(kv_transfer/ledger/outbox.py); this core owns both and joins them with the engine's word on the sequence.
"""

from collections.abc import Mapping

from baton.errors import EngineError, InvariantError
from baton.ids import WorkerIdentity
from baton.layout import KvLayout
from baton.pages import PageWrite
from baton_engine.messages import (
    Abort,
    Failed,
    Prefill,
    PrefillStarted,
    Release,
    Released,
    Reserved,
    Sampled,
)
from kv_transfer.ledger.outbox import (
    FirstTokensDrawn,
    FromDecode,
    GivenUp,
    HandOver,
    HandOverFailed,
    Opened,
    Outbox,
    OutboxEvent,
    PeerDown,
    PeerUp,
    PushDone,
    Started,
)
from prefill_worker.detours import Detours
from prefill_worker.legs import Leg, LegState, LegTable
from prefill_worker.messages import (
    Cancel,
    Connect,
    LayerReady,
    PrefillAction,
    PrefillEvent,
    PromptPut,
    StreamGone,
    Submit,
    TellFailed,
    TellFirstTokens,
    TellHandedOff,
    TellPooled,
)
from prefill_worker.refusals import refusal_of


class PrefillLifecycle:
    """Pure: no sockets, no clock, no engine. Time comes in as `now_s` (monotonic seconds).

    `handle` returns the actions the shell must carry out, in order. Not thread-safe: one owner.
    """

    def __init__(self, layout: KvLayout, *, pool_after_s: float | None = None) -> None:
        """No leg yet.

        Args:
            layout: Of this worker's pages.
            pool_after_s: How long a computed prompt waits for room before it goes to the pool; None where there is none.
        """
        self._layout = layout
        self._outbox = Outbox(layout)
        self._legs = LegTable()
        self._detours = Detours(self._legs, self._outbox, pool_after_s)
        self._peers: set[WorkerIdentity] = set()
        self.draining = False

    def handle(self, event: PrefillEvent, now_s: float) -> list[PrefillAction]:
        """Applies one event; what names an unknown leg or sequence has no effect."""
        match event:
            case Submit():
                return self._submit(event, now_s)
            case Cancel():
                leg = self._legs.get((event.stream, event.leg_id))
                return [] if leg is None else self._cancel(leg, now_s)
            case StreamGone():
                legs = self._legs.of_stream(event.stream)
                return [action for leg in legs for action in self._cancel(leg, now_s)]
            case LayerReady():
                return self._layer_ready(event, now_s)
            case PeerDown():
                self._peers.discard(event.peer)
                return self._transfer(event, now_s)
            case PeerUp() | FromDecode() | PushDone():
                return self._transfer(event, now_s)
            case PromptPut():
                return self._put(event, now_s)
            case PrefillStarted():
                return self._started(event, now_s)
            case Sampled():
                return self._sampled(event, now_s)
            case Released() | Failed():
                return self._gone(event, now_s)
            case Reserved():
                raise InvariantError(f"{event.seq_id} was reserved on a prefill worker")

    def tick(self, now_s: float) -> list[PrefillAction]:
        """Checks who waits for room."""
        return [*self._detours.due(now_s)]

    def in_flight(self) -> int:
        """Legs that are not over, and sequences and hand-offs that are left of others."""
        silent = self._outbox.in_flight() - len(self._legs.transfers)
        return self._legs.left() + silent

    def transfers_in_flight(self) -> int:
        """Hand-offs that are not over."""
        return self._outbox.in_flight()

    @property
    def refused_messages(self) -> int:
        """Messages of decode workers that fitted nothing."""
        return self._outbox.refused

    @property
    def outcomes(self) -> Mapping[LegState, int]:
        """How many legs have ended in which way."""
        return self._legs.outcomes

    def check_integrity(self) -> None:
        """Raises InvariantError if the tables contradict each other."""
        self._outbox.check_integrity()
        self._legs.check_integrity()
        for xfer_id in self._legs.transfers:
            if self._outbox.state(xfer_id) is None:
                raise InvariantError(f"transfer {xfer_id} is over and its leg is not")

    def _submit(self, event: Submit, now_s: float) -> list[PrefillAction]:
        if (event.stream, event.leg_id) in self._legs:
            return []  # a repetition; failing it would end the leg that runs
        refusal = refusal_of(event, self._layout, self._outbox, draining=self.draining)
        if refusal is not None:
            return [TellFailed(stream=event.stream, leg_id=event.leg_id, error=refusal)]
        leg = self._legs.admit(event, now_s)
        return [
            *self._connect(event),
            *self._transfer(Opened(permit=event.permit), now_s),
            Prefill(seq_id=leg.seq_id, prompt=event.prompt),
        ]

    def _connect(self, event: Submit) -> list[PrefillAction]:
        peer = event.permit.target
        if peer in self._peers:
            return []
        self._peers.add(peer)
        return [Connect(peer=peer, address=event.address)]

    def _layer_ready(self, event: LayerReady, now_s: float) -> list[PrefillAction]:
        actions: list[PrefillAction] = []
        for export in event.exports:
            leg = self._legs.of_seq(export.seq_id)
            if leg is None:
                continue
            if event.layer_index == 0:
                leg.exported(export)
            write = PageWrite(
                xfer_id=leg.xfer_id,
                layer_index=event.layer_index,
                first_block=export.first_block,
                source=export.blocks,
                ready=event.done,
            )
            actions += self._transfer(write, now_s)
        return actions

    def _started(self, event: PrefillStarted, now_s: float) -> list[PrefillAction]:
        leg = self._legs.of_seq(event.seq_id)
        if leg is None:
            return []
        if leg.state is LegState.QUEUED:
            self._legs.move(leg, LegState.PREFILLING)
            leg.started_s = now_s
            leg.cached_tokens, leg.pooled_tokens = event.cached_tokens, event.pooled_tokens
        return self._transfer(Started(xfer_id=leg.xfer_id), now_s)

    def _sampled(self, event: Sampled, now_s: float) -> list[PrefillAction]:
        leg = self._legs.of_seq(event.seq_id)
        if leg is None:
            return []
        tell = TellFirstTokens(
            stream=leg.stream,
            leg_id=leg.leg_id,
            tokens=event.tokens,
            prompt_tokens=leg.prompt_tokens,
            cached_tokens=leg.cached_tokens,
            pooled_tokens=leg.pooled_tokens,
            queue_s=leg.started_s - leg.arrived_s,
            prefill_s=now_s - leg.started_s,
            prompt_logprobs=event.prompt_logprobs,
        )
        if all(sample.finish is not None for sample in event.tokens):
            # Nothing is left to decode: the router is told to its end here, and nobody needs the pages.
            self._legs.end(leg, LegState.DONE)
            given_up = self._transfer(GivenUp(xfer_id=leg.xfer_id), now_s)
            return [tell, *given_up, Release(seq_id=leg.seq_id)]
        self._legs.move(leg, LegState.HANDING_OFF)
        leg.waits_since_s = now_s
        drew = FirstTokensDrawn(xfer_id=leg.xfer_id, first_tokens=event.tokens)
        return [tell, *self._transfer(drew, now_s)]

    def _gone(self, event: Released | Failed, now_s: float) -> list[PrefillAction]:
        leg = self._legs.drop_seq(event.seq_id)
        if leg is None:
            return []
        error = (
            event.error
            if isinstance(event, Failed)
            else EngineError("the engine dropped the sequence")
        )
        self._legs.end(leg, LegState.FAILED)
        given_up = self._transfer(GivenUp(xfer_id=leg.xfer_id), now_s)
        return [TellFailed(stream=leg.stream, leg_id=leg.leg_id, error=error), *given_up]

    def _cancel(self, leg: Leg, now_s: float) -> list[PrefillAction]:
        self._legs.end(leg, LegState.CANCELLED)
        given_up = self._transfer(GivenUp(xfer_id=leg.xfer_id), now_s)
        return [*given_up, Abort(seq_id=leg.seq_id)]

    def _transfer(self, event: OutboxEvent, now_s: float) -> list[PrefillAction]:
        actions: list[PrefillAction] = []
        for action in self._outbox.handle(event, now_s):
            match action:
                case HandOver():
                    actions += self._handed_over(action)
                case HandOverFailed():
                    actions += self._not_taken(action)
                case _:
                    actions.append(action)
        return actions

    def _handed_over(self, done: HandOver) -> list[PrefillAction]:
        leg = self._legs.transfers[done.xfer_id]
        self._legs.end(leg, LegState.DONE)
        tell = TellHandedOff(stream=leg.stream, leg_id=leg.leg_id, done=done)
        return [tell, Release(seq_id=leg.seq_id)]

    def _put(self, event: PromptPut, now_s: float) -> list[PrefillAction]:
        leg = self._detours.arrived(event, now_s)
        if leg is None:
            return []
        self._legs.end(leg, LegState.DONE)
        tell = TellPooled(stream=leg.stream, leg_id=leg.leg_id)
        given_up = self._transfer(GivenUp(xfer_id=leg.xfer_id), now_s)
        return [tell, *given_up, Release(seq_id=leg.seq_id)]

    def _not_taken(self, failed: HandOverFailed) -> list[PrefillAction]:
        leg = self._legs.transfers[failed.xfer_id]
        self._legs.end(leg, LegState.FAILED)
        tell = TellFailed(stream=leg.stream, leg_id=leg.leg_id, error=failed.error)
        return [tell, Abort(seq_id=leg.seq_id)]
