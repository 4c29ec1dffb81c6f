"""What the prefill worker's outbox is told, and what it asks of its shell. Plain frozen data.

engine, router, sessions ── OutboxEvent ──▶ outbox.py ── OutboxAction ──▶ sessions, pushers, the leg's lifecycle
"""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from baton.errors import BatonError, TransferError
from baton.generation import TokenSample
from baton.ids import WorkerIdentity, XferId
from kv_transfer.heads import LinkPlan
from kv_transfer.messages import ToDecode, ToPrefill
from kv_transfer.plan import Export
from kv_transfer.ports import Push
from kv_transfer.ticket import Permit


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
