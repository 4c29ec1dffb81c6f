"""The decode worker's book of hand-offs: what was promised to prefill workers, and what may be freed when.

A transfer becomes real when two independent messages have met: the router's word that it is wanted, and the prefill
worker's request for pages. Then pages are taken for the whole prompt, all or nothing; nobody waits while holding part.

    (router) EXPECTED ─┐                             commit verified
                       ├─ RESERVED ──── WRITING ───────────────────── COMMITTED   pages belong to the running sequence
    (peer)      ASKED ─┘     │             │ cancel, failure, peer lost
                             │             └──── ABORTING ─── quiesced or fenced ─┐
                             └───────────────────────────────── nobody writes ──── QUIESCED ─── engine has them ─── FREE

Pages that a peer may be writing to are freed only once it said that it has stopped, or can write no more.
"""

from collections import OrderedDict
from dataclasses import dataclass
from enum import Enum

from baton.errors import (
    BatonError,
    CancelledByPeerError,
    DeadlineError,
    InvariantError,
    TransferError,
    WorkerLostError,
)
from baton.ids import WorkerIdentity, XferId
from kv_transfer.messages import (
    AbortRequest,
    Commit,
    Committed,
    EndSession,
    Expected,
    FreePages,
    FromPeer,
    Granted,
    LedgerAction,
    LedgerEvent,
    PagesGone,
    PagesReserved,
    PeerFenced,
    Quiesced,
    Reserve,
    ReservePages,
    SessionId,
    SessionLost,
    StartDecoding,
    ToPeer,
    TransferFailed,
    Withdrawn,
)
from kv_transfer.plan import Grant


class TransferState(Enum):
    """Where one transfer stands on the decode worker."""

    EXPECTED = "expected"
    ASKED = "asked"
    RESERVED = "reserved"
    WRITING = "writing"
    ABORTING = "aborting"
    QUIESCED = "quiesced"
    COMMITTED = "committed"
    FREE = "free"


_S = TransferState
TRANSITIONS: dict[TransferState, frozenset[TransferState]] = {
    _S.EXPECTED: frozenset({_S.RESERVED, _S.FREE}),
    _S.ASKED: frozenset({_S.RESERVED, _S.FREE}),
    _S.RESERVED: frozenset({_S.WRITING, _S.QUIESCED, _S.FREE}),
    _S.WRITING: frozenset({_S.COMMITTED, _S.ABORTING, _S.QUIESCED}),
    _S.ABORTING: frozenset({_S.QUIESCED}),
    _S.QUIESCED: frozenset({_S.FREE}),
    _S.COMMITTED: frozenset(),
    _S.FREE: frozenset(),
}
_ENDS = frozenset({_S.COMMITTED, _S.FREE})
_MAX_ENDED = 65_536
_LOST = "the prefill worker was lost during the hand-off"
_OVER = "this transfer is over already"


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerLimits:
    """How long the ledger waits, in seconds, and what a page weighs.

    Attributes:
        expect_timeout_s: For the prefill worker's request after the router's word; covers queueing there.
        reserve_timeout_s: For the engine's pages, and for the router's word after the prefill worker's request.
        quiesce_timeout_s: For the answer to an abort before the peer is cut off.
        page_bytes: Bytes of one page over all layers.
    """

    expect_timeout_s: float
    reserve_timeout_s: float
    quiesce_timeout_s: float
    page_bytes: int


@dataclass(slots=True, eq=False)
class _Transfer:
    """One hand-off. A seam for later: attempts, tickets and leases will hang here."""

    xfer_id: XferId
    state: TransferState
    since_s: float
    num_blocks: int
    source: WorkerIdentity
    session: SessionId | None = None
    grant: Grant | None = None
    pages_held: bool = False
    error: BatonError | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ended:
    """How a transfer ended, for those who ask after it."""

    at_s: float
    error: BatonError


