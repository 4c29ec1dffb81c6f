"""One hand-off as the decode worker keeps it: from the first word on it until its pages have an owner again.

Pages are reserved once two independent messages have arrived: the router's word that it is wanted (`Expected`), and the
prefill worker's request for pages (`Reserve`). Then pages are taken for the whole prompt, all or nothing;
nothing waits while holding part.

    (router) EXPECTED ─┐                      commit       checksums right
                       ├─ RESERVED ─ WRITING ──────── VERIFYING ──────── COMMITTED   pages belong to the running sequence
    (peer)      ASKED ─┘     │          │ │               │ wrong
                    peer lost│   peer lost│ cancel        │
                             ▼          ▼ ▼               ▼
           later attempt ◀─ ORPHANED   ABORTING ──────── QUIESCED ── engine has them ── FREE
                             └ no one came ┘  the writer stopped, or can write no more

Mostly one session brings the pages; where ranks of a prefill worker share the heads out, each brings a part
(`sender_parts.py`). The first rank that asks makes the transfer RESERVED, the last one that commits makes it VERIFYING,
and any that is lost makes it ORPHANED. Which transfer a message means, and whether its sender may say it,
is decided by the ledger (`ledger.py`).
"""

from dataclasses import dataclass, field
from enum import Enum

from baton.errors import (
    BatonError,
    CancelledByPeerError,
    CorruptKvError,
    DeadlineError,
    InvariantError,
    NoRoomError,
    TransferError,
    WorkerLostError,
)
from baton.generation import TokenSample
from baton.ids import XferId
from baton.story import StoryLog
from kv_transfer.heads import LinkPlan
from kv_transfer.ledger.sender_parts import SenderPart, SenderParts
from kv_transfer.memory.checksum import checksum_bytes
from kv_transfer.messages import AbortRequest, Commit, Committed, PagesGranted, SessionId, ToPrefill
from kv_transfer.plan import Grant
from kv_transfer.ticket import Permit


class TransferState(Enum):
    """Where one transfer stands on the decode worker."""

    EXPECTED = "expected"
    ASKED = "asked"
    RESERVED = "reserved"
    WRITING = "writing"
    VERIFYING = "verifying"
    ORPHANED = "orphaned"
    ABORTING = "aborting"
    QUIESCED = "quiesced"
    COMMITTED = "committed"
    FREE = "free"


_S = TransferState
TRANSITIONS: dict[TransferState, frozenset[TransferState]] = {
    _S.EXPECTED: frozenset({_S.RESERVED, _S.ORPHANED, _S.FREE}),
    _S.ASKED: frozenset({_S.RESERVED, _S.FREE}),
    _S.RESERVED: frozenset({_S.WRITING, _S.ORPHANED, _S.QUIESCED, _S.FREE}),
    _S.WRITING: frozenset({_S.VERIFYING, _S.ORPHANED, _S.ABORTING, _S.QUIESCED}),
    _S.VERIFYING: frozenset({_S.COMMITTED, _S.QUIESCED}),
    _S.ORPHANED: frozenset({_S.RESERVED, _S.WRITING, _S.ABORTING, _S.QUIESCED, _S.FREE}),
    _S.ABORTING: frozenset({_S.QUIESCED}),
    _S.QUIESCED: frozenset({_S.FREE}),
    _S.COMMITTED: frozenset(),
    _S.FREE: frozenset(),
}
ANNOUNCED = frozenset({_S.EXPECTED, _S.RESERVED, _S.WRITING, _S.ORPHANED})
"""By the router, and prefill workers may still come or go."""
ENDS = frozenset({_S.COMMITTED, _S.FREE})


