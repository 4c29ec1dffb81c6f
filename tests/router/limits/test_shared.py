"""Limits over several routers: sums hold, what died is given back, what Redis forgot is told again."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from math import isfinite
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from baton.errors import UnavailableError
from baton.redis_link import RefusedValues, open_redis
from router.limits.ports import LimitGranted, LimitRefused
from router.limits.shared import RedisLimiter
from router.tenants.tenant import Tenant
from tests.redis_servers import KINDS, a_redis, no_refusals
from tests.router.limits.test_contract import grant, tenant

LEASE_S = 5.0


class Cluster:
    """Two routers' limiters on one Redis."""

    def __init__(self, clients: list[Any]) -> None:
        self.client = clients[0]
        self._registry = CollectorRegistry()
        refused = RefusedValues(self._registry)
        self.routers = [
            RedisLimiter(c, prefix="test", lease_s=LEASE_S, refused=refused) for c in clients
        ]

    def refused(self, reader: str) -> float:
        """How much was."""
        labels = {"reader": reader}
        return self._registry.get_sample_value("baton_redis_refused_values_total", labels) or 0.0

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


@pytest.mark.parametrize(("rate", "burst"), [(1e-6, 1), (1e-6, 1e12), (1e12, 1e12)])
async def test_the_least_and_the_largest_limits_of_a_document_are_counted(
    cluster: Cluster, rate: float, burst: float
):
    (router, _) = cluster.routers
    asks = tenant(requests_per_minute=rate, tokens_per_minute=rate, token_burst=burst)
    assert isinstance(await router.enter(asks, grant(0)), LimitGranted)
    assert isinstance(await router.charge(asks, grant(0), int(burst)), LimitGranted)
    await router.enter(asks, grant(1))
    again = await router.charge(asks, grant(0), int(burst))
    assert isinstance(again, LimitRefused)
    assert 0 < again.retry_after_s <= 1e9
    await router.leave(asks, grant(0), 0)
    assert isinstance(await router.charge(asks, grant(1), int(burst)), LimitGranted)
    assert cluster.refused("limits") == 0


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
    assert len(keys) == 4
    for key in keys:
        assert 0 < await cluster.client.pttl(key) < 2 * 3600 * 1000, key


async def test_all_keys_of_a_tenant_have_its_name_as_their_hash_tag(cluster: Cluster):
    asks = tenant("acme", tokens_per_minute=1, token_burst=100)
    await cluster.routers[0].enter(asks, grant(0))
    await cluster.routers[0].charge(asks, grant(0), 1)
    assert set(await cluster.client.keys("*")) == {
        b"test:{acme}:buckets",
        b"test:{acme}:in_flight",
        b"test:{acme}:charged",
    }


async def remaining(cluster: Cluster, asks: Tenant) -> float:
    """Tokens that the tenant has left; those of a minute are fewer than one."""
    level = (await cluster.routers[0].usage(asks)).levels.tokens
    assert level is not None
    return level.remaining


async def test_what_was_charged_is_settled_by_who_did_not_hear_of_it(cluster: Cluster):
    asks, (hears, does_not) = tenant(tokens_per_minute=1, token_burst=1000), cluster.routers
    await hears.enter(asks, grant(0))
    for tokens in (300, 200):
        await hears.charge(asks, grant(0), tokens)
    await does_not.leave(asks, grant(0), 40)
    assert 960 <= await remaining(cluster, asks) < 961
    await does_not.leave(asks, grant(0), 40)
    assert await remaining(cluster, asks) < 961, "once"


async def test_a_lease_that_ended_while_redis_was_away_does_not_charge_twice(cluster: Cluster):
    asks, (router, _) = tenant(tokens_per_minute=1, token_burst=1000), cluster.routers
    await router.enter(asks, grant(0))
    await router.charge(asks, grant(0), 500)
    await cluster.advance(LEASE_S + 1)
    await router.renew(asks, [grant(0)])
    await router.leave(asks, grant(0), 40)
    assert 960 <= await remaining(cluster, asks) < 961


async def test_what_a_router_that_died_was_charged_goes_with_its_lease(cluster: Cluster):
    asks, (dead, alive) = tenant(tokens_per_minute=1, token_burst=1000), cluster.routers
    await dead.enter(asks, grant(0))
    await dead.charge(asks, grant(0), 500)
    await cluster.advance(LEASE_S + 1)
    await alive.enter(asks, grant(1))
    await alive.charge(asks, grant(1), 100)
    assert await cluster.client.hkeys("test:{acme}:charged") == [grant(1).encode()]


@pytest.mark.parametrize("false", [b"nan", b"-5", b"1e300", b"x"])
async def test_a_false_charge_is_none_and_counted(cluster: Cluster, false: bytes):
    asks, (router, _) = tenant(tokens_per_minute=1, token_burst=1000), cluster.routers
    await router.enter(asks, grant(0))
    await router.charge(asks, grant(0), 500)
    await cluster.client.hset("test:{acme}:charged", grant(0), false)
    await router.leave(asks, grant(0), 40)
    assert 960 <= await remaining(cluster, asks) < 961
    assert cluster.refused("limits") == 1


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


FALSE_NUMBERS = [
    b"nan",
    b"-nan",
    b"inf",
    b"-inf",
    b"1e300",
    b"-1e300",
    b"0x7",
    b"",
    b"x" * 9000,
    b"-5",
]
FAR_MS = b"99999999999999"


def false_buckets() -> st.SearchStrategy[dict[str, bytes]]:
    value = st.one_of(st.sampled_from([*FALSE_NUMBERS, FAR_MS]), st.binary(max_size=12))
    return st.dictionaries(st.sampled_from(["requests", "tokens", "at", "more"]), value, min_size=1)


