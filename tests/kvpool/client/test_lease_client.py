import asyncio

import pytest

from tests.kvpool.client.agent_world import SOON_S, AgentWorld, until, working
from tests.kvpool.client.arena_world import OTHER, SEQ, TIMEOUT_S, fetch, key

KEYS = [key(number) for number in range(4)]


async def test_a_prompt_may_fetch_what_the_node_has_of_its_beginning():
    async with working(AgentWorld()) as world:
        await world.publish([0, 1, 3])
        await world.agent.prepare(SEQ, KEYS)
        assert world.agent.source.get_num_matched_blocks(SEQ, KEYS) == 2
        assert world.counted("lookups", outcome="hit") == 1


async def test_what_is_forgotten_is_given_back():
    async with working(AgentWorld()) as world:
        await world.publish([0])
        await world.agent.prepare(SEQ, KEYS)
        await world.agent.prepare(OTHER, KEYS)
        assert world.pool.ledger.usage().leases == 2
        await asyncio.to_thread(world.agent.source.request_finished, SEQ)
        await asyncio.to_thread(world.agent.source.request_finished, OTHER)
        await until(lambda: world.pool.ledger.usage().leases == 0)


async def test_without_a_node_nobody_is_asked():
    async with working(AgentWorld()) as world:
        world.pool.leave()
        await world.agent.prepare(SEQ, KEYS)
        assert world.pool.calls["lease"] == 0


async def test_a_slow_node_is_not_waited_for_and_its_late_answer_is_given_back():
    async with working(AgentWorld(lookup_timeout_s=SOON_S)) as world:
        await world.publish([0])
        world.pool.hold()
        await world.agent.prepare(SEQ, KEYS)
        assert world.agent.source.get_num_matched_blocks(SEQ, KEYS) == 0
        assert world.counted("lookups", outcome="late") == 1
        world.pool.let_go()
        await world.pool.asked("release")
        await until(lambda: world.pool.ledger.usage().leases == 0)


async def test_a_node_that_owes_answers_delays_no_more_prompts():
    async with working(AgentWorld(lookup_timeout_s=SOON_S)) as world:
        world.pool.hold()
        for _ in range(10):
            await world.agent.prepare(SEQ, KEYS)
        assert world.pool.calls["lease"] == 4
        world.pool.let_go()
        await world.publish([0])
        await until(lambda: world.pool.ledger.usage().leases == 0)
        await world.agent.prepare(SEQ, KEYS)
        assert world.pool.calls["lease"] == 5


async def test_a_prompt_that_is_cancelled_while_it_waits_leaves_nothing_borrowed():
    async with working(AgentWorld()) as world:
        await world.publish([0])
        world.pool.hold()
        preparing = asyncio.create_task(world.agent.prepare(SEQ, KEYS))
        await world.pool.asked("lease")
        preparing.cancel()
        await asyncio.wait([preparing])
        world.pool.let_go()
        await world.pool.asked("release")
        assert world.agent.source.get_num_matched_blocks(SEQ, KEYS) == 0
        await until(lambda: world.pool.ledger.usage().leases == 0)


@pytest.mark.parametrize("comes_back", [False, True])
async def test_a_node_that_is_lost_while_it_is_asked_has_lent_nothing(comes_back):
    async with working(AgentWorld()) as world:
        await world.publish([0])
        world.pool.hold()
        preparing = asyncio.create_task(world.agent.prepare(SEQ, KEYS))
        await world.pool.asked("lease")
        world.pool.leave()
        if comes_back:
            world.pool.come()
        world.pool.let_go()
        async with asyncio.timeout(TIMEOUT_S):
            await preparing
        assert world.agent.source.get_num_matched_blocks(SEQ, KEYS) == 0
        assert world.counted("lookups", outcome="failed") == 1


async def test_what_a_lost_node_had_lent_is_void():
    async with working(AgentWorld()) as world:
        await world.publish([0])
        await world.agent.prepare(SEQ, KEYS)
        world.pool.leave()
        world.pool.come()
        assert world.agent.source.get_num_matched_blocks(SEQ, KEYS) == 0


async def test_borrowed_blocks_are_kept_for_as_long_as_the_prompt_waits():
    async with working(AgentWorld(lease_s=0.3)) as world:
        await world.publish([0])
        await world.agent.prepare(SEQ, KEYS)
        for _ in range(3):
            world.clock.advance(0.2)
            await world.pool.asked("renew", world.pool.calls["renew"] + 1)
            await asyncio.sleep(0)
        assert world.agent.source.get_num_matched_blocks(SEQ, KEYS) == 1


async def test_what_the_node_does_not_know_any_more_is_not_read():
    async with working(AgentWorld(lease_s=0.3)) as world:
        await world.publish([0])
        await world.agent.prepare(SEQ, KEYS)
        world.pool.ledger.release(world.pool.leases_given[-1])
        await world.pool.asked("renew")
        await until(lambda: world.agent.source.get_num_matched_blocks(SEQ, KEYS) == 0)


async def test_a_preempted_sequence_borrows_again():
    async with working(AgentWorld()) as world:
        await world.publish([0, 1])
        await asyncio.to_thread(world.agent.source.prefetch, SEQ, KEYS)
        await until(lambda: world.agent.source.get_num_matched_blocks(SEQ, KEYS) == 2)


async def test_a_corrupt_block_fails_its_fetch_and_is_dropped_at_the_node():
    async with working(AgentWorld()) as world:
        await world.publish([0, 1])
        await world.agent.prepare(SEQ, KEYS)
        for rows in world.pool.rows:
            rows[:, 3] ^= 1
        source = world.agent.source
        source.start_load_kv([fetch(SEQ, (0, 4), (1, 5))])
        assert await asyncio.to_thread(source.wait_for_layer_load, 2) == {SEQ}
        outcome = await asyncio.to_thread(source.finish_load_kv)
        assert outcome.failed.keys() == {SEQ}
        await until(lambda: world.held(0) == 0)
        assert world.counted("fetch_failures", reason="kv_corrupt") == 1


async def test_a_worker_that_leaves_gives_back_what_it_borrowed_and_puts_what_is_in_line():
    world = AgentWorld()
    async with working(world):
        await world.publish([0])
        await world.agent.prepare(SEQ, KEYS)
        world.agent.block_sink.put([world.page(1), world.page(2)])
    assert world.held(0, 1, 2) == 3
