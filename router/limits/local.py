"""Limits counted in this process: token buckets, the pure ledger of all tenants' counts, and the `Limiter` on a clock.

A router that stands alone has no others; with Redis (`router.limits.shared`) they hold while Redis does not answer. The
bucket is the in-process twin of the one in `limits.lua`: a request may take more than is left when it settles, even
more than the bucket holds. The level goes below zero then, and nothing more is given until time has paid the debt, so
that the long-run rate holds whatever was estimated.
"""

from dataclasses import dataclass, field

from baton.clock import Clock
from baton.errors import InvariantError
from baton.story import StoryEntry, StoryLog
from router.limits.ports import (
    GrantId,
    Level,
    Levels,
    LimitGranted,
    LimitKind,
    LimitRefused,
    LimitUsage,
)
from router.tenants.tenant import Tenant, TenantId, TenantLimits

CONCURRENCY_RETRY_S = 1.0
"""When a request in flight will end is not known; retrying this often costs little."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketSize:
    """What one bucket gives.

    Attributes:
        rate_per_s: Refill.
        capacity: What it holds when it is full.
    """

    rate_per_s: float
    capacity: float

    @classmethod
    def of(cls, per_minute: float | None, burst: float | None, share: float) -> "BucketSize | None":
        """The bucket of a limit, or of this `share` of it; None without one."""
        if per_minute is None:
            return None
        capacity = max(1.0, (burst if burst is not None else per_minute) * share)
        return cls(rate_per_s=per_minute * share / 60, capacity=capacity)


class TokenBucket:
    """One bucket; full at first. Its size may change between two calls."""

    __slots__ = ("_level", "_stamp_s")

    def __init__(self) -> None:
        self._level: float | None = None
        self._stamp_s = 0.0

    def level(self, size: BucketSize, now_s: float) -> Level:
        """How full it is."""
        remaining = self._refilled(size, now_s)
        reset_s = (size.capacity - remaining) / size.rate_per_s
        return Level(limit=size.capacity, remaining=remaining, reset_s=reset_s)

    def take(self, amount: float, size: BucketSize, now_s: float) -> float:
        """Takes `amount` and returns 0, or takes nothing and returns the seconds to wait for it."""
        remaining = self._refilled(size, now_s)
        missing = min(amount, size.capacity) - remaining
        if missing > 1e-9:
            return missing / size.rate_per_s
        self._set(remaining - amount, now_s)
        return 0.0

    def give_back(self, amount: float, size: BucketSize, now_s: float) -> None:
        """Returns what was not used; a negative amount takes more, and is never refused."""
        self._set(min(self._refilled(size, now_s) + amount, size.capacity), now_s)

    def full(self, size: BucketSize, now_s: float) -> bool:
        """Whether it is as if it had never been used."""
        return self._refilled(size, now_s) >= size.capacity

    def _refilled(self, size: BucketSize, now_s: float) -> float:
        if self._level is None:
            return size.capacity
        gained = max(0.0, now_s - self._stamp_s) * size.rate_per_s
        return min(self._level + gained, size.capacity)

    def _set(self, level: float, now_s: float) -> None:
        self._level, self._stamp_s = level, now_s


@dataclass(slots=True, eq=False)
class _Account:
    """One tenant's counts."""

    requests: TokenBucket = field(default_factory=TokenBucket)
    tokens: TokenBucket = field(default_factory=TokenBucket)
    in_flight: dict[GrantId, int | None] = field(default_factory=dict)
    """Each with the tokens that were charged here; None where another ledger charges it."""