LOST = "the prefill worker was lost during the hand-off"


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerLimits:
    """How long the ledger waits, in seconds.

    Attributes:
        expect_timeout_s: For the prefill worker's request after the router's word; covers queueing there.
        reserve_timeout_s: For the engine's pages, for the router's word after the prefill worker's request, and for the
            other ranks of a prefill worker after the first one was granted pages.
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


_TAKEN_OVER = "another prefill worker takes this hand-off over"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReservePages:
    """To the engine: take pages for this transfer's prompt."""

    xfer_id: XferId


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyPages:
    """To a thread of the shell's: compare what came over `link`, in `session`,
    with these checksums (`PagesVerified` answers).
    """

    xfer_id: XferId
    session: SessionId
    attempt: int
    link: LinkPlan
    grant: Grant
    checksums: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class StartDecoding:
    """To the engine: the pages hold the prompt's KV."""

    xfer_id: XferId
    first_tokens: tuple[TokenSample, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FreePages:
    """To the engine: give the pages back (`PagesReleased` answers)."""

    xfer_id: XferId


@dataclass(frozen=True, slots=True, kw_only=True)
class ToPeer:
    """To the session: send this."""

    session: SessionId
    message: ToPrefill


@dataclass(frozen=True, slots=True, kw_only=True)
class WriterLost:
    """To the leg: the prefill worker of this attempt is gone. The reservation is kept for a moment, for another one."""

    xfer_id: XferId
    attempt: int
    error: BatonError


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferFailed:
    """To the leg: its KV will not come. Said once, and never of a transfer that the router withdrew."""

    xfer_id: XferId
    error: BatonError


@dataclass(frozen=True, slots=True, kw_only=True)
class EndSession:
    """To the session: this peer does not answer; cut it off and fence it."""

    session: SessionId
    error: BatonError


LedgerAction = (
    ReservePages
    | VerifyPages
    | StartDecoding
    | FreePages
    | ToPeer
    | WriterLost
    | TransferFailed
    | EndSession
)


@dataclass(slots=True, eq=False)
class Transfer:
    """One transfer. Pure; methods return the actions that follow, in order. Changed by the ledger only.

    Attributes:
        permit: Of the attempt that counts now.
        state: Where it stands.
        since_s: When it entered the state, or when the wait in it began anew.
        checksums: Whether commits must carry them.
        log: Of the ledger.
        parts: Which sessions bring what, and which may still write.
        pages_held: Whether the engine was asked for pages and has not got them back.
        grant: The pages, once the engine took them.
        reassigned: Whether the router has named the next attempt since the last writer was lost.
        error: What the last writer was lost with, or the transfer ended with.
    """

    permit: Permit
    state: TransferState
    since_s: float
    checksums: bool
    log: StoryLog
    parts: SenderParts = field(default_factory=SenderParts)
    pages_held: bool = False
    grant: Grant | None = None
    reassigned: bool = False
    error: BatonError | None = None

    @property
    def xfer_id(self) -> XferId:
        """Its name."""
        return self.permit.xfer_id

    @property
    def attempt(self) -> int:
        """The attempt that counts now."""
        return self.permit.attempt

    @property
    def ended(self) -> bool:
        """Whether the ledger is done with its pages."""
        return self.state in ENDS

    @property
    def unclaimed(self) -> bool:
        """Whether its attempt is lost, and the router has not named another one yet."""
        return self.state is _S.ORPHANED and not self.reassigned

    @property
    def waits_for_peers(self) -> bool:
        """Whether prefill workers may still join it, or be lost to it."""
        return self.state is _S.ASKED or self.state in ANNOUNCED

    def takes_over(self, permit: Permit) -> bool:
        """Whether `permit` is of a later attempt at the same reservation, while that is of use."""
        fits = (
            permit.attempt > self.attempt
            and permit.num_blocks == self.permit.num_blocks
            and permit.cache_scope == self.permit.cache_scope
        )
        return fits and self.state in ANNOUNCED

    def take_over(self, permit: Permit, now_s: float) -> list[LedgerAction]:
        """A later attempt begins: nothing of the earlier one counts any more, and its writer has to stop."""
        told = self._stop(CancelledByPeerError(_TAKEN_OVER), now_s)
        self.parts.dismiss()
        self.permit, self.reassigned = permit, True
        if self.state in (_S.RESERVED, _S.WRITING):
            self._move(_S.ORPHANED, now_s)
        self.since_s = now_s
        return told

    def may_join(self, link: LinkPlan) -> bool:
        """Whether the attempt still waits for what comes over `link`."""
        return self.waits_for_peers and not self.unclaimed and self.parts.fits(link)

    def join(self, session: SessionId, link: LinkPlan, now_s: float) -> list[LedgerAction]:
        """A prefill worker, or a rank of one, asks for pages."""
        if not self.parts:
            self.since_s = now_s
        part = SenderPart(session=session, attempt=self.attempt, link=link)
        self.parts.join(part)
        if self.state is _S.WRITING and self.grant is not None:
            return [self._grant_to(part, self.grant)]
        if self.state in (_S.EXPECTED, _S.ORPHANED):
            return self._provide_pages(now_s)
        return []

    def request_pages(self, now_s: float) -> list[LedgerAction]:
        """The router wants it too: the engine is asked for pages."""
        self._move(_S.RESERVED, now_s)
        self.pages_held = True
        return [ReservePages(xfer_id=self.xfer_id)]

    def reserved(self, grant: Grant, now_s: float) -> list[LedgerAction]:
        """The engine took the pages."""
        if not self.pages_held or self.grant is not None:
            return []
        if self.state is _S.RESERVED:
            self.grant = grant
            return self._grant_all(grant, now_s)
        if self.state is _S.ORPHANED:
            self.grant = grant
        return []  # else given up meanwhile: `FreePages` is already on its way to the engine

    def commit(self, part: SenderPart, commit: Commit, now_s: float) -> list[LedgerAction]:
        """A part is written, as its sender says; with the last one all are verified."""
        assert self.grant is not None
        fault = self._fault_of(commit, part, self.grant)
        if fault is not None:
            return self.fail(fault, now_s)
        self.parts.stopped(part)  # a commit says that nothing more will be written
        part.commit = commit
        if not self.parts.committed:
            return []
        self._move(_S.VERIFYING, now_s)
        if not self.checksums or not self.grant.blocks:
            return self._committed(now_s)
        return [self._verify(of, said, self.grant) for of, said in self.parts.commits()]

    def part_under_verification(self, session: SessionId, attempt: int) -> SenderPart | None:
        """The part of which it is being asked whether its bytes are right."""
        part = self.parts.of(session)
        if part is None or part.attempt != attempt or self.state is not _S.VERIFYING:
            return None
        return part

    def verified(self, part: SenderPart, fault: str | None, now_s: float) -> list[LedgerAction]:
        """The bytes of a part are what was sent, or `fault` says what differs."""
        if fault is not None:
            return self.fail(_corrupt(fault), now_s)
        part.verified = True
        return self._committed(now_s) if self.parts.verified else []

    def needs(self, session: SessionId, link: LinkPlan, *, ours: bool) -> bool:
        """Whether the attempt cannot succeed without what a session brings, or would bring if it asked.

        Args:
            session: Which.
            link: What it writes of each page.
            ours: Whether it is of the prefill worker that the router named.
        """
        part = self.parts.of(session)
        if part is not None:
            return part.commit is None
        return ours and self.parts.fits(link)

    def sender_lost(
        self, session: SessionId, error: BatonError, now_s: float
    ) -> list[LedgerAction]:
        """A session that had a part to bring will not, and was not told by us;
        for states in which it waits for peers.
        """
        if self.state is _S.ASKED:
            return [*self._stop(error, now_s, but=session), *self._free_pages(error, now_s)]
        return self._orphan(error, now_s, without=session)

    def writer_stopped(
        self, part: SenderPart, error: BatonError, now_s: float
    ) -> list[LedgerAction]:
        """A session that was granted the pages writes no more."""
        self.parts.stopped(part)
        match self.state:
            case TransferState.WRITING:
                return self._orphan(error, now_s, without=part.session)
            case TransferState.ABORTING if self.parts.writers():
                return []
            case TransferState.ABORTING:
                return self._free_pages(self.error or error, now_s)
            case _:
                return self._provide_pages(now_s)

    def pages_released(self, error: BatonError | None, now_s: float) -> list[LedgerAction]:
        """The engine has the pages back: it was asked to, or it gave the sequence up with `error`.

        Raises:
            InvariantError: A peer may still write there.
        """
        if not self.pages_held:
            return []
        if self.state is _S.QUIESCED:
            self._move(_S.FREE, now_s)
            return []
        if self.grant is not None:
            raise self.broken("the engine freed its pages while they are in use")
        error = error or TransferError("the engine gave the reserved pages up")
        told, self.error = self._stop(error, now_s), error
        self._move(_S.FREE, now_s)
        return [*told, TransferFailed(xfer_id=self.xfer_id, error=error)]

    def fail(self, error: BatonError, now_s: float) -> list[LedgerAction]:
        """As `abort`, and the leg is told."""
        failed = TransferFailed(xfer_id=self.xfer_id, error=error)
        return [*self.abort(error, now_s), failed]

    def abort(self, error: BatonError, now_s: float) -> list[LedgerAction]:
        """Ends it from this side; pages that may be written to stay until the peer has stopped."""
        told = self._stop(error, now_s)
        if not self.parts.writers():
            return [*told, *self._free_pages(error, now_s)]
        self.error = error
        self._move(_S.ABORTING, now_s)
        return told

    def overdue(self, limits: LedgerLimits, now_s: float) -> BatonError | None:
        """What it ends with if it has waited for too long; None while it may wait on."""
        waited_s, reserve_s = now_s - self.since_s, limits.reserve_timeout_s
        match self.state:
            case TransferState.EXPECTED if waited_s > limits.expect_timeout_s:
                return DeadlineError(f"no prefill worker asked for pages in {waited_s:.0f} s")
            case TransferState.ASKED if waited_s > reserve_s:
                return DeadlineError(f"no router announced this transfer in {waited_s:.0f} s")
            case TransferState.RESERVED if waited_s > reserve_s:
                blocks = self.permit.num_blocks
                return NoRoomError(
                    f"no room for {blocks} pages on the decode worker in {waited_s:.0f} s"
                )
            case TransferState.WRITING if waited_s > reserve_s and not self.parts.whole:
                return TransferError(f"not all ranks asked to write their part in {waited_s:.0f} s")
            case TransferState.ORPHANED:
                queued = self.reassigned and not self.parts
                limit_s = limits.expect_timeout_s if queued else limits.retry_grace_s
                return None if waited_s <= limit_s else self.error or WorkerLostError(LOST)
            case _:
                return None

    def slow_to_stop(self, limits: LedgerLimits, now_s: float) -> list[SessionId]:
        """Sessions that were asked to stop writing and have not answered in time."""
        limit_s = now_s - limits.quiesce_timeout_s
        return [
            part.session
            for part in self.parts.writers()
            if part.stop_asked_s is not None and part.stop_asked_s < limit_s
        ]

    def broken(self, what: str) -> InvariantError:
        """An error with this transfer's story."""
        return InvariantError(
            f"transfer {self.xfer_id}: {what}", story=self.log.story(self.xfer_id)
        )

    def check_integrity(self) -> None:
        """Raises InvariantError if it contradicts itself."""
        contradiction = self.parts.contradiction()
        if contradiction is not None:
            raise self.broken(contradiction)
        state, writers = self.state, self.parts.writers()
        granted = state in (_S.WRITING, _S.ABORTING, _S.VERIFYING)
        consistent = (
            not self.ended
            and self.pages_held == self._should_hold_pages()
            and (self.grant is not None or not granted)
            and (self.grant is None or state is not _S.RESERVED)
            and (not writers or state in (_S.WRITING, _S.ABORTING, _S.ORPHANED))
            and (bool(writers) or state is not _S.ABORTING)
            and not (state is _S.WRITING and (self.parts.left_over() or self.parts.committed))
            and (self.parts.committed or state is not _S.VERIFYING)
            and (bool(self.parts) or state not in (_S.ASKED, _S.RESERVED, _S.WRITING))
        )
        if not consistent:
            raise self.broken(f"inconsistent: {self!r}")

    def _should_hold_pages(self) -> bool:
        if self.state is _S.ORPHANED:
            return self.pages_held  # lost before or after it asked for pages
        return self.state not in (_S.EXPECTED, _S.ASKED)

    def _provide_pages(self, now_s: float) -> list[LedgerAction]:
        """Pages for the sessions that ask: new ones,
        or those of the attempt before as soon as no other writes there.
        """
        if self.parts.left_over() or not self.parts:
            return []
        if not self.pages_held:
            return self.request_pages(now_s)
        if self.grant is None:
            self._move(_S.RESERVED, now_s)
            return []
        return self._grant_all(self.grant, now_s)

    def _grant_all(self, pages: Grant, now_s: float) -> list[LedgerAction]:
        self.reassigned = False
        self._move(_S.WRITING, now_s)
        return [self._grant_to(part, pages) for part in self.parts]

    def _grant_to(self, part: SenderPart, pages: Grant) -> ToPeer:
        """Leave to write its part of `pages`."""
        part.may_write = True
        granted = PagesGranted(
            xfer_id=self.xfer_id,
            attempt=self.attempt,
            cache_scope=self.permit.cache_scope,
            grant=pages,
        )
        return ToPeer(session=part.session, message=granted)

    def _fault_of(self, commit: Commit, part: SenderPart, grant: Grant) -> TransferError | None:
        """What is wrong with the commit of `part`, beside the bytes themselves,
        which are compared once all parts are written.
        """
        pages = len(grant.blocks)
        wanted = (pages, pages * part.link.bytes_per_page)
        if (commit.num_blocks, commit.num_bytes) != wanted:
            return TransferError(
                f"committed {commit.num_blocks} pages and {commit.num_bytes} bytes, "
                f"granted {wanted[0]} and {wanted[1]}"
            )
        if any(other.first_tokens != commit.first_tokens for _, other in self.parts.commits()):
            return TransferError("two ranks of the prefill worker drew different first tokens")
        sums = checksum_bytes(part.link, commit.num_blocks)
        if self.checksums and pages and len(commit.checksums) != sums:
            return _corrupt("checksums are missing")
        return None

    def _verify(self, part: SenderPart, commit: Commit, grant: Grant) -> VerifyPages:
        return VerifyPages(
            xfer_id=self.xfer_id,
            session=part.session,
            attempt=part.attempt,
            link=part.link,
            grant=grant,
            checksums=commit.checksums,
        )

    def _committed(self, now_s: float) -> list[LedgerAction]:
        self._move(_S.COMMITTED, now_s)
        _, first = self.parts.commits()[0]
        started = StartDecoding(xfer_id=self.xfer_id, first_tokens=first.first_tokens)
        told = Committed(xfer_id=self.xfer_id, attempt=self.attempt)
        return [started, *self._to_senders(told)]

    def _orphan(self, error: BatonError, now_s: float, *, without: SessionId) -> list[LedgerAction]:
        """A prefill worker is gone before it committed: the pages wait for another one;
        its other ranks have to stop.
        """
        told = self._stop(error, now_s, but=without)
        lost = WriterLost(xfer_id=self.xfer_id, attempt=self.attempt, error=error)
        self.parts.dismiss()
        self.reassigned, self.error = False, error
        if self.state is not _S.ORPHANED:
            self._move(_S.ORPHANED, now_s)
        self.since_s = now_s
        return [*told, lost]

    def _free_pages(self, error: BatonError, now_s: float) -> list[LedgerAction]:
        """No peer writes (any more): whatever pages there are go back."""
        self.error = error
        if not self.pages_held:
            self._move(_S.FREE, now_s)
            return []
        self._move(_S.QUIESCED, now_s)
        return [FreePages(xfer_id=self.xfer_id)]

    def _stop(
        self, error: BatonError, now_s: float, *, but: SessionId | None = None
    ) -> list[LedgerAction]:
        """Has every session stop that still may write, and lets the rest of the attempt know that it is over.

        Args:
            error: Why.
            now_s: From when on an answer is waited for.
            but: The session that needs not be told: it said so itself, or hears nothing.
        """
        for part in self.parts.writers():
            if part.stop_asked_s is None and part.session != but:
                part.stop_asked_s = now_s
        message = AbortRequest(xfer_id=self.xfer_id, attempt=self.attempt, error=error)
        return self._to_senders(message, but=but)

    def _to_senders(
        self, message: ToPrefill, *, but: SessionId | None = None
    ) -> list[LedgerAction]:
        """To every session of the attempt that counts."""
        return [
            ToPeer(session=part.session, message=message)
            for part in self.parts
            if part.connected and part.session != but
        ]

    def _move(self, state: TransferState, now_s: float) -> None:
        if state not in TRANSITIONS[self.state]:
            raise self.broken(f"{self.state} to {state}")
        self.state = state
        self.since_s = now_s


def _corrupt(fault: str) -> CorruptKvError:
    """The bytes are not to be decoded; `fault` says what differs."""
    return CorruptKvError(f"the pages are not what the prefill worker sent: {fault}")
