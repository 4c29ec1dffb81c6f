"""What a tenant has on each node of the pool, and how much of its quota each of them lets it have. Pure.

Nobody decides for all. Each node tells the directory with its lease what limited tenants have there, reads the same of the others,
and sets its own limit. What nobody uses is open to whoever puts next; where there is nothing left, a node that has less than half
of an even part gets that much, from those that have more.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

_IDLE_WORTH = 0.5
"""Of its bytes, that a node counts with where the tenant is idle: round by round they go to where it is not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantPart:
    """What a tenant has on one node.

    Attributes:
        tenant: Its name.
        size_bytes: Of memory and disk together.
        active: It has put or read there of late.
    """

    tenant: str
    size_bytes: int
    active: bool


def may_hold(quota_bytes: int, here: TenantPart, elsewhere: Iterable[TenantPart]) -> int:
    """Bytes that a tenant may have on a node, so that what it has on all nodes comes to its quota.

    Args:
        quota_bytes: Over all nodes.
        here: What it has on this one.
        elsewhere: And on the others, as they last said.
    """
    if not here.size_bytes:
        here = replace(here, active=True)  # it is about to begin
    parts = [here, *elsewhere]
    num_active = max(1, sum(part.active for part in parts))
    least = quota_bytes / (2 * num_active)
    claims = [_claim(part, least) for part in parts]
    fair = quota_bytes * claims[0] / max(1.0, sum(claims))
    spare = quota_bytes - sum(part.size_bytes for part in parts)
    if spare < 0:
        return int(fair)
    return int(max(fair, here.size_bytes + spare / num_active))


def _claim(part: TenantPart, least: float) -> float:
    return max(part.size_bytes, least) if part.active else _IDLE_WORTH * part.size_bytes