class LimitLedger:
    """How much each tenant has used.

    Pure: no clock. Not thread-safe: one owner. TenantLimits come with every call, so that a reload holds at once; only
    what was used is kept here.

    Args:
        share: Part of every limit that is given out here: 1, or 1/n where n routers cannot speak with each other.
    """

    def __init__(self, share: float = 1.0) -> None:
        self.share = share
        self._accounts: dict[TenantId, _Account] = {}
        self._story = StoryLog("limits")

    def enter(self, tenant: Tenant, grant: GrantId, now_s: float) -> LimitGranted | LimitRefused:
        """See `Limiter.enter`."""
        account = self._accounts.setdefault(tenant.tenant_id, _Account())
        if grant in account.in_flight:
            return LimitGranted(levels=self._levels(account, tenant.limits, now_s))
        if len(account.in_flight) >= self._max_concurrency(tenant.limits):
            return self._refused(account, tenant, LimitKind.CONCURRENCY, CONCURRENCY_RETRY_S, now_s)
        size = self._requests(tenant.limits)
        wait_s = 0.0 if size is None else account.requests.take(1.0, size, now_s)
        if wait_s > 0:
            return self._refused(account, tenant, LimitKind.REQUESTS, wait_s, now_s)
        account.in_flight[grant] = 0
        return LimitGranted(levels=self._levels(account, tenant.limits, now_s))

    def hold(self, tenant: Tenant, grant: GrantId) -> None:
        """Counts a request as in flight here too that another ledger let in and charges."""
        self._accounts.setdefault(tenant.tenant_id, _Account()).in_flight[grant] = None

    def charge(
        self, tenant: Tenant, grant: GrantId, tokens: int, now_s: float
    ) -> LimitGranted | LimitRefused:
        """See `Limiter.charge`."""
        account = self._accounts[tenant.tenant_id]
        size = self._tokens(tenant.limits)
        wait_s = 0.0 if size is None else account.tokens.take(tokens, size, now_s)
        if wait_s > 0:
            return self._refused(account, tenant, LimitKind.TOKENS, wait_s, now_s)
        account.in_flight[grant] = (account.in_flight[grant] or 0) + tokens
        return LimitGranted(levels=self._levels(account, tenant.limits, now_s))

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

    def usage(self, tenant: Tenant, now_s: float) -> LimitUsage:
        """See `Limiter.usage`."""
        account = self._accounts.get(tenant.tenant_id, _Account())
        levels = self._levels(account, tenant.limits, now_s)
        return LimitUsage(in_flight=len(account.in_flight), levels=levels)

    def story(self, tenant_id: TenantId) -> tuple[StoryEntry, ...]:
        """What this tenant was refused, as far as it is remembered. Requests that are let in are not:
        there are too many.
        """
        return self._story.story(tenant_id)

    def note_refusal(self, tenant: Tenant, refused: LimitRefused, now_s: float) -> None:
        """Remembers a refusal, also another ledger's."""
        event = f"refused: {refused.kind.value}, for {refused.retry_after_s:.3g} s"
        self._story.record(tenant.tenant_id, now_s, event)

    def check_integrity(self) -> None:
        """Raises `InvariantError` when one request is in flight for two tenants."""
        owners: dict[GrantId, TenantId] = {}
        for tenant_id, account in self._accounts.items():
            for grant in account.in_flight:
                if (other := owners.setdefault(grant, tenant_id)) != tenant_id:
                    story = (*self.story(other), *self.story(tenant_id))
                    message = f"{grant} is in flight for {other} and for {tenant_id}"
                    raise InvariantError(message, story=story)

    def _max_concurrency(self, limits: TenantLimits) -> float:
        if limits.max_concurrency is None:
            return float("inf")
        return max(1, int(limits.max_concurrency * self.share))

    def _requests(self, limits: TenantLimits) -> BucketSize | None:
        return BucketSize.of(limits.requests_per_minute, limits.request_burst, self.share)

    def _tokens(self, limits: TenantLimits) -> BucketSize | None:
        return BucketSize.of(limits.tokens_per_minute, limits.token_burst, self.share)

    def _levels(self, account: _Account, limits: TenantLimits, now_s: float) -> Levels:
        requests, tokens = self._requests(limits), self._tokens(limits)
        return Levels(
            requests=None if requests is None else account.requests.level(requests, now_s),
            tokens=None if tokens is None else account.tokens.level(tokens, now_s),
        )

    def _refused(
        self, account: _Account, tenant: Tenant, kind: LimitKind, wait_s: float, now_s: float
    ) -> LimitRefused:
        levels = self._levels(account, tenant.limits, now_s)
        refused = LimitRefused(kind=kind, retry_after_s=wait_s, levels=levels)
        self.note_refusal(tenant, refused, now_s)
        return refused

    def _idle(self, account: _Account, limits: TenantLimits, now_s: float) -> bool:
        requests, tokens = self._requests(limits), self._tokens(limits)
        return (
            not account.in_flight
            and (requests is None or account.requests.full(requests, now_s))
            and (tokens is None or account.tokens.full(tokens, now_s))
        )


class LocalLimiter:
    """A `Limiter` in this process.

    Args:
        clock: Fills the buckets.
        share: Part of every limit that is given out here.
    """

    def __init__(self, clock: Clock, share: float = 1.0) -> None:
        self._clock = clock
        self.ledger = LimitLedger(share)

    async def enter(self, tenant: Tenant, grant: GrantId) -> LimitGranted | LimitRefused:
        """See `Limiter`."""
        return self.ledger.enter(tenant, grant, self._clock.now_s())

    async def charge(
        self, tenant: Tenant, grant: GrantId, tokens: int
    ) -> LimitGranted | LimitRefused:
        """See `Limiter`."""
        return self.ledger.charge(tenant, grant, tokens, self._clock.now_s())

    async def leave(self, tenant: Tenant, grant: GrantId, used_tokens: int) -> None:
        """See `Limiter`."""
        self.ledger.leave(tenant, grant, used_tokens, self._clock.now_s())

    async def usage(self, tenant: Tenant) -> LimitUsage:
        """See `Limiter`."""
        return self.ledger.usage(tenant, self._clock.now_s())

    def story(self, about: str) -> tuple[StoryEntry, ...]:
        """What a tenant of this id was refused lately."""
        return self.ledger.story(TenantId(about))
