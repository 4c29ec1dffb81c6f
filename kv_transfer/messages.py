"""What the two cores of a hand-off are told and what they ask their shells to do. Plain frozen data, no protobuf.

`ledger.py` (decode worker) and `outbox.py` (prefill worker) speak these; `session.py` carries the ones that cross the wire.
"""

from dataclasses import dataclass, field
from typing import NewType

import numpy as np
import numpy.typing as npt

from baton.errors import BatonError, TicketError, TransferError
from baton.generation import TokenSample
from baton.ids import WorkerIdentity, XferId
from kv_transfer.heads import LinkPlan
from kv_transfer.plan import Export, Grant
from kv_transfer.ports import Push
from kv_transfer.ticket import Permit

SessionId = NewType("SessionId", int)
"""One session of one peer, as the decode worker counts them; a peer that reconnects gets a new one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserve:
    """P to D: pages for the whole prompt, please."""

    permit: Permit


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """P to D: everything is written, and nothing more will be.

    Attributes:
        xfer_id: The transfer.
        attempt: The one that wrote.
        num_blocks: Pages written.
        num_bytes: Their bytes.
        first_tokens: What decoding goes on from.
        checksums: Of the pages (`kv_transfer.checksum`), 64-bit little-endian; empty where the session does without.
    """

    xfer_id: XferId
    attempt: int
    num_blocks: int
    num_bytes: int
    first_tokens: tuple[TokenSample, ...]
    checksums: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quiesced:
    """P to D: this attempt writes nothing any more, and nothing was committed."""

    xfer_id: XferId
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """P to D, and D's answer: still here, with everything that this session writes."""

    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Granted:
    """D to P: these pages are yours to write. Crosses as a signed ticket."""

    xfer_id: XferId
    attempt: int
    cache_scope: str
    grant: Grant


@dataclass(frozen=True, slots=True, kw_only=True)
class GrantRefused:
    """D to P, as P took it: the ticket of this attempt is not good."""

    xfer_id: XferId
    attempt: int
    error: TicketError


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """D to P: verified; you may release your pages."""

    xfer_id: XferId
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AbortRequest:
    """D to P: stop writing and answer `Quiesced`."""

    xfer_id: XferId
    attempt: int
    error: BatonError


ToDecode = Reserve | Commit | Quiesced | Heartbeat
ToPrefill = Granted | GrantRefused | Committed | AbortRequest


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """A prompt will be prefilled here for another worker."""

    permit: Permit


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerUp:
    """The session with `peer` is open.

    Attributes:
        peer: Who.
        region_blocks: Pages of its region.
        link: What is written of each page; None where both layouts are equal.
        checksums: Whether its commits have to carry them.
    """

    peer: WorkerIdentity
    region_blocks: int
    link: LinkPlan | None = None
    checksums: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerDown:
    """The session with `peer` broke, or never came up."""

    peer: WorkerIdentity
    error: BatonError


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """The first chunk of the prompt is scheduled."""

    xfer_id: XferId


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """The engine completed pages of one layer."""

    xfer_id: XferId
    export: Export


@dataclass(frozen=True, slots=True, kw_only=True)
class Drew:
    """The first tokens are known."""

    xfer_id: XferId
    first_tokens: tuple[TokenSample, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PushDone:
    """A push landed in the peer's memory, or cannot.

    Attributes:
        xfer_id: Its transfer.
        push_id: Which one.
        error: Why not.
        hashes: Of the pages as they were pushed, `[pages]`, if the session wants them.
    """

    xfer_id: XferId
    push_id: int
    error: TransferError | None = None
    hashes: npt.NDArray[np.uint64] | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenUp:
    """The leg is over here: stop, and let the peer know."""

    xfer_id: XferId


@dataclass(frozen=True, slots=True, kw_only=True)
class FromDecode:
    """A message of the session with `peer`."""

    peer: WorkerIdentity
    message: ToPrefill


OutboxEvent = (
    Opened | PeerUp | PeerDown | Started | Exported | Drew | PushDone | GivenUp | FromDecode
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Send:
    """To the session with `peer`: send this."""

    peer: WorkerIdentity
    message: ToDecode


@dataclass(frozen=True, slots=True, kw_only=True)
class StartPush:
    """To the writer of `peer`: copy these pages and report `PushDone`."""

    peer: WorkerIdentity
    push_id: int
    push: Push


@dataclass(frozen=True, slots=True, kw_only=True)
class HandOver:
    """To the leg: the peer verified the commit.

    Attributes:
        peer: Who has them.
        blocks_sent: Pages written.
        bytes_sent: Their bytes.
        reserve_wait_s: From the first chunk until pages were granted.
        unhidden_s: From the first tokens until the verified commit.
    """

    xfer_id: XferId
    peer: WorkerIdentity
    blocks_sent: int
    bytes_sent: int
    reserve_wait_s: float
    unhidden_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class HandOverFailed:
    """To the leg: the pages will not be taken. Never said of a leg that was given up here."""

    xfer_id: XferId
    error: BatonError


OutboxAction = Send | StartPush | HandOver | HandOverFailed
