"""Permits as a router would give them, for tests of everything that is shown one."""

from baton.ids import Incarnation, WorkerId, WorkerIdentity, XferId
from kv_transfer.ticket import Permit, TicketOffice

OFFICE = TicketOffice(bytes(32))
P = WorkerIdentity(worker_id=WorkerId("p"), incarnation=Incarnation(1))
D = WorkerIdentity(worker_id=WorkerId("d"), incarnation=Incarnation(2))


def permit(
    xfer_id: str = "x",
    *,
    attempt: int = 1,
    num_blocks: int = 3,
    source: WorkerIdentity = P,
    target: WorkerIdentity = D,
    layout_digest: str = "",
    cache_scope: str = "",
) -> Permit:
    """One that its holder can show."""
    claims = Permit(
        xfer_id=XferId(xfer_id),
        attempt=attempt,
        cache_scope=cache_scope,
        layout_digest=layout_digest,
        source=source,
        target=target,
        num_blocks=num_blocks,
    )
    return OFFICE.issue(claims)
