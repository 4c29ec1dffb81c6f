"""Why a prefill worker does not take a leg up: it is leaving, or what the router sent cannot be prefilled here."""

from baton.errors import BatonError, DrainingError, InvalidRequestError, TransferError
from baton.layout import KvLayout
from kv_transfer.ledger.outbox import Outbox
from kv_transfer.ticket import refuse_holder
from prefill_worker.messages import Submit


def refusal_of(
    event: Submit, layout: KvLayout, outbox: Outbox, *, draining: bool
) -> BatonError | None:
    """What the router is told; None for a leg that is taken.

    Args:
        event: The leg.
        layout: Of this worker's pages.
        outbox: Its hand-offs.
        draining: Whether the worker is leaving.
    """
    if draining:
        return DrainingError("this prefill worker is leaving")
    if not event.prompt.tokens or not event.prompt.samples:
        return InvalidRequestError("a prompt needs a token and a sample", param="prompt")
    if not event.permit.xfer_id or not event.address:
        return InvalidRequestError("a prefill needs a transfer id and a target", param="target")
    if outbox.state(event.permit.xfer_id) is not None:
        # Perhaps an earlier attempt of ours that still has to stop: somebody else can take this one.
        return TransferError("the transfer id is in use")
    return _misfit(event, layout)


def _misfit(event: Submit, layout: KvLayout) -> BatonError | None:
    """Why the permit is not one for this prompt."""
    blocks = layout.num_blocks_for(len(event.prompt.tokens))
    if event.permit.num_blocks != blocks:
        return refuse_holder(f"prompt: it takes {blocks} pages, not {event.permit.num_blocks}")
    if event.permit.cache_scope != event.prompt.cache_scope:
        return refuse_holder("cache_scope")
    return None
