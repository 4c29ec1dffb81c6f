"""Limits over several routers: sums hold, what died is given back, what Redis forgot is told again."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from baton.redis_link import open_redis
from router.limits.ports import LimitGranted, LimitRefused
from router.limits.shared import RedisLimiter
from tests.redis_servers import KINDS, a_redis
from tests.router.test_limits_contract import grant, tenant

LEASE_S = 5.0


class Cluster:
    """Two routers' limiters on one Redis."""

    def __init__(self, clients: list[Any]) -> None:
        self.client = clients[0]
        self.routers = [RedisLimiter(c, prefix="test", lease_s=LEASE_S) for c in clients]

    async def advance(self, seconds: float) -> None:
        """Makes leases older."""
        for key in [*await self.client.keys("test:*:in_flight"), "test:routers"]:
            for member in await self.client.zrange(key, 0, -1):
                await self.client.zincrby(key, -seconds * 1000, member)


@pytest.fixture(params=KINDS)
async def cluster(request, tmp_path) -> AsyncIterator[Cluster]:
    async with a_redis(request.param, tmp_path) as url, contextlib.AsyncExitStack() as stack:
        clients = [open_redis(url, 30.0) for _ in range(2)]
        for client in clients:
            stack.push_async_callback(client.aclose)
        yield Cluster(clients)


async def test_the_sum_over_routers_is_the_limit(cluster: Cluster):
    asks = tenant(requests_per_minute=1, request_burst=10, max_concurrency=7)
    entering = [cluster.routers[n % 2].enter(asks, grant(n)) for n in range(40)]
    decisions = await asyncio.gather(*entering)
    assert sum(isinstance(decision, LimitGranted) for decision in decisions) == 7


async def test_the_sum_of_tokens_over_routers_is_the_limit(cluster: Cluster):
    asks = tenant(tokens_per_minute=1, token_burst=1000)
    for n in range(40):
        await cluster.routers[n % 2].enter(asks, grant(n))
    charging = [cluster.routers[n % 2].charge(asks, grant(n), 100) for n in range(40)]
    decisions = await asyncio.gather(*charging)
    assert sum(isinstance(decision, LimitGranted) for decision in decisions) == 10


async def test_places_of_a_router_that_died_are_free_after_its_lease(cluster: Cluster):
    asks = tenant(max_concurrency=1)
    dead, alive = cluster.routers
    await dead.enter(asks, grant(0))
    assert isinstance(await alive.enter(asks, grant(1)), LimitRefused)
    await cluster.advance(LEASE_S - 1)
    assert isinstance(await alive.enter(asks, grant(1)), LimitRefused)
    await cluster.advance(2)
    assert isinstance(await alive.enter(asks, grant(1)), LimitGranted)


async def test_places_that_are_renewed_are_kept(cluster: Cluster):
    asks = tenant(max_concurrency=1)
    holder, other = cluster.routers
    await holder.enter(asks, grant(0))
    for _ in range(3):
        await cluster.advance(LEASE_S - 1)
        await holder.renew(asks, [grant(0)])
    assert isinstance(await other.enter(asks, grant(1)), LimitRefused)


async def test_what_redis_lost_comes_back_with_the_next_renewal(cluster: Cluster):
    asks = tenant(max_concurrency=2)
    for n in range(2):
        await cluster.routers[0].enter(asks, grant(n))
    await cluster.client.flushall()
    await cluster.routers[0].renew(asks, [grant(0), grant(1)])
    assert isinstance(await cluster.routers[1].enter(asks, grant(2)), LimitRefused)


async def test_scripts_that_redis_forgot_are_loaded_again(cluster: Cluster):
    asks = tenant(requests_per_minute=1, request_burst=2)
    assert isinstance(await cluster.routers[0].enter(asks, grant(0)), LimitGranted)
    await cluster.client.script_flush()
    assert isinstance(await cluster.routers[0].enter(asks, grant(1)), LimitGranted)
    assert isinstance(await cluster.routers[0].enter(asks, grant(2)), LimitRefused)


async def test_nothing_stays_in_redis_for_ever(cluster: Cluster):
    asks = tenant(requests_per_minute=1, tokens_per_minute=1, token_burst=100)
    await cluster.routers[0].enter(asks, grant(0))
    await cluster.routers[0].charge(asks, grant(0), 100)
    await cluster.routers[0].count_routers("a")
    keys = await cluster.client.keys("*")
    assert len(keys) == 3
    for key in keys:
        assert 0 < await cluster.client.pttl(key) < 2 * 3600 * 1000, key


async def test_both_keys_of_a_tenant_have_its_name_as_their_hash_tag(cluster: Cluster):
    await cluster.routers[0].enter(tenant("acme", requests_per_minute=1), grant(0))
    assert set(await cluster.client.keys("*")) == {
        "test:{acme}:buckets",
        "test:{acme}:in_flight",
    }


async def test_a_clock_that_is_set_back_gives_nothing_and_breaks_nothing(cluster: Cluster):
    asks = tenant(requests_per_minute=60, request_burst=1)
    await cluster.routers[0].enter(asks, grant(0))
    await cluster.client.hincrby("test:{acme}:buckets", "at", 3600_000)
    refused = await cluster.routers[0].enter(asks, grant(1))
    assert isinstance(refused, LimitRefused)
    assert refused.retry_after_s <= 1


async def test_routers_are_counted_while_they_say_that_they_are_there(cluster: Cluster):
    one, other = cluster.routers
    assert await one.count_routers("one") == 1
    assert await other.count_routers("other") == 2
    assert await other.count_routers("other", leaving=True) == 1
    await other.count_routers("other")
    await cluster.advance(LEASE_S + 1)
    assert await one.count_routers("one") == 1
