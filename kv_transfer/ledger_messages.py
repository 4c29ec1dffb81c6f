"""What the decode worker's ledger is told, and what it asks of its shell. Plain frozen data.

router, sessions, engine ── LedgerEvent ──▶ ledger.py ── LedgerAction ──▶ engine, sessions, the leg's lifecycle
"""

from dataclasses import dataclass

from baton.errors import BatonError
from baton.generation import TokenSample
from baton.ids import WorkerIdentity, XferId
from kv_transfer.heads import LinkPlan
from kv_transfer.messages import SessionId, ToDecode, ToPrefill
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ReservePages:
    """To the engine: take pages for this transfer's prompt."""

    xfer_id: XferId


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyPages:
    """To a thread of the shell's: compare what came over `link`, in `session`, with these checksums (`PagesVerified` answers)."""

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
    """To the engine: give the pages back (`PagesGone` answers)."""

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
