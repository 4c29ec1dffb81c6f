"""The counts of all tenants in one process: the pure core of `LocalLimiter`, and what holds while Redis is away."""

from dataclasses import dataclass, field

from baton.errors import InvariantError
from router.limits.bucket import BucketSize, TokenBucket
from router.limits.ports import Granted, GrantId, Levels, LimitKind, Refused, Usage
from router.tenants.tenant import Limits, Tenant, TenantId

CONCURRENCY_RETRY_S = 1.0
"""Nobody knows when a request in flight ends; this is how often asking again costs nobody anything."""


@dataclass(slots=True, eq=False)
class _Account:
    """One tenant's counts."""

    requests: TokenBucket = field(default_factory=TokenBucket)
    tokens: TokenBucket = field(default_factory=TokenBucket)
    in_flight: dict[GrantId, int | None] = field(default_factory=dict)
    """Each with the tokens that were charged here; None where somebody else charges it."""


class LimitLedger:
    """Who has used how much.

    Pure: no clock. Not thread-safe: one owner. Limits come with every call, so that a reload holds at once; only what was
    used is kept here.

    Args:
        share: Part of every limit that is given out here: 1, or 1/n where n routers cannot speak with each other.
    """

    def __init__(self, share: float = 1.0) -> None:
        self.share = share
        self._accounts: dict[TenantId, _Account] = {}

    def enter(self, tenant: Tenant, grant: GrantId, now_s: float) -> Granted | Refused:
        """See `Limiter.enter`."""
        account = self._accounts.setdefault(tenant.tenant_id, _Account())
        if grant in account.in_flight:
            return Granted(levels=self._levels(account, tenant.limits, now_s))
        if len(account.in_flight) >= self._max_concurrency(tenant.limits):
            return self._refused(
                account, tenant.limits, LimitKind.CONCURRENCY, CONCURRENCY_RETRY_S, now_s
            )
        size = self._requests(tenant.limits)
        wait_s = 0.0 if size is None else account.requests.take(1.0, size, now_s)
        if wait_s > 0:
            return self._refused(account, tenant.limits, LimitKind.REQUESTS, wait_s, now_s)
        account.in_flight[grant] = 0
        return Granted(levels=self._levels(account, tenant.limits, now_s))

    def hold(self, tenant: Tenant, grant: GrantId) -> None:
        """Counts a request that somebody else let in, and charges, as in flight here too."""
        self._accounts.setdefault(tenant.tenant_id, _Account()).in_flight[grant] = None

    def charge(
        self, tenant: Tenant, grant: GrantId, tokens: int, now_s: float
    ) -> Granted | Refused:
        """See `Limiter.charge`."""
        account = self._accounts[tenant.tenant_id]
        size = self._tokens(tenant.limits)
        wait_s = 0.0 if size is None else account.tokens.take(tokens, size, now_s)
        if wait_s > 0:
            return self._refused(account, tenant.limits, LimitKind.TOKENS, wait_s, now_s)
        account.in_flight[grant] = (account.in_flight[grant] or 0) + tokens
        return Granted(levels=self._levels(account, tenant.limits, now_s))

    def leave(self, tenant: Tenant, grant: GrantId, used_tokens: int, now_s: float) -> None:
        """See `Limiter.leave`."""
        account = self._accounts.get(tenant.tenant_id)
        if account is None or grant not in account.in_flight:
            return
        charged = account.in_flight.pop(grant)
        size = self._tokens(tenant.limits)
        if size is not None and charged is not None:
            account.tokens.give_back(charged - used_tokens, size, now_s)
        if self._idle(account, tenant.limits, now_s):
            del self._accounts[tenant.tenant_id]

    def usage(self, tenant: Tenant, now_s: float) -> Usage:
        """See `Limiter.usage`."""
        account = self._accounts.get(tenant.tenant_id, _Account())
        levels = self._levels(account, tenant.limits, now_s)
        return Usage(in_flight=len(account.in_flight), levels=levels)

    def check_integrity(self) -> None:
        """Raises `InvariantError` when one request is in flight for two tenants."""
        grants = [grant for account in self._accounts.values() for grant in account.in_flight]
        if len(grants) != len(set(grants)):
            raise InvariantError("a request is in flight twice")

    def _max_concurrency(self, limits: Limits) -> float:
        if limits.max_concurrency is None:
            return float("inf")
        return max(1, int(limits.max_concurrency * self.share))

    def _requests(self, limits: Limits) -> BucketSize | None:
        return BucketSize.of(limits.requests_per_minute, limits.request_burst, self.share)

    def _tokens(self, limits: Limits) -> BucketSize | None:
        return BucketSize.of(limits.tokens_per_minute, limits.token_burst, self.share)

    def _levels(self, account: _Account, limits: Limits, now_s: float) -> Levels:
        requests, tokens = self._requests(limits), self._tokens(limits)
        return Levels(
            requests=None if requests is None else account.requests.level(requests, now_s),
            tokens=None if tokens is None else account.tokens.level(tokens, now_s),
        )

    def _refused(
        self, account: _Account, limits: Limits, kind: LimitKind, wait_s: float, now_s: float
    ) -> Refused:
        levels = self._levels(account, limits, now_s)
        return Refused(kind=kind, retry_after_s=wait_s, levels=levels)

    def _idle(self, account: _Account, limits: Limits, now_s: float) -> bool:
        requests, tokens = self._requests(limits), self._tokens(limits)
        return (
            not account.in_flight
            and (requests is None or account.requests.full(requests, now_s))
            and (tokens is None or account.tokens.full(tokens, now_s))
        )
