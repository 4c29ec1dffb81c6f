"""Shared limits that never cost an outage: where Redis gives no answer, each router gives out its part of every limit.

What left meanwhile is told when Redis answers again: its places would else stay taken for a lease.
Known routers are those that Redis last knew of, and at least as many as configured. While degraded the sum over all of
them stays within the limits as long as that number is right; a concurrency cap below it lets each have one.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge

from baton.clock import Clock
from baton.errors import UnavailableError
from baton.story import StoryEntry, StoryLog
from baton.telemetry.logs import get_logger
from router.breaker import Breaker, BreakerPolicy
from router.limits.local import LocalLimiter
from router.limits.ports import GrantId, LimitGranted, LimitRefused, LimitUsage
from router.limits.shared import RedisLimiter
from router.tenants.tenant import Tenant

_ASK_AGAIN = BreakerPolicy(
    min_failures=1, failure_share=0.0, pause_s=1.0, max_pause_s=5.0, trial_timeout_s=5.0
)
_RENEWALS_PER_LEASE = 3
_AWAY_S = 0.5
_REDIS = "redis"
"""What the circuit to Redis is called in a story."""
_Answer = TypeVar("_Answer")
_log = get_logger(__name__)


class LimitMetrics:
    """Metrics of one router's limits on one registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._degraded = Gauge(
            "baton_limits_degraded",
            "1 while Redis gives no answer and this router gives out its part of the limits.",
            registry=registry,
        )
        self._alone = Counter(
            "baton_limits_degraded_decisions",
            "Decisions that this router made without Redis.",
            registry=registry,
        )

    def degraded(self, is_degraded: bool) -> None:
        """Whether Redis gave no answer."""
        self._degraded.set(is_degraded)

    def decided_alone(self) -> None:
        """One decision was made without Redis."""
        self._alone.inc()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Left:
    """A request that left at `at_s`, of which Redis is still to be told."""

    tenant: Tenant
    used_tokens: int
    at_s: float


