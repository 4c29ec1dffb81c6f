"""What two workers say to each other about their hand-offs, in the session that they share. Plain frozen data,
no protobuf.

P is the prefill worker, whose words the ledger hears (`ledger/ledger.py`); D the decode worker, whose words the outbox
hears (`ledger/outbox.py`). What each core and its own shell say to each other stands in those two files.
"""

from dataclasses import dataclass
from typing import NewType

from baton.errors import BatonError, TicketError
from baton.generation import TokenSample
from baton.ids import XferId
from kv_transfer.plan import Grant
from kv_transfer.ticket import Permit

SessionId = NewType("SessionId", int)
"""One session of one peer, as the decode worker counts them; a peer that reconnects gets a new one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserve:
    """P to D: asks for pages for the whole prompt."""

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
        checksums: Of the pages (`kv_transfer.memory.checksum`), 64-bit little-endian;
            empty where the session does without.
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
class PagesGranted:
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
ToPrefill = PagesGranted | GrantRefused | Committed | AbortRequest
