"""Pool nodes that fetch from each other, seen by the workers of their hosts."""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from baton.config.schema import TransferConfig
from kv_transfer.backends.registry import BACKENDS
from kvpool.messages import Owner
from tests.kvpool.nodes_world import ANNA, LAYOUT, NUM_SLOTS, Node, Worker, keys, pool_config, until
from tests.redis_servers import a_redis
from tests.waits import soon


@pytest.fixture
async def redis(tmp_path: Path) -> AsyncIterator[str]:
    async with a_redis("fakeredis", tmp_path) as url:
        yield url


@contextlib.asynccontextmanager
async def two_nodes(
    redis: str, folder: Path, **settings: object
) -> AsyncIterator[tuple[Worker, Worker]]:
    first = Node("pool-0", folder, pool_config(redis, failure_domain="a", **settings))
    second = Node("pool-1", folder, pool_config(redis, failure_domain="b", **settings))
    async with first.started() as here, second.started() as there:
        yield here, there


async def empty(worker: Worker, *, held: int = 0) -> None:
    """Until nothing of any fetch is left but the blocks that are held."""

    async def settled() -> bool:
        said = await worker.usage()
        return said.puts == 0 and said.slots_free == NUM_SLOTS - held

    await until(settled)


async def test_what_one_node_holds_the_worker_of_another_reads(redis: str, tmp_path: Path) -> None:
    async with two_nodes(redis, tmp_path) as (here, there):
        await here.put(1, 2, 3)
        await here.found(1, 2, 3)
        lease = await there.lease(1, 2, 3, 4)
        assert [held.key for held in lease.blocks] == keys(1, 2, 3)
        said = await there.usage()
        assert {owner.tenant: owner.blocks for owner in said.owners if owner.blocks} == {"anna": 3}
        await there.found(1, 2, 3)
        await empty(there, held=3)


async def test_only_what_is_missing_comes_and_the_rest_is_read_where_it_is(
    redis: str, tmp_path: Path
) -> None:
    async with two_nodes(redis, tmp_path) as (here, there):
        await there.put(1, 2)
        await here.put(1, 2, 3, 4)
        await here.found(1, 2, 3, 4)
        assert await there.has(1, 2, 3, 4) == 4
        assert (await there.usage()).fetched_blocks == 2
        assert (await here.usage()).sent_blocks == 2


async def test_a_long_text_comes_in_parts_and_each_block_keeps_its_owner(
    redis: str, tmp_path: Path
) -> None:
    bert = Owner(tenant="bert", scope="anna", model="m")
    numbers = range(1, 21)
    async with two_nodes(redis, tmp_path) as (here, there):
        await here.put(*numbers[:10], owner=ANNA)
        await here.put(*numbers[10:], owner=bert)
        await here.found(*numbers)
        assert await there.has(*numbers) == 20
        owners = (await there.usage()).owners
        billed = {owner.tenant: owner.blocks for owner in owners if owner.blocks}
        assert billed == {"anna": 10, "bert": 10}


async def test_a_lease_that_cannot_wait_gets_what_is_there_and_the_next_one_gets_the_rest(
    redis: str, tmp_path: Path
) -> None:
    async with two_nodes(redis, tmp_path) as (here, there):
        await there.put(1)
        await here.put(1, 2)
        await here.found(1, 2)
        assert await there.has(1, 2, wait_s=0.0) == 1

        async def come() -> bool:
            return await there.has(1, 2, wait_s=0.0) == 2

        await until(come)


async def test_several_that_want_the_same_text_have_it_brought_once(
    redis: str, tmp_path: Path
) -> None:
    async with two_nodes(redis, tmp_path) as (here, there):
        await here.put(1, 2, 3)
        await here.found(1, 2, 3)
        assert await asyncio.gather(*(there.has(1, 2, 3) for _ in range(5))) == [3] * 5
        assert (await there.usage()).fetched_blocks == 3


