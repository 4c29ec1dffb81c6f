"""The decode worker's book of hand-offs: what was promised to prefill workers, and what may be freed when.

Which hand-off a message means, who may say it, and who has been silent for too long is decided here; how one hand-off goes on
stands in `transfer.py`.

Pages that a peer may be writing to are freed, or granted to another one, only once that peer said that it has stopped, or can
write no more. What a lost peer was granted stays out of use until then.
"""

from baton.errors import (
    BatonError,
    CancelledByPeerError,
    CorruptKvError,
    TransferError,
    WorkerLostError,
)
from baton.ids import XferId
from kv_transfer.deadlines import LOST, LedgerLimits, overdue, too_slow
from kv_transfer.ledger_messages import (
    EndSession,
    Expected,
    FromPeer,
    LedgerAction,
    LedgerEvent,
    PagesGone,
    PagesReserved,
    PagesVerified,
    PeerFenced,
    Reassigned,
    SessionLost,
    SessionOpened,
    ToPeer,
    TransferFailed,
    Withdrawn,
)
from kv_transfer.messages import AbortRequest, Commit, Heartbeat, Quiesced, Reserve, SessionId
from kv_transfer.peers import PeerBook
from kv_transfer.ticket import Permit
from kv_transfer.transfer import Transfer
from kv_transfer.transfer_book import OVER, TransferBook
from kv_transfer.transfer_state import TransferState

_S = TransferState


