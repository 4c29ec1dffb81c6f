"""Redis away is never an outage: each router gives out its part, and the sum over all of them holds."""

import asyncio
import contextlib
from collections.abc import Iterable
from typing import Any

import pytest

from baton.clock import ManualClock
from baton.errors import UnavailableError
from baton.telemetry.metrics import new_registry
from router.limits.degrading import DegradingLimiter, LimitMetrics
from router.limits.local import LocalLimiter
from router.limits.ports import GrantId, LimitGranted, LimitRefused
from router.tenants.tenant import Tenant
from tests.redis_servers import REDIS_SERVER, no_refusals, real_redis
from tests.router.limits.test_contract import grant, tenant
from tests.waits import soon


class Shared(LocalLimiter):
    """Counts that routers share, until they are away."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__(clock)
        self.away = False
        self.late = False
        """Who enters is let in, and does not hear it."""
        self.asked = 0
        self.routers: set[str] = set()
        self.forgotten: list[GrantId] = []
        self.answered = asyncio.Event()
        self.renewing: tuple[asyncio.Event, asyncio.Event] | None = None
        """Is set when a renewal is asked for, and has it go on."""

    def _answer(self) -> None:
        self.asked += 1
        if self.away:
            raise UnavailableError("away")
        self.answered.set()

    async def enter(self, tenant: Tenant, grant: GrantId) -> LimitGranted | LimitRefused:
        self._answer()
        decision = await super().enter(tenant, grant)
        if self.late:
            raise UnavailableError("late")
        return decision

    async def charge(
        self, tenant: Tenant, grant: GrantId, tokens: int
    ) -> LimitGranted | LimitRefused:
        self._answer()
        return await super().charge(tenant, grant, tokens)

    async def leave(self, tenant: Tenant, grant: GrantId, used_tokens: int) -> None:
        self._answer()
        await super().leave(tenant, grant, used_tokens)

    def forget(self, grant: GrantId) -> None:
        self.forgotten.append(grant)

    async def renew(self, tenant: Tenant, grants: Iterable[GrantId]) -> None:
        self._answer()
        if self.renewing is not None:
            begun, goes_on = self.renewing
            begun.set()
            await goes_on.wait()
        for held in grants:
            self.ledger.hold(tenant, held)

    async def count_routers(self, router_id: str, *, leaving: bool = False) -> int:
        self._answer()
        (self.routers.discard if leaving else self.routers.add)(router_id)
        return len(self.routers)


class World:
    """Routers that share one clock and one set of counts."""

    def __init__(self, routers: int, *, known: int = 1) -> None:
        self.clock = ManualClock()
        self.shared = Shared(self.clock)
        self.registries = [new_registry() for _ in range(routers)]
        self.limiters = [
            DegradingLimiter(
                self.shared,  # type: ignore[arg-type]  # what it needs of a RedisLimiter
                clock=self.clock,
                router_id=f"router-{number}",
                routers=known,
                lease_s=30.0,
                metrics=LimitMetrics(registry),
            )
            for number, registry in enumerate(self.registries)
        ]

    def metric(self, name: str) -> float | None:
        return self.registries[0].get_sample_value(name)


async def _enter_all(world: World, asks: Tenant, attempts: int) -> int:
    decisions = [
        await world.limiters[n % len(world.limiters)].enter(asks, grant(n)) for n in range(attempts)
    ]
    return sum(isinstance(decision, LimitGranted) for decision in decisions)


async def test_while_redis_answers_the_limits_are_whole():
    world = World(2)
    assert await _enter_all(world, tenant(requests_per_minute=1, request_burst=10), 30) == 10
    assert world.metric("baton_limits_degraded") == 0


@pytest.mark.parametrize("known", [1, 2])
async def test_without_redis_the_sum_over_the_routers_that_were_known_holds(known: int):
    world = World(2, known=known)
    for limiter in world.limiters:
        await limiter.renew()
    await world.limiters[0].renew()
    world.shared.away = True
    asks = tenant(requests_per_minute=1, request_burst=10, max_concurrency=8)
    assert await _enter_all(world, asks, 30) == 8
    assert world.metric("baton_limits_degraded") == 1
    assert world.metric("baton_limits_degraded_decisions_total") == 15


async def test_what_a_tenant_was_refused_is_told_whoever_decided_and_redis_has_a_story_too():
    world, asks = World(1), tenant(requests_per_minute=1, request_burst=1)
    (limiter,) = world.limiters
    await limiter.enter(asks, grant(1))
    await limiter.enter(asks, grant(2))
    world.shared.away = True
    await limiter.enter(asks, grant(3))
    await limiter.enter(asks, grant(4))
    await limiter.leave(asks, grant(1), 5)
    assert [(entry.core, entry.event) for entry in limiter.story(asks.tenant_id)] == [
        ("limits", "refused: requests, for 60 s"),
        ("limits", "refused: requests, for 60 s"),
    ]
    assert [entry.actions for entry in limiter.story("redis")] == [("opened for 1 s",)]
    assert limiter.story("nobody") == ()


async def test_redis_is_not_asked_at_every_request_while_it_is_away():
    world = World(1)
    world.shared.away = True
    await _enter_all(world, tenant(requests_per_minute=600), 50)
    assert world.shared.asked == 1
    world.clock.advance(1.0)
    await _enter_all(world, tenant(requests_per_minute=600), 50)
    assert world.shared.asked == 2


async def test_when_redis_is_back_the_limits_are_whole_again():
    world = World(2, known=2)
    world.shared.away = True
    asks = tenant(max_concurrency=4)
    assert await _enter_all(world, asks, 10) == 4
    world.shared.away = False
    world.clock.advance(10.0)
    for limiter in world.limiters:
        await limiter.renew()
    assert (await world.limiters[0].usage(asks)).in_flight == 4, "told again what is in flight"
    assert world.metric("baton_limits_degraded") == 0
    await world.limiters[0].leave(asks, grant(0), 0)
    assert isinstance(await world.limiters[1].enter(asks, grant(99)), LimitGranted)


async def test_what_left_while_redis_was_away_takes_no_place_there():
    world, asks = World(2), tenant(max_concurrency=4, tokens_per_minute=1, token_burst=100)
    for n in range(4):
        await world.limiters[0].enter(asks, grant(n))
        await world.limiters[0].charge(asks, grant(n), 25)
    world.shared.away = True
    for n in range(4):
        await world.limiters[0].leave(asks, grant(n), 1)
    world.shared.away = False
    world.clock.advance(1.0)
    await world.limiters[0].renew()
    usage = await world.limiters[1].usage(asks)
    assert usage.in_flight == 0
    assert usage.levels.tokens is not None
    assert 96 <= usage.levels.tokens.remaining < 97
    asked = world.shared.asked
    await world.limiters[0].renew()
    assert world.shared.asked == asked + 1, "each is told once"


async def test_of_what_left_longer_ago_than_a_lease_nothing_is_told_or_kept():
    world, asks = World(1), tenant(max_concurrency=4)
    await world.limiters[0].enter(asks, grant(0))
    world.shared.away = True
    await world.limiters[0].leave(asks, grant(0), 0)
    world.clock.advance(30.0)
    await world.limiters[0].renew()
    assert world.shared.forgotten == [grant(0)]


async def test_who_was_let_in_too_late_to_hear_it_and_refused_here_takes_no_place():
    world, asks = World(2, known=2), tenant(max_concurrency=2)
    await world.limiters[0].renew()
    await world.limiters[0].enter(asks, grant(0))
    world.shared.late = True
    assert isinstance(await world.limiters[0].enter(asks, grant(1)), LimitRefused)
    world.shared.late = False
    world.clock.advance(1.0)
    await world.limiters[0].renew()
    assert (await world.limiters[1].usage(asks)).in_flight == 1
    await world.limiters[0].leave(asks, grant(0), 0)


async def test_what_leaves_while_it_is_renewed_takes_no_place():
    world, asks = World(2), tenant(max_concurrency=1)
    await world.limiters[0].enter(asks, grant(0))
    begun, goes_on = world.shared.renewing = asyncio.Event(), asyncio.Event()
    renewal = asyncio.create_task(world.limiters[0].renew())
    await soon(begun.wait())
    await soon(world.limiters[0].leave(asks, grant(0), 0))
    goes_on.set()
    await soon(renewal)
    assert isinstance(await world.limiters[1].enter(asks, grant(1)), LimitGranted)


async def test_that_redis_is_back_is_found_without_a_request():
    world, asks = World(2), tenant(max_concurrency=1)
    running = asyncio.create_task(world.limiters[0].run())
    await soon(world.shared.answered.wait())
    await world.limiters[0].enter(asks, grant(0))
    world.shared.away = True
    await world.limiters[0].leave(asks, grant(0), 0)
    world.shared.away = False
    world.clock.advance(1.0)
    world.shared.answered.clear()
    await soon(world.shared.answered.wait())
    assert isinstance(await world.limiters[1].enter(asks, grant(1)), LimitGranted)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_places_taken_with_redis_count_when_it_goes_away():
    world = World(1)
    asks = tenant(max_concurrency=2)
    for n in range(2):
        await world.limiters[0].enter(asks, grant(n))
    world.shared.away = True
    assert isinstance(await world.limiters[0].enter(asks, grant(2)), LimitRefused)
    await world.limiters[0].leave(asks, grant(0), 0)
    assert isinstance(await world.limiters[0].enter(asks, grant(3)), LimitGranted)


async def test_a_request_may_enter_with_redis_and_be_charged_and_leave_without():
    world = World(1)
    asks = tenant(tokens_per_minute=1, token_burst=100)
    await world.limiters[0].enter(asks, grant(0))
    world.shared.away = True
    assert isinstance(await world.limiters[0].charge(asks, grant(0), 80), LimitGranted)
    await world.limiters[0].leave(asks, grant(0), 30)
    tokens = (await world.limiters[0].usage(asks)).levels.tokens
    assert tokens is not None
    assert 70 <= tokens.remaining < 71


async def test_a_tenant_without_limits_does_not_wait_for_redis():
    world = World(1)
    await world.limiters[0].enter(tenant(), grant(0))
    await world.limiters[0].charge(tenant(), grant(0), 100)
    await world.limiters[0].leave(tenant(), grant(0), 10)
    assert world.shared.asked == 0


@pytest.mark.redis
@pytest.mark.skipif(REDIS_SERVER is None, reason="redis-server is not installed")
async def test_a_redis_that_is_killed_and_comes_back_costs_no_request(tmp_path):
    from baton.redis_link import open_redis
    from router.limits.shared import RedisLimiter

    clock, registry = ManualClock(), new_registry()
    asks = tenant(requests_per_minute=1, request_burst=4, max_concurrency=100)
    async with real_redis(tmp_path) as server, contextlib.AsyncExitStack() as stack:
        client = open_redis(server.url, 5.0)
        stack.push_async_callback(client.aclose)
        limiter = DegradingLimiter(
            RedisLimiter(client, prefix="t", lease_s=30, refused=no_refusals()),
            clock=clock,
            router_id="r",
            routers=2,
            lease_s=30.0,
            metrics=LimitMetrics(registry),
        )
        await limiter.renew()
        assert isinstance(await limiter.enter(asks, grant(0)), LimitGranted)
        await server.kill()
        granted: list[Any] = [await limiter.enter(asks, grant(n)) for n in range(1, 10)]
        assert sum(isinstance(d, LimitGranted) for d in granted) == 2, "this router's half of four"
        assert registry.get_sample_value("baton_limits_degraded") == 1
        await server.start()
        clock.advance(10.0)
        await limiter.renew()
        assert registry.get_sample_value("baton_limits_degraded") == 0
        assert (await limiter.usage(asks)).in_flight == 3
