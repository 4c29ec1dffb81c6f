"""What the pool leaves behind in Redis, and what it makes of what others put there."""

import asyncio
import json
import time
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from redis.asyncio import Redis

from baton.errors import InvalidRequestError, OverloadedError, PoolUnavailableError
from baton.ids import BlockKey, Incarnation, WorkerId, WorkerIdentity
from baton.redis_link import RefusedValues, open_redis
from kvpool.directory.redis import _FLUSH_TRIES, RedisDirectory, found_chain
from kvpool.directory.statements import Statements
from kvpool.messages import DirectoryChanges, NodeState, Owner, Selection, Stored, TenantPart, Tier
from tests.redis_servers import KINDS, a_redis

OWNER = Owner(tenant="anna", scope="anna", model="m1")
NUM_BLOCKS = 1000
SECRET = b"s" * 32


def state(worker_id: str) -> NodeState:
    node = WorkerIdentity(worker_id=WorkerId(worker_id), incarnation=Incarnation(1))
    part = TenantPart(tenant="anna", size_bytes=5, active=True)
    return NodeState(node=node, address="unix:/run/pool.sock", parts=(part,))


def key(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(16, "little"))


def stored(number: int) -> Stored:
    return Stored(key=key(number), owner=OWNER, size_bytes=1, tier=Tier.DRAM, epoch=1)


def directory_on(redis: Redis, secret: bytes = SECRET) -> tuple[RedisDirectory, CollectorRegistry]:
    registry = CollectorRegistry()
    refused = RefusedValues(registry)
    return RedisDirectory(redis, prefix="test", secret=secret, refused=refused), registry


def refusals(registry: CollectorRegistry, reader: str) -> float:
    said = registry.get_sample_value("baton_redis_refused_values_total", {"reader": reader})
    return said or 0.0


@pytest.mark.parametrize("kind", KINDS)
async def test_what_a_dead_node_held_is_swept_out_while_others_renew(
    kind: str, tmp_path: Path
) -> None:
    dead, alive = state("pool-0"), state("pool-1")
    async with a_redis(kind, tmp_path) as url, open_redis(url, timeout_s=5.0) as redis:
        directory, _ = directory_on(redis)
        for node, numbers in (
            (dead, range(NUM_BLOCKS)),
            (alive, range(NUM_BLOCKS - 10, NUM_BLOCKS)),
        ):
            await directory.renew(node, 60.0, 0)
            blocks = tuple(map(stored, numbers))
            await directory.publish(node.node, DirectoryChanges(stored=blocks))
        await directory.retire(dead.node)
        assert await redis.hlen("test:pool2:blocks") == NUM_BLOCKS
        for _ in range(50):
            await directory.renew(alive, 60.0, 0)
        assert await redis.hlen("test:pool2:blocks") == 10
        found = await directory.lookup([key(n) for n in range(NUM_BLOCKS - 10, NUM_BLOCKS)])
        assert len(found) == 10


@pytest.mark.parametrize("kind", KINDS)
async def test_records_of_a_pool_where_no_node_renews_have_an_end(
    kind: str, tmp_path: Path
) -> None:
    node = state("pool-0")
    async with a_redis(kind, tmp_path) as url, open_redis(url, timeout_s=5.0) as redis:
        directory, _ = directory_on(redis)
        await directory.renew(node, 60.0, 0)
        await directory.publish(node.node, DirectoryChanges(stored=(stored(1),)))
        await directory.renew(node, 60.0, 0)
        assert await redis.pttl("test:pool2:blocks") > 60_000


KEYS = ("blocks", "nodes", "flush", "flush_words", "flushes", "number", "swept")
KEYS_OF_NODES = ("n", "t", "f")

_said = {
    "worker_id": "pool-9",
    "incarnation": "1",
    "address": "h:1",
    "failure_domain": "",
    "lease_s": 9,
}
_nearly = st.fixed_dictionaries(
    {},
    optional={
        **{name: st.sampled_from([value, 1, [], {"a": 1}, None]) for name, value in _said.items()},
        "free_bytes": st.sampled_from([1, -1, 1e400, "1", 2**70]),
        "capacity_bytes": st.just(1),
        "sick": st.sampled_from([True, 1, "no"]),
        "more": st.just(1),
    },
)
RUBBISH = st.one_of(
    st.binary(max_size=80),
    st.just(b"x" * 20_000),
    st.sampled_from([b"nan", b"inf", b"-1", b"1e308", b"99999999999999999999", b"", b"null"]),
    _nearly.map(lambda said: json.dumps(said).encode()),
    st.lists(st.one_of(st.text(), st.integers(), st.none())).map(lambda v: json.dumps(v).encode()),
)


