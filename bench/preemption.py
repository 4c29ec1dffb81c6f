"""What it takes a preempted sequence to come back: from the pool, or computed again:
`python -m bench.preemption [--shape qwen370m] [--contexts 256 1024] [--json FILE]`.

Two sequences of one length decode in an arena that is too small for both, so that the later one is preempted. Then
everything that no sequence uses is dropped from the prefix cache, as a crowd would, and the other one is aborted. Timed
is from the step in which the preempted one is taken in again to its next token, in the same engine twice:
connected to a pool, and not.
"""

import argparse
import asyncio
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry

from baton.clock import MonotonicClock
from baton.config.schema import EngineConfig, ModelConfig, PoolConfig
from baton.generation import Prompt, SamplingParams
from baton.ids import SeqId
from baton.layout import SPARE_BLOCKS
from baton_engine.messages import Abort, FlushCache, Generate, PrefillStarted, StepEvents
from bench.harness.report import Report
from bench.harness.shapes import SHAPES, write_model
from kv_transfer.memory.arena import WorkerMemory
from kvpool.client.agent import PoolAgent
from kvpool.client.arena_pages import HostPages
from kvpool.client.metrics import PoolMetrics
from kvpool.client.pooled_engine import PooledEngine, PromptKeys
from kvpool.fakes.pool import FakePool

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from baton_engine.build import BuiltEngine
    from baton_engine.ports import EnginePort

