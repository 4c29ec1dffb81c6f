"""How long a decode worker waits for each of the others that a hand-off needs, and what it says when they do not come."""

from dataclasses import dataclass

from baton.errors import BatonError, DeadlineError, TransferError, WorkerLostError
from kv_transfer.messages import SessionId
from kv_transfer.transfer import Transfer
from kv_transfer.transfer_state import TransferState

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


def overdue(transfer: Transfer, limits: LedgerLimits, now_s: float) -> BatonError | None:
    """What a transfer that has waited for too long ends with; None while it may wait on."""
    waited_s, reserve_s = now_s - transfer.since_s, limits.reserve_timeout_s
    match transfer.state:
        case TransferState.EXPECTED if waited_s > limits.expect_timeout_s:
            return DeadlineError(f"no prefill worker asked for pages in {waited_s:.0f} s")
        case TransferState.ASKED if waited_s > reserve_s:
            return DeadlineError(f"no router announced this transfer in {waited_s:.0f} s")
        case TransferState.RESERVED if waited_s > reserve_s:
            blocks = transfer.permit.num_blocks
            return TransferError(
                f"no room for {blocks} pages on the decode worker in {waited_s:.0f} s"
            )
        case TransferState.WRITING if waited_s > reserve_s and not transfer.parts.whole:
            return TransferError(f"not all ranks asked to write their part in {waited_s:.0f} s")
        case TransferState.ORPHANED:
            queued = transfer.reassigned and not transfer.parts
            limit_s = limits.expect_timeout_s if queued else limits.retry_grace_s
            return None if waited_s <= limit_s else transfer.error or WorkerLostError(LOST)
        case _:
            return None


def too_slow(transfer: Transfer, limits: LedgerLimits, now_s: float) -> list[SessionId]:
    """Those who were asked to stop writing and have not answered in time."""
    limit_s = now_s - limits.quiesce_timeout_s
    return [
        part.session
        for part in transfer.parts.writers()
        if part.stop_asked_s is not None and part.stop_asked_s < limit_s
    ]