@st.composite
def lies(draw: st.DrawFn) -> tuple[str, str, bytes]:
    """A key, how it is written, and with what."""
    how = draw(st.sampled_from(["SET", "LPUSH", "HSET", "ZADD", "SADD"]))
    return draw(st.sampled_from([*KEYS, *KEYS_OF_NODES, "record"])), how, draw(RUBBISH)


async def _tell(redis: Redis, name: str, how: str, value: bytes, node: bytes) -> None:
    """Writes one lie; a key of another type than it needs is gone before."""
    where = f"test:pool2:{name}".encode()
    field = b"field"
    if name in KEYS_OF_NODES:
        where += b":" + node
    elif name == "record":
        where, how, field = b"test:pool2:blocks", "HSET", key(2)
    arguments: dict[str, list[Any]] = {
        "SET": [value],
        "LPUSH": [value],
        "HSET": [field, value],
        "ZADD": [1, value],
        "SADD": [value],
    }
    if await redis.type(where) != {"LPUSH": b"list", "HSET": b"hash"}.get(how):
        await redis.delete(where)
    await redis.execute_command(how, where, *arguments[how])


async def _copy(redis: Redis, source: bytes, target: bytes) -> None:
    value = await redis.get(source)
    assert value is not None
    await redis.set(target, value)


async def _number_of(redis: Redis, name: str, prefix: str = "test") -> bytes:
    number = await redis.hget(f"{prefix}:pool2:nodes", f"{name}@1")
    assert isinstance(number, bytes)
    return number


async def _uses(directory: RedisDirectory) -> None:
    """Every call; none raises anything, and what is answered is of the cluster's own."""
    node = state("pool-0")
    for states in [await directory.nodes()]:
        assert {s.node for s in states} <= {node.node}
    for replicas in await directory.lookup([key(n) for n in range(1, 6)]):
        assert [(r.node, r.tier) for r in replicas] == [(node.node, Tier.DRAM)]
    renewal = await directory.renew(node, 60.0, 0)
    assert set(renewal.selections) <= {Selection(tenant="anna"), Selection()}
    await directory.publish(node.node, DirectoryChanges(stored=(stored(4),), removed=(key(3),)))
    await directory.flush(Selection(tenant="anna"))
    await directory.renew(node, 60.0, 0)
    await directory.publish(node.node, DirectoryChanges(stored=(stored(1), stored(2))))
    assert len(await directory.lookup([key(1), key(2), key(3)])) == 2, "it works again"
    await directory.retire(node.node)
    assert await directory.nodes() == ()


@pytest.mark.parametrize("kind", KINDS)
async def test_whatever_lies_in_redis_is_passed_over_and_the_directory_works(
    kind: str, tmp_path: Path
) -> None:
    async with a_redis(kind, tmp_path) as url, open_redis(url, timeout_s=5.0) as redis:
        loop = asyncio.get_running_loop()

        async def tried(told: list[tuple[str, str, bytes]]) -> None:
            await redis.flushall()
            directory, _ = directory_on(redis)
            await directory.renew(state("pool-0"), 60.0, 0)
            blocks = tuple(stored(n) for n in range(1, 6))
            await directory.publish(state("pool-0").node, DirectoryChanges(stored=blocks))
            number = await _number_of(redis, "pool-0")
            for one in told:
                await _tell(redis, *one, number)
            await _uses(directory)

        @settings(
            max_examples=30 if kind == "fakeredis" else 150,
            deadline=None,
            database=None,
            suppress_health_check=[HealthCheck.too_slow],
        )
        @given(st.lists(lies(), min_size=1, max_size=4))
        @example([("n", "SET", b"{}")])
        @example([("n", "SET", b"no json")])
        @example([("t", "SET", b"[[1, 2]]"), ("flush_words", "LPUSH", b'["anna", "", 3]')])
        @example([("record", "HSET", b"x" * 27), ("record", "HSET", b"x" * 26)])
        @example([(name, "ZADD", b"x") for name in (*KEYS, *KEYS_OF_NODES)])
        @example([("flushes", "SET", b"nan"), ("number", "SET", b"-7"), ("swept", "SET", b"x")])
        @example([("nodes", "HSET", b"too long a number")])
        def every_example(told: list[tuple[str, str, bytes]]) -> None:
            asyncio.run_coroutine_threadsafe(tried(told), loop).result(60)

        await asyncio.to_thread(every_example)


