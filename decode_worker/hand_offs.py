"""The hand-offs behind a worker's receive legs: what the ledger decides, as words to routers, peers and the engine.

What a transfer may do and when its pages are freed is the ledger's business (kv_transfer/ledger/transfer.py).
"""

from baton.errors import BatonError, InvalidRequestError, InvariantError
from baton.generation import TokenSample
from baton.ids import XferId
from baton.story import StoryEntry
from baton_engine.messages import (
    Abort,
    Failed,
    PrefillStarted,
    PromptComputed,
    Receive,
    Released,
    Reserved,
    SeqEvent,
    Start,
)
from baton_worker.legs import LegState, WorkerLeg, WorkerLegTable
from baton_worker.messages import (
    FailedMessage,
    LegReassigned,
    ReceivingEvent,
    WorkerAction,
    WriterLostMessage,
)
from kv_transfer.ledger.ledger import (
    Expected,
    LedgerEvent,
    PagesReleased,
    PagesReserved,
    Reassigned,
    TransferLedger,
    Withdrawn,
)
from kv_transfer.ledger.outbox import FirstTokensDrawn
from kv_transfer.ledger.transfer import (
    EndSession,
    FreePages,
    LedgerAction,
    LedgerLimits,
    ReservePages,
    StartDecoding,
    ToPeer,
    TransferFailed,
    VerifyPages,
    WriterLost,
)
from kv_transfer.plan import Grant
from kv_transfer.ticket import Permit


