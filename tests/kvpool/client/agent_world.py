"""A worker's part in the pool over plain memory, with a node that can be held up and cut."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from prometheus_client import CollectorRegistry

from baton.config.schema import PoolConfig
from baton.ids import BlockId
from baton.pages import PublishedPage
from kvpool.client.agent import PoolAgent
from kvpool.client.metrics import PoolMetrics
from kvpool.fakes.pool import FakePool
from tests.kvpool.client.arena_world import NUM_PAGES, TIMEOUT_S, ArenaWorld, key

SOON_S = 0.01
"""How long prompts wait for a node that does not answer."""


class AgentWorld(ArenaWorld):
    """Page `i` of the arena is what block `i` holds; the node's slab is empty."""

    def __init__(self, *, num_slots: int = 16, **config) -> None:
        super().__init__()
        for page in range(NUM_PAGES):
            for layer, rows in zip(self.pages, self.rows, strict=True):
                layer[page] = rows[page]
        self.generations = [1] * NUM_PAGES
        self.pool = FakePool(self.layout, self.clock, num_slots=num_slots)
        self.registry = CollectorRegistry()
        self.agent = PoolAgent(
            self.pool.client,
            self.host,
            lambda block: self.generations[block],
            config=PoolConfig(**{"lookup_timeout_s": TIMEOUT_S, **config}),
            model="tiny",
            metrics=PoolMetrics(self.registry),
            clock=self.clock,
        )

    def page(self, number: int, *, tenant: str = "t", index: int | None = None) -> PublishedPage:
        return PublishedPage(
            key=key(number),
            block=BlockId(number),
            generation=1,
            index=number if index is None else index,
            scope="s",
            tenant=tenant,
        )

    async def publish(self, numbers: Sequence[int], **said) -> None:
        self.agent.block_sink.put([self.page(number, **said) for number in numbers])
        async with asyncio.timeout(TIMEOUT_S):
            await self.agent.published()

    def held(self, *numbers: int) -> int:  # type: ignore[override]  # of the node, not of a lease
        return self.pool.ledger.held([key(number) for number in numbers])

    def counted(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(f"baton_pool_{name}_total", labels or None) or 0.0


@asynccontextmanager
async def working(world: AgentWorld) -> AsyncIterator[AgentWorld]:
    """Starts the agent; at the end nothing is borrowed or being put."""
    await world.agent.start()
    try:
        yield world
    finally:
        world.pool.let_go()
        await world.agent.close()
    world.pool.ledger.check_integrity()
    assert world.pool.ledger.usage().leases == 0


async def until(true) -> None:
    """Lets the loop go on until the condition holds."""
    async with asyncio.timeout(TIMEOUT_S):
        while not true():  # noqa: ASYNC110
            await asyncio.sleep(0)  # nobody tells when the loop has got that far