@pytest.mark.parametrize("kind", KINDS)
async def test_what_is_refused_is_counted_by_its_reader(kind: str, tmp_path: Path) -> None:
    async with a_redis(kind, tmp_path) as url, open_redis(url, timeout_s=5.0) as redis:
        directory, registry = directory_on(redis)
        await directory.renew(state("pool-0"), 60.0, 0)
        await directory.publish(state("pool-0").node, DirectoryChanges(stored=(stored(1),)))
        await directory.nodes()
        assert await directory.lookup([key(1)])
        assert not any(refusals(registry, f"pool_{r}") for r in ("nodes", "lookup", "renew"))
        number = await _number_of(redis, "pool-0")
        await _tell(redis, "n", "SET", b'{"address": 7}', number)
        assert await directory.nodes() == ()
        assert list(await directory.lookup([key(1)])) == []
        await redis.set("test:pool2:flush_words", "a text")
        await directory.renew(state("pool-0"), 60.0, 0)
        assert refusals(registry, "pool_nodes") == 1
        assert refusals(registry, "pool_lookup") == 2  # the state, and a replica on nobody
        assert refusals(registry, "pool_renew") == 1


async def test_what_another_cluster_says_is_not_believed(tmp_path: Path) -> None:
    async with a_redis("fakeredis", tmp_path) as url, open_redis(url, timeout_s=5.0) as redis:
        ours, registry = directory_on(redis)
        theirs, _ = directory_on(redis, b"t" * 32)
        await theirs.renew(state("pool-1"), 60.0, 0)
        await theirs.publish(state("pool-1").node, DirectoryChanges(stored=(stored(1),)))
        await theirs.flush(Selection())
        assert await ours.nodes() == ()
        assert list(await ours.lookup([key(1)])) == []
        assert (await ours.renew(state("pool-0"), 60.0, 0)).selections == ()
        assert refusals(registry, "pool_renew") == 1


async def test_a_states_seal_is_of_one_directory_and_its_parts_of_one_node(tmp_path: Path) -> None:
    async with a_redis("fakeredis", tmp_path) as url, open_redis(url, timeout_s=5.0) as redis:
        directory, _ = directory_on(redis)
        for name in ("pool-0", "pool-1"):
            await directory.renew(state(name), 60.0, 0)
        one, two = [await _number_of(redis, f"pool-{n}") for n in (0, 1)]
        await _copy(redis, b"test:pool2:t:" + one, b"test:pool2:t:" + two)
        parts = {found.node.worker_id: found.parts for found in await directory.nodes()}
        assert parts == {"pool-0": state("pool-0").parts, "pool-1": ()}
        elsewhere = RedisDirectory(
            redis, prefix="other", secret=SECRET, refused=RefusedValues(CollectorRegistry())
        )
        await elsewhere.renew(state("pool-2"), 60.0, 0)
        their = await _number_of(redis, "pool-2", "other")
        await _copy(redis, b"other:pool2:n:" + their, b"test:pool2:n:" + one)
        assert [found.node.worker_id for found in await directory.nodes()] == ["pool-1"]


async def test_an_old_flush_is_not_carried_out_again_nor_a_false_count(tmp_path: Path) -> None:
    async with a_redis("fakeredis", tmp_path) as url, open_redis(url, timeout_s=5.0) as redis:
        directory, _ = directory_on(redis)
        first = await directory.flush(Selection(tenant="anna"))
        (old,) = await redis.lrange("test:pool2:flush_words", 0, -1)
        second = await directory.flush(Selection(tenant="bert"))
        assert (await directory.renew(state("pool-0"), 60.0, second)).selections == ()
        await redis.set("test:pool2:flushes", 4_000_000)
        await redis.lpush("test:pool2:flush_words", old)
        renewal = await directory.renew(state("pool-0"), 60.0, second)
        assert (renewal.selections, renewal.flushes) == ((), second)
        await redis.flushall()
        third = await directory.flush(Selection(tenant="carl"))
        assert first < second < third, "also after Redis lost everything"
        renewal = await directory.renew(state("pool-0"), 60.0, second)
        assert renewal.selections == (Selection(tenant="carl"),)


async def test_a_directory_that_lost_its_memory_makes_no_node_skip_a_flush(tmp_path: Path) -> None:
    async with a_redis("fakeredis", tmp_path) as url, open_redis(url, timeout_s=5.0) as redis:
        directory, _ = directory_on(redis)
        first = await directory.flush(Selection(tenant="anna"))
        carried_out = first + 60_000  # by the clock of another host
        renewal = await directory.renew(state("pool-0"), 60.0, carried_out)
        assert (renewal.selections, renewal.flushes) == ((Selection(tenant="anna"),), carried_out)
        renewal = await directory.renew(state("pool-0"), 60.0, carried_out)
        assert (renewal.selections, renewal.flushes) == ((), carried_out)
        await directory.flush(Selection(tenant="bert"))
        renewal = await directory.renew(state("pool-0"), 60.0, carried_out)
        assert renewal.selections == (Selection(tenant="bert"),)
        started_again, _ = directory_on(redis)
        _set_clock(started_again, ahead_s=700.0)
        renewal = await started_again.renew(state("pool-0"), 60.0, carried_out + 600_000)
        assert renewal.selections == (), "clocks do not differ by so much: these are old"


