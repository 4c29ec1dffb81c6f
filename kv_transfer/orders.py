"""What a decode worker tells the senders of one hand-off: write here, stop, it is done."""

from baton.errors import BatonError
from kv_transfer.ledger_messages import ToPeer
from kv_transfer.messages import AbortRequest, Granted, SessionId, ToPrefill
from kv_transfer.parts import Part
from kv_transfer.transfer import Transfer


def tell(transfer: Transfer, message: ToPrefill) -> list[ToPeer]:
    """To everybody of the attempt that counts."""
    return [
        ToPeer(session=part.session, message=message) for part in transfer.parts if part.connected
    ]


def grant(transfer: Transfer, part: Part) -> ToPeer:
    """Leave to write its part of the pages that the transfer holds."""
    assert transfer.grant is not None
    part.may_write = True
    granted = Granted(
        xfer_id=transfer.xfer_id,
        attempt=transfer.attempt,
        cache_scope=transfer.permit.cache_scope,
        grant=transfer.grant,
    )
    return ToPeer(session=part.session, message=granted)


def stop(
    transfer: Transfer, error: BatonError, now_s: float, *, but: SessionId | None = None
) -> list[ToPeer]:
    """Has everybody stop who still may write, and lets the rest of the attempt know that it is over.

    Args:
        transfer: Of which nothing is to be written any more.
        error: Why.
        now_s: From when on an answer is waited for.
        but: Who needs not be told: it said so itself, or hears nothing.
    """
    for part in transfer.parts.writers():
        if part.stop_asked_s is None and part.session != but:
            part.stop_asked_s = now_s
    message = AbortRequest(xfer_id=transfer.xfer_id, attempt=transfer.attempt, error=error)
    return [order for order in tell(transfer, message) if order.session != but]