async def test_blocks_on_the_holders_disk_are_sent(redis: str, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir(mode=0o700)
    room = LAYOUT.page_bytes * 400
    settings = {"high_watermark": 0.5, "low_watermark": 0.2, "eviction": "lru"}
    first = Node(
        "pool-0",
        tmp_path,
        pool_config(redis, ssd_dir=str(disk), ssd_bytes=max(room, 8 << 20), **settings),
    )
    second = Node("pool-1", tmp_path, pool_config(redis))
    async with first.started() as here, second.started() as there:
        for begin in range(1, 51, 10):
            await here.put(*range(begin, begin + 10))

        async def demoted() -> bool:
            return (await here.usage()).demoted_blocks >= 10

        await until(demoted)
        await here.found(*range(1, 11))
        assert await there.has(*range(1, 11)) == 10
        assert (await here.usage()).promoted_blocks > 0


async def test_altered_bytes_are_a_miss_and_leave_nothing(redis: str, tmp_path: Path) -> None:
    async with two_nodes(redis, tmp_path) as (here, there):
        await here.put(1, 2, 3)
        await here.found(1, 2, 3)
        lease = await here.client.lease(keys(1, 2), 30.0, 0.0)
        here.slab[1][lease.blocks[1].slot][5] ^= 1
        assert await there.has(1, 2, 3) == 1
        said = await there.usage()
        assert (said.corrupt_blocks, said.puts) == (1, 0)


async def test_what_the_directory_says_too_much_is_a_miss(redis: str, tmp_path: Path) -> None:
    async with two_nodes(redis, tmp_path, node_lease_s=600.0) as (here, there):
        await here.put(1, 2)
        await here.found(1, 2)
        await here.client.corrupt(keys(2))
        assert await there.has(1, 2) <= 1  # none, as long as the directory tells of two
        assert await there.has(1) == 1
        assert await there.has(1, 2) == 1
        await empty(there, held=1)


async def test_a_node_without_the_clusters_key_gets_nothing(redis: str, tmp_path: Path) -> None:
    first = Node("pool-0", tmp_path, pool_config(redis))
    stranger = Node("pool-1", tmp_path, pool_config(redis), secret="77" * 32)
    async with first.started() as here, stranger.started() as there:
        await here.put(1)
        await here.found(1)
        assert await there.has(1) == 0
        await empty(there)
        assert (await here.usage()).leases == 0


async def test_nodes_with_slots_of_another_size_refuse_each_other(
    redis: str, tmp_path: Path
) -> None:
    first = Node("pool-0", tmp_path, pool_config(redis))
    second = Node("pool-1", tmp_path, pool_config(redis), layout=replace(LAYOUT, head_dim=16))
    async with first.started() as here, second.started() as there:
        await here.put(1)
        await here.found(1)
        assert await there.has(1) == 0
        assert (await there.usage()).puts == 0
        assert (await here.usage()).leases == 0


async def test_a_holder_that_is_killed_while_it_writes_costs_the_hit_and_no_slot(
    redis: str, tmp_path: Path
) -> None:
    stalled = tmp_path / "stalled"
    first = Node("pool-0", tmp_path, pool_config(redis))
    second = Node("pool-1", tmp_path, pool_config(redis))
    async with second.started() as there, first.process(stall_at=str(stalled)) as holder:
        async with first.attached() as here:
            await here.put(1, 2, 3, 4)
            await here.found(1, 2, 3, 4)
            asked = asyncio.create_task(there.has(1, 2, 3, 4))
            await until(stalled.exists)
            assert (await there.usage()).slots_free < NUM_SLOTS
            holder.kill()
            await soon(holder.wait())
            assert await asked == 0
        await empty(there)
        assert (await there.usage()).failed_fetches == 1


async def test_a_holder_that_stands_still_keeps_its_slots_until_it_is_dead(
    redis: str, tmp_path: Path
) -> None:
    stalled = tmp_path / "stalled"
    quick = TransferConfig(lease_s=0.5, quiesce_timeout_s=0.2)
    first = Node("pool-0", tmp_path, pool_config(redis))
    second = Node("pool-1", tmp_path, pool_config(redis, fetch_timeout_s=0.3), transfer=quick)
    async with second.started() as there, first.process(stall_at=str(stalled)) as holder:
        async with first.attached() as here:
            await here.put(1, 2)
            await here.found(1, 2)
            asked = asyncio.create_task(there.has(1, 2))
            await until(stalled.exists)
            os.kill(holder.pid, signal.SIGSTOP)
            await there.put(7)
            # Longer than any lease, and the slots are still nobody else's: a stopped writer may go on.
            await asyncio.wait({asked}, timeout=3.0)
            said = await there.usage()
            assert (said.puts, said.slots_free) == (1, NUM_SLOTS - 3)
            holder.kill()
            await soon(holder.wait())
            assert await asked == 0
        await empty(there, held=1)


async def test_a_holder_that_stands_still_keeps_no_blocks_of_other_holders_away(
    redis: str, tmp_path: Path
) -> None:
    stalled, numbers = tmp_path / "stalled", range(11, 19)
    quick = TransferConfig(lease_s=0.5, quiesce_timeout_s=0.2)
    first = Node("pool-0", tmp_path, pool_config(redis))
    second = Node("pool-1", tmp_path, pool_config(redis, fetch_timeout_s=1.0), transfer=quick)
    third = Node("pool-2", tmp_path, pool_config(redis))
    async with (
        second.started() as there,
        third.started() as elsewhere,
        first.process(stall_at=str(stalled)) as holder,
    ):
        async with first.attached() as here:
            for number in numbers:
                await here.put(number)
            await here.found(*numbers)
            await elsewhere.put(1)
            await elsewhere.found(1)
            asked = [asyncio.create_task(there.has(number)) for number in numbers]
            await until(stalled.exists)
            os.kill(holder.pid, signal.SIGSTOP)
            assert await soon(asyncio.gather(*asked)) == [0] * len(numbers)
            await until(partial(there.has, 1))
            assert (await there.usage()).puts > 0, "it may still write"
            holder.kill()
            await soon(holder.wait())
        await empty(there, held=1)


async def test_hot_blocks_get_a_copy_on_a_node_whose_memory_is_full_of_what_nobody_reads(
    redis: str, tmp_path: Path
) -> None:
    settings = {"replicate_reads": 4.0, "max_replicas": 2}
    first = Node("pool-0", tmp_path, pool_config(redis, failure_domain="a", **settings))
    full = Node("pool-1", tmp_path, pool_config(redis, failure_domain="b", **settings))
    async with first.started() as here, full.started() as there:
        assert await there.put(*range(100, 100 + NUM_SLOTS)) == NUM_SLOTS
        await here.put(1, 2, 3)
        await here.found(1, 2, 3)
        await there.registered()
        for _ in range(6):
            assert await here.has(1, 2, wait_s=0.0) == 2
        await there.found(1, 2)
        assert (await there.usage()).fetched_blocks == 2


async def test_hot_blocks_get_a_copy_in_another_failure_domain(redis: str, tmp_path: Path) -> None:
    settings = {"replicate_reads": 4.0, "max_replicas": 2}
    first = Node("pool-0", tmp_path, pool_config(redis, failure_domain="a", **settings))
    near = Node("pool-1", tmp_path, pool_config(redis, failure_domain="a", **settings))
    far = Node("pool-2", tmp_path, pool_config(redis, failure_domain="b", **settings))
    async with first.started() as here, near.started() as beside, far.started() as there:
        await here.put(1, 2, 3)
        await here.found(1, 2, 3)
        await beside.registered()
        await there.registered()
        for _ in range(6):
            assert await here.has(1, 2, wait_s=0.0) == 2
        await there.found(1, 2)
        assert (await there.usage()).fetched_blocks == 2
        assert (await beside.usage()).fetched_blocks == 0


@pytest.mark.parametrize("backend", ["nixl", "ucx"])
async def test_between_hosts_blocks_come_over_the_network(
    redis: str, tmp_path: Path, backend: str
) -> None:
    if not BACKENDS[backend].installed:
        pytest.skip(f"{backend} is not installed: {BACKENDS[backend].remedy}")
    only = TransferConfig(backends=(backend,))
    nodes = [
        Node(
            f"pool-{number}",
            tmp_path,
            pool_config(redis),
            peer_address="127.0.0.1:0",
            transfer=only,
        )
        for number in range(2)
    ]
    async with nodes[0].process(), nodes[0].attached() as here, nodes[1].started() as there:
        await here.put(1, 2, 3)
        await here.found(1, 2, 3)

        async def come() -> bool:  # a session's first setup may take longer than any lease waits
            return await there.has(1, 2, 3) == 3

        await until(come)
        assert (await there.usage()).fetched_blocks == 3
