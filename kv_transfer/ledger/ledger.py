"""The decode worker's side of all hand-offs: what was promised to prefill workers, and what may be freed when.

Counterpart of `outbox.py`. Decides which transfer a message means, whether its sender may say it, and which session has
been silent for too long; how one transfer goes on stands in `transfer.py`, with its states;
who writes which bytes of it in `sender_parts.py`.

Pages that a peer may be writing to are freed, or granted to another one, only once that peer said that it has stopped,
or can write no more. What a lost peer was granted stays out of use until then.

    router, sessions, engine ── LedgerEvent ──▶ TransferLedger ── LedgerAction ──▶ engine, sessions, the leg's lifecycle
"""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from baton.errors import (
    BatonError,
    CancelledByPeerError,
    CorruptKvError,
    HandedOffError,
    TransferError,
    UnreachableError,
    WorkerLostError,
)
from baton.ids import WorkerIdentity, XferId
from baton.story import StoryEntry, StoryLog
from kv_transfer.heads import LinkPlan
from kv_transfer.lease import SessionLeases
from kv_transfer.ledger.transfer import (
    LOST,
    EndSession,
    LedgerAction,
    LedgerLimits,
    ToPeer,
    Transfer,
    TransferFailed,
    TransferState,
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
class PagesReleased:
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
    | PagesReleased
    | PagesVerified
    | Withdrawn
    | SessionLost
    | PeerFenced
)


_S = TransferState
_OVER = "this transfer is over already"
_COMMITTED = "the pages are committed already"
_MAX_ENDED = 65_536


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ended:
    """A transfer that is over: remembered so that a replayed or overtaken message cannot open it again."""

    at_s: float
    error: BatonError


@dataclass(frozen=True, slots=True, kw_only=True)
class _Overdue:
    """In a transfer's story: it waited for too long."""

    error: BatonError


