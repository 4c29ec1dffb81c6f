"""Two workers' engines with a real model, real threads, and one node between them."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch
from prometheus_client import CollectorRegistry

from baton.clock import MonotonicClock
from baton.config.schema import PoolConfig
from baton.generation import Prompt, SamplingParams
from baton.ids import SeqId
from baton_engine.cache.arena import KvArena
from baton_engine.host import ThreadEngineHost
from baton_engine.messages import (
    Abort,
    Failed,
    Generate,
    PrefillStarted,
    StepEvents,
)
from baton_engine.models.config import kv_layout, load_spec
from baton_engine.models.loader import load_decoder
from baton_engine.runner import ModelRunner
from baton_engine.scheduling.limits import EngineLimits
from baton_engine.scheduling.scheduler import Scheduler
from kvpool.client.agent import PoolAgent
from kvpool.client.arena_pages import HostPages
from kvpool.client.metrics import PoolMetrics
from kvpool.client.pooled_engine import PooledEngine, PromptKeys
from kvpool.fakes.pool import FakePool
from tests.baton_engine.sampled import Event, Sampled, all_events
from tests.baton_engine.tiny_models import make_model
from tests.kvpool.client.agent_world import SOON_S
from tests.kvpool.client.arena_world import TIMEOUT_S

NUM_BLOCKS, BLOCK_TOKENS, LENGTH = 40, 8, 100
POOLED = (LENGTH - 1) // BLOCK_TOKENS * BLOCK_TOKENS
PROMPT = Prompt(
    prompt_tokens=tuple(5 + 7 * index % 90 for index in range(LENGTH)),
    sampling=SamplingParams(temperature=0, max_tokens=12, ignore_eos=True),
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp("agent"), "llama", num_layers=2)


class Worker:
    """An engine in its thread, and its part in the pool."""

    def __init__(self, checkpoint: Path, pool: FakePool | None, lookup_timeout_s: float) -> None:
        spec = load_spec(checkpoint)
        self.layout = kv_layout(spec, torch.float32, BLOCK_TOKENS)
        memory = memoryview(bytearray(self.layout.region_bytes(NUM_BLOCKS)))
        limits = EngineLimits(
            max_num_seqs=4,
            max_num_batched_tokens=64,
            max_model_len=256,
            block_tokens=BLOCK_TOKENS,
            num_blocks=NUM_BLOCKS,
            vocab_size=spec.vocab_size,
        )
        decoder = load_decoder(checkpoint, spec, torch.float32, torch.device("cpu"))
        runner = ModelRunner(decoder, KvArena(self.layout, NUM_BLOCKS, memory), None)
        self.scheduler = Scheduler(limits, layout=self.layout, secret=bytes(32))
        self.host = ThreadEngineHost(self.scheduler, runner)
        clock = MonotonicClock()
        self.pool = pool or FakePool(self.layout, clock)
        self.agent = PoolAgent(
            self.pool.client,
            HostPages(memory, self.layout, num_blocks=NUM_BLOCKS),
            self.host.generation,
            config=PoolConfig(lookup_timeout_s=lookup_timeout_s),
            model=self.layout.model_fingerprint,
            metrics=PoolMetrics(CollectorRegistry()),
            clock=clock,
        )
        self.engine = PooledEngine(self.host, self.agent, PromptKeys(bytes(32), self.layout))
        self.events: list[Event] = []
        self._news = asyncio.Event()
        self._next = 0

    async def start(self) -> None:
        loop = asyncio.get_running_loop()

        def hear(told: StepEvents) -> None:
            loop.call_soon_threadsafe(self._take, told)

        self.engine.attach(hear)
        self.host.connect_pool(self.agent.source, self.agent.block_sink)
        await self.agent.start()
        self.host.start()

    def submit(self, prompt: Prompt = PROMPT) -> SeqId:
        self._next += 1
        seq_id = SeqId(f"w/{self._next}")
        self.engine.submit(Generate(seq_id=seq_id, prompt=prompt))
        return seq_id

    async def drawn(self, seq_id: SeqId) -> list[int]:
        """All tokens of a sequence; none where it failed."""
        while True:
            own = [event for event in self.events if event.seq_id == seq_id]
            tokens = [token for e in own if isinstance(e, Sampled) for token in e.tokens]
            if any(isinstance(e, Failed) for e in own) or (tokens and tokens[-1].finish):
                return [token.token for token in tokens]
            self._news.clear()
            async with asyncio.timeout(TIMEOUT_S):
                await self._news.wait()

    def pooled(self, seq_id: SeqId) -> int:
        started = [e for e in self.events if isinstance(e, PrefillStarted)]
        return next(event.pooled_tokens for event in started if event.seq_id == seq_id)

    async def close(self) -> None:
        self.pool.let_go()
        await asyncio.to_thread(self.host.close)
        await self.agent.close()
        self.scheduler.check_integrity()
        assert self.scheduler.load().blocks_used == 0
        assert self.host.failure() is None

    def _take(self, told: StepEvents) -> None:
        self.events += all_events(told)
        self._news.set()


@asynccontextmanager
async def worker(
    checkpoint: Path, pool: FakePool | None = None, *, lookup_timeout_s: float = TIMEOUT_S
) -> AsyncIterator[Worker]:
    one = Worker(checkpoint, pool, lookup_timeout_s)
    await one.start()
    try:
        yield one
    finally:
        await one.close()
    one.pool.ledger.check_integrity()


async def computed(one: Worker) -> list[int]:
    """Tokens of a prompt that nobody computed before; its blocks are in the pool after that."""
    first = one.submit()
    tokens = await one.drawn(first)
    assert one.pooled(first) == 0
    await one.agent.published()
    return tokens


async def test_what_one_engine_computed_another_fetches_and_draws_the_same_tokens(checkpoint):
    async with worker(checkpoint) as p, worker(checkpoint, p.pool) as d:
        tokens = await computed(p)
        second = d.submit()
        assert await d.drawn(second) == tokens
        assert d.pooled(second) == POOLED
    assert p.pool.ledger.usage().leases == 0


async def test_without_a_node_prompts_are_computed(checkpoint):
    async with worker(checkpoint) as p, worker(checkpoint, p.pool) as d:
        tokens = await computed(p)
        p.pool.leave()
        second = d.submit()
        assert await d.drawn(second) == tokens
        assert d.pooled(second) == 0


async def test_a_node_that_does_not_answer_delays_a_prompt_only_for_a_moment(checkpoint):
    async with worker(checkpoint) as p:
        async with worker(checkpoint, p.pool, lookup_timeout_s=SOON_S) as d:
            tokens = await computed(p)
            p.pool.hold()
            second = d.submit()
            assert await d.drawn(second) == tokens
            assert d.pooled(second) == 0
        await p.agent.published()
    assert p.pool.ledger.usage().leases == 0


async def test_a_node_that_is_lost_while_prompts_are_served_costs_only_its_blocks(checkpoint):
    async with worker(checkpoint) as p, worker(checkpoint, p.pool) as d:
        tokens = await computed(p)
        p.pool.hold()
        waiting = d.submit()
        await p.pool.asked("lease", 2)
        p.pool.leave()
        assert await d.drawn(waiting) == tokens
        p.pool.let_go()
        p.pool.come()
        again = d.submit()
        assert await d.drawn(again) == tokens


async def test_wrong_bytes_fail_the_sequence_and_are_not_offered_again(checkpoint):
    async with worker(checkpoint) as p, worker(checkpoint, p.pool) as d:
        tokens = await computed(p)
        for rows in p.pool.rows:
            rows[:, 11] ^= 1
        assert await d.drawn(d.submit()) == []
        await p.pool.asked("corrupt")
        again = d.submit()
        assert await d.drawn(again) == tokens


async def test_a_prompt_that_is_aborted_while_the_node_is_asked_leaves_nothing(checkpoint):
    async with worker(checkpoint) as p, worker(checkpoint, p.pool) as d:
        tokens = await computed(p)
        p.pool.hold()
        gone = d.submit()
        await p.pool.asked("lease", 2)
        d.engine.submit(Abort(seq_id=gone))
        p.pool.let_go()
        assert await d.drawn(d.submit()) == tokens
        assert not [e for e in d.events if isinstance(e, Sampled) and e.seq_id == gone]
    assert p.pool.ledger.usage().leases == 0