async def test_a_tenant_gets_a_plain_answer_whatever_lies_in_its_bucket(cluster: Cluster):
    asks = tenant(requests_per_minute=60, request_burst=5, tokens_per_minute=600, max_concurrency=9)
    limiter, loop = cluster.routers[0], asyncio.get_running_loop()

    async def tried(bucket: dict[str, bytes]) -> None:
        await cluster.client.flushall()
        await cluster.client.hset("test:{acme}:buckets", mapping=bucket)
        for step in (
            limiter.enter(asks, grant(0)),
            limiter.charge(asks, grant(0), 20),
            limiter.renew(asks, [grant(0)]),
            limiter.leave(asks, grant(0), 10),
        ):
            await step
        usage = await limiter.usage(asks)
        for level in (usage.levels.requests, usage.levels.tokens):
            assert level is not None
            assert all(map(isfinite, (level.remaining, level.reset_s)))
            assert level.remaining <= level.limit
            assert level.wait_s(1) < 2e9 * level.reset_s + 1

    @settings(max_examples=40, deadline=None, database=None)
    @given(false_buckets())
    @example({"requests": b"nan", "tokens": b"nan", "at": b"nan"})
    @example({"requests": b"0", "tokens": b"0", "at": FAR_MS})
    def every_example(bucket: dict[str, bytes]) -> None:
        asyncio.run_coroutine_threadsafe(tried(bucket), loop).result(30)

    await asyncio.to_thread(every_example)


@pytest.mark.parametrize("bucket", [{"requests": "nan"}, {"requests": "-inf"}, {"at": FAR_MS}])
async def test_a_false_bucket_is_repaired_and_counted(cluster: Cluster, bucket: dict[str, str]):
    asks = tenant(requests_per_minute=60, request_burst=2)
    await cluster.client.hset("test:{acme}:buckets", mapping={"at": 5, **bucket})
    for n in range(2):
        assert isinstance(await cluster.routers[0].enter(asks, grant(n)), LimitGranted)
    assert isinstance(await cluster.routers[0].enter(asks, grant(2)), LimitRefused)
    assert cluster.refused("limits") == 1


async def test_an_empty_bucket_of_the_far_future_fills_again(cluster: Cluster):
    asks = tenant(requests_per_minute=60_000, request_burst=1)
    bucket = {"requests": "0", "tokens": "0", "at": FAR_MS}
    await cluster.client.hset("test:{acme}:buckets", mapping=bucket)
    async with asyncio.timeout(10):
        while isinstance(await cluster.routers[0].enter(asks, grant(0)), LimitRefused):  # noqa: ASYNC110
            await asyncio.sleep(0.001)


@pytest.mark.parametrize(
    "key",
    ["test:{acme}:buckets", "test:{acme}:in_flight", "test:{acme}:charged", "test:routers"],
)
async def test_a_key_of_another_type_is_replaced(cluster: Cluster, key: str):
    asks = tenant(requests_per_minute=60, max_concurrency=1)
    await cluster.client.set(key, "a text")
    assert isinstance(await cluster.routers[0].enter(asks, grant(0)), LimitGranted)
    assert isinstance(await cluster.routers[1].enter(asks, grant(1)), LimitRefused)
    assert await cluster.routers[0].count_routers("one") == 1
    assert cluster.refused("limits") + cluster.refused("limits_routers") == 1


async def test_leases_that_never_end_are_none(cluster: Cluster):
    asks = tenant(max_concurrency=1)
    await cluster.client.zadd("test:{acme}:in_flight", {"x": float("inf"), "y": 1e15})
    await cluster.client.zadd("test:routers", {"x": float("inf")})
    assert isinstance(await cluster.routers[0].enter(asks, grant(0)), LimitGranted)
    assert await cluster.routers[0].count_routers("one") == 1


async def test_more_routers_than_there_are_do_not_shrink_a_tenants_part(cluster: Cluster):
    now_s = (await cluster.client.time())[0]
    false = {f"router-{n}": (now_s + 3) * 1000 for n in range(2000)}
    await cluster.client.zadd("test:routers", false)
    with pytest.raises(UnavailableError):
        await cluster.routers[0].count_routers("one")


class AnyReply:
    """A Redis that answers every script with the same."""

    def __init__(self, reply: object) -> None:
        self._reply = reply

    def register_script(self, _text: str) -> Any:
        async def answer(keys: object, args: object) -> object:
            return self._reply

        return answer


NUMBERS = st.sampled_from([b"1", b"-3.5", b"nan", b"inf", b"1e308", b"", b"x"])


@given(
    st.one_of(
        st.none(),
        st.integers(),
        st.binary(),
        st.lists(st.one_of(st.integers(-1, 2), NUMBERS), max_size=8),
        st.tuples(
            st.integers(-1, 2),
            st.sampled_from([b"", b"requests", b"tokens", b"concurrency", b"\xff"]),
            *[NUMBERS] * 3,
            st.integers(-1, 2),
            st.integers(-1, 2),
        ).map(list),
    )
)
@settings(deadline=None)
def test_any_reply_of_a_false_redis_is_a_decision_or_none(reply: object):
    async def asked() -> None:
        redis: Any = AnyReply(reply)
        limiter = RedisLimiter(redis, prefix="test", lease_s=LEASE_S, refused=no_refusals())
        asks = tenant(requests_per_minute=60)
        for step in (limiter.enter(asks, grant(0)), limiter.count_routers("one")):
            with contextlib.suppress(UnavailableError):
                decision = await step
                if isinstance(decision, LimitRefused):
                    assert 0 < decision.retry_after_s < 1e15

    asyncio.run(asked())