class TransferLedger:
    """Pure: no sockets, no clock, no engine. Time comes in as `now_s` (monotonic seconds).

    Every method returns the actions the shell must carry out, in order. Messages that are late, repeated or name nothing
    known are refused without effect and counted in `refused`. Not thread-safe: one owner.
    """

    def __init__(self, limits: LedgerLimits) -> None:
        self._limits = limits
        self._book = TransferBook(keep_s=limits.expect_timeout_s, checksums=limits.checksums)
        self._peers = PeerBook(limits.lease_s)
        self.refused = 0
        self.corrupted = 0

    def handle(self, event: LedgerEvent, now_s: float) -> list[LedgerAction]:
        """Applies one event."""
        match event:
            case FromPeer():
                return self._from_peer(event, now_s)
            case Expected():
                return self._expect(event.permit, now_s)
            case Reassigned():
                return self._reassigned(event.permit, now_s)
            case PagesReserved():
                return self._reserved(event, now_s)
            case PagesGone():
                return self._gone(event, now_s)
            case PagesVerified():
                return self._verified(event, now_s)
            case Withdrawn():
                return self._withdraw(event, now_s)
            case SessionOpened():
                self._peers.open(event.session, event.link, now_s)
                return []
            case SessionLost():
                return self._session_lost(event.session, now_s)
            case PeerFenced():
                return self._fenced(event.session, now_s)

    def tick(self, now_s: float) -> list[LedgerAction]:
        """Checks every lease and deadline; call it at least a few times per second, whether or not there is new work."""
        actions: list[LedgerAction] = []
        for session in self._peers.silent(now_s):
            silent = WorkerLostError("the prefill worker gave no sign of life within its lease")
            actions += self._cut_off(session, silent)
            actions += self._session_lost(session, now_s)
        for transfer in self._book:
            actions += self._check_deadline(transfer, now_s)
        self._book.forget_old(now_s)
        return actions

    def state(self, xfer_id: XferId) -> TransferState | None:
        """Where a transfer stands; None once it is over."""
        transfer = self._book.find(xfer_id)
        return transfer.state if transfer else None

    def in_flight(self) -> int:
        """Transfers that are not over."""
        return len(self._book)

    def quarantined(self) -> int:
        """Pages that nobody may use because a prefill worker that was lost may still write there."""
        return self._book.quarantined(self._peers)

    def check_integrity(self) -> None:
        """Raises InvariantError if the book contradicts itself."""
        self._book.check_integrity()

    def _expect(self, permit: Permit, now_s: float) -> list[LedgerAction]:
        ended = self._book.ended_with(permit.xfer_id)
        if ended is not None:
            # The prefill worker gave up before the router's word arrived, or this is a replay.
            self.refused += 1
            return [TransferFailed(xfer_id=permit.xfer_id, error=ended)]
        transfer = self._book.find(permit.xfer_id)
        if transfer is None:
            self._book.open(permit, _S.EXPECTED, now_s)
            return []
        if transfer.state is not _S.ASKED:
            self.refused += 1
            return []
        if transfer.permit != permit:
            error = TransferError("the prefill worker showed another permit than the router")
            return self._book.kept(transfer, transfer.fail(error, now_s), now_s)
        return transfer.announced(now_s)

    def _reassigned(self, permit: Permit, now_s: float) -> list[LedgerAction]:
        transfer = self._book.find(permit.xfer_id)
        if transfer is not None and transfer.permit == permit:
            transfer.reassigned = True  # its request overtook the router's word
            return []
        if transfer is None or not transfer.takes_over(permit):
            self.refused += 1
            return []
        return transfer.take_over(permit, now_s)

    def _from_peer(self, event: FromPeer, now_s: float) -> list[LedgerAction]:
        # Whoever speaks is alive. After its lease nothing it says counts: it was cut off, and its writes are not waited for.
        if not self._peers.heard(event.session, now_s):
            self.refused += 1
            return []
        match event.message:
            case Reserve():
                return self._asked(event, event.message.permit, now_s)
            case Commit():
                return self._commit(event, event.message, now_s)
            case Quiesced():
                return self._quiesced(event, event.message, now_s)
            case Heartbeat():
                return []

    def _asked(self, event: FromPeer, permit: Permit, now_s: float) -> list[LedgerAction]:
        if permit.source != event.peer:
            return self._refuse(event, permit.xfer_id, permit.attempt)
        ended = self._book.ended_with(permit.xfer_id)
        if ended is not None:
            return self._refuse(event, permit.xfer_id, permit.attempt, ended)
        link = self._peers.link(event.session)
        transfer = self._book.find(permit.xfer_id)
        if transfer is None:
            opened = self._book.open(permit, _S.ASKED, now_s)
            return opened.join(event.session, link, now_s)
        actions: list[LedgerAction] = []
        if transfer.takes_over(permit):
            # The permit is the router's word too; the other copy is still on its way.
            actions = transfer.take_over(permit, now_s)
        if transfer.permit != permit:
            return self._refuse(event, permit.xfer_id, permit.attempt)
        if not transfer.may_join(link):
            repeated = transfer.parts.of(event.session) is not None
            return self._refuse(event, permit.xfer_id, permit.attempt, repeated=repeated)
        return [*actions, *transfer.join(event.session, link, now_s)]

    def _reserved(self, event: PagesReserved, now_s: float) -> list[LedgerAction]:
        transfer = self._book.find(event.xfer_id)
        return transfer.reserved(event.grant, now_s) if transfer else []

    def _commit(self, event: FromPeer, commit: Commit, now_s: float) -> list[LedgerAction]:
        transfer = self._book.find(commit.xfer_id)
        part = transfer.parts.writer(event.session, commit.attempt) if transfer else None
        if transfer is None or part is None:
            return self._refuse(event, commit.xfer_id, commit.attempt)
        if transfer.state is not _S.WRITING:
            # Crossed our abort, which the peer will answer.
            return self._refuse(event, commit.xfer_id, commit.attempt, repeated=True)
        return self._judged(transfer, transfer.commit(part, commit, now_s), now_s)

    def _verified(self, event: PagesVerified, now_s: float) -> list[LedgerAction]:
        transfer = self._book.find(event.xfer_id)
        part = transfer.in_question(event.session, event.attempt) if transfer else None
        if transfer is None or part is None:
            return []
        return self._judged(transfer, transfer.verified(part, event.fault, now_s), now_s)

    def _judged(
        self, transfer: Transfer, actions: list[LedgerAction], now_s: float
    ) -> list[LedgerAction]:
        """What followed of a commit, or of the look at its bytes."""
        self.corrupted += isinstance(transfer.error, CorruptKvError)
        return self._book.kept(transfer, actions, now_s)

    def _quiesced(self, event: FromPeer, said: Quiesced, now_s: float) -> list[LedgerAction]:
        error = CancelledByPeerError("the prefill worker gave this transfer up")
        transfer = self._book.find(said.xfer_id)
        if transfer is None:
            # Perhaps before the router's word, which then finds it over.
            self.refused += 1
            self._book.shut(said.xfer_id, error, now_s)
            return []
        writer = transfer.parts.writer(event.session, said.attempt)
        if writer is not None:
            return self._book.kept(transfer, transfer.writer_stopped(writer, error, now_s), now_s)
        current = said.attempt == transfer.attempt and not transfer.unclaimed
        if not current or not transfer.waits_for_peers or not self._is_needed(transfer, event):
            self.refused += 1
            return []
        return self._book.kept(transfer, transfer.lost(event.session, error, now_s), now_s)

    def _is_needed(self, transfer: Transfer, event: FromPeer) -> bool:
        link, ours = self._peers.link(event.session), transfer.permit.source == event.peer
        return transfer.needs(event.session, link, ours=ours)

    def _withdraw(self, event: Withdrawn, now_s: float) -> list[LedgerAction]:
        transfer = self._book.find(event.xfer_id)
        if transfer is None:
            # Withdrawn before anybody asked for pages: whoever asks later is refused at once.
            self._book.shut(event.xfer_id, event.error, now_s)
            return []
        if transfer.state in (_S.ABORTING, _S.QUIESCED):
            return []
        return self._book.kept(transfer, transfer.abort(event.error, now_s), now_s)

    def _gone(self, event: PagesGone, now_s: float) -> list[LedgerAction]:
        transfer = self._book.find(event.xfer_id)
        if transfer is None:
            return []
        return self._book.kept(transfer, transfer.pages_gone(event.error, now_s), now_s)

    def _session_lost(self, session: SessionId, now_s: float) -> list[LedgerAction]:
        """Of parts that were committed all that their sender had to say is here; the others are lost."""
        self._peers.end(session)
        actions: list[LedgerAction] = []
        for transfer in self._book:
            transfer.parts.disconnected(session)
            part = transfer.parts.of(session)
            if part is not None and part.commit is None and transfer.waits_for_peers:
                told = transfer.lost(session, WorkerLostError(LOST), now_s)
                actions += self._book.kept(transfer, told, now_s)
        return actions

    def _fenced(self, session: SessionId, now_s: float) -> list[LedgerAction]:
        actions = self._session_lost(session, now_s)
        for transfer in self._book:
            for part in transfer.parts.writers():
                if part.session == session:
                    told = transfer.writer_stopped(part, WorkerLostError(LOST), now_s)
                    actions += self._book.kept(transfer, told, now_s)
        self._peers.fenced(session)
        return actions

    def _check_deadline(self, transfer: Transfer, now_s: float) -> list[LedgerAction]:
        actions = self._check_writers(transfer, now_s)
        error = overdue(transfer, self._limits, now_s)
        if error is None:
            return actions
        # Of what the router never announced there is no leg to be told.
        ends = transfer.abort if transfer.state is _S.ASKED else transfer.fail
        return [*actions, *self._book.kept(transfer, ends(error, now_s), now_s)]

    def _check_writers(self, transfer: Transfer, now_s: float) -> list[LedgerAction]:
        """A writer that was asked to stop has to answer in time."""
        error = TransferError("the prefill worker did not confirm that it stopped writing")
        slow = too_slow(transfer, self._limits, now_s)
        return [cut for session in slow for cut in self._cut_off(session, error)]

    def _cut_off(self, session: SessionId, error: BatonError) -> list[LedgerAction]:
        if not self._peers.cut_off(session):
            return []
        return [EndSession(session=session, error=error)]

    def _refuse(
        self,
        event: FromPeer,
        xfer_id: XferId,
        attempt: int,
        error: BatonError | None = None,
        *,
        repeated: bool = False,
    ) -> list[LedgerAction]:
        """Counts a message that fits nothing; tells the peer to stop unless it is only a repetition."""
        self.refused += 1
        if repeated:
            return []
        message = AbortRequest(xfer_id=xfer_id, attempt=attempt, error=error or TransferError(OVER))
        return [ToPeer(session=event.session, message=message)]