class TransferLedger:
    """Pure: no sockets, no clock, no engine. Time comes in as `now_s` (monotonic seconds).

    Every method returns the actions the shell must carry out, in order. Messages that are late, repeated or name
    nothing known are refused without effect and counted in `refused`. Not thread-safe: one owner.
    """

    def __init__(self, limits: LedgerLimits) -> None:
        self._limits = limits
        self._transfers: dict[XferId, Transfer] = {}
        self._ended: OrderedDict[XferId, _Ended] = OrderedDict()  # bounded in time and number
        self._leases = SessionLeases(limits.lease_s)
        # What each open session writes of a page. A session that is over is in neither,
        # though its peer may still write.
        self._links: dict[SessionId, LinkPlan] = {}
        self._cut_sessions: set[SessionId] = set()
        self._log = StoryLog("ledger")
        self.refused = 0
        self.corrupted = 0

    def handle(self, event: LedgerEvent, now_s: float) -> list[LedgerAction]:
        """Applies one event."""
        match event:
            case FromPeer():
                return self._from_peer(event, now_s)
            case Expected():
                return self._expect(event, now_s)
            case Reassigned():
                return self._reassign(event, now_s)
            case PagesReserved():
                return self._reserved(event, now_s)
            case PagesReleased():
                return self._pages_released(event, now_s)
            case PagesVerified():
                return self._verified(event, now_s)
            case Withdrawn():
                return self._withdraw(event, now_s)
            case SessionOpened():
                self._leases.open(event.session, now_s)
                self._links[event.session] = event.link
                return []
            case SessionLost():
                return self._session_lost(event, now_s)
            case PeerFenced():
                return self._fenced(event, now_s)

    def tick(self, now_s: float) -> list[LedgerAction]:
        """Checks every lease and deadline; call it at least a few times per second,
        whether or not there is new work.
        """
        actions: list[LedgerAction] = []
        for session in self._leases.expired(now_s):
            silent = UnreachableError("the prefill worker gave no sign of life within its lease")
            actions += self._cut_off(session, silent)
            actions += self._session_lost(SessionLost(session=session), now_s, silent)
        for transfer in self._open_transfers():
            actions += self._check_deadlines(transfer, now_s)
        self._forget_ended(now_s)
        return actions

    def state(self, xfer_id: XferId) -> TransferState | None:
        """Where a transfer stands; None once it is over."""
        transfer = self._transfers.get(xfer_id)
        return transfer.state if transfer else None

    def in_flight(self) -> int:
        """Transfers that are not over."""
        return len(self._transfers)

    def quarantined(self) -> int:
        """Pages that are out of use because a prefill worker that was lost may still write there."""
        return sum(
            len(transfer.grant.blocks)
            for transfer in self._transfers.values()
            if transfer.grant
            and any(part.session not in self._links for part in transfer.parts.writers())
        )

    def story(self, xfer_id: XferId) -> tuple[StoryEntry, ...]:
        """What has lately happened to a transfer, oldest first."""
        return self._log.story(xfer_id)

    def check_integrity(self) -> None:
        """Raises InvariantError if the ledger contradicts itself."""
        for xfer_id, transfer in self._transfers.items():
            transfer.check_integrity()
            if xfer_id != transfer.xfer_id or xfer_id in self._ended:
                raise transfer.broken(f"over and still here: {transfer!r}")

    def _expect(self, event: Expected, now_s: float) -> list[LedgerAction]:
        permit = event.permit
        ended = self._ended.get(permit.xfer_id)
        if ended is not None:
            # The prefill worker gave up before the router's word arrived, or this is a replay.
            self.refused += 1
            return [TransferFailed(xfer_id=permit.xfer_id, error=ended.error)]
        transfer = self._transfers.get(permit.xfer_id)
        if transfer is None:
            return self._kept(self._open(permit, _S.EXPECTED, now_s), event, [], now_s)
        if transfer.state is not _S.ASKED:
            self.refused += 1
            return []
        if transfer.permit != permit:
            error = TransferError("the prefill worker showed another permit than the router")
            return self._kept(transfer, event, transfer.fail(error, now_s), now_s)
        return self._kept(transfer, event, transfer.request_pages(now_s), now_s)

    def _reassign(self, event: Reassigned, now_s: float) -> list[LedgerAction]:
        permit = event.permit
        transfer = self._transfers.get(permit.xfer_id)
        if transfer is not None and transfer.permit == permit:
            transfer.reassigned = True  # its request overtook the router's word
            return []
        if transfer is None or not transfer.takes_over(permit):
            self.refused += 1
            return []
        return self._kept(transfer, event, transfer.take_over(permit, now_s), now_s)

    def _withdraw(self, event: Withdrawn, now_s: float) -> list[LedgerAction]:
        transfer = self._transfers.get(event.xfer_id)
        if transfer is None:
            # Withdrawn before a peer asked for pages: one that asks later is refused at once.
            self._log.record(event.xfer_id, now_s, event)
            self._shut(event.xfer_id, event.error, now_s)
            return []
        if transfer.state in (_S.ABORTING, _S.QUIESCED):
            return []
        return self._kept(transfer, event, transfer.abort(event.error, now_s), now_s)

    def _from_peer(self, event: FromPeer, now_s: float) -> list[LedgerAction]:
        # A peer that speaks is alive. After its lease nothing it says counts: it was cut off,
        # and its writes are not waited for.
        if not self._leases.renew(event.session, now_s):
            self.refused += 1
            return []
        match event.message:
            case Reserve():
                return self._asked(event, event.message, now_s)
            case Commit():
                return self._commit(event, event.message, now_s)
            case Quiesced():
                return self._quiesced(event, event.message, now_s)
            case Heartbeat():
                return []

    def _asked(self, event: FromPeer, message: Reserve, now_s: float) -> list[LedgerAction]:
        permit = message.permit
        if permit.source != event.peer:
            return self._refuse(event, permit.xfer_id, permit.attempt, now_s)
        ended = self._ended.get(permit.xfer_id)
        if ended is not None:
            return self._refuse(event, permit.xfer_id, permit.attempt, now_s, ended.error)
        link = self._links[event.session]
        transfer = self._transfers.get(permit.xfer_id)
        if transfer is None:
            opened = self._open(permit, _S.ASKED, now_s)
            return self._kept(opened, message, opened.join(event.session, link, now_s), now_s)
        actions: list[LedgerAction] = []
        if transfer.takes_over(permit):
            # The permit is the router's word too; the other copy is still on its way.
            actions = transfer.take_over(permit, now_s)
        if transfer.permit != permit:
            # Should verification fail, D's leg is told of it.
            committed = transfer.state is _S.VERIFYING
            error = HandedOffError(_COMMITTED) if committed else None
            return self._refuse(event, permit.xfer_id, permit.attempt, now_s, error)
        if not transfer.may_join(link):
            repeated = transfer.parts.of(event.session) is not None
            return self._refuse(event, permit.xfer_id, permit.attempt, now_s, repeated=repeated)
        actions += transfer.join(event.session, link, now_s)
        return self._kept(transfer, message, actions, now_s)

    def _commit(self, event: FromPeer, commit: Commit, now_s: float) -> list[LedgerAction]:
        transfer = self._transfers.get(commit.xfer_id)
        part = transfer.parts.writer(event.session, commit.attempt) if transfer else None
        if transfer is None or part is None:
            return self._refuse(event, commit.xfer_id, commit.attempt, now_s)
        if transfer.state is not _S.WRITING:
            # Crossed our abort, which the peer will answer.
            return self._refuse(event, commit.xfer_id, commit.attempt, now_s, repeated=True)
        actions = transfer.commit(part, commit, now_s)
        self.corrupted += isinstance(transfer.error, CorruptKvError)
        return self._kept(transfer, commit, actions, now_s)

    def _quiesced(self, event: FromPeer, said: Quiesced, now_s: float) -> list[LedgerAction]:
        error = CancelledByPeerError("the prefill worker gave this transfer up")
        transfer = self._transfers.get(said.xfer_id)
        if transfer is None:
            # Perhaps before the router's word, which then finds it over.
            self.refused += 1
            self._log.record(said.xfer_id, now_s, said)
            self._shut(said.xfer_id, error, now_s)
            return []
        writer = transfer.parts.writer(event.session, said.attempt)
        if writer is not None:
            actions = transfer.writer_stopped(writer, error, now_s)
            return self._kept(transfer, said, actions, now_s)
        current = said.attempt == transfer.attempt and not transfer.unclaimed
        if not current or not transfer.waits_for_peers or not self._is_needed(transfer, event):
            self.refused += 1
            return []
        return self._kept(transfer, said, transfer.sender_lost(event.session, error, now_s), now_s)

    def _is_needed(self, transfer: Transfer, event: FromPeer) -> bool:
        link, ours = self._links[event.session], transfer.permit.source == event.peer
        return transfer.needs(event.session, link, ours=ours)

    def _session_lost(
        self, event: SessionLost | PeerFenced, now_s: float, error: BatonError | None = None
    ) -> list[LedgerAction]:
        """Of parts that were committed all that their sender had to say is here; the others are lost."""
        session = event.session
        self._leases.end(session)
        self._links.pop(session, None)
        actions: list[LedgerAction] = []
        for transfer in self._open_transfers():
            transfer.parts.disconnected(session)
            part = transfer.parts.of(session)
            if part is not None and part.commit is None and transfer.waits_for_peers:
                told = transfer.sender_lost(session, error or WorkerLostError(LOST), now_s)
                actions += self._kept(transfer, event, told, now_s)
        return actions

    def _fenced(self, event: PeerFenced, now_s: float) -> list[LedgerAction]:
        actions = self._session_lost(event, now_s)
        for transfer in self._open_transfers():
            for part in transfer.parts.writers():
                if part.session == event.session:
                    told = transfer.writer_stopped(part, WorkerLostError(LOST), now_s)
                    actions += self._kept(transfer, event, told, now_s)
        self._cut_sessions.discard(event.session)
        return actions

    def _refuse(
        self,
        event: FromPeer,
        xfer_id: XferId,
        attempt: int,
        now_s: float,
        error: BatonError | None = None,
        *,
        repeated: bool = False,
    ) -> list[LedgerAction]:
        """Counts a message that fits nothing; tells the peer to stop unless it is only a repetition."""
        self.refused += 1
        actions: list[LedgerAction] = []
        if not repeated:
            error = error or TransferError(_OVER)
            message = AbortRequest(xfer_id=xfer_id, attempt=attempt, error=error)
            actions = [ToPeer(session=event.session, message=message)]
        self._log.record(xfer_id, now_s, event.message, actions)
        return actions

    def _reserved(self, event: PagesReserved, now_s: float) -> list[LedgerAction]:
        transfer = self._transfers.get(event.xfer_id)
        if transfer is None:
            return []
        return self._kept(transfer, event, transfer.reserved(event.grant, now_s), now_s)

    def _verified(self, event: PagesVerified, now_s: float) -> list[LedgerAction]:
        transfer = self._transfers.get(event.xfer_id)
        part = transfer.part_under_verification(event.session, event.attempt) if transfer else None
        if transfer is None or part is None:
            return []
        actions = transfer.verified(part, event.fault, now_s)
        self.corrupted += isinstance(transfer.error, CorruptKvError)
        return self._kept(transfer, event, actions, now_s)

    def _pages_released(self, event: PagesReleased, now_s: float) -> list[LedgerAction]:
        transfer = self._transfers.get(event.xfer_id)
        if transfer is None:
            return []
        return self._kept(transfer, event, transfer.pages_released(event.error, now_s), now_s)

    def _check_deadlines(self, transfer: Transfer, now_s: float) -> list[LedgerAction]:
        actions: list[LedgerAction] = []
        for session in transfer.slow_to_stop(self._limits, now_s):
            # A writer that was asked to stop has to answer in time.
            error = TransferError("the prefill worker did not confirm that it stopped writing")
            actions += self._cut_off(session, error)
        error_of_wait = transfer.overdue(self._limits, now_s)
        if error_of_wait is None:
            return actions
        # Of what the router never announced there is no leg to be told.
        ends = transfer.abort if transfer.state is _S.ASKED else transfer.fail
        told = ends(error_of_wait, now_s)
        return [*actions, *self._kept(transfer, _Overdue(error=error_of_wait), told, now_s)]

    def _cut_off(self, session: SessionId, error: BatonError) -> list[LedgerAction]:
        """Once per session, for fencing takes as long as it takes: a stopped process may wake up."""
        if session in self._cut_sessions:
            return []
        self._cut_sessions.add(session)
        return [EndSession(session=session, error=error)]

    def _open(self, permit: Permit, state: TransferState, now_s: float) -> Transfer:
        transfer = Transfer(
            permit=permit,
            state=state,
            since_s=now_s,
            checksums=self._limits.checksums,
            log=self._log,
        )
        self._transfers[permit.xfer_id] = transfer
        return transfer

    def _open_transfers(self) -> Iterator[Transfer]:
        """Those under way; they may end meanwhile."""
        return iter(tuple(self._transfers.values()))

    def _kept(
        self,
        transfer: Transfer,
        event: "LedgerEvent | ToDecode | _Overdue",
        actions: list[LedgerAction],
        now_s: float,
    ) -> list[LedgerAction]:
        """What followed of an event, which is logged and may have been the transfer's last."""
        self._log.record_kinds(transfer.xfer_id, now_s, event, actions)
        if transfer.ended:
            committed = transfer.state is _S.COMMITTED
            over = HandedOffError(_COMMITTED) if committed else transfer.error
            self._shut(transfer.xfer_id, over or TransferError(_OVER), now_s)
        return actions

    def _shut(self, xfer_id: XferId, error: BatonError, now_s: float) -> None:
        """It is over, perhaps before its first word came; what it first ended with counts."""
        self._transfers.pop(xfer_id, None)
        self._ended.setdefault(xfer_id, _Ended(at_s=now_s, error=error))
        if len(self._ended) > _MAX_ENDED:
            self._ended.popitem(last=False)

    def _forget_ended(self, now_s: float) -> None:
        """Drops those that are over and whose messages cannot be on their way any more."""
        horizon_s = now_s - self._limits.expect_timeout_s
        while self._ended and next(iter(self._ended.values())).at_s < horizon_s:
            self._ended.popitem(last=False)
