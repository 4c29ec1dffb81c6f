"""Everything that stands between a client and the endpoints: tenants, limits, guardrails, audit. Put together here.

`tenancy_of_keys` is what a router has without any of it: the keys of its configuration and no limits. `open_tenancy` is
what the router process runs with; it looks after reloads and leases in the background.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry

from baton.background import in_background
from baton.clock import Clock, MonotonicClock
from baton.config.schema import BatonConfig, TenantsConfig
from baton.errors import UnavailableError
from baton.redis_link import RefusedValues, open_redis
from baton.story import StoryEntry
from baton.telemetry.logs import get_logger
from router.guardrails.chain import GuardChain
from router.guardrails.load import load_guardrails
from router.http.audit import AuditLog
from router.limits.degrading import DegradingLimiter, LimitMetrics
from router.limits.local import LocalLimiter
from router.limits.shared import RedisLimiter
from router.tenants.breakers import TenantBreakers
from router.tenants.directory import TenantDirectory
from router.tenants.reload import ReloadMetrics, TenantReloader
from router.tenants.sources import FileSource, RedisSource, TenantSource
from router.tenants.tenant import TenantId

if TYPE_CHECKING:
    from redis.asyncio import Redis

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenancy:
    """The parts.

    Attributes:
        directory: Knows the tenants.
        limiter: Keeps their counts.
        clock: Of limits and circuits.
        breakers: Knows whose requests break workers.
        guards: The operator's checks.
        audit: Where requests are recorded, if they are.
        keep_content: Whether every tenant's content is recorded.
        reloader: Follows the tenants document, if there is one.
    """

    directory: TenantDirectory
    limiter: LocalLimiter | DegradingLimiter
    clock: Clock
    breakers: TenantBreakers = field(default_factory=TenantBreakers)
    guards: GuardChain = field(default_factory=GuardChain)
    audit: AuditLog | None = None
    keep_content: bool = False
    reloader: TenantReloader | None = None

    def story(self, about: str) -> tuple[StoryEntry, ...]:
        """What a tenant of this id was refused lately, and what its circuit did."""
        return (*self.limiter.story(about), *self.breakers.story(TenantId(about)))


def tenancy_of_keys(api_keys: Sequence[str], clock: Clock) -> Tenancy:
    """One anonymous tenant without limits: every client with one of the keys, or every client if there are none."""
    return Tenancy(directory=TenantDirectory(api_keys), limiter=LocalLimiter(clock), clock=clock)


@asynccontextmanager
async def open_tenancy(
    config: BatonConfig, registry: CollectorRegistry, refused: RefusedValues
) -> AsyncIterator[Tenancy]:
    """All that the configuration asks for, at work inside.

    Args:
        config: The whole configuration.
        registry: For metrics.
        refused: Is told of what is not believed of Redis.

    Raises:
        ConfigError: The tenants document, a guardrail or the URL of Redis is wrong, or an extra is not installed.
    """
    clock = MonotonicClock()
    described = bool(config.tenants.file) or config.tenants.source == "redis"
    directory = TenantDirectory(config.router.api_keys, described=described)
    async with AsyncExitStack() as stack:
        redis = await _redis(config.tenants, stack)
        limiter = await _limiter(config.tenants, redis, clock, registry, refused, stack)
        reloader = await _reloader(config, redis, directory, registry, refused, stack)
        audit = None
        if config.audit.file:
            audit = AuditLog(Path(config.audit.file), registry)
            stack.push_async_callback(asyncio.to_thread, audit.close)
        yield Tenancy(
            directory=directory,
            limiter=limiter,
            clock=clock,
            guards=GuardChain(load_guardrails(config.router.guardrails)),
            audit=audit,
            keep_content=config.audit.content,
            reloader=reloader,
        )


async def _redis(config: TenantsConfig, stack: AsyncExitStack) -> "Redis | None":
    if not config.redis_url:
        return None
    redis = open_redis(config.redis_url, config.redis_timeout_s)
    stack.push_async_callback(redis.aclose)
    return redis


async def _limiter(
    config: TenantsConfig,
    redis: "Redis | None",
    clock: Clock,
    registry: CollectorRegistry,
    refused: RefusedValues,
    stack: AsyncExitStack,
) -> LocalLimiter | DegradingLimiter:
    if redis is None:
        return LocalLimiter(clock, share=1 / config.routers)
    shared = RedisLimiter(
        redis, prefix=config.redis_prefix, lease_s=config.lease_s, refused=refused
    )
    limiter = DegradingLimiter(
        shared,
        clock=clock,
        router_id=secrets.token_hex(8),
        routers=config.routers,
        lease_s=config.lease_s,
        metrics=LimitMetrics(registry),
    )
    await limiter.renew()
    await stack.enter_async_context(
        in_background(limiter.run(), "limits", "limits are not renewed any more")
    )
    return limiter


async def _reloader(
    config: BatonConfig,
    redis: "Redis | None",
    directory: TenantDirectory,
    registry: CollectorRegistry,
    refused: RefusedValues,
    stack: AsyncExitStack,
) -> TenantReloader | None:
    source = _source(config, redis, refused)
    if source is None:
        return None
    reloader = TenantReloader(
        source,
        directory,
        ReloadMetrics(registry),
        pause_s=config.tenants.reload_s,
        slo_classes=config.router.slo_classes,
    )
    try:
        await reloader.load()
    except UnavailableError as error:
        # Until Redis answers, only requests with plain keys are let in.
        _log.error("no tenants yet: they are in Redis", why=error.message)
    await stack.enter_async_context(
        in_background(reloader.run(), "tenants", "tenants are not read again any more")
    )
    return reloader


def _source(
    config: BatonConfig, redis: "Redis | None", refused: RefusedValues
) -> TenantSource | None:
    tenants = config.tenants
    if tenants.source == "redis":
        assert redis is not None, "checked with the configuration"
        secret = bytes.fromhex(config.cluster.secret)
        return RedisSource(redis, tenants.redis_prefix, secret, refused)
    return FileSource(Path(tenants.file)) if tenants.file else None
