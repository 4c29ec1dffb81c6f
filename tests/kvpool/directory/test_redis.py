"""What the pool leaves behind in Redis."""

from pathlib import Path

import pytest

from baton.ids import BlockKey, Incarnation, WorkerId, WorkerIdentity
from baton.redis_link import open_redis
from kvpool.directory.redis import RedisDirectory
from kvpool.messages import DirectoryChanges, NodeState, Owner, Stored, Tier
from tests.redis_servers import KINDS, a_redis

OWNER = Owner(tenant="anna", scope="anna", model="m1")
NUM_BLOCKS = 1000


def state(worker_id: str) -> NodeState:
    node = WorkerIdentity(worker_id=WorkerId(worker_id), incarnation=Incarnation(1))
    return NodeState(node=node, address="unix:/run/pool.sock")


def stored(number: int) -> Stored:
    key = BlockKey(number.to_bytes(16, "little"))
    return Stored(key=key, owner=OWNER, size_bytes=1, tier=Tier.DRAM, epoch=1)


@pytest.mark.parametrize("kind", KINDS)
async def test_what_a_dead_node_held_is_swept_out_while_others_renew(
    kind: str, tmp_path: Path
) -> None:
    dead, alive = state("pool-0"), state("pool-1")
    async with a_redis(kind, tmp_path) as url, open_redis(url, timeout_s=5.0, text=False) as redis:
        directory = RedisDirectory(redis, prefix="test")
        for node, numbers in (
            (dead, range(NUM_BLOCKS)),
            (alive, range(NUM_BLOCKS - 10, NUM_BLOCKS)),
        ):
            await directory.renew(node, 60.0, 0)
            blocks = tuple(map(stored, numbers))
            await directory.publish(node.node, DirectoryChanges(stored=blocks))
        await directory.retire(dead.node)
        assert await redis.hlen("test:pool:blocks") == NUM_BLOCKS
        for _ in range(50):
            await directory.renew(alive, 60.0, 0)
        assert await redis.hlen("test:pool:blocks") == 10
        found = await directory.lookup(
            [stored(number).key for number in range(NUM_BLOCKS - 10, NUM_BLOCKS)]
        )
        assert len(found) == 10


@pytest.mark.parametrize("kind", KINDS)
async def test_records_of_a_pool_where_no_node_renews_have_an_end(
    kind: str, tmp_path: Path
) -> None:
    node = state("pool-0")
    async with a_redis(kind, tmp_path) as url, open_redis(url, timeout_s=5.0, text=False) as redis:
        directory = RedisDirectory(redis, prefix="test")
        await directory.renew(node, 60.0, 0)
        await directory.publish(node.node, DirectoryChanges(stored=(stored(1),)))
        await directory.renew(node, 60.0, 0)
        assert await redis.pttl("test:pool:blocks") > 60_000
