"""The hand-offs behind a decode worker's legs: what the ledger decides, as words to routers, peers and the engine.

What a transfer may do and when its pages are freed is the ledger's business (kv_transfer/ledger/ledger.py). Pure, like the
lifecycle that owns it.
"""

from baton.errors import InvariantError
from baton.generation import TokenSample
from baton.ids import XferId
from baton_engine.messages import Abort, Reserve, Reserved, Start
from decode_worker.legs import LegState, LegTable
from decode_worker.messages import DecodeAction, TellFailed, TellWriterLost
from kv_transfer.ledger.ledger import (
    Expected,
    LedgerEvent,
    PagesGone,
    PagesReserved,
    TransferLedger,
    Withdrawn,
)
from kv_transfer.ledger.transfer import (
    EndSession,
    FreePages,
    LedgerAction,
    ReservePages,
    StartDecoding,
    ToPeer,
    TransferFailed,
    VerifyPages,
    WriterLost,
)
from kv_transfer.plan import Grant


class HandOffs:
    """Joins the ledger's transfers with the legs that they are for.

    Args:
        ledger: Whom this one alone tells what happens.
        legs: The worker's.
    """

    def __init__(self, ledger: TransferLedger, legs: LegTable) -> None:
        self._ledger = ledger
        self._legs = legs

    def handle(self, event: LedgerEvent, now_s: float) -> list[DecodeAction]:
        """Something happened to a transfer or its peer."""
        actions = self._carry_out(self._ledger.handle(event, now_s))
        match event:
            case Expected():
                self._forget(event.permit.xfer_id)
            case Withdrawn() | PagesGone():
                self._forget(event.xfer_id)
        return actions

    def reserved(self, event: Reserved, now_s: float) -> list[DecodeAction]:
        """The engine has pages for a sequence."""
        leg = self._legs.seqs.get(event.seq_id)
        if leg is None or leg.xfer_id is None:
            return []
        grant = Grant(held_blocks=event.held_blocks, blocks=event.blocks[event.held_blocks :])
        return self.handle(PagesReserved(xfer_id=leg.xfer_id, grant=grant), now_s)

    def tick(self, now_s: float) -> list[DecodeAction]:
        """Checks every deadline."""
        return self._carry_out(self._ledger.tick(now_s))

    def check_integrity(self) -> None:
        """Raises InvariantError if ledger and legs contradict each other."""
        self._ledger.check_integrity()
        for xfer_id in self._legs.transfers:
            if self._ledger.state(xfer_id) is None:
                raise InvariantError(f"transfer {xfer_id} is over and still mapped")

    def _carry_out(self, decided: list[LedgerAction]) -> list[DecodeAction]:
        actions: list[DecodeAction] = []
        for action in decided:
            match action:
                case ReservePages():
                    actions.append(self._reserve(action.xfer_id))
                case StartDecoding():
                    actions.append(self._start(action.xfer_id, action.first_tokens))
                case FreePages():
                    actions.append(Abort(seq_id=self._legs.transfers[action.xfer_id].seq_id))
                case TransferFailed():
                    actions += self._not_given(action)
                case WriterLost():
                    actions += self._writer_lost(action)
                case ToPeer() | EndSession() | VerifyPages():
                    actions.append(action)
        return actions

    def _reserve(self, xfer_id: XferId) -> DecodeAction:
        leg = self._legs.transfers[xfer_id]
        self._legs.seqs[leg.seq_id] = leg
        return Reserve(seq_id=leg.seq_id, prompt=leg.prompt)

    def _start(self, xfer_id: XferId, first_tokens: tuple[TokenSample, ...]) -> DecodeAction:
        """The prefill worker told the router of the first tokens; what follows is told from here."""
        leg = self._legs.transfers.pop(xfer_id)
        self._legs.move(leg, LegState.RUNNING)
        leg.unfinished -= sum(sample.finish is not None for sample in first_tokens)
        if leg.unfinished == 0:
            self._legs.end(leg, LegState.DONE)
        return Start(seq_id=leg.seq_id, first_tokens=first_tokens)

    def _writer_lost(self, lost: WriterLost) -> list[DecodeAction]:
        leg = self._legs.transfers.get(lost.xfer_id)
        if leg is None or leg.over:
            return []
        tell = TellWriterLost(
            stream=leg.stream, leg_id=leg.leg_id, attempt=lost.attempt, error=lost.error
        )
        return [tell]

    def _not_given(self, failed: TransferFailed) -> list[DecodeAction]:
        leg = self._legs.transfers[failed.xfer_id]
        self._forget(failed.xfer_id)
        if leg.over:
            return []
        self._legs.end(leg, LegState.FAILED)
        return [TellFailed(stream=leg.stream, leg_id=leg.leg_id, error=failed.error)]

    def _forget(self, xfer_id: XferId) -> None:
        if self._ledger.state(xfer_id) is None:
            self._legs.transfers.pop(xfer_id, None)
