"""One hand-off as the decode worker's ledger keeps it: its states, and what belongs to it while it lasts."""

from collections import OrderedDict
from dataclasses import dataclass, field
from enum import Enum

from baton.errors import BatonError, InvariantError
from baton.ids import XferId
from kv_transfer.parts import Parts
from kv_transfer.plan import Grant
from kv_transfer.ticket import Permit

_MAX_ENDED = 65_536


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
ENDS = frozenset({_S.COMMITTED, _S.FREE})


@dataclass(slots=True, eq=False)
class Transfer:
    """One hand-off. Changed by the ledger only.

    Attributes:
        permit: Of the attempt that counts now.
        state: Where it stands.
        since_s: When it entered the state, or when the wait in it began anew.
        parts: Who brings what, and who may still write.
        pages_held: Whether the engine was asked for pages and has not got them back.
        grant: The pages, once the engine took them.
        reassigned: Whether the router has named the next attempt since the last writer was lost.
        error: What the last writer was lost with, or the transfer ended with.
    """

    permit: Permit
    state: TransferState
    since_s: float
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
    def unclaimed(self) -> bool:
        """Whether its attempt is lost, and the router has not named another one yet."""
        return self.state is _S.ORPHANED and not self.reassigned

    def move(self, state: TransferState, now_s: float) -> None:
        """Enters `state`.

        Raises:
            InvariantError: The table has no such transition.
        """
        if state not in TRANSITIONS[self.state]:
            raise InvariantError(f"transfer {self.xfer_id}: {self.state} to {state}")
        self.state = state
        self.since_s = now_s

    def check_integrity(self) -> None:
        """Raises InvariantError if it contradicts itself."""
        self.parts.check_integrity()
        state, writers = self.state, self.parts.writers()
        granted = state in (_S.WRITING, _S.ABORTING, _S.VERIFYING)
        consistent = (
            state not in ENDS
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a transfer ended, for those who ask after it."""

    at_s: float
    error: BatonError


class EndedTransfers:
    """Ids that ended, so that a replayed or overtaken message cannot open them again. Bounded in time and number."""

    def __init__(self, keep_s: float) -> None:
        self._keep_s = keep_s
        self._ended: OrderedDict[XferId, Ended] = OrderedDict()

    def find(self, xfer_id: XferId) -> Ended | None:
        """How it ended, if it did."""
        return self._ended.get(xfer_id)

    def add(self, xfer_id: XferId, error: BatonError, now_s: float) -> None:
        """It ended; the first word counts."""
        self._ended.setdefault(xfer_id, Ended(at_s=now_s, error=error))
        if len(self._ended) > _MAX_ENDED:
            self._ended.popitem(last=False)

    def forget_old(self, now_s: float) -> None:
        """Drops those whose messages cannot be on their way any more."""
        horizon_s = now_s - self._keep_s
        while self._ended and next(iter(self._ended.values())).at_s < horizon_s:
            self._ended.popitem(last=False)
