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

Where ranks of a prefill worker share the heads out, each of them asks, writes and commits its part (`parts.py`): the first one
that asks makes the transfer RESERVED, the last one that commits makes it VERIFYING, and any that is lost makes it ORPHANED.

Pages that a peer may be writing to are freed, or granted to another one, only once that peer said that it has stopped, or can
write no more. What a lost peer was granted stays out of use until then.
"""

from baton.errors import (
    BatonError,
    CancelledByPeerError,
    CorruptKvError,
    InvariantError,
    TransferError,
    WorkerLostError,
)
from baton.ids import XferId
from kv_transfer.checksum import checksum_bytes
from kv_transfer.deadlines import LOST, LedgerLimits, overdue
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
from kv_transfer.messages import (
    AbortRequest,
    Commit,
    Committed,
    Heartbeat,
    Quiesced,
    Reserve,
    SessionId,
)
from kv_transfer.orders import grant, stop, tell
from kv_transfer.parts import Part
from kv_transfer.peers import PeerBook
from kv_transfer.plan import Grant
from kv_transfer.ticket import Permit
from kv_transfer.transfer import ENDS, EndedTransfers, Transfer, TransferState

_S = TransferState
_LIVE = (_S.EXPECTED, _S.RESERVED, _S.WRITING)
_OVER = "this transfer is over already"
_TAKEN_OVER = "another prefill worker takes this hand-off over"


class TransferLedger:
    """Pure: no sockets, no clock, no engine. Time comes in as `now_s` (monotonic seconds).

    Every method returns the actions the shell must carry out, in order. Messages that are late, repeated or name nothing
    known are refused without effect and counted in `refused`. Not thread-safe: one owner.
    """

    def __init__(self, limits: LedgerLimits) -> None:
        self._limits = limits
        self._transfers: dict[XferId, Transfer] = {}
        self._ended = EndedTransfers(keep_s=limits.expect_timeout_s)
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
            if transfer.grant
            and any(part.session not in self._peers for part in transfer.parts.writers())
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
        told = stop(transfer, CancelledByPeerError(_TAKEN_OVER), now_s)
        transfer.parts.dismiss()
        transfer.permit, transfer.reassigned = permit, True
        if transfer.state in (_S.RESERVED, _S.WRITING):
            transfer.move(_S.ORPHANED, now_s)
        transfer.since_s = now_s
        return [*told]

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
        ended = self._ended.find(permit.xfer_id)
        if ended is not None:
            return self._refuse(event, permit.xfer_id, permit.attempt, ended.error)
        transfer = self._transfers.get(permit.xfer_id)
        if transfer is None:
            return self._join(self._open(permit, _S.ASKED, now_s), event.session, now_s)
        actions: list[LedgerAction] = []
        if self._takes_over(transfer, permit):
            # The permit is the router's word too; the other copy is still on its way.
            actions = self._take_over(transfer, permit, now_s)
        if transfer.permit != permit:
            return self._refuse(event, permit.xfer_id, permit.attempt)
        if not self._may_join(transfer, event.session):
            repeated = transfer.parts.of(event.session) is not None
            return self._refuse(event, permit.xfer_id, permit.attempt, repeated=repeated)
        return [*actions, *self._join(transfer, event.session, now_s)]

    def _may_join(self, transfer: Transfer, session: SessionId) -> bool:
        """Whether the attempt still waits for what the session brings."""
        waits = transfer.state in (*_LIVE, _S.ASKED, _S.ORPHANED) and not transfer.unclaimed
        return waits and transfer.parts.fits(self._peers.link(session))

    def _join(self, transfer: Transfer, session: SessionId, now_s: float) -> list[LedgerAction]:
        if not transfer.parts:
            transfer.since_s = now_s
        part = Part(session=session, attempt=transfer.attempt, link=self._peers.link(session))
        transfer.parts.join(part)
        if transfer.state is _S.WRITING:
            return [grant(transfer, part)]
        if transfer.state in (_S.EXPECTED, _S.ORPHANED):
            return self._go_on(transfer, now_s)
        return []

    def _go_on(self, transfer: Transfer, now_s: float) -> list[LedgerAction]:
        """Pages for whoever asks: new ones, or those of the attempt before as soon as nobody else writes there."""
        if transfer.parts.left_over() or not transfer.parts:
            return []
        if not transfer.pages_held:
            return self._ask_engine(transfer, now_s)
        if transfer.grant is None:
            transfer.move(_S.RESERVED, now_s)
            return []
        return self._grant_all(transfer, now_s)

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
            return self._grant_all(transfer, now_s)
        if transfer.state is _S.ORPHANED:
            transfer.grant = event.grant
        return []  # else given up meanwhile: `FreePages` is already on its way to the engine

    def _grant_all(self, transfer: Transfer, now_s: float) -> list[LedgerAction]:
        transfer.reassigned = False
        transfer.move(_S.WRITING, now_s)
        return [grant(transfer, part) for part in transfer.parts]

    def _commit(self, event: FromPeer, commit: Commit, now_s: float) -> list[LedgerAction]:
        transfer = self._transfers.get(commit.xfer_id)
        part = transfer.parts.writer(event.session, commit.attempt) if transfer else None
        if transfer is None or part is None:
            return self._refuse(event, commit.xfer_id, commit.attempt)
        if transfer.state is not _S.WRITING:
            # Crossed our abort, which the peer will answer.
            return self._refuse(event, commit.xfer_id, commit.attempt, repeated=True)
        error = _miscount(transfer, part, commit)
        if error is not None:
            return [*self._abort(transfer, error, now_s), *_failed(transfer, error)]
        sums = checksum_bytes(part.link, commit.num_blocks)
        if self._verifies(transfer.grant) and len(commit.checksums) != sums:
            return self._corrupt(transfer, "checksums are missing", now_s)
        transfer.parts.stopped(part)  # a commit says that nothing more will be written
        part.commit = commit
        return self._verify(transfer, now_s) if transfer.parts.committed else []

    def _verify(self, transfer: Transfer, now_s: float) -> list[LedgerAction]:
        """Every part, once all are written: nobody can spoil what was found right."""
        assert transfer.grant is not None
        transfer.move(_S.VERIFYING, now_s)
        if not self._verifies(transfer.grant):
            return self._committed(transfer, now_s)
        return [
            VerifyPages(
                xfer_id=transfer.xfer_id,
                session=part.session,
                attempt=part.attempt,
                link=part.link,
                grant=transfer.grant,
                checksums=commit.checksums,
            )
            for part, commit in transfer.parts.commits()
        ]

    def _verifies(self, grant: Grant | None) -> bool:
        return self._limits.checksums and grant is not None and bool(grant.blocks)

    def _verified(self, event: PagesVerified, now_s: float) -> list[LedgerAction]:
        transfer = self._transfers.get(event.xfer_id)
        part = transfer.parts.of(event.session) if transfer else None
        current = part is not None and part.attempt == event.attempt
        if transfer is None or part is None or not current or transfer.state is not _S.VERIFYING:
            return []
        if event.fault is not None:
            return self._corrupt(transfer, event.fault, now_s)
        part.verified = True
        return self._committed(transfer, now_s) if transfer.parts.verified else []

    def _corrupt(self, transfer: Transfer, fault: str, now_s: float) -> list[LedgerAction]:
        self.corrupted += 1
        error = CorruptKvError(f"the pages are not what the prefill worker sent: {fault}")
        return [*self._abort(transfer, error, now_s), *_failed(transfer, error)]

    def _committed(self, transfer: Transfer, now_s: float) -> list[LedgerAction]:
        self._move(transfer, _S.COMMITTED, now_s)
        _, first = transfer.parts.commits()[0]
        told = Committed(xfer_id=transfer.xfer_id, attempt=transfer.attempt)
        return [
            StartDecoding(xfer_id=transfer.xfer_id, first_tokens=first.first_tokens),
            *tell(transfer, told),
        ]

    def _quiesced(self, event: FromPeer, said: Quiesced, now_s: float) -> list[LedgerAction]:
        error = CancelledByPeerError("the prefill worker gave this transfer up")
        transfer = self._transfers.get(said.xfer_id)
        if transfer is None:
            # Perhaps before the router's word, which then finds it over.
            self.refused += 1
            self._ended.add(said.xfer_id, error, now_s)
            return []
        writer = transfer.parts.writer(event.session, said.attempt)
        if writer is not None:
            return self._writer_stopped(transfer, writer, error, now_s)
        current = said.attempt == transfer.attempt and not transfer.unclaimed
        if not current or not self._is_awaited(transfer, event):
            self.refused += 1
            return []
        if transfer.state is _S.ASKED:
            told = stop(transfer, error, now_s, but=event.session)
            return [*told, *self._settle(transfer, error, now_s)]
        if transfer.state in (*_LIVE, _S.ORPHANED):
            return self._orphan(transfer, error, now_s, without=event.session)
        self.refused += 1
        return []

    def _is_awaited(self, transfer: Transfer, event: FromPeer) -> bool:
        """Whether the attempt cannot succeed without what this session brings, or would bring if it asked."""
        part = transfer.parts.of(event.session)
        if part is not None:
            return part.commit is None
        ours = transfer.permit.source == event.peer
        return ours and transfer.parts.fits(self._peers.link(event.session))

    def _writer_stopped(
        self, transfer: Transfer, part: Part, error: BatonError, now_s: float
    ) -> list[LedgerAction]:
        """Whoever was granted the pages writes no more."""
        transfer.parts.stopped(part)
        match transfer.state:
            case TransferState.WRITING:
                return self._orphan(transfer, error, now_s, without=part.session)
            case TransferState.ABORTING if transfer.parts.writers():
                return []
            case TransferState.ABORTING:
                return self._settle(transfer, transfer.error or error, now_s)
            case _:
                return self._go_on(transfer, now_s)

    def _orphan(
        self, transfer: Transfer, error: BatonError, now_s: float, *, without: SessionId
    ) -> list[LedgerAction]:
        """A prefill worker is gone before it committed: the pages wait for another one; its other ranks have to stop."""
        told = stop(transfer, error, now_s, but=without)
        lost = WriterLost(xfer_id=transfer.xfer_id, attempt=transfer.attempt, error=error)
        transfer.parts.dismiss()
        transfer.reassigned, transfer.error = False, error
        if transfer.state is not _S.ORPHANED:
            transfer.move(_S.ORPHANED, now_s)
        transfer.since_s = now_s
        return [*told, lost]

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
        actions = [*stop(transfer, error, now_s), *_failed(transfer, error)]
        transfer.error = error
        self._move(transfer, _S.FREE, now_s)
        return actions

    def _session_lost(self, session: SessionId, now_s: float) -> list[LedgerAction]:
        self._peers.end(session)
        actions: list[LedgerAction] = []
        for transfer in list(self._transfers.values()):
            transfer.parts.disconnected(session)
            part = transfer.parts.of(session)
            if part is not None and part.commit is None:
                actions += self._part_lost(transfer, session, now_s)
        return actions

    def _part_lost(
        self, transfer: Transfer, session: SessionId, now_s: float
    ) -> list[LedgerAction]:
        """A session ended that had not committed; of one that had, all it had to say is here."""
        error = WorkerLostError(LOST)
        match transfer.state:
            case TransferState.ASKED:
                told = stop(transfer, error, now_s, but=session)
                return [*told, *self._settle(transfer, error, now_s)]
            case TransferState.RESERVED | TransferState.WRITING | TransferState.ORPHANED:
                return self._orphan(transfer, error, now_s, without=session)
            case _:
                return []  # over, and told to stop

    def _fenced(self, session: SessionId, now_s: float) -> list[LedgerAction]:
        actions = self._session_lost(session, now_s)
        for transfer in list(self._transfers.values()):
            for part in transfer.parts.writers():
                if part.session == session:
                    actions += self._writer_stopped(transfer, part, WorkerLostError(LOST), now_s)
        self._peers.fenced(session)
        return actions

    def _check_deadline(self, transfer: Transfer, now_s: float) -> list[LedgerAction]:
        actions = self._check_writers(transfer, now_s)
        error = overdue(transfer, self._limits, now_s)
        if error is None:
            return actions
        told = [] if transfer.state is _S.ASKED else _failed(transfer, error)
        return [*actions, *self._abort(transfer, error, now_s), *told]

    def _check_writers(self, transfer: Transfer, now_s: float) -> list[LedgerAction]:
        """A writer that was asked to stop has to answer in time."""
        limit_s = now_s - self._limits.quiesce_timeout_s
        error = TransferError("the prefill worker did not confirm that it stopped writing")
        return [
            cut
            for part in transfer.parts.writers()
            if part.stop_asked_s is not None and part.stop_asked_s < limit_s
            for cut in self._cut_off(part.session, error)
        ]

    def _cut_off(self, session: SessionId, error: BatonError) -> list[LedgerAction]:
        if not self._peers.cut_off(session):
            return []
        return [EndSession(session=session, error=error)]

    def _abort(self, transfer: Transfer, error: BatonError, now_s: float) -> list[LedgerAction]:
        """Ends a transfer from this side; pages that may be written to stay until the peer has stopped."""
        told = stop(transfer, error, now_s)
        if not transfer.parts.writers():
            return [*told, *self._settle(transfer, error, now_s)]
        transfer.error = error
        self._move(transfer, _S.ABORTING, now_s)
        return [*told]

    def _settle(self, transfer: Transfer, error: BatonError, now_s: float) -> list[LedgerAction]:
        """Nobody writes (any more): whatever pages there are go back."""
        transfer.error = error
        if not transfer.pages_held:
            self._move(transfer, _S.FREE, now_s)
            return []
        self._move(transfer, _S.QUIESCED, now_s)
        return [FreePages(xfer_id=transfer.xfer_id)]

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


def _miscount(transfer: Transfer, part: Part, commit: Commit) -> BatonError | None:
    """What is wrong with a commit beside the bytes themselves."""
    assert transfer.grant is not None
    pages = len(transfer.grant.blocks)
    wanted = (pages, pages * part.link.bytes_per_page)
    if (commit.num_blocks, commit.num_bytes) != wanted:
        return TransferError(
            f"committed {commit.num_blocks} pages and {commit.num_bytes} bytes, "
            f"granted {wanted[0]} and {wanted[1]}"
        )
    others = [other for _, other in transfer.parts.commits()]
    if any(other.first_tokens != commit.first_tokens for other in others):
        return TransferError("two ranks of the prefill worker drew different first tokens")
    return None