class TransferLedger:
    """Pure: no sockets, no clock, no engine. Time comes in as `now_s` (monotonic seconds).

    Every method returns the actions the shell must carry out, in order. Messages that are late, repeated or name nothing
    known are refused without effect and counted in `refused`. Not thread-safe: one owner.
    """

    def __init__(self, limits: LedgerLimits) -> None:
        self._limits = limits
        self._transfers: dict[XferId, _Transfer] = {}
        # Ids that ended here, so that a replayed or overtaken message cannot open them again.
        self._ended: OrderedDict[XferId, _Ended] = OrderedDict()
        self._cut: set[SessionId] = set()
        self.refused = 0

    def handle(self, event: LedgerEvent, now_s: float) -> list[LedgerAction]:
        """Applies one event."""
        match event:
            case Expected():
                return self._expect(event, now_s)
            case FromPeer():
                return self._from_peer(event, now_s)
            case PagesReserved():
                return self._reserved(event, now_s)
            case PagesGone():
                return self._gone(event, now_s)
            case Withdrawn():
                return self._withdraw(event, now_s)
            case SessionLost():
                return self._session_lost(event.session, now_s)
            case PeerFenced():
                return self._fenced(event.session, now_s)

    def tick(self, now_s: float) -> list[LedgerAction]:
        """Checks every deadline; call it at least a few times per second, whether or not there is new work."""
        actions: list[LedgerAction] = []
        for transfer in list(self._transfers.values()):
            actions += self._check_deadline(transfer, now_s)
        horizon_s = now_s - self._limits.expect_timeout_s
        while self._ended and next(iter(self._ended.values())).at_s < horizon_s:
            self._ended.popitem(last=False)
        return actions

    def state(self, xfer_id: XferId) -> TransferState | None:
        """Where a transfer stands; None once it is over."""
        transfer = self._transfers.get(xfer_id)
        return transfer.state if transfer else None

    def in_flight(self) -> int:
        """Transfers that are not over."""
        return len(self._transfers)

    def check_integrity(self) -> None:
        """Raises InvariantError if the book contradicts itself."""
        for transfer in self._transfers.values():
            granted = transfer.state in (_S.WRITING, _S.ABORTING)
            consistent = (
                transfer.state not in _ENDS
                and (transfer.grant is not None or not granted)
                and (transfer.session is not None or transfer.state in (_S.EXPECTED, _S.QUIESCED))
                and transfer.pages_held == (transfer.state not in (_S.EXPECTED, _S.ASKED))
                and transfer.xfer_id not in self._ended
            )
            if not consistent:
                raise InvariantError(f"transfer {transfer.xfer_id} is inconsistent: {transfer!r}")

    def _expect(self, event: Expected, now_s: float) -> list[LedgerAction]:
        ended = self._ended.get(event.xfer_id)
        if ended is not None:
            # The prefill worker gave up before the router's word arrived, or this is a replay.
            self.refused += 1
            return [TransferFailed(xfer_id=event.xfer_id, error=ended.error)]
        transfer = self._transfers.get(event.xfer_id)
        if transfer is None:
            self._transfers[event.xfer_id] = _Transfer(
                xfer_id=event.xfer_id,
                state=_S.EXPECTED,
                since_s=now_s,
                num_blocks=event.num_blocks,
                source=event.source,
            )
            return []
        if transfer.state is not _S.ASKED:
            self.refused += 1
            return []
        mismatch = _mismatch(event.source, event.num_blocks, transfer.source, transfer.num_blocks)
        if mismatch is not None:
            error = TransferError(mismatch)
            return [*self._abort(transfer, error, now_s), *_failed(transfer, error)]
        return self._ask_engine(transfer, now_s)

    def _from_peer(self, event: FromPeer, now_s: float) -> list[LedgerAction]:
        match event.message:
            case Reserve():
                return self._asked(event, event.message, now_s)
            case Commit():
                return self._commit(event, event.message, now_s)
            case Quiesced():
                return self._quiesced(event, event.message.xfer_id, now_s)

    def _asked(self, event: FromPeer, asked: Reserve, now_s: float) -> list[LedgerAction]:
        transfer = self._transfers.get(asked.xfer_id)
        if transfer is None and asked.xfer_id not in self._ended:
            self._transfers[asked.xfer_id] = _Transfer(
                xfer_id=asked.xfer_id,
                state=_S.ASKED,
                since_s=now_s,
                num_blocks=asked.num_blocks,
                source=event.peer,
                session=event.session,
            )
            return []
        if transfer is None:
            return self._refuse(event, asked.xfer_id, self._ended[asked.xfer_id].error)
        if transfer.state is not _S.EXPECTED:
            return self._refuse(event, asked.xfer_id, repeated=self._owns(event, transfer))
        mismatch = _mismatch(transfer.source, transfer.num_blocks, event.peer, asked.num_blocks)
        if mismatch is not None:
            return self._refuse(event, asked.xfer_id, TransferError(mismatch))
        transfer.session = event.session
        return self._ask_engine(transfer, now_s)

    def _ask_engine(self, transfer: _Transfer, now_s: float) -> list[LedgerAction]:
        self._move(transfer, _S.RESERVED, now_s)
        transfer.pages_held = True
        return [ReservePages(xfer_id=transfer.xfer_id)]

    def _reserved(self, event: PagesReserved, now_s: float) -> list[LedgerAction]:
        transfer = self._transfers.get(event.xfer_id)
        if transfer is None or transfer.state is not _S.RESERVED or transfer.grant is not None:
            return []  # given up meanwhile: `FreePages` is already on its way to the engine
        assert transfer.session is not None
        transfer.grant = event.grant
        self._move(transfer, _S.WRITING, now_s)
        granted = Granted(xfer_id=event.xfer_id, grant=event.grant)
        return [ToPeer(session=transfer.session, message=granted)]

    def _commit(self, event: FromPeer, commit: Commit, now_s: float) -> list[LedgerAction]:
        transfer = self._transfers.get(commit.xfer_id)
        if transfer is None or not self._owns(event, transfer):
            return self._refuse(event, commit.xfer_id)
        if transfer.state is not _S.WRITING:
            # Crossed our abort, which the peer will answer; or it commits what was never granted.
            return self._refuse(event, commit.xfer_id, repeated=True)
        assert transfer.grant is not None
        pages = len(transfer.grant.blocks)
        wanted = (pages, pages * self._limits.page_bytes)
        if (commit.num_blocks, commit.num_bytes) != wanted:
            error = TransferError(
                f"committed {commit.num_blocks} pages and {commit.num_bytes} bytes, "
                f"granted {wanted[0]} and {wanted[1]}"
            )
            return [*self._abort(transfer, error, now_s), *_failed(transfer, error)]
        self._move(transfer, _S.COMMITTED, now_s)
        return [
            StartDecoding(xfer_id=commit.xfer_id, first_tokens=commit.first_tokens),
            ToPeer(session=event.session, message=Committed(xfer_id=commit.xfer_id)),
        ]

    def _quiesced(self, event: FromPeer, xfer_id: XferId, now_s: float) -> list[LedgerAction]:
        error = CancelledByPeerError("the prefill worker gave this transfer up")
        transfer = self._transfers.get(xfer_id)
        if transfer is None:
            # Perhaps before the router's word, which then finds it over.
            self.refused += 1
            self._remember(xfer_id, error, now_s)
            return []
        unasked = transfer.state is _S.EXPECTED and transfer.source == event.peer
        if not unasked and not self._owns(event, transfer):
            self.refused += 1
            return []
        live = transfer.state in (_S.EXPECTED, _S.RESERVED, _S.WRITING)
        tell = _failed(transfer, error) if live else []
        return [*tell, *self._settle(transfer, error, now_s)]

    def _withdraw(self, event: Withdrawn, now_s: float) -> list[LedgerAction]:
        transfer = self._transfers.get(event.xfer_id)
        if transfer is None:
            # Withdrawn before anybody asked for pages: whoever asks later is refused at once.
            self._remember(event.xfer_id, event.error, now_s)
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
        error = event.error or TransferError("the engine gave the reserved pages up")
        if transfer.state is _S.RESERVED:
            actions = [*self._abort_message(transfer, error), *_failed(transfer, error)]
            transfer.error = error
            self._move(transfer, _S.FREE, now_s)
            return actions
        raise InvariantError(f"the engine freed pages of {event.xfer_id} while they are written")

    def _session_lost(self, session: SessionId, now_s: float) -> list[LedgerAction]:
        error = WorkerLostError(_LOST)
        actions: list[LedgerAction] = []
        for transfer in self._of_session(session):
            if transfer.state in (_S.ASKED, _S.RESERVED, _S.WRITING):
                actions += _failed(transfer, error) if transfer.pages_held else []
                actions += self._abort(transfer, error, now_s, tell_peer=False)
        return actions

    def _fenced(self, session: SessionId, now_s: float) -> list[LedgerAction]:
        actions = self._session_lost(session, now_s)
        for transfer in self._of_session(session):
            if transfer.state is _S.ABORTING:
                actions += self._settle(transfer, WorkerLostError(_LOST), now_s)
        self._cut.discard(session)
        return actions

    def _check_deadline(self, transfer: _Transfer, now_s: float) -> list[LedgerAction]:
        limits, waited_s = self._limits, now_s - transfer.since_s
        match transfer.state:
            case TransferState.EXPECTED if waited_s > limits.expect_timeout_s:
                error = DeadlineError(f"no prefill worker asked for pages in {waited_s:.0f} s")
                return [*self._abort(transfer, error, now_s), *_failed(transfer, error)]
            case TransferState.ASKED if waited_s > limits.reserve_timeout_s:
                error = DeadlineError(f"no router announced this transfer in {waited_s:.0f} s")
                return self._abort(transfer, error, now_s)
            case TransferState.RESERVED if waited_s > limits.reserve_timeout_s:
                late = TransferError(
                    f"no room for {transfer.num_blocks} pages on the decode worker in {waited_s:.0f} s"
                )
                return [*self._abort(transfer, late, now_s), *_failed(transfer, late)]
            case TransferState.ABORTING if waited_s > limits.quiesce_timeout_s:
                return self._cut_off(transfer)
            case _:
                return []

    def _cut_off(self, transfer: _Transfer) -> list[LedgerAction]:
        assert transfer.session is not None
        if transfer.session in self._cut:
            return []  # fencing takes as long as it takes: a stopped process may wake up and write
        self._cut.add(transfer.session)
        error = TransferError("the prefill worker did not confirm that it stopped writing")
        return [EndSession(session=transfer.session, error=error)]

    def _abort(
        self, transfer: _Transfer, error: BatonError, now_s: float, *, tell_peer: bool = True
    ) -> list[LedgerAction]:
        """Ends a transfer from this side; pages that may be written to stay until the peer has stopped."""
        told = self._abort_message(transfer, error) if tell_peer else []
        if transfer.state is _S.WRITING:
            self._move(transfer, _S.ABORTING, now_s)
            return told
        return [*told, *self._settle(transfer, error, now_s)]

    def _settle(self, transfer: _Transfer, error: BatonError, now_s: float) -> list[LedgerAction]:
        """Nobody writes (any more): whatever pages there are go back."""
        if transfer.state is _S.QUIESCED:
            return []
        transfer.error = error
        if not transfer.pages_held:
            self._move(transfer, _S.FREE, now_s)
            return []
        self._move(transfer, _S.QUIESCED, now_s)
        return [FreePages(xfer_id=transfer.xfer_id)]

    def _abort_message(self, transfer: _Transfer, error: BatonError) -> list[LedgerAction]:
        if transfer.session is None:
            return []
        message = AbortRequest(xfer_id=transfer.xfer_id, error=error)
        return [ToPeer(session=transfer.session, message=message)]

    def _refuse(
        self,
        event: FromPeer,
        xfer_id: XferId,
        error: BatonError | None = None,
        *,
        repeated: bool = False,
    ) -> list[LedgerAction]:
        """Counts a message that fits nothing; tells the peer to stop unless it is only a repetition."""
        self.refused += 1
        if repeated:
            return []
        message = AbortRequest(xfer_id=xfer_id, error=error or TransferError(_OVER))
        return [ToPeer(session=event.session, message=message)]

    def _owns(self, event: FromPeer, transfer: _Transfer | None) -> bool:
        return transfer is not None and transfer.session == event.session

    def _of_session(self, session: SessionId) -> list[_Transfer]:
        return [t for t in self._transfers.values() if t.session == session]

    def _move(self, transfer: _Transfer, state: TransferState, now_s: float) -> None:
        if state not in TRANSITIONS[transfer.state]:
            raise InvariantError(f"transfer {transfer.xfer_id}: {transfer.state} to {state}")
        transfer.state = state
        transfer.since_s = now_s
        if state in _ENDS:
            del self._transfers[transfer.xfer_id]
            self._remember(transfer.xfer_id, transfer.error or TransferError(_OVER), now_s)

    def _remember(self, xfer_id: XferId, error: BatonError, now_s: float) -> None:
        self._ended.setdefault(xfer_id, _Ended(at_s=now_s, error=error))
        if len(self._ended) > _MAX_ENDED:
            self._ended.popitem(last=False)


def _failed(transfer: _Transfer, error: BatonError) -> list[LedgerAction]:
    return [TransferFailed(xfer_id=transfer.xfer_id, error=error)]


def _mismatch(
    expected: WorkerIdentity, expected_blocks: int, peer: WorkerIdentity, blocks: int
) -> str | None:
    """Why the router's word and the peer's request do not belong together, or None."""
    if expected != peer:
        return f"expected from {expected}, asked by {peer}"
    if expected_blocks != blocks:
        return f"the prompt takes {expected_blocks} pages, asked for {blocks}"
    return None
