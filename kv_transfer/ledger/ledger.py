"""The decode worker's book of hand-offs: what was promised to prefill workers, and what may be freed when.

Which hand-off a message means, who may say it, and who has been silent for too long is decided here; how one hand-off goes on
stands in `transfer.py`.

Pages that a peer may be writing to are freed, or granted to another one, only once that peer said that it has stopped, or can
write no more. What a lost peer was granted stays out of use until then.
"""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from baton.errors import (
    BatonError,
    CancelledByPeerError,
    CorruptKvError,
    InvariantError,
    TransferError,
    WorkerLostError,
)
from baton.ids import WorkerIdentity, XferId
from kv_transfer.heads import LinkPlan
from kv_transfer.lease import LeaseBook
from kv_transfer.ledger.transfer import (
    LOST,
    EndSession,
    LedgerAction,
    LedgerLimits,
    ToPeer,
    Transfer,
    TransferFailed,
    TransferState,
    overdue,
    too_slow,
)
from kv_transfer.messages import (
    AbortRequest,
    Commit,
    Heartbeat,
    Quiesced,
    Reserve,
    SessionId,
    ToDecode,
)
from kv_transfer.plan import Grant
from kv_transfer.ticket import Permit


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """The router announced a transfer."""

    permit: Permit


@dataclass(frozen=True, slots=True, kw_only=True)
class Reassigned:
    """The router gave the transfer to another prefill worker, as a later attempt."""

    permit: Permit


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionOpened:
    """A prefill worker's session begins; its lease counts from now, and `link` is what it writes of each page."""

    session: SessionId
    peer: WorkerIdentity
    link: LinkPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class FromPeer:
    """A message of a prefill worker's session."""

    session: SessionId
    peer: WorkerIdentity
    message: ToDecode


@dataclass(frozen=True, slots=True, kw_only=True)
class PagesReserved:
    """The engine took the pages."""

    xfer_id: XferId
    grant: Grant


@dataclass(frozen=True, slots=True, kw_only=True)
class PagesGone:
    """The engine has the pages back: after `FreePages`, or with `error` because it gave the sequence up."""

    xfer_id: XferId
    error: BatonError | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PagesVerified:
    """The answer to `VerifyPages`: `fault` says what differs."""

    xfer_id: XferId
    session: SessionId
    attempt: int
    fault: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Withdrawn:
    """The router, or the end of its stream, cancelled the leg."""

    xfer_id: XferId
    error: BatonError


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionLost:
    """The session's stream ended. The peer may still be writing."""

    session: SessionId


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerFenced:
    """The peer of this session can never write here again (`KvReceiver.revoke`)."""

    session: SessionId


LedgerEvent = (
    Expected
    | Reassigned
    | SessionOpened
    | FromPeer
    | PagesReserved
    | PagesGone
    | PagesVerified
    | Withdrawn
    | SessionLost
    | PeerFenced
)


class PeerBook:
    """Pure. A session that is over is not in the book, though its peer may still be writing."""

    def __init__(self, lease_s: float) -> None:
        self._leases = LeaseBook(lease_s)
        self._links: dict[SessionId, LinkPlan] = {}
        self._cut: set[SessionId] = set()

    def __contains__(self, session: SessionId) -> bool:
        return session in self._leases

    def open(self, session: SessionId, link: LinkPlan, now_s: float) -> None:
        """A session begins; its lease counts from now."""
        self._leases.open(session, now_s)
        self._links[session] = link

    def link(self, session: SessionId) -> LinkPlan:
        """What it writes of each page."""
        return self._links[session]

    def heard(self, session: SessionId, now_s: float) -> bool:
        """It gave a sign of life; False once its lease is over: it was cut off, and its writes are not waited for."""
        return self._leases.renew(session, now_s)

    def silent(self, now_s: float) -> list[SessionId]:
        """Those whose lease is over."""
        return self._leases.expired(now_s)

    def end(self, session: SessionId) -> None:
        """It is over."""
        self._leases.end(session)
        self._links.pop(session, None)

    def cut_off(self, session: SessionId) -> bool:
        """Whether it has to be cut off; once, for fencing takes as long as it takes: a stopped process may wake up."""
        first = session not in self._cut
        self._cut.add(session)
        return first

    def fenced(self, session: SessionId) -> None:
        """It can write no more."""
        self._cut.discard(session)


_MAX_ENDED = 65_536
OVER = "this transfer is over already"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ended:
    at_s: float
    error: BatonError


class TransferBook:
    """Pure. What is over is bounded in time and number.

    Args:
        keep_s: How long it is remembered that a transfer is over.
        checksums: Whether commits must carry them.
    """

    def __init__(self, *, keep_s: float, checksums: bool) -> None:
        self._keep_s = keep_s
        self._checksums = checksums
        self._open: dict[XferId, Transfer] = {}
        self._ended: OrderedDict[XferId, _Ended] = OrderedDict()

    def __len__(self) -> int:
        """Those under way."""
        return len(self._open)

    def __iter__(self) -> Iterator[Transfer]:
        """Those under way; they may end meanwhile."""
        return iter(tuple(self._open.values()))

    def find(self, xfer_id: XferId) -> Transfer | None:
        """It, while it is under way."""
        return self._open.get(xfer_id)

    def ended_with(self, xfer_id: XferId) -> BatonError | None:
        """What it ended with; None if it did not, or long ago."""
        ended = self._ended.get(xfer_id)
        return ended.error if ended else None

    def open(self, permit: Permit, state: TransferState, now_s: float) -> Transfer:
        """The first word of it."""
        transfer = Transfer(permit=permit, state=state, since_s=now_s, checksums=self._checksums)
        self._open[permit.xfer_id] = transfer
        return transfer

    def shut(self, xfer_id: XferId, error: BatonError, now_s: float) -> None:
        """It is over, perhaps before its first word came; what it first ended with counts."""
        self._open.pop(xfer_id, None)
        self._ended.setdefault(xfer_id, _Ended(at_s=now_s, error=error))
        if len(self._ended) > _MAX_ENDED:
            self._ended.popitem(last=False)

    def kept(
        self, transfer: Transfer, actions: list[LedgerAction], now_s: float
    ) -> list[LedgerAction]:
        """`actions`, which followed of an event that may have been the transfer's last."""
        if transfer.over:
            self.shut(transfer.xfer_id, transfer.error or TransferError(OVER), now_s)
        return actions

    def quarantined(self, peers: PeerBook) -> int:
        """Pages that nobody may use, because a prefill worker that was lost may still write there."""
        return sum(
            len(transfer.grant.blocks)
            for transfer in self
            if transfer.grant
            and any(part.session not in peers for part in transfer.parts.writers())
        )

    def forget_old(self, now_s: float) -> None:
        """Drops those that are over and whose messages cannot be on their way any more."""
        horizon_s = now_s - self._keep_s
        while self._ended and next(iter(self._ended.values())).at_s < horizon_s:
            self._ended.popitem(last=False)

    def check_integrity(self) -> None:
        """Raises InvariantError if it contradicts itself."""
        for xfer_id, transfer in self._open.items():
            transfer.check_integrity()
            if xfer_id != transfer.xfer_id or xfer_id in self._ended:
                raise InvariantError(f"transfer {xfer_id} is over and still here: {transfer!r}")


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
