"""One hand-off as the decode worker's ledger keeps it: from the first word on it until its pages have an owner again.

It becomes real when two independent messages have met: the router's word that it is wanted (`announced`), and the prefill
worker's request for pages (`join`). Then pages are taken for the whole prompt, all or nothing; nobody waits while holding part.
How it may go on from there is drawn in `transfer_state.py`. Which transfer a message means, and whether whoever says it may say
it, has been decided by the ledger.
"""

from dataclasses import dataclass, field

from baton.errors import BatonError, CancelledByPeerError, InvariantError, TransferError
from baton.ids import XferId
from kv_transfer import orders
from kv_transfer.heads import LinkPlan
from kv_transfer.ledger_messages import (
    FreePages,
    LedgerAction,
    ReservePages,
    StartDecoding,
    TransferFailed,
    WriterLost,
)
from kv_transfer.messages import Commit, Committed, SessionId
from kv_transfer.parts import Part, Parts
from kv_transfer.plan import Grant
from kv_transfer.ticket import Permit
from kv_transfer.transfer_state import ANNOUNCED, ENDS, TRANSITIONS, TransferState
from kv_transfer.verification import corrupt, fault_of, questions

_S = TransferState
_TAKEN_OVER = "another prefill worker takes this hand-off over"


@dataclass(slots=True, eq=False)
class Transfer:
    """Pure. Methods return the actions that follow, in order. Changed by the ledger only.

    Attributes:
        permit: Of the attempt that counts now.
        state: Where it stands.
        since_s: When it entered the state, or when the wait in it began anew.
        checksums: Whether commits must carry them.
        parts: Who brings what, and who may still write.
        pages_held: Whether the engine was asked for pages and has not got them back.
        grant: The pages, once the engine took them.
        reassigned: Whether the router has named the next attempt since the last writer was lost.
        error: What the last writer was lost with, or the transfer ended with.
    """

    permit: Permit
    state: TransferState
    since_s: float
    checksums: bool
    parts: Parts = field(default_factory=Parts)
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
    def over(self) -> bool:
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
        part = Part(session=session, attempt=self.attempt, link=link)
        self.parts.join(part)
        if self.state is _S.WRITING and self.grant is not None:
            return [orders.grant(self.permit, part, self.grant)]
        if self.state in (_S.EXPECTED, _S.ORPHANED):
            return self._go_on(now_s)
        return []

    def announced(self, now_s: float) -> list[LedgerAction]:
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

    def commit(self, part: Part, commit: Commit, now_s: float) -> list[LedgerAction]:
        """A part is written, as its sender says; with the last one all are verified."""
        assert self.grant is not None
        fault = fault_of(commit, part, self.parts, self.grant, checksums=self.checksums)
        if fault is not None:
            return self.fail(fault, now_s)
        self.parts.stopped(part)  # a commit says that nothing more will be written
        part.commit = commit
        if not self.parts.committed:
            return []
        self._move(_S.VERIFYING, now_s)
        if not self.checksums or not self.grant.blocks:
            return self._committed(now_s)
        return [*questions(self.xfer_id, self.parts, self.grant)]

    def in_question(self, session: SessionId, attempt: int) -> Part | None:
        """The part of which it is being asked whether its bytes are right."""
        part = self.parts.of(session)
        if part is None or part.attempt != attempt or self.state is not _S.VERIFYING:
            return None
        return part

    def verified(self, part: Part, fault: str | None, now_s: float) -> list[LedgerAction]:
        """The bytes of a part are what was sent, or `fault` says what differs."""
        if fault is not None:
            return self.fail(corrupt(fault), now_s)
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

    def lost(self, session: SessionId, error: BatonError, now_s: float) -> list[LedgerAction]:
        """Whoever had something to bring will not, and was not told by us; for states in which it waits for peers."""
        if self.state is _S.ASKED:
            return [*self._stop(error, now_s, but=session), *self._settle(error, now_s)]
        return self._orphan(error, now_s, without=session)

    def writer_stopped(self, part: Part, error: BatonError, now_s: float) -> list[LedgerAction]:
        """Whoever was granted the pages writes no more."""
        self.parts.stopped(part)
        match self.state:
            case TransferState.WRITING:
                return self._orphan(error, now_s, without=part.session)
            case TransferState.ABORTING if self.parts.writers():
                return []
            case TransferState.ABORTING:
                return self._settle(self.error or error, now_s)
            case _:
                return self._go_on(now_s)

    def pages_gone(self, error: BatonError | None, now_s: float) -> list[LedgerAction]:
        """The engine has the pages back: it was asked to, or it gave the sequence up with `error`.

        Raises:
            InvariantError: Somebody may still write there.
        """
        if not self.pages_held:
            return []
        if self.state is _S.QUIESCED:
            self._move(_S.FREE, now_s)
            return []
        if self.grant is not None:
            raise InvariantError(f"the engine freed pages of {self.xfer_id} while they are in use")
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
            return [*told, *self._settle(error, now_s)]
        self.error = error
        self._move(_S.ABORTING, now_s)
        return told

    def check_integrity(self) -> None:
        """Raises InvariantError if it contradicts itself."""
        self.parts.check_integrity()
        state, writers = self.state, self.parts.writers()
        granted = state in (_S.WRITING, _S.ABORTING, _S.VERIFYING)
        consistent = (
            not self.over
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
            raise InvariantError(f"transfer {self.xfer_id} is inconsistent: {self!r}")

    def _should_hold_pages(self) -> bool:
        if self.state is _S.ORPHANED:
            return self.pages_held  # lost before or after it asked for pages
        return self.state not in (_S.EXPECTED, _S.ASKED)

    def _go_on(self, now_s: float) -> list[LedgerAction]:
        """Pages for whoever asks: new ones, or those of the attempt before as soon as nobody else writes there."""
        if self.parts.left_over() or not self.parts:
            return []
        if not self.pages_held:
            return self.announced(now_s)
        if self.grant is None:
            self._move(_S.RESERVED, now_s)
            return []
        return self._grant_all(self.grant, now_s)

    def _grant_all(self, pages: Grant, now_s: float) -> list[LedgerAction]:
        self.reassigned = False
        self._move(_S.WRITING, now_s)
        return [orders.grant(self.permit, part, pages) for part in self.parts]

    def _committed(self, now_s: float) -> list[LedgerAction]:
        self._move(_S.COMMITTED, now_s)
        _, first = self.parts.commits()[0]
        started = StartDecoding(xfer_id=self.xfer_id, first_tokens=first.first_tokens)
        told = Committed(xfer_id=self.xfer_id, attempt=self.attempt)
        return [started, *orders.tell(self.parts, told)]

    def _orphan(self, error: BatonError, now_s: float, *, without: SessionId) -> list[LedgerAction]:
        """A prefill worker is gone before it committed: the pages wait for another one; its other ranks have to stop."""
        told = self._stop(error, now_s, but=without)
        lost = WriterLost(xfer_id=self.xfer_id, attempt=self.attempt, error=error)
        self.parts.dismiss()
        self.reassigned, self.error = False, error
        if self.state is not _S.ORPHANED:
            self._move(_S.ORPHANED, now_s)
        self.since_s = now_s
        return [*told, lost]

    def _settle(self, error: BatonError, now_s: float) -> list[LedgerAction]:
        """Nobody writes (any more): whatever pages there are go back."""
        self.error = error
        if not self.pages_held:
            self._move(_S.FREE, now_s)
            return []
        self._move(_S.QUIESCED, now_s)
        return [FreePages(xfer_id=self.xfer_id)]

    def _stop(
        self, error: BatonError, now_s: float, *, but: SessionId | None = None
    ) -> list[LedgerAction]:
        return [*orders.stop(self.permit, self.parts, error, now_s, but=but)]

    def _move(self, state: TransferState, now_s: float) -> None:
        if state not in TRANSITIONS[self.state]:
            raise InvariantError(f"transfer {self.xfer_id}: {self.state} to {state}")
        self.state = state
        self.since_s = now_s