async def test_a_node_whose_clock_was_ahead_at_a_flush_skips_none_once_it_is_right(
    tmp_path: Path,
) -> None:
    async with a_redis("fakeredis", tmp_path) as url, open_redis(url, timeout_s=5.0) as redis:
        ahead, _ = directory_on(redis)
        _set_clock(ahead, ahead_s=86400.0)
        await ahead.flush(Selection(tenant="anna"))
        carried_out = (await ahead.renew(state("pool-0"), 60.0, 0)).flushes
        _set_clock(ahead, ahead_s=0.0)
        other, _ = directory_on(redis)
        await other.flush(Selection(tenant="bert"))
        renewal = await ahead.renew(state("pool-0"), 60.0, carried_out)
        assert renewal.selections == (Selection(tenant="bert"),)
        renewal = await ahead.renew(state("pool-0"), 60.0, renewal.flushes)
        assert renewal.selections == ()


def _set_clock(directory: RedisDirectory, *, ahead_s: float) -> None:
    """Has all that a directory seals and opens go by a clock that is so far ahead."""
    statements = directory._statements
    for seal in (statements._states, statements._parts, statements._flushes):
        seal._wall_s = lambda: time.time() + ahead_s


async def test_a_flush_whose_words_are_lost_drops_everything(tmp_path: Path) -> None:
    async with a_redis("fakeredis", tmp_path) as url, open_redis(url, timeout_s=5.0) as redis:
        directory, _ = directory_on(redis)
        first = await directory.flush(Selection(tenant="anna"))
        for tenant in ("bert", "carl"):
            await directory.flush(Selection(tenant=tenant))
        await redis.lset("test:pool2:flush_words", 1, "not what bert's was")
        renewal = await directory.renew(state("pool-0"), 60.0, first)
        assert renewal.selections == (Selection(),)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_flush_that_all_nodes_are_asked_for_at_once_succeeds_on_each(
    kind: str, tmp_path: Path
) -> None:
    async with a_redis(kind, tmp_path) as url, open_redis(url, timeout_s=5.0) as redis:
        directory, _ = directory_on(redis)
        await directory.renew(state("pool-0"), 60.0, 0)
        for selection in (Selection(tenant="anna"), Selection(tenant="bert"), Selection()):
            first = await directory.flush(Selection(tenant="carl"))
            await directory.renew(state("pool-0"), 60.0, first)
            await directory.publish(state("pool-0").node, DirectoryChanges(stored=(stored(1),)))
            numbers = await asyncio.gather(*(directory.flush(selection) for _ in range(24)))
            assert min(numbers) > first
            renewal = await directory.renew(state("pool-0"), 60.0, first)
            assert set(renewal.selections) == {selection}
            assert renewal.flushes == max(numbers)


class Crowded:
    """A Redis in which another one flushes before each of the first `num_others` flushes that it is asked for."""

    def __init__(self, num_others: int, selection: Selection) -> None:
        self.tries = 0
        self._words = list[bytes]()
        self._selection = selection
        self._num_others = num_others
        self._statements = Statements(SECRET, "test:pool2")

    def register_script(self, _text: str) -> Any:
        async def answer(args: list[bytes]) -> list[object]:
            self.tries += 1
            if self.tries > self._num_others:
                assert args[3] == self._words[0]
                return [0, 1]
            previous = self._statements.open_flush(self._words[0]).number if self._words else 0
            is_last = self.tries == self._num_others
            selection = self._selection if is_last else Selection(tenant=f"t{self.tries}")
            self._words.insert(0, self._statements.seal_flush(selection, previous))
            return [0, 0, *self._words[:64]]

        return answer


@pytest.mark.parametrize("num_others", [2, 5, 70])
async def test_a_flush_succeeds_however_many_others_come_before_it(num_others: int) -> None:
    crowd = Crowded(num_others, Selection(tenant="bert"))
    directory, _ = directory_on(crowd)  # type: ignore[arg-type]  # what it needs of Redis
    assert await directory.flush(Selection(tenant="anna")) > 0
    assert crowd.tries == num_others + 1


