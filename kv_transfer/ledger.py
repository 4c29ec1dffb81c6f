"""The decode worker's book of hand-offs: what was promised to prefill workers, and what may be freed when.

A transfer becomes real when two independent messages have met: the router's word that it is wanted, and the prefill
worker's request for pages. Then pages are taken for the whole prompt, all or nothing; nobody waits while holding part.

    (router) EXPECTED ─┐                      commit       checksums right
                       ├─ RESERVED ─ WRITING ──────── VERIFYING ──────── COMMITTED   pages belong to the running sequence
    (peer)      ASKED ─┘     │          │ │               │ wrong
                    peer lost│   peer lost│ cancel        │
                             ▼          ▼ ▼               ▼
           later attempt ◀─ ORPHANED   ABORTING ──────── QUIESCED ── engine has them ── FREE
                             └ nobody came ┘  the writer stopped, or can write no more

Pages that a peer may be writing to are freed, or granted to another one, only once that peer said that it has stopped, or can
write no more. What a lost peer was granted stays out of use until then.
"""

from dataclasses import dataclass

from baton.errors import (
    BatonError,
    CancelledByPeerError,
    CorruptKvError,
    DeadlineError,
    InvariantError,
    TransferError,
    WorkerLostError,
)
from baton.ids import XferId
from kv_transfer.checksum import checksum_bytes
from kv_transfer.heads import LinkPlan
from kv_transfer.lease import LeaseBook
from kv_transfer.messages import (
    AbortRequest,
    Commit,
    Committed,
    EndSession,
    Expected,
    FreePages,
    FromPeer,
    Granted,
    Heartbeat,
    LedgerAction,
    LedgerEvent,
    PagesGone,
    PagesReserved,
    PagesVerified,
    PeerFenced,
    Quiesced,
    Reassigned,
    Reserve,
    ReservePages,
    SessionId,
    SessionLost,
    SessionOpened,
    StartDecoding,
    ToPeer,
    TransferFailed,
    VerifyPages,
    Withdrawn,
    WriterLost,
)
from kv_transfer.ticket import Permit
from kv_transfer.transfer import ENDS, EndedTransfers, Transfer, TransferState

_S = TransferState
_LIVE = (_S.EXPECTED, _S.RESERVED, _S.WRITING)
_LOST = "the prefill worker was lost during the hand-off"
_OVER = "this transfer is over already"
_TAKEN_OVER = "another prefill worker takes this hand-off over"


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerLimits:
    """How long the ledger waits, in seconds.

    Attributes:
        expect_timeout_s: For the prefill worker's request after the router's word; covers queueing there.
        reserve_timeout_s: For the engine's pages, and for the router's word after the prefill worker's request.
        quiesce_timeout_s: For the answer to an abort before the peer is cut off.
        lease_s: For a sign of life of a peer.
        retry_grace_s: For another prefill worker after one was lost, and for the lost one to be known to write no more.
        checksums: Whether commits must carry them.
    """

    expect_timeout_s: float
    reserve_timeout_s: float
    quiesce_timeout_s: float
    lease_s: float
    retry_grace_s: float
    checksums: bool


