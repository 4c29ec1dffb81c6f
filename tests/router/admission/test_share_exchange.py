"""Routers that tell each other what they gave, through Redis and without it."""

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from baton.config.schema import BatonConfig, ClusterConfig, TenantsConfig
from baton.errors import UnavailableError
from baton.redis_link import RefusedValues, open_redis
from baton.seal import HEAD_BYTES, Seal
from router.admission.share_exchange import ShareExchange, sharing
from tests.redis_servers import KINDS, a_redis, no_refusals, real_redis
from tests.waits import soon

pytestmark = pytest.mark.timeout(60)
KEY = "baton:admitted"
SECRET = b"s" * 32


@dataclass
class Clock:
    at_s: float = 0.0

    def now_s(self) -> float:
        return self.at_s


@dataclass(eq=False)
class Books:
    """A sharer that writes down what it hears."""

    admitted: dict[str, float] = field(default_factory=dict)
    heard: list[dict[str, Any]] = field(default_factory=list)
    news: asyncio.Event = field(default_factory=asyncio.Event)

    def hear(self, others) -> None:
        self.heard.append({name: dict(totals) for name, totals in others.items()})
        self.news.set()


def exchange(
    redis,
    name: str,
    books: Books,
    clock: Clock | None = None,
    *,
    secret: bytes = SECRET,
    refused: RefusedValues | None = None,
) -> ShareExchange:
    return ShareExchange(
        redis,
        key=KEY,
        router_id=name,
        admission=books,
        clock=clock or Clock(),
        secret=secret,
        refused=refused or no_refusals(),
    )


@pytest.mark.parametrize("kind", KINDS)
async def test_each_router_hears_what_the_others_gave_and_not_itself(kind, tmp_path):
    async with a_redis(kind, tmp_path) as url, open_redis(url, 5.0) as redis:
        one, other = Books({"1/a": 100.0}), Books({"1/b": 7.0})
        first, second = exchange(redis, "r1", one), exchange(redis, "r2", other)
        await first.exchange()
        await second.exchange()
        await first.exchange()
        assert one.heard == [{}, {"r2": {"1/b": 7.0}}]
        assert other.heard == [{"r1": {"1/a": 100.0}}]


async def test_a_router_that_says_nothing_new_for_a_lease_is_taken_out(tmp_path):
    async with a_redis("fakeredis", tmp_path) as url, open_redis(url, 5.0) as redis:
        clock, books = Clock(), Books()
        here = exchange(redis, "r1", books, clock)
        await exchange(redis, "dead", Books({"1/a": 5.0})).exchange()
        await here.exchange()
        clock.at_s = 2.9
        await here.exchange()
        clock.at_s = 3.1
        await here.exchange()
        assert books.heard == [{"dead": {"1/a": 5.0}}, {"dead": {"1/a": 5.0}}, {}]
        assert await redis.hkeys(KEY) == [b"r1"]


async def test_a_router_that_leaves_takes_its_word_back(tmp_path):
    async with a_redis("fakeredis", tmp_path) as url, open_redis(url, 5.0) as redis:
        here = exchange(redis, "r1", Books())
        await here.exchange()
        await here.leave()
        assert await redis.hkeys(KEY) == []


@pytest.mark.parametrize("rubbish", ["", "{}", "[1]", '{"beat": "x"}', "\x00", "null"])
async def test_what_no_router_wrote_is_ignored_and_taken_out(rubbish, tmp_path):
    async with a_redis("fakeredis", tmp_path) as url, open_redis(url, 5.0) as redis:
        await redis.hset(KEY, "stranger", rubbish)
        books = Books()
        await exchange(redis, "r1", books).exchange()
        assert books.heard == [{}]
        assert await redis.hkeys(KEY) == [b"r1"]


@pytest.mark.parametrize("kind", KINDS)
async def test_whatever_lies_in_the_hash_the_others_are_heard(kind, tmp_path):
    async with a_redis(kind, tmp_path) as url, open_redis(url, 5.0) as redis:
        loop = asyncio.get_running_loop()

        async def tried(fields: dict[bytes, bytes], of_type: str) -> None:
            await redis.flushall()
            if of_type == "string":
                await redis.set(KEY, b"a text")
            elif of_type == "set":
                await redis.sadd(KEY, b"a member")
            else:
                for name, value in fields.items():
                    await redis.hset(KEY, name, value)
            books, registry = Books({"1/a": 1.0}), CollectorRegistry()
            here = exchange(redis, "r1", books, refused=RefusedValues(registry))
            await here.exchange()
            assert books.heard == [{}]
            await exchange(redis, "r2", Books({"1/b": 2.0})).exchange()
            await here.exchange()
            assert books.heard[-1] == {"r2": {"1/b": 2.0}}
            labels = {"reader": "shares"}
            refused = registry.get_sample_value("baton_redis_refused_values_total", labels)
            assert (refused or 0) == (len(fields) if of_type == "hash" else 1)

        names = st.binary(max_size=70).filter(lambda name: name not in (b"r1", b"r2"))
        messages = st.one_of(st.binary(max_size=99), st.just(b'{"beat": 1, "given": {"1/a": 1e9}}'))

        @settings(max_examples=25, deadline=None, database=None)
        @given(
            st.dictionaries(names, messages, max_size=3),
            st.sampled_from(["hash", "hash", "string", "set"]),
        )
        def every_example(fields: dict[bytes, bytes], of_type: str) -> None:
            asyncio.run_coroutine_threadsafe(tried(fields, of_type), loop).result(30)

        await asyncio.to_thread(every_example)