async def test_a_flush_that_finds_itself_done_with_its_last_look_is_not_said_to_have_failed() -> (
    None
):
    crowd = Crowded(_FLUSH_TRIES, Selection(tenant="anna"))
    directory, _ = directory_on(crowd)  # type: ignore[arg-type]  # what it needs of Redis
    assert await directory.flush(Selection(tenant="anna")) > 0
    assert crowd.tries == _FLUSH_TRIES


async def test_a_crowd_that_never_ends_is_no_directory_that_is_away() -> None:
    crowd = Crowded(10 * _FLUSH_TRIES, Selection(tenant="anna"))
    directory, _ = directory_on(crowd)  # type: ignore[arg-type]  # what it needs of Redis
    with pytest.raises(OverloadedError, match="too many others flush"):
        await directory.flush(Selection(tenant="anna"))


@pytest.mark.parametrize("kind", KINDS)
async def test_flushes_of_many_selections_at_once_all_succeed(kind: str, tmp_path: Path) -> None:
    async with a_redis(kind, tmp_path) as url, open_redis(url, timeout_s=5.0) as redis:
        directory, _ = directory_on(redis)
        first = await directory.flush(Selection(tenant="first"))
        await directory.renew(state("pool-0"), 60.0, first)
        asked = [Selection(tenant=f"t{n}") for n in range(12)]
        await asyncio.gather(*(directory.flush(each) for each in asked for _ in range(4)))
        renewal = await directory.renew(state("pool-0"), 60.0, first)
        assert set(renewal.selections) == set(asked)


async def test_a_flush_of_too_long_a_name_is_refused_by_the_fields_name(tmp_path: Path) -> None:
    async with a_redis("fakeredis", tmp_path) as url, open_redis(url, timeout_s=5.0) as redis:
        directory, _ = directory_on(redis)
        with pytest.raises(InvalidRequestError, match="scope: at most 512 characters"):
            await directory.flush(Selection(scope="x" * 513))


class AnyReply:
    """A Redis that answers every script with the same."""

    def __init__(self, reply: object) -> None:
        self._reply = reply

    def register_script(self, _text: str) -> Any:
        async def answer(args: object) -> object:
            return self._reply

        return answer


REPLIES = st.one_of(
    st.none(),
    st.binary(max_size=60),
    st.integers(),
    st.lists(st.one_of(st.none(), st.integers(0, 5), st.binary(max_size=60)), max_size=8),
    st.tuples(st.integers(0, 9), st.binary(max_size=120), st.binary(max_size=40)).map(list),
)


@given(REPLIES)
@settings(deadline=None)
def test_any_reply_of_a_false_redis_is_an_answer_or_none(reply: object) -> None:
    async def asked() -> None:
        directory, _ = directory_on(AnyReply(reply))  # type: ignore[arg-type]  # what it needs of Redis
        calls: list[Awaitable[object]] = [
            directory.lookup([key(1), key(2)]),
            directory.nodes(),
            directory.renew(state("pool-0"), 60.0, 0),
            directory.publish(state("pool-0").node, DirectoryChanges(stored=(stored(1),))),
            directory.retire(state("pool-0").node),
            directory.flush(Selection()),
        ]
        for call in calls:
            try:
                await call
            except PoolUnavailableError:
                continue

    asyncio.run(asked())


@given(st.binary(max_size=27 * 5), st.binary(max_size=24), st.integers(0, 5), st.booleans())
def test_a_chain_of_any_bytes_holds_only_known_nodes(
    packed: bytes, several: bytes, num_keys: int, known: bool
) -> None:
    nodes = {int.from_bytes(packed[16:20], "little"): state("pool-0").node} if known else {}
    faults: list[str] = []
    found = found_chain(packed, several, num_keys, nodes, faults)
    assert len(found) <= num_keys
    assert [found[n] for n in range(len(found))] == list(found)
    for replicas in found:
        assert {r.node for r in replicas} == set(nodes.values())


def test_a_chain_ends_where_no_replica_is_on_a_known_node() -> None:
    def entry(node: int, tier: int = 0) -> bytes:
        return bytes(16) + node.to_bytes(4, "little") + bytes([tier]) + bytes(6)

    packed = entry(7) + entry(8) + entry(7) + entry(7, tier=1) + entry(8) + entry(7)
    several = np.array([1, 2], dtype="<u4").tobytes()
    faults: list[str] = []
    found = found_chain(packed, several, 9, {7: state("pool-0").node}, faults)
    assert [[replica.tier for replica in replicas] for replicas in found] == [
        [Tier.DRAM],
        [Tier.DRAM],
        [Tier.SSD],
    ]
    assert len(faults) == 1