class TransferLedger:
    """Pure: no sockets, no clock, no engine. Time comes in as `now_s` (monotonic seconds).

    Every method returns the actions the shell must carry out, in order. Messages that are late, repeated or name nothing
    known are refused without effect and counted in `refused`. Not thread-safe: one owner.
    """

    def __init__(self, limits: LedgerLimits) -> None:
        self._limits = limits
        self._transfers: dict[XferId, Transfer] = {}
        self._ended = EndedTransfers(keep_s=limits.expect_timeout_s)
        self._leases = LeaseBook(limits.lease_s)
        self._links: dict[SessionId, LinkPlan] = {}
        self._cut: set[SessionId] = set()
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
                self._leases.open(event.session, now_s)
                self._links[event.session] = event.link
                return []
            case SessionLost():
                return self._session_lost(event.session, now_s)
            case PeerFenced():
                return self._fenced(event.session, now_s)

    def tick(self, now_s: float) -> list[LedgerAction]:
        """Checks every lease and deadline; call it at least a few times per second, whether or not there is new work."""
        actions: list[LedgerAction] = []
        for session in self._leases.expired(now_s):
            silent = WorkerLostError("the prefill worker gave no sign of life within its lease")
            actions += self._cut_off(session, silent)
            actions += self._session_lost(session, now_s)
        for transfer in list(self._transfers.values()):
            actions += self._check_deadline(transfer, now_s)
        self._ended.forget_old(now_s)
        return actions

    def state(self, xfer_id: XferId) -> TransferState | None:
        """Where a transfer stands; None once it is over."""
        transfer = self._transfers.get(xfer_id)
        return transfer.state if transfer else None

    def in_flight(self) -> int:
        """Transfers that are not over."""
        return len(self._transfers)

    def quarantined(self) -> int:
        """Pages that nobody may use because a prefill worker that was lost may still write there."""
        return sum(
            len(transfer.grant.blocks)
            for transfer in self._transfers.values()
            if transfer.grant and transfer.writer and transfer.writer[0] not in self._leases
        )

    def check_integrity(self) -> None:
        """Raises InvariantError if the book contradicts itself."""
        for xfer_id, transfer in self._transfers.items():
            transfer.check_integrity()
            if xfer_id != transfer.xfer_id or self._ended.find(xfer_id) is not None:
                raise InvariantError(f"transfer {xfer_id} is over and still here: {transfer!r}")

    def _expect(self, permit: Permit, now_s: float) -> list[LedgerAction]:
        ended = self._ended.find(permit.xfer_id)
        if ended is not None:
            # The prefill worker gave up before the router's word arrived, or this is a replay.
            self.refused += 1
            return [TransferFailed(xfer_id=permit.xfer_id, error=ended.error)]
        transfer = self._transfers.get(permit.xfer_id)
        if transfer is None:
            self._open(permit, _S.EXPECTED, now_s)
            return []
        if transfer.state is not _S.ASKED:
            self.refused += 1
            return []
        if transfer.permit != permit:
            error = TransferError("the prefill worker showed another permit than the router")
            return [*self._abort(transfer, error, now_s), *_failed(transfer, error)]
        return self._ask_engine(transfer, now_s)

    def _reassigned(self, permit: Permit, now_s: float) -> list[LedgerAction]:
        transfer = self._transfers.get(permit.xfer_id)
        if transfer is not None and transfer.permit == permit:
            transfer.reassigned = True  # its request overtook the router's word
            return []
        if transfer is None or not self._takes_over(transfer, permit):
            self.refused += 1
            return []
        return self._take_over(transfer, permit, now_s)

    def _takes_over(self, transfer: Transfer, permit: Permit) -> bool:
        fits = (
            permit.attempt > transfer.attempt
            and permit.num_blocks == transfer.permit.num_blocks
            and permit.cache_scope == transfer.permit.cache_scope
        )
        return fits and transfer.state in (*_LIVE, _S.ORPHANED)

    def _take_over(self, transfer: Transfer, permit: Permit, now_s: float) -> list[LedgerAction]:
        """A later attempt begins: nothing of the earlier one counts any more, and its writer has to stop."""
        told = self._abort_message(transfer, CancelledByPeerError(_TAKEN_OVER))
        if transfer.writer is not None and transfer.stop_asked_s is None:
            transfer.stop_asked_s = now_s
        transfer.permit, transfer.session, transfer.reassigned = permit, None, True
        if transfer.state in (_S.RESERVED, _S.WRITING):
            transfer.move(_S.ORPHANED, now_s)
        transfer.since_s = now_s
        return told

    def _from_peer(self, event: FromPeer, now_s: float) -> list[LedgerAction]:
        # Whoever speaks is alive. After its lease nothing it says counts: it was cut off, and its writes are not waited for.
        if not self._leases.renew(event.session, now_s):
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
        ended = self._ended.find(permit.xfer_id)
        if ended is not None:
            return self._refuse(event, permit.xfer_id, permit.attempt, ended.error)
        transfer = self._transfers.get(permit.xfer_id)
        if transfer is None:
            self._open(permit, _S.ASKED, now_s).session = event.session
            return []
        actions: list[LedgerAction] = []
        if self._takes_over(transfer, permit):
            # The permit is the router's word too; the other copy is still on its way.
            actions = self._take_over(transfer, permit, now_s)
        if transfer.permit != permit:
            return self._refuse(event, permit.xfer_id, permit.attempt)
        if transfer.session is not None or transfer.state not in (_S.EXPECTED, _S.ORPHANED):
            repeated = transfer.session == event.session
            return self._refuse(event, permit.xfer_id, permit.attempt, repeated=repeated)
        transfer.session, transfer.since_s = event.session, now_s
        return [*actions, *self._go_on(transfer, now_s)]

    def _go_on(self, transfer: Transfer, now_s: float) -> list[LedgerAction]:
        """Pages for whoever asks: new ones, or those of the attempt before as soon as nobody else writes there."""
        if transfer.writer is not None or transfer.session is None:
            return []
        if not transfer.pages_held:
            return self._ask_engine(transfer, now_s)
        if transfer.grant is None:
            transfer.move(_S.RESERVED, now_s)
            return []
        return self._grant(transfer, now_s)

    def _ask_engine(self, transfer: Transfer, now_s: float) -> list[LedgerAction]:
        transfer.move(_S.RESERVED, now_s)
        transfer.pages_held = True
        return [ReservePages(xfer_id=transfer.xfer_id)]

    def _reserved(self, event: PagesReserved, now_s: float) -> list[LedgerAction]:
        transfer = self._transfers.get(event.xfer_id)
        if transfer is None or not transfer.pages_held or transfer.grant is not None:
            return []
        if transfer.state is _S.RESERVED:
            transfer.grant = event.grant
            return self._grant(transfer, now_s)
        if transfer.state is _S.ORPHANED:
            transfer.grant = event.grant
        return []  # else given up meanwhile: `FreePages` is already on its way to the engine

    def _grant(self, transfer: Transfer, now_s: float) -> list[LedgerAction]:
        assert transfer.session is not None
        assert transfer.grant is not None
        transfer.writer, transfer.stop_asked_s = (transfer.session, transfer.attempt), None
        transfer.reassigned = False
        transfer.move(_S.WRITING, now_s)
        granted = Granted(
            xfer_id=transfer.xfer_id,
            attempt=transfer.attempt,
            cache_scope=transfer.permit.cache_scope,
            grant=transfer.grant,
        )
        return [ToPeer(session=transfer.session, message=granted)]

    def _commit(self, event: FromPeer, commit: Commit, now_s: float) -> list[LedgerAction]:
        transfer = self._transfers.get(commit.xfer_id)
        if transfer is None or transfer.writer != (event.session, commit.attempt):
            return self._refuse(event, commit.xfer_id, commit.attempt)
        if transfer.state is not _S.WRITING:
            # Crossed our abort, which the peer will answer.
            return self._refuse(event, commit.xfer_id, commit.attempt, repeated=True)
        assert transfer.grant is not None
        link, pages = self._links[event.session], len(transfer.grant.blocks)
        wanted = (pages, pages * link.bytes_per_page)
        if (commit.num_blocks, commit.num_bytes) != wanted:
            error = TransferError(
                f"committed {commit.num_blocks} pages and {commit.num_bytes} bytes, "
                f"granted {wanted[0]} and {wanted[1]}"
            )
            return [*self._abort(transfer, error, now_s), *_failed(transfer, error)]
        transfer.writer = None  # a commit says that nothing more will be written
        transfer.commit = commit
        transfer.move(_S.VERIFYING, now_s)
        if not self._limits.checksums or not pages:
            return self._committed(transfer, now_s)
        if len(commit.checksums) != checksum_bytes(link, pages):
            return self._corrupt(transfer, "checksums are missing", now_s)
        return [
            VerifyPages(
                xfer_id=commit.xfer_id,
                attempt=commit.attempt,
                link=link,
                grant=transfer.grant,
                checksums=commit.checksums,
            )
        ]

    def _verified(self, event: PagesVerified, now_s: float) -> list[LedgerAction]:
        transfer = self._transfers.get(event.xfer_id)
        current = transfer is not None and transfer.attempt == event.attempt
        if transfer is None or not current or transfer.state is not _S.VERIFYING:
            return []
        if event.fault is not None:
            return self._corrupt(transfer, event.fault, now_s)
        return self._committed(transfer, now_s)

    def _corrupt(self, transfer: Transfer, fault: str, now_s: float) -> list[LedgerAction]:
        self.corrupted += 1
        error = CorruptKvError(f"the pages are not what the prefill worker sent: {fault}")
        return [*self._abort(transfer, error, now_s), *_failed(transfer, error)]

    def _committed(self, transfer: Transfer, now_s: float) -> list[LedgerAction]:
        assert transfer.commit is not None
        self._move(transfer, _S.COMMITTED, now_s)
        xfer_id, first_tokens = transfer.xfer_id, transfer.commit.first_tokens
        actions: list[LedgerAction] = [StartDecoding(xfer_id=xfer_id, first_tokens=first_tokens)]
        if transfer.session is not None:
            message = Committed(xfer_id=xfer_id, attempt=transfer.attempt)
            actions.append(ToPeer(session=transfer.session, message=message))
        return actions

    def _quiesced(self, event: FromPeer, said: Quiesced, now_s: float) -> list[LedgerAction]:
        error = CancelledByPeerError("the prefill worker gave this transfer up")
        transfer = self._transfers.get(said.xfer_id)
        if transfer is None:
            # Perhaps before the router's word, which then finds it over.
            self.refused += 1
            self._ended.add(said.xfer_id, error, now_s)
            return []
        if transfer.writer == (event.session, said.attempt):
            return self._writer_stopped(transfer, error, now_s)
        asked = transfer.session == event.session
        unasked = transfer.session is None and transfer.permit.source == event.peer
        if said.attempt != transfer.attempt or not (asked or unasked):
            self.refused += 1
            return []
        if transfer.state is _S.ASKED:
            return self._settle(transfer, error, now_s)
        if transfer.state in (_S.EXPECTED, _S.RESERVED, _S.ORPHANED):
            return self._orphan(transfer, error, now_s)
        self.refused += 1
        return []

    def _writer_stopped(
        self, transfer: Transfer, error: BatonError, now_s: float
    ) -> list[LedgerAction]:
        """Whoever was granted the pages writes no more."""
        transfer.writer = transfer.stop_asked_s = None
        match transfer.state:
            case TransferState.WRITING:
                return self._orphan(transfer, error, now_s)
            case TransferState.ABORTING:
                return self._settle(transfer, transfer.error or error, now_s)
            case _:
                return self._go_on(transfer, now_s)

    def _orphan(self, transfer: Transfer, error: BatonError, now_s: float) -> list[LedgerAction]:
        """The prefill worker is gone before it committed: the pages wait for another one."""
        lost = WriterLost(xfer_id=transfer.xfer_id, attempt=transfer.attempt, error=error)
        transfer.session, transfer.reassigned, transfer.error = None, False, error
        if transfer.state is not _S.ORPHANED:
            transfer.move(_S.ORPHANED, now_s)
        transfer.since_s = now_s
        return [lost]

    def _withdraw(self, event: Withdrawn, now_s: float) -> list[LedgerAction]:
        transfer = self._transfers.get(event.xfer_id)
        if transfer is None:
            # Withdrawn before anybody asked for pages: whoever asks later is refused at once.
            self._ended.add(event.xfer_id, event.error, now_s)
            return []
        if transfer.state in (_S.ABORTING, _S.QUIESCED):
            return []
        return self._abort(transfer, event.error, now_s)

    def _gone(self, event: PagesGone, now_s: float) -> list[LedgerAction]:
        transfer = self._transfers.get(event.xfer_id)
        if transfer is None or not transfer.pages_held:
            return []
        if transfer.state is _S.QUIESCED:
            self._move(transfer, _S.FREE, now_s)
            return []
        if transfer.grant is not None:
            raise InvariantError(f"the engine freed pages of {event.xfer_id} while they are in use")
        error = event.error or TransferError("the engine gave the reserved pages up")
        actions = [*self._abort_message(transfer, error), *_failed(transfer, error)]
        transfer.error = error
        self._move(transfer, _S.FREE, now_s)
        return actions

    def _session_lost(self, session: SessionId, now_s: float) -> list[LedgerAction]:
        self._leases.end(session)
        self._links.pop(session, None)
        actions: list[LedgerAction] = []
        for transfer in [t for t in self._transfers.values() if t.session == session]:
            transfer.session = None
            match transfer.state:
                case TransferState.ASKED:
                    actions += self._settle(transfer, WorkerLostError(_LOST), now_s)
                case TransferState.RESERVED | TransferState.WRITING | TransferState.ORPHANED:
                    actions += self._orphan(transfer, WorkerLostError(_LOST), now_s)
                case _:
                    pass  # committed: all it had to say is here; or over, and told to stop
        return actions

    def _fenced(self, session: SessionId, now_s: float) -> list[LedgerAction]:
        actions = self._session_lost(session, now_s)
        for transfer in list(self._transfers.values()):
            if transfer.writer is not None and transfer.writer[0] == session:
                actions += self._writer_stopped(transfer, WorkerLostError(_LOST), now_s)
        self._cut.discard(session)
        return actions

    def _check_deadline(self, transfer: Transfer, now_s: float) -> list[LedgerAction]:
        actions = self._check_writer(transfer, now_s)
        error = self._overdue(transfer, now_s - transfer.since_s)
        if error is None:
            return actions
        told = [] if transfer.state is _S.ASKED else _failed(transfer, error)
        return [*actions, *self._abort(transfer, error, now_s), *told]

    def _check_writer(self, transfer: Transfer, now_s: float) -> list[LedgerAction]:
        """A writer that was asked to stop has to answer in time."""
        asked_s = transfer.stop_asked_s
        if transfer.writer is None or asked_s is None:
            return []
        if now_s - asked_s <= self._limits.quiesce_timeout_s:
            return []
        error = TransferError("the prefill worker did not confirm that it stopped writing")
        return self._cut_off(transfer.writer[0], error)

    def _overdue(self, transfer: Transfer, waited_s: float) -> BatonError | None:
        """What a transfer that has waited for too long ends with."""
        limits = self._limits
        match transfer.state:
            case TransferState.EXPECTED if waited_s > limits.expect_timeout_s:
                return DeadlineError(f"no prefill worker asked for pages in {waited_s:.0f} s")
            case TransferState.ASKED if waited_s > limits.reserve_timeout_s:
                return DeadlineError(f"no router announced this transfer in {waited_s:.0f} s")
            case TransferState.RESERVED if waited_s > limits.reserve_timeout_s:
                blocks = transfer.permit.num_blocks
                return TransferError(
                    f"no room for {blocks} pages on the decode worker in {waited_s:.0f} s"
                )
            case TransferState.ORPHANED:
                queued = transfer.reassigned and transfer.session is None
                limit_s = limits.expect_timeout_s if queued else limits.retry_grace_s
                return None if waited_s <= limit_s else transfer.error or WorkerLostError(_LOST)
            case _:
                return None

    def _cut_off(self, session: SessionId, error: BatonError) -> list[LedgerAction]:
        if session in self._cut:
            return []  # fencing takes as long as it takes: a stopped process may wake up and write
        self._cut.add(session)
        return [EndSession(session=session, error=error)]

    def _abort(self, transfer: Transfer, error: BatonError, now_s: float) -> list[LedgerAction]:
        """Ends a transfer from this side; pages that may be written to stay until the peer has stopped."""
        told = self._abort_message(transfer, error)
        if transfer.writer is None:
            return [*told, *self._settle(transfer, error, now_s)]
        transfer.error = error
        if transfer.stop_asked_s is None:
            transfer.stop_asked_s = now_s
        self._move(transfer, _S.ABORTING, now_s)
        return told

    def _settle(self, transfer: Transfer, error: BatonError, now_s: float) -> list[LedgerAction]:
        """Nobody writes (any more): whatever pages there are go back."""
        transfer.error = error
        if not transfer.pages_held:
            self._move(transfer, _S.FREE, now_s)
            return []
        self._move(transfer, _S.QUIESCED, now_s)
        return [FreePages(xfer_id=transfer.xfer_id)]

    def _abort_message(self, transfer: Transfer, error: BatonError) -> list[LedgerAction]:
        if transfer.session is None:
            return []
        message = AbortRequest(xfer_id=transfer.xfer_id, attempt=transfer.attempt, error=error)
        return [ToPeer(session=transfer.session, message=message)]

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
        message = AbortRequest(
            xfer_id=xfer_id, attempt=attempt, error=error or TransferError(_OVER)
        )
        return [ToPeer(session=event.session, message=message)]

    def _open(self, permit: Permit, state: TransferState, now_s: float) -> Transfer:
        transfer = Transfer(permit=permit, state=state, since_s=now_s)
        self._transfers[permit.xfer_id] = transfer
        return transfer

    def _move(self, transfer: Transfer, state: TransferState, now_s: float) -> None:
        transfer.move(state, now_s)
        if state in ENDS:
            del self._transfers[transfer.xfer_id]
            self._ended.add(transfer.xfer_id, transfer.error or TransferError(_OVER), now_s)


def _failed(transfer: Transfer, error: BatonError) -> list[LedgerAction]:
    return [TransferFailed(xfer_id=transfer.xfer_id, error=error)]