class DegradingLimiter:
    """A `Limiter` that asks Redis, and this router's own counts when there is no answer.

    Args:
        shared: On Redis.
        clock: Of this router's own counts.
        router_id: Tells this router from the others.
        routers: How many there are at least.
        lease_s: Of what is held in Redis.
        metrics: Counts what was decided alone.
    """

    def __init__(
        self,
        shared: RedisLimiter,
        *,
        clock: Clock,
        router_id: str,
        routers: int,
        lease_s: float,
        metrics: LimitMetrics,
    ) -> None:
        self._shared = shared
        self._local = LocalLimiter(clock, share=1 / routers)
        self._clock = clock
        self._router_id = router_id
        self._least_routers = routers
        self._lease_s = lease_s
        self._pause_s = lease_s / _RENEWALS_PER_LEASE
        self._metrics = metrics
        self._story = StoryLog("shared limits")
        self._breaker = Breaker(_ASK_AGAIN, name=_REDIS, story=self._story)
        self._answered = True
        self._turned = asyncio.Event()
        """Redis gives no answer any more, or answers again."""
        self._held: dict[Tenant, set[GrantId]] = {}
        self._left: dict[GrantId, _Left] = {}

    @property
    def degraded(self) -> bool:
        """Whether this router decides alone."""
        return not self._breaker.allows(self._clock.now_s())

    async def enter(self, tenant: Tenant, grant: GrantId) -> LimitGranted | LimitRefused:
        """See `Limiter`."""
        if tenant.limits.unlimited:
            return await self._local.enter(tenant, grant)
        is_asked = not self.degraded
        decision = await self._ask(lambda: self._shared.enter(tenant, grant))
        if decision is None:
            self._metrics.decided_alone()
            decision = await self._local.enter(tenant, grant)
            if is_asked and isinstance(decision, LimitRefused):
                # Redis may have let it in, and its answer have come too late.
                self._left[grant] = _Left(tenant=tenant, used_tokens=0, at_s=self._clock.now_s())
        elif isinstance(decision, LimitGranted):
            self._local.ledger.hold(tenant, grant)
        else:
            self._local.ledger.note_refusal(tenant, decision, self._clock.now_s())
        if isinstance(decision, LimitGranted):
            self._held.setdefault(tenant, set()).add(grant)
        return decision

    async def charge(
        self, tenant: Tenant, grant: GrantId, tokens: int
    ) -> LimitGranted | LimitRefused:
        """See `Limiter`."""
        if tenant.limits.tokens_per_minute is None:
            return await self._local.charge(tenant, grant, tokens)
        decision = await self._ask(lambda: self._shared.charge(tenant, grant, tokens))
        if decision is None:
            self._metrics.decided_alone()
            return await self._local.charge(tenant, grant, tokens)
        if isinstance(decision, LimitRefused):
            self._local.ledger.note_refusal(tenant, decision, self._clock.now_s())
        return decision

    async def leave(self, tenant: Tenant, grant: GrantId, used_tokens: int) -> None:
        """See `Limiter`."""
        await self._local.leave(tenant, grant, used_tokens)
        held = self._held.get(tenant)
        if held is None or grant not in held:
            return
        held.remove(grant)
        if not held:
            del self._held[tenant]
        left = _Left(tenant=tenant, used_tokens=used_tokens, at_s=self._clock.now_s())
        if not await self._told(grant, left):
            self._left[grant] = left

    async def usage(self, tenant: Tenant) -> LimitUsage:
        """See `Limiter`."""
        usage = await self._ask(lambda: self._shared.usage(tenant))
        return await self._local.usage(tenant) if usage is None else usage

    def story(self, about: str) -> tuple[StoryEntry, ...]:
        """What a tenant of this id was refused lately; and of the circuit to Redis, which is called `redis`."""
        told = (*self._local.story(about), *self._story.story(about))
        return tuple(sorted(told, key=lambda entry: entry.at_s))

    async def run(self) -> None:
        """Renews what this router holds in Redis and counts the routers, until cancelled. While there is no answer it
        asks more often, so that no request is the one that finds Redis back, and places that are free taken.
        """
        try:
            while True:
                self._turned.clear()
                await self.renew()
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._pause_s if self._answered else _AWAY_S):
                        await self._turned.wait()
        finally:
            await self._ask(lambda: self._shared.count_routers(self._router_id, leaving=True))

    async def renew(self) -> None:
        """One round of `run`."""
        routers = await self._ask(lambda: self._shared.count_routers(self._router_id))
        if routers is not None:
            self._local.ledger.share = 1 / max(routers, self._least_routers)
        for tenant, grants in list(self._held.items()):
            renewed = tuple(grants)
            await self._ask(partial(self._shared.renew, tenant, renewed))
            # Over another connection Redis may have heard before that one has left.
            gone = _Left(tenant=tenant, used_tokens=0, at_s=self._clock.now_s())
            for grant in set(renewed).difference(self._held.get(tenant, ())):
                self._left.setdefault(grant, gone)
        await self._tell_left()

    async def _tell_left(self) -> None:
        """Tells Redis of those that left and that it may still hold, as far as it answers."""
        for grant, left in list(self._left.items()):
            held = self._clock.now_s() - left.at_s < self._lease_s
            if held and not await self._told(grant, left):
                return
            self._left.pop(grant)
            self._shared.forget(grant)

    async def _told(self, grant: GrantId, left: _Left) -> bool:
        """Whether Redis has heard that this one left."""

        async def leave() -> bool:
            await self._shared.leave(left.tenant, grant, left.used_tokens)
            return True

        return await self._ask(leave) is not None

    async def _ask(self, question: Callable[[], Awaitable[_Answer]]) -> _Answer | None:
        """Redis' answer, or None. After a fault it is left alone for a moment."""
        now_s = self._clock.now_s()
        if not self._breaker.allows(now_s):
            return None
        self._breaker.started(now_s)
        try:
            answer = await question()
        except UnavailableError as error:
            self._breaker.failed(self._clock.now_s())
            self._metrics.degraded(True)
            if self._answered:
                _log.warning("limits are this router's own for now", why=error.message)
                self._turned.set()
            self._answered = False
            return None
        except BaseException:
            self._breaker.abandoned(self._clock.now_s())
            raise
        self._breaker.succeeded(self._clock.now_s())
        self._metrics.degraded(False)
        if not self._answered:
            _log.info("limits hold over all routers again")
            self._turned.set()
        self._answered = True
        return answer
