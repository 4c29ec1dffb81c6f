"""What every keeper of limits owes, in this process, on fakeredis and on a real Redis."""

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Protocol

import pytest

from baton.clock import ManualClock
from baton.redis_link import open_redis
from router.limits.local import LocalLimiter
from router.limits.ports import GrantId, Limiter, LimitGranted, LimitKind, LimitRefused
from router.limits.shared import RedisLimiter
from router.tenants.tenant import Tenant, TenantId, TenantLimits
from tests.redis_servers import KINDS, a_redis, no_refusals

LEASE_S = 600.0


def tenant(name: str = "acme", **limits: Any) -> Tenant:
    return Tenant(tenant_id=TenantId(name), limits=TenantLimits(**limits))


def grant(number: int) -> GrantId:
    return GrantId(f"g{number}")


class World(Protocol):
    """A limiter and its time."""

    limiter: Limiter

    async def advance(self, seconds: float) -> None:
        """Lets time pass."""


class _Local:
    def __init__(self) -> None:
        self._clock = ManualClock(100.0)
        self.limiter: Limiter = LocalLimiter(self._clock)

    async def advance(self, seconds: float) -> None:
        self._clock.advance(seconds)


class _Redis:
    """Nobody can set a server's clock, so what it remembers is made older."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self.limiter: Limiter = RedisLimiter(
            client, prefix="test", lease_s=LEASE_S, refused=no_refusals()
        )

    async def advance(self, seconds: float) -> None:
        for key in await self._client.keys("test:*:buckets"):
            await self._client.hincrby(key, "at", -round(seconds * 1000))
        for key in await self._client.keys("test:*:in_flight"):
            for member in await self._client.zrange(key, 0, -1):
                await self._client.zincrby(key, -seconds * 1000, member)


@contextlib.asynccontextmanager
async def a_world(kind: str, directory: Path) -> AsyncIterator[World]:
    if kind == "local":
        yield _Local()
        return
    async with a_redis(kind, directory) as url:
        client = open_redis(url, 30.0)
        try:
            yield _Redis(client)
        finally:
            await client.aclose()


@pytest.fixture(params=["local", *KINDS])
async def world(request, tmp_path) -> AsyncIterator[World]:
    async with a_world(request.param, tmp_path) as made:
        yield made


async def test_a_burst_is_granted_and_what_follows_it_waits_as_long_as_it_is_told(world: World):
    asks = tenant(requests_per_minute=6, request_burst=3)
    for number in range(3):
        assert isinstance(await world.limiter.enter(asks, grant(number)), LimitGranted)
    refused = await world.limiter.enter(asks, grant(3))
    assert isinstance(refused, LimitRefused)
    assert refused.kind is LimitKind.REQUESTS
    assert 9 < refused.retry_after_s <= 10
    await world.advance(refused.retry_after_s - 1)
    assert isinstance(await world.limiter.enter(asks, grant(3)), LimitRefused)
    await world.advance(1.1)
    assert isinstance(await world.limiter.enter(asks, grant(3)), LimitGranted)


async def test_a_refusal_takes_nothing(world: World):
    asks = tenant(requests_per_minute=6, request_burst=1)
    await world.limiter.enter(asks, grant(0))
    for _ in range(5):
        refused = await world.limiter.enter(asks, grant(1))
        assert isinstance(refused, LimitRefused)
        assert refused.retry_after_s <= 10
    assert (await world.limiter.usage(asks)).in_flight == 1


async def test_tokens_that_were_not_used_come_back(world: World):
    asks = tenant(tokens_per_minute=1, token_burst=1000)
    await world.limiter.enter(asks, grant(0))
    charged = await world.limiter.charge(asks, grant(0), 900)
    assert charged.levels.tokens is not None
    assert 100 <= charged.levels.tokens.remaining < 101
    await world.limiter.leave(asks, grant(0), 50)
    tokens = (await world.limiter.usage(asks)).levels.tokens
    assert tokens is not None
    assert 950 <= tokens.remaining < 951


async def test_tokens_that_were_used_beyond_the_estimate_are_owed(world: World):
    asks = tenant(tokens_per_minute=60, token_burst=100)
    await world.limiter.enter(asks, grant(0))
    await world.limiter.charge(asks, grant(0), 100)
    await world.limiter.leave(asks, grant(0), 300)
    await world.limiter.enter(asks, grant(1))
    refused = await world.limiter.charge(asks, grant(1), 10)
    assert isinstance(refused, LimitRefused)
    assert refused.kind is LimitKind.TOKENS
    assert 205 < refused.retry_after_s <= 210
    await world.advance(refused.retry_after_s + 1)
    assert isinstance(await world.limiter.charge(asks, grant(1), 10), LimitGranted)


async def test_more_than_the_bucket_holds_is_granted_once_it_is_full_and_owed_after_that(
    world: World,
):
    asks = tenant(tokens_per_minute=60, token_burst=100)
    await world.limiter.enter(asks, grant(0))
    big = await world.limiter.charge(asks, grant(0), 400)
    assert isinstance(big, LimitGranted)
    assert big.levels.tokens is not None
    assert -300 <= big.levels.tokens.remaining < -299
    again = await world.limiter.charge(asks, grant(0), 400)
    assert isinstance(again, LimitRefused)
    assert 395 < again.retry_after_s <= 400


async def test_no_more_requests_are_in_flight_than_allowed(world: World):
    asks = tenant(max_concurrency=2)
    await world.limiter.enter(asks, grant(0))
    await world.limiter.enter(asks, grant(1))
    refused = await world.limiter.enter(asks, grant(2))
    assert isinstance(refused, LimitRefused)
    assert refused.kind is LimitKind.CONCURRENCY
    await world.limiter.leave(asks, grant(0), 0)
    assert isinstance(await world.limiter.enter(asks, grant(2)), LimitGranted)


async def test_leaving_twice_gives_nothing_twice(world: World):
    asks = tenant(max_concurrency=2, tokens_per_minute=1, token_burst=100)
    await world.limiter.enter(asks, grant(0))
    await world.limiter.enter(asks, grant(1))
    await world.limiter.charge(asks, grant(0), 60)
    await world.limiter.charge(asks, grant(1), 40)
    for _ in range(3):
        await world.limiter.leave(asks, grant(0), 60)
    usage = await world.limiter.usage(asks)
    assert usage.in_flight == 1
    assert usage.levels.tokens is not None
    assert 0 <= usage.levels.tokens.remaining < 1


async def test_entering_twice_is_entering_once(world: World):
    asks = tenant(max_concurrency=2, requests_per_minute=1, request_burst=2)
    for _ in range(5):
        assert isinstance(await world.limiter.enter(asks, grant(0)), LimitGranted)
    assert isinstance(await world.limiter.enter(asks, grant(1)), LimitGranted)


async def test_what_one_tenant_uses_costs_no_other(world: World):
    one, other = (
        tenant(name, requests_per_minute=1, request_burst=1, max_concurrency=1)
        for name in ("one", "other")
    )
    assert isinstance(await world.limiter.enter(one, grant(0)), LimitGranted)
    assert isinstance(await world.limiter.enter(one, grant(1)), LimitRefused)
    assert isinstance(await world.limiter.enter(other, grant(2)), LimitGranted)


async def test_a_long_pause_fills_a_bucket_and_no_more(world: World):
    asks = tenant(requests_per_minute=60, request_burst=2)
    await world.limiter.enter(asks, grant(0))
    await world.advance(3600)
    usage = await world.limiter.usage(asks)
    assert usage.levels.requests is not None
    assert (usage.levels.requests.remaining, usage.levels.requests.reset_s) == (2, 0)


async def test_limits_that_change_hold_at_once(world: World):
    await world.limiter.enter(tenant(requests_per_minute=1, request_burst=100), grant(0))
    tight = tenant(requests_per_minute=1, request_burst=1)
    assert isinstance(await world.limiter.enter(tight, grant(1)), LimitGranted)
    assert isinstance(await world.limiter.enter(tight, grant(2)), LimitRefused)


async def test_a_tenant_without_limits_is_never_refused(world: World):
    asks = tenant()
    for number in range(20):
        assert isinstance(await world.limiter.enter(asks, grant(number)), LimitGranted)
        decision = await world.limiter.charge(asks, grant(number), 10**9)
        assert isinstance(decision, LimitGranted)
        assert decision.levels.tokens is None
