"""What a decode worker tells the senders of one hand-off: write here, stop, it is done."""

from baton.errors import BatonError
from kv_transfer.ledger_messages import ToPeer
from kv_transfer.messages import AbortRequest, Granted, SessionId, ToPrefill
from kv_transfer.parts import Part, Parts
from kv_transfer.plan import Grant
from kv_transfer.ticket import Permit


def tell(parts: Parts, message: ToPrefill) -> list[ToPeer]:
    """To everybody of the attempt that counts."""
    return [ToPeer(session=part.session, message=message) for part in parts if part.connected]


def grant(permit: Permit, part: Part, pages: Grant) -> ToPeer:
    """Leave to write its part of `pages`."""
    part.may_write = True
    granted = Granted(
        xfer_id=permit.xfer_id,
        attempt=permit.attempt,
        cache_scope=permit.cache_scope,
        grant=pages,
    )
    return ToPeer(session=part.session, message=granted)


def stop(
    permit: Permit, parts: Parts, error: BatonError, now_s: float, *, but: SessionId | None = None
) -> list[ToPeer]:
    """Has everybody stop who still may write, and lets the rest of the attempt know that it is over.

    Args:
        permit: Of the attempt that counted until now.
        parts: Of which nothing is to be written any more.
        error: Why.
        now_s: From when on an answer is waited for.
        but: Who needs not be told: it said so itself, or hears nothing.
    """
    for part in parts.writers():
        if part.stop_asked_s is None and part.session != but:
            part.stop_asked_s = now_s
    message = AbortRequest(xfer_id=permit.xfer_id, attempt=permit.attempt, error=error)
    return [order for order in tell(parts, message) if order.session != but]
