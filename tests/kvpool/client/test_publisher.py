import asyncio

from prometheus_client import CollectorRegistry

from kvpool.client.metrics import PoolMetrics
from kvpool.client.publisher import PoolWriter, Publisher
from kvpool.messages import PutRefusalReason
from tests.kvpool.client.agent_world import AgentWorld, until, working
from tests.kvpool.client.arena_world import NUM_PAGES, SEQ, TIMEOUT_S, Gated, fetch, key


async def test_full_pages_come_into_the_pool_and_out_of_it_unchanged():
    async with working(AgentWorld()) as world:
        await world.publish(range(4))
        assert world.held(0, 1, 2, 3) == 4
        assert world.counted("published_blocks") == 4
        await world.agent.prepare(SEQ, [key(2)])
        source = world.agent.source
        source.start_load_kv([fetch(SEQ, (2, 5))])
        await asyncio.to_thread(source.wait_for_layer_load, 2)
        assert (await asyncio.to_thread(source.finish_load_kv)).num_blocks == 1
        assert all(world.is_there(5, 2, layer_index) for layer_index in range(3))


async def test_blocks_are_billed_to_their_tenant_or_else_to_their_scope():
    async with working(AgentWorld()) as world:
        await world.publish([0, 1], tenant="acme")
        await world.publish([2], tenant="")
        owners = {owner.tenant: owner.blocks for owner in world.pool.ledger.owners()}
        assert owners == {"acme": 2, "s": 1}


async def test_what_is_held_already_is_not_copied_again():
    async with working(AgentWorld()) as world:
        await world.publish([0])
        await world.publish([0])
        assert world.pool.calls["commit"] == 1


async def test_at_most_one_batch_is_under_way_and_the_oldest_pages_are_dropped():
    async with working(AgentWorld(publish_queue_blocks=2)) as world:
        world.pool.hold()
        world.agent.block_sink.put([world.page(0)])
        await world.pool.asked("reserve")
        for number in range(1, NUM_PAGES):
            world.agent.block_sink.put([world.page(number)])
        assert len(world.agent.block_sink) == 2
        assert world.pool.calls["reserve"] == 1
        world.pool.let_go()
        await world.agent.published()
        assert [world.held(number) for number in range(NUM_PAGES)] == [1, 0, 0, 0, 1, 1]
        await until(lambda: world.counted("unpublished_blocks", reason="overflow") == 3)


async def test_a_node_that_is_away_empties_the_line():
    async with working(AgentWorld()) as world:
        world.pool.hold()
        world.agent.block_sink.put([world.page(0)])
        await world.pool.asked("reserve")
        world.agent.block_sink.put([world.page(1), world.page(2)])
        world.pool.leave()
        assert len(world.agent.block_sink) == 0
        world.pool.let_go()
        await world.agent.published()
        await world.publish([3])
        assert world.counted("unpublished_blocks", reason="away") == 3
        assert world.counted("unpublished_blocks", reason="failed") == 1
        assert world.pool.calls["reserve"] == 1


async def test_a_batch_that_nobody_foresaw_is_dropped_and_the_next_one_is_published(monkeypatch):
    async with working(AgentWorld()) as world:
        with monkeypatch.context() as patched:
            patched.setattr(PoolWriter, "write", _broken)
            await world.publish([0])
        await world.publish([1])
        assert [world.held(0), world.held(1)] == [0, 1]
        assert world.counted("unpublished_blocks", reason="failed") == 1


def _broken(*_: object) -> list[bytes]:
    raise ValueError("a fault of our own")


async def test_places_of_a_new_node_are_not_written_by_the_slab_of_the_old_one():
    async with working(AgentWorld()) as world:
        world.pool.hold()
        world.agent.block_sink.put([world.page(0)])
        await world.pool.asked("reserve")
        world.pool.leave()
        world.pool.come()
        world.pool.let_go()
        await world.agent.published()
        assert world.held(0) == 0
        assert not any(rows.any() for rows in world.pool.rows)
        await world.publish([1])
        assert world.held(1) == 1


async def test_a_page_that_was_handed_out_again_is_not_put():
    async with working(AgentWorld()) as world:
        world.generations[1] += 1
        await world.publish([0, 1])
        assert (world.held(0), world.held(1)) == (1, 0)
        assert world.counted("unpublished_blocks", reason="overwritten") == 1
        assert world.pool.ledger.usage().puts == 0


async def test_what_the_node_refuses_is_dropped():
    async with working(AgentWorld()) as world:
        world.pool.ledger.refuses = PutRefusalReason.SICK
        await world.publish([0, 1])
        assert world.counted("unpublished_blocks", reason="refused") == 2
        world.pool.ledger.refuses = None
        await world.publish([2])
        assert world.held(2) == 1


async def test_nothing_is_copied_any_more_once_it_is_closed():
    world = AgentWorld()
    gated = _GatedOut(world.host)
    publisher = Publisher(
        world.pool.client(),
        PoolWriter(gated, lambda block: world.generations[block]),
        capacity=8,
        model="tiny",
        put_timeout_s=TIMEOUT_S,
        clock=world.clock,
        metrics=PoolMetrics(CollectorRegistry()),
    )
    publisher.start()
    publisher.connect(world.pool.rows)
    publisher.queue.put([world.page(0)])
    assert await asyncio.to_thread(gated.entered[0].wait, TIMEOUT_S)
    closing = asyncio.create_task(publisher.close())
    await asyncio.sleep(0)
    assert not closing.done()
    gated.open()
    await closing
    assert world.held(0) == 0
    world.agent.source.close()


class _GatedOut(Gated):
    """Holds up what is copied out."""

    def copy_out(self, layer_index, pages, target, slots):
        self.entered[layer_index].set()
        assert self.gates[layer_index].wait(TIMEOUT_S)
        return super().copy_out(layer_index, pages, target, slots)


async def test_a_text_in_a_hurry_does_not_wait_for_the_line():
    async with working(AgentWorld()) as world:
        world.pool.hold()
        world.agent.block_sink.put([world.page(0)])
        await world.pool.asked("reserve")
        world.agent.block_sink.put([world.page(1), world.page(2)])
        hurried = asyncio.create_task(
            world.agent.put_now([world.page(3, index=0), world.page(4, index=1)])
        )
        await asyncio.sleep(0)
        world.pool.let_go()
        async with asyncio.timeout(TIMEOUT_S):
            assert await hurried
            await world.agent.published()
        assert [world.held(number) for number in range(5)] == [1] * 5
        assert world.pool.asked_places == [key(n) for n in (0, 3, 4, 1, 2)]


async def test_a_text_in_a_hurry_is_not_there_when_the_node_refuses_it_or_is_away():
    async with working(AgentWorld()) as world:
        world.pool.ledger.refuses = PutRefusalReason.SICK
        assert not await world.agent.put_now([world.page(0)])
        world.pool.ledger.refuses = None
        world.pool.leave()
        assert not await world.agent.put_now([world.page(0)])


async def test_a_text_of_which_a_page_was_handed_out_again_is_not_all_there():
    async with working(AgentWorld()) as world:
        world.generations[1] += 1
        assert not await world.agent.put_now([world.page(0), world.page(1)])
        assert await world.agent.put_now([world.page(0)])


async def test_a_text_that_is_there_already_is_not_copied_again():
    async with working(AgentWorld()) as world:
        await world.publish([0, 1])
        assert await world.agent.put_now([world.page(0), world.page(1)])
        assert world.pool.calls["commit"] == 1
