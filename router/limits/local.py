"""Limits of a router that stands alone: the counts are its own."""

from baton.clock import Clock
from router.limits.ledger import LimitLedger
from router.limits.ports import Granted, GrantId, Refused, Usage
from router.tenants.tenant import Tenant


class LocalLimiter:
    """A `Limiter` in this process.

    Args:
        clock: Fills the buckets.
        share: Part of every limit that is given out here.
    """

    def __init__(self, clock: Clock, share: float = 1.0) -> None:
        self._clock = clock
        self.ledger = LimitLedger(share)

    async def enter(self, tenant: Tenant, grant: GrantId) -> Granted | Refused:
        """See `Limiter`."""
        return self.ledger.enter(tenant, grant, self._clock.now_s())

    async def charge(self, tenant: Tenant, grant: GrantId, tokens: int) -> Granted | Refused:
        """See `Limiter`."""
        return self.ledger.charge(tenant, grant, tokens, self._clock.now_s())

    async def leave(self, tenant: Tenant, grant: GrantId, used_tokens: int) -> None:
        """See `Limiter`."""
        self.ledger.leave(tenant, grant, used_tokens, self._clock.now_s())

    async def usage(self, tenant: Tenant) -> Usage:
        """See `Limiter`."""
        return self.ledger.usage(tenant, self._clock.now_s())
