"""What every directory of the pool does alike: the one in memory, on a Redis in Python, and on a real one."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from redis.asyncio import Redis

from baton.clock import ManualClock
from baton.errors import PoolUnavailableError
from baton.ids import BlockKey, Incarnation, WorkerId, WorkerIdentity
from baton.redis_link import RefusedValues, open_redis
from kvpool.directory.memory import MemoryDirectory
from kvpool.directory.redis import RedisDirectory
from kvpool.messages import (
    DirectoryChanges,
    NodeState,
    Owner,
    Replica,
    Selection,
    Stored,
    TenantPart,
    Tier,
)
from kvpool.ports import Directory
from tests.redis_servers import KINDS, a_redis

LEASE_S = 60.0
ANNA = Owner(tenant="anna", scope="anna", model="m1")
BERT = Owner(tenant="bert", scope="bert/salt", model="m2")


class World:
    """A directory, and a way to let its leases end."""

    def __init__(self, directory: Directory, end_lease: Callable[[], Awaitable[None]]) -> None:
        self.directory = directory
        self.end_leases = end_lease


@pytest.fixture(params=["memory", *KINDS])
async def world(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[World]:
    """One per kind of directory, empty."""
    if request.param == "memory":
        clock = ManualClock()

        async def pass_time() -> None:
            clock.advance(LEASE_S + 1)

        memory = MemoryDirectory(clock)
        yield World(memory, pass_time)
        memory.check_integrity()
        return
    async with a_redis(request.param, tmp_path) as url:
        redis = open_redis(url, timeout_s=5.0)

        async def drop_leases() -> None:
            for key in await redis.keys("test:pool2:n:*"):
                await redis.delete(key)

        yield World(a_directory(redis), drop_leases)
        await redis.aclose()


def a_directory(redis: Redis) -> RedisDirectory:
    refused = RefusedValues(CollectorRegistry())
    return RedisDirectory(redis, prefix="test", secret=bytes(32), refused=refused)


def node(name: str = "pool-0", incarnation: int = 7) -> WorkerIdentity:
    return WorkerIdentity(worker_id=WorkerId(name), incarnation=Incarnation(incarnation))


def state(identity: WorkerIdentity, *, free_bytes: int = 100) -> NodeState:
    return NodeState(
        node=identity,
        address=f"unix:/run/{identity.worker_id}.sock",
        failure_domain="rack ä",
        free_bytes=free_bytes,
        capacity_bytes=1 << 40,
    )


def key(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(16, "little"))


def stored(number: int, *, owner: Owner = ANNA, tier: Tier = Tier.DRAM, epoch: int = 1) -> Stored:
    return Stored(key=key(number), owner=owner, size_bytes=1 << 20, tier=tier, epoch=epoch)


def changes(*blocks: Stored, removed: tuple[int, ...] = ()) -> DirectoryChanges:
    return DirectoryChanges(stored=blocks, removed=tuple(map(key, removed)))


async def joined(directory: Directory, identity: WorkerIdentity) -> None:
    await directory.renew(state(identity), LEASE_S, 0)


async def holders(directory: Directory, *numbers: int) -> list[set[str]]:
    found = await directory.lookup([key(number) for number in numbers])
    return [{replica.node.worker_id for replica in replicas} for replicas in found]


async def test_a_published_block_is_found_with_its_place(world: World) -> None:
    await joined(world.directory, node())
    await world.directory.publish(node(), changes(stored(1, tier=Tier.SSD, epoch=2**40 + 3)))
    expected = (Replica(node=node(), tier=Tier.SSD, epoch=2**40 + 3),)
    assert list(await world.directory.lookup([key(1)])) == [expected]


async def test_a_chain_is_found_up_to_the_first_block_that_nobody_holds(world: World) -> None:
    await joined(world.directory, node())
    await world.directory.publish(node(), changes(stored(1), stored(2), stored(4)))
    assert len(await world.directory.lookup([key(n) for n in (1, 2, 3, 4)])) == 2
    assert list(await world.directory.lookup([key(3), key(4)])) == []
    assert list(await world.directory.lookup([])) == []


async def test_a_long_chain_is_found_whole_and_in_order(world: World) -> None:
    await joined(world.directory, node())
    await world.directory.publish(node(), changes(*(stored(n, epoch=n) for n in range(1, 2501))))
    found = await world.directory.lookup([key(n) for n in range(1, 3000)])
    assert [replicas[0].epoch for replicas in found] == list(range(1, 2501))


async def test_a_chain_of_which_two_nodes_hold_parts_tells_who_holds_which(world: World) -> None:
    one, two = node("pool-1"), node("pool-2")
    theirs = {one: range(1, 700), two: range(500, 1001, 3)}
    for identity, numbers in theirs.items():
        await joined(world.directory, identity)
        await world.directory.publish(identity, changes(*map(stored, numbers)))
    found = await world.directory.lookup([key(n) for n in range(1, 1001)])
    assert [{replica.node for replica in replicas} for replicas in found] == [
        {who for who, numbers in theirs.items() if n in numbers} for n in range(1, 700)
    ]
    assert [found[520], found[-1]] == [list(found)[520], *found[-1:]]


async def test_two_nodes_hold_a_block_and_one_of_them_gives_it_up(world: World) -> None:
    one, two = node("pool-1"), node("pool-2")
    for identity in (one, two):
        await joined(world.directory, identity)
        await world.directory.publish(identity, changes(stored(1), stored(2)))
    assert await holders(world.directory, 1, 2) == [{"pool-1", "pool-2"}] * 2
    await world.directory.publish(one, changes(removed=(1,)))
    assert await holders(world.directory, 1, 2) == [{"pool-2"}, {"pool-1", "pool-2"}]
    await world.directory.publish(two, changes(removed=(1, 2)))
    assert await holders(world.directory, 1) == []
    assert await holders(world.directory, 2) == [{"pool-1"}]


async def test_a_block_that_moves_has_one_replica_there(world: World) -> None:
    await joined(world.directory, node())
    await world.directory.publish(node(), changes(stored(1)))
    await world.directory.publish(node(), changes(stored(1, tier=Tier.SSD, epoch=9)))
    expected = (Replica(node=node(), tier=Tier.SSD, epoch=9),)
    assert list(await world.directory.lookup([key(1)])) == [expected]


async def test_removing_what_a_node_does_not_hold_changes_nothing(world: World) -> None:
    one, two = node("pool-1"), node("pool-2")
    for identity in (one, two):
        await joined(world.directory, identity)
    await world.directory.publish(one, changes(stored(1)))
    await world.directory.publish(two, changes(removed=(1, 5)))
    assert await holders(world.directory, 1) == [{"pool-1"}]


async def test_what_a_node_without_a_lease_says_is_passed_over(world: World) -> None:
    await world.directory.publish(node(), changes(stored(1)))
    assert await holders(world.directory, 1) == []


async def test_the_blocks_of_a_node_whose_lease_ended_are_not_found(world: World) -> None:
    await joined(world.directory, node())
    await world.directory.publish(node(), changes(stored(1)))
    await world.end_leases()
    assert await holders(world.directory, 1) == []
    assert await world.directory.nodes() == ()


async def test_a_node_that_was_away_too_long_has_to_publish_anew(world: World) -> None:
    assert (await world.directory.renew(state(node()), LEASE_S, 0)).anew
    assert not (await world.directory.renew(state(node()), LEASE_S, 0)).anew
    await world.directory.publish(node(), changes(stored(1)))
    await world.end_leases()
    assert (await world.directory.renew(state(node()), LEASE_S, 0)).anew
    # It may have given the block up meanwhile, without anybody hearing of it.
    assert await holders(world.directory, 1) == []
    await world.directory.publish(node(), changes(stored(1)))
    assert await holders(world.directory, 1) == [{"pool-0"}]


async def test_a_retired_start_of_a_node_holds_nothing_any_more(world: World) -> None:
    old, new = node(incarnation=1), node(incarnation=2)
    await joined(world.directory, old)
    await world.directory.publish(old, changes(stored(1), stored(2)))
    await joined(world.directory, new)
    await world.directory.publish(new, changes(stored(2)))
    await world.directory.retire(old)
    assert await holders(world.directory, 1) == []
    (replicas,) = await world.directory.lookup([key(2)])
    assert [replica.node for replica in replicas] == [new]
    await world.directory.publish(old, changes(stored(3)))
    assert await holders(world.directory, 3) == []


async def test_the_living_nodes_are_listed_as_they_last_described_themselves(world: World) -> None:
    await world.directory.renew(state(node(), free_bytes=5), LEASE_S, 0)
    await world.directory.renew(state(node(), free_bytes=6), LEASE_S, 0)
    await joined(world.directory, node("pool-1"))
    found = sorted(await world.directory.nodes(), key=lambda s: s.node.worker_id)
    assert found == [state(node(), free_bytes=6), state(node("pool-1"))]


async def test_what_tenants_have_is_told_to_all_for_as_long_as_the_node_says_it(
    world: World,
) -> None:
    anna = TenantPart(tenant='"anna" ä', size_bytes=1 << 40, active=True)
    bert = TenantPart(tenant="bert", size_bytes=0, active=False)
    await world.directory.renew(replace(state(node()), parts=(anna, bert)), LEASE_S, 0)
    (found,) = await world.directory.nodes()
    assert found.parts == (anna, bert)
    await world.directory.renew(replace(state(node()), parts=(bert,)), LEASE_S, 0)
    await joined(world.directory, node("pool-1"))
    parts = {one.node.worker_id: one.parts for one in await world.directory.nodes()}
    assert parts == {"pool-0": (bert,), "pool-1": ()}
    await joined(world.directory, node())
    assert {one.parts for one in await world.directory.nodes()} == {()}


@pytest.mark.parametrize(
    ("selection", "left"),
    [
        (Selection(tenant="anna"), [2]),
        (Selection(scope="bert/salt"), [1]),
        (Selection(model="m1"), [2]),
        (Selection(), []),
        (Selection(tenant="anna", model="m2"), [1, 2]),
        (Selection(tenant="nobody"), [1, 2]),
    ],
)
async def test_a_flush_voids_what_it_covers_and_nothing_else(
    world: World, selection: Selection, left: list[int]
) -> None:
    await joined(world.directory, node())
    await world.directory.publish(node(), changes(stored(1, owner=ANNA), stored(2, owner=BERT)))
    assert await world.directory.flush(selection) > 0
    found = [n for n in (1, 2) if await holders(world.directory, n)]
    assert found == left


async def test_what_is_stored_after_a_flush_stays(world: World) -> None:
    await joined(world.directory, node())
    await world.directory.flush(Selection())
    await joined(world.directory, node())
    await world.directory.publish(node(), changes(stored(1)))
    assert await holders(world.directory, 1) == [{"pool-0"}]


async def test_what_a_node_says_that_has_not_heard_of_a_flush_brings_nothing_back(
    world: World,
) -> None:
    """It moves a block to its disk, say; until it has given it up no other node is to fetch it."""
    one, two = node("pool-1"), node("pool-2")
    for identity in (one, two):
        await joined(world.directory, identity)
        await world.directory.publish(identity, changes(stored(1), stored(2, owner=BERT)))
    await world.directory.flush(Selection(tenant="anna"))
    await joined(world.directory, one)
    moved = stored(1, tier=Tier.SSD), stored(2, owner=BERT, tier=Tier.SSD), stored(3)
    await world.directory.publish(two, changes(*moved))
    assert [await holders(world.directory, n) for n in (1, 3)] == [[], []]
    assert await holders(world.directory, 2) == [{"pool-1", "pool-2"}]
    await world.directory.publish(one, changes(stored(1)))
    await world.directory.publish(two, changes(*moved))
    assert await holders(world.directory, 1) == [{"pool-1"}]
    await joined(world.directory, two)
    await world.directory.publish(two, changes(stored(1)))
    assert await holders(world.directory, 1) == [{"pool-1", "pool-2"}]


async def test_a_node_is_told_of_the_flushes_that_it_missed_in_order(world: World) -> None:
    await joined(world.directory, node())
    one = await world.directory.flush(Selection(tenant="anna"))
    two = await world.directory.flush(Selection(model="m2"))
    first = await world.directory.renew(state(node()), LEASE_S, 0)
    assert first.flushes == two > one > 0
    assert first.selections == (Selection(tenant="anna"), Selection(model="m2"))
    assert (await world.directory.renew(state(node()), LEASE_S, one)).selections == (
        Selection(model="m2"),
    )
    last = await world.directory.renew(state(node()), LEASE_S, two)
    assert (last.selections, last.flushes) == ((), two)


async def test_a_node_that_missed_very_many_flushes_drops_what_they_covered(world: World) -> None:
    await joined(world.directory, node())
    await world.directory.publish(node(), changes(stored(1, owner=ANNA)))
    for _ in range(80):
        await world.directory.flush(Selection(tenant="anna"))
    renewal = await world.directory.renew(state(node()), LEASE_S, 0)
    assert any(selection.covers(ANNA) for selection in renewal.selections)
    assert await holders(world.directory, 1) == []


@pytest.mark.parametrize("kind", KINDS)
async def test_a_redis_that_is_away_is_said_to_be(kind: str, tmp_path: Path) -> None:
    async with a_redis(kind, tmp_path) as url:
        pass
    redis = open_redis(url, timeout_s=0.5)
    directory = a_directory(redis)
    async with asyncio.timeout(30):
        for call in (
            directory.lookup([key(1)]),
            directory.publish(node(), changes(stored(1))),
            directory.renew(state(node()), LEASE_S, 0),
            directory.nodes(),
            directory.flush(Selection()),
            directory.retire(node()),
        ):
            with pytest.raises(PoolUnavailableError):
                await call
    await redis.aclose()