async def test_a_message_of_another_cluster_or_from_before_is_not_heard(tmp_path):
    async with a_redis("fakeredis", tmp_path) as url, open_redis(url, 5.0) as redis:
        books, other = Books(), Books({"1/b": 2.0})
        here, there = exchange(redis, "r1", books), exchange(redis, "r2", other)
        await exchange(redis, "r3", Books({"1/c": 3.0}), secret=b"t" * 32).exchange()
        await there.exchange()
        old = await redis.hget(KEY, "r2")
        other.admitted["1/b"] = 50.0
        await there.exchange()
        await here.exchange()
        assert books.heard[-1] == {"r2": {"1/b": 50.0}}
        await redis.hset(KEY, "r2", old)
        await redis.hset(KEY, "r4", old)
        for _ in range(2):
            await here.exchange()
            assert books.heard[-1] == {}
            await redis.hset(KEY, "r2", old)


@pytest.mark.parametrize("ahead_s", [-400.0, 400.0])
async def test_a_router_whose_clock_is_wrong_takes_no_other_out(ahead_s, tmp_path):
    """What it finds is what a router sealed so long ago, or ahead, by its clock."""
    async with a_redis("fakeredis", tmp_path) as url, open_redis(url, 5.0) as redis:
        books, registry = Books(), CollectorRegistry()
        await exchange(redis, "r2", Books({"1/b": 2.0})).exchange()
        sealed: Any = await redis.hget(KEY, "r2")
        seal = Seal(SECRET, "router shares")
        theirs = seal.close("r2", sealed[HEAD_BYTES:], round(1000 * (time.time() - ahead_s)))
        await redis.hset(KEY, "r2", theirs)
        await exchange(redis, "r1", books, refused=RefusedValues(registry)).exchange()
        assert books.heard == [{}]
        assert await redis.hget(KEY, "r2") == theirs
        labels = {"reader": "shares"}
        assert registry.get_sample_value("baton_redis_refused_values_total", labels) == 1


async def test_without_redis_nothing_is_heard_and_that_is_said(tmp_path):
    async with open_redis(f"unix://{tmp_path}/nobody", 0.1) as redis:
        books = Books()
        with pytest.raises(UnavailableError):
            await exchange(redis, "r1", books).exchange()
        assert books.heard == []


async def test_where_no_redis_is_configured_nothing_is_done():
    books = Books()
    async with sharing(BatonConfig(), books, no_refusals()):
        assert books.heard == []


async def test_an_exchange_that_ends_by_a_fault_of_its_own_is_told_of(tmp_path, caplog):
    async with a_redis("fakeredis", tmp_path) as url:
        books = Books(heard=None)  # type: ignore[arg-type]  # it cannot hear
        tenants = TenantsConfig(redis_url=url, redis_timeout_s=5.0)
        config = BatonConfig(tenants=tenants, cluster=ClusterConfig(secret="5a" * 32))
        async with sharing(config, books, no_refusals()), asyncio.timeout(20):
            while not any("the exchange of shares died" in told for told in caplog.messages):  # noqa: ASYNC110
                await asyncio.sleep(0.01)


@pytest.mark.redis
async def test_while_redis_is_away_routers_go_on_and_hear_each_other_again_afterwards(tmp_path):
    async with real_redis(tmp_path) as server:
        tenants = TenantsConfig(redis_url=server.url, redis_timeout_s=1.0)
        config = BatonConfig(tenants=tenants, cluster=ClusterConfig(secret="5a" * 32))
        one, other = Books({"1/a": 1.0}), Books({"1/b": 2.0})
        async with sharing(config, one, no_refusals()), sharing(config, other, no_refusals()):
            await _hears(one, {"1/b": 2.0})
            await server.kill()
            one.heard.clear()
            other.admitted["1/b"] = 50.0
            await server.start()
            await _hears(one, {"1/b": 50.0})
            await _hears(other, {"1/a": 1.0})


async def _hears(books: Books, totals: dict[str, float]) -> None:
    while not (books.heard and totals in books.heard[-1].values()):
        books.news.clear()
        await soon(books.news.wait())