class ReceivingHandOffs:
    """Pure: no sockets, no clock, no engine (a `baton_worker.ports.HandOffCore`). Not thread-safe: one owner.

    Args:
        limits: Of the ledger, which this one alone tells what happens.
        legs: The worker's.
    """

    def __init__(self, limits: LedgerLimits, legs: WorkerLegTable) -> None:
        self._ledger = TransferLedger(limits)
        self._legs = legs
        self._transfers: dict[XferId, WorkerLeg] = {}
        """Legs whose transfer the ledger still has; ended ones included."""

    def refusal(self, permit: Permit) -> BatonError | None:
        """See `HandOffs`."""
        if permit.xfer_id in self._transfers:
            return InvalidRequestError("the transfer id is in use", param="xfer_id")
        return None

    def begin(self, leg: WorkerLeg, now_s: float) -> list[WorkerAction]:
        """See `HandOffs`."""
        permit = leg.permit
        assert permit is not None
        self._transfers[permit.xfer_id] = leg
        return self._handle(Expected(permit=permit), permit.xfer_id, now_s)

    def advance(
        self, leg: WorkerLeg, event: SeqEvent | FirstTokensDrawn, now_s: float
    ) -> list[WorkerAction]:
        """See `HandOffs`."""
        xfer_id = leg.xfer_id
        if xfer_id is None or xfer_id not in self._transfers:
            return []
        match event:
            case Reserved():
                held = event.held_blocks
                grant = Grant(held_blocks=held, blocks=event.blocks[held:])
                return self._handle(PagesReserved(xfer_id=xfer_id, grant=grant), xfer_id, now_s)
            case Released() | Failed():
                error = event.error if isinstance(event, Failed) else None
                return self._handle(PagesReleased(xfer_id=xfer_id, error=error), xfer_id, now_s)
            case PrefillStarted() | PromptComputed() | FirstTokensDrawn():
                raise InvariantError(
                    f"{leg.seq_id} was computed before its pages were here",
                    story=self.story(xfer_id),
                )

    def withdraw(self, xfer_id: XferId, error: BatonError, now_s: float) -> list[WorkerAction]:
        """See `HandOffs`; a sender that asks for pages later is refused with the same error."""
        return self._handle(Withdrawn(xfer_id=xfer_id, error=error), xfer_id, now_s)

    def handle(self, event: ReceivingEvent, now_s: float) -> list[WorkerAction]:
        """See `HandOffs`."""
        if not isinstance(event, LegReassigned):
            return self._carry_out(self._ledger.handle(event, now_s))
        leg = self._legs.get((event.stream, event.leg_id))
        if leg is None or leg.xfer_id != event.permit.xfer_id:
            return []  # over: the router is told so already
        return self._carry_out(self._ledger.handle(Reassigned(permit=event.permit), now_s))

    def tick(self, now_s: float) -> list[WorkerAction]:
        """Checks every deadline."""
        return self._carry_out(self._ledger.tick(now_s))

    def story(self, xfer_id: XferId) -> tuple[StoryEntry, ...]:
        """See `HandOffTable`."""
        return self._ledger.story(xfer_id)

    def in_flight(self) -> int:
        """See `HandOffTable`: also those that no router has announced yet."""
        return self._ledger.in_flight()

    def left_over(self) -> int:
        """See `HandOffTable`."""
        held = self._legs.held()
        return self._ledger.in_flight() - sum(leg in held for leg in self._transfers.values())

    @property
    def refused_messages(self) -> int:
        """Senders' messages that fitted nothing."""
        return self._ledger.refused

    @property
    def corrupted_transfers(self) -> int:
        """Hand-offs whose pages had other checksums than their sender's."""
        return self._ledger.corrupted

    def quarantined_pages(self) -> int:
        """Pages that may not be used because a lost sender may still write there."""
        return self._ledger.quarantined()

    def check_integrity(self) -> None:
        """Raises InvariantError if ledger and legs contradict each other."""
        self._ledger.check_integrity()
        for xfer_id, leg in self._transfers.items():
            if self._ledger.state(xfer_id) is None:
                raise InvariantError(
                    f"transfer {xfer_id} is over and still mapped", story=self.story(xfer_id)
                )
            if leg.xfer_id != xfer_id or leg.state is LegState.RUNNING:
                raise InvariantError(
                    f"transfer {xfer_id} and its leg disagree: {leg!r}", story=self.story(xfer_id)
                )

    def _handle(self, event: LedgerEvent, xfer_id: XferId, now_s: float) -> list[WorkerAction]:
        """Applies an event of one transfer, which may be over then."""
        actions = self._carry_out(self._ledger.handle(event, now_s))
        self._forget(xfer_id)
        return actions

    def _carry_out(self, decided: list[LedgerAction]) -> list[WorkerAction]:
        actions: list[WorkerAction] = []
        for action in decided:
            match action:
                case ReservePages():
                    leg = self._transfers[action.xfer_id]
                    self._legs.seqs[leg.seq_id] = leg
                    actions.append(Receive(seq_id=leg.seq_id, prompt=leg.prompt))
                case StartDecoding():
                    actions.append(self._start(action.xfer_id, action.first_tokens))
                case FreePages():
                    actions.append(Abort(seq_id=self._transfers[action.xfer_id].seq_id))
                case TransferFailed():
                    actions += self._failed(action)
                case WriterLost():
                    actions += self._writer_lost(action)
                case ToPeer() | EndSession() | VerifyPages():
                    actions.append(action)
        return actions

    def _start(self, xfer_id: XferId, first_tokens: tuple[TokenSample, ...]) -> WorkerAction:
        """The sending worker told the router of the first tokens; what follows is told from here."""
        leg = self._transfers.pop(xfer_id)
        self._legs.move(leg, LegState.RUNNING)
        leg.unfinished -= sum(sample.finish is not None for sample in first_tokens)
        if leg.unfinished == 0:
            self._legs.end(leg, LegState.DONE)
        return Start(seq_id=leg.seq_id, first_tokens=first_tokens)

    def _writer_lost(self, lost: WriterLost) -> list[WorkerAction]:
        leg = self._transfers.get(lost.xfer_id)
        if leg is None or leg.ended:
            return []
        message = WriterLostMessage(
            stream=leg.stream, leg_id=leg.leg_id, attempt=lost.attempt, error=lost.error
        )
        return [message]

    def _failed(self, event: TransferFailed) -> list[WorkerAction]:
        leg = self._transfers[event.xfer_id]
        self._forget(event.xfer_id)
        if leg.ended:
            return []
        self._legs.end(leg, LegState.FAILED)
        return [FailedMessage.of(leg, event.error)]

    def _forget(self, xfer_id: XferId) -> None:
        if self._ledger.state(xfer_id) is None:
            self._transfers.pop(xfer_id, None)