_BLOCK_TOKENS = 16
_SPARE_PAGES = 4
_LEAST_OUTPUT = (_SPARE_PAGES // 2 + 2) * _BLOCK_TOKENS
"""Tokens with which two sequences of any length outgrow the spare pages, and the later one has some left."""

_FIRST, _SECOND = SeqId("bench/first"), SeqId("bench/second")
_SECRET = bytes(32)


@dataclass(slots=True, eq=False)
class Watch:
    """What the engine has said, with times; on the event loop.

    Attributes:
        tokens: Of each sequence.
        returned: The second sequence's last admission.
        returned_s: When that was.
        token_s: When its latest token came.
    """

    tokens: dict[SeqId, list[int]] = field(default_factory=lambda: {_FIRST: [], _SECOND: []})
    preemptions: int = 0
    returned: PrefillStarted | None = None
    returned_s: float = 0.0
    token_s: float = 0.0
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def take(self, told: StepEvents, now_s: float) -> None:
        """One message of the engine, which came at `now_s`."""
        self.preemptions = told.load.preemptions
        for event in told.events:
            if isinstance(event, PrefillStarted) and event.seq_id == _SECOND:
                self.returned, self.returned_s = event, now_s
        if told.sampled is not None:
            for seq_id, token in zip(told.sampled.seq_ids, told.sampled.tokens, strict=True):
                self.tokens[seq_id].append(token)
                if seq_id == _SECOND:
                    self.token_s = now_s
        self._changed.set()

    async def until(self, holds: Callable[[], bool]) -> None:
        """Waits for the engine to say what makes `holds` true."""
        while not holds():
            self._changed.clear()
            await self._changed.wait()


@dataclass(frozen=True, slots=True, kw_only=True)
class Return:
    """How the second sequence came back.

    Attributes:
        seconds: Until its next token.
        pooled_tokens: Tokens that were fetched.
        tokens: All that were drawn of it.
    """

    seconds: float
    pooled_tokens: int
    tokens: tuple[int, ...]


async def preempt(directory: Path, context: int, *, with_pool: bool) -> Return:
    """One engine, one preemption."""
    built, memory = await asyncio.to_thread(_build, directory, context)
    watch, loop = Watch(), asyncio.get_running_loop()
    built.host.attach(
        lambda told: loop.call_soon_threadsafe(watch.take, told, time.perf_counter()),  # type: ignore[arg-type]
    )
    async with _connected(built, memory, with_pool=with_pool) as (engine, settle):
        built.host.start()
        for number, seq_id in enumerate((_FIRST, _SECOND)):
            engine.submit(Generate(seq_id=seq_id, prompt=_prompt(context, number)))
        await watch.until(lambda: watch.preemptions == 1)
        before = len(watch.tokens[_SECOND])
        await settle()
        engine.submit(FlushCache())
        engine.submit(Abort(seq_id=_FIRST))
        await watch.until(lambda: len(watch.tokens[_SECOND]) > before)
        seconds, returned = watch.token_s - watch.returned_s, watch.returned
        await watch.until(lambda: len(watch.tokens[_SECOND]) > before + 8)
        engine.submit(Abort(seq_id=_SECOND))
        engine.close()
    assert returned is not None
    return Return(
        seconds=seconds,
        pooled_tokens=returned.pooled_tokens,
        tokens=tuple(watch.tokens[_SECOND][: before + 8]),
    )


@asynccontextmanager
async def _connected(
    built: "BuiltEngine", memory: WorkerMemory, *, with_pool: bool
) -> "AsyncIterator[tuple[EnginePort, Callable[[], asyncio.Future[None]]]]":
    """The engine as a worker has it, and a wait for what is on its way to the pool and for leases asked for."""
    if not with_pool:
        yield built.host, lambda: asyncio.ensure_future(asyncio.sleep(0))
        return
    pool = FakePool(built.layout, MonotonicClock(), num_slots=4 * built.limits.num_blocks)
    agent = PoolAgent(
        pool.client,
        HostPages(
            memory.span.host_view, built.layout, num_blocks=built.limits.num_blocks + SPARE_BLOCKS
        ),
        built.host.generation,
        config=PoolConfig(),
        model="bench",
        metrics=PoolMetrics(CollectorRegistry()),
        clock=MonotonicClock(),
    )
    built.host.connect_pool(agent.source, agent.block_sink)
    await agent.start()

    async def settle() -> None:
        await agent.published()
        await asyncio.sleep(0.1)  # the lease that the preemption asked for

    yield (
        PooledEngine(built.host, agent, PromptKeys(_SECRET, built.layout)),
        lambda: asyncio.ensure_future(settle()),
    )
    await agent.close()


def _build(directory: Path, context: int) -> "tuple[BuiltEngine, WorkerMemory]":
    import torch

    from baton_engine.build import build_engine
    from baton_engine.models.config import kv_layout, load_spec

    memory = WorkerMemory()
    layout = kv_layout(load_spec(directory), torch.float32, _BLOCK_TOKENS)
    pages = 2 * -(-context // _BLOCK_TOKENS) + _SPARE_PAGES
    built = build_engine(
        ModelConfig(
            model=str(directory), dtype="float32", max_model_len=context + _output(context)
        ),
        EngineConfig(block_size=_BLOCK_TOKENS, kv_cache_memory_bytes=pages * layout.page_bytes),
        secret=_SECRET,
        memory=memory,
        sink=None,
        progress=lambda _what, _fraction: None,
    )
    return built, memory


def _output(context: int) -> int:
    return max(context, _LEAST_OUTPUT)


def _prompt(context: int, number: int) -> Prompt:
    tokens = tuple(10 + (number * 7919 + place * 31) % 4096 for place in range(context))
    return Prompt(
        prompt_tokens=tokens,
        sampling=SamplingParams(max_tokens=_output(context), temperature=0.0, ignore_eos=True),
    )


async def measure(directory: Path, contexts: Sequence[int], figures: dict[str, float]) -> None:
    """Fills `figures` for every context, and tells them as they come."""
    for context in contexts:
        alone = await preempt(directory, context, with_pool=False)
        pooled = await preempt(directory, context, with_pool=True)
        figures[f"recompute_ms_{context}"] = 1e3 * alone.seconds
        figures[f"swap_ms_{context}"] = 1e3 * pooled.seconds
        figures[f"swap_speedup_{context}"] = alone.seconds / pooled.seconds
        figures[f"pooled_tokens_{context}"] = pooled.pooled_tokens
        common = min(len(alone.tokens), len(pooled.tokens))
        same = alone.tokens[:common] == pooled.tokens[:common]
        figures[f"equal_tokens_{context}"] = common if same else 0
        print(
            f"{context} tokens: computed again {1e3 * alone.seconds:8.1f} ms, from the pool "
            f"{1e3 * pooled.seconds:8.1f} ms ({pooled.pooled_tokens} tokens fetched), "
            f"{common} tokens {'equal' if same else 'DIFFER'}",
            flush=True,
        )


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the report here")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen370m")
    parser.add_argument("--contexts", type=int, nargs="+", default=[256, 1024])
    arguments = parser.parse_args(argv)
    settings = {"shape": arguments.shape, "contexts": arguments.contexts}
    report = Report(benchmark="preemption", settings=settings)
    with (
        report.written_to(arguments.json),
        tempfile.TemporaryDirectory(prefix="baton-bench-") as directory,
    ):
        write_model(SHAPES[arguments.shape], Path(directory))
        asyncio.run(measure(Path(directory), arguments.contexts, report.figures))


if __name__ == "__main__":
    main()
