"""A router's index against real workers over gRPC: prefill and decode services over an engine without a model."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from prometheus_client import CollectorRegistry, generate_latest

from baton.blocks import joined
from baton.clock import MonotonicClock
from baton.config.schema import RouterConfig
from baton.generation import Prompt, SamplingParams
from baton.hashing import chain_keys, root_key
from baton.ids import RequestId, Role
from baton_engine.messages import FlushCache
from router.admin.stories import OperatorStories
from router.ports import GenerationRequest
from router.routing.table import fingerprints_of
from router.service import RouterParts, compose, running
from router.telemetry.collectors import IndexMetrics
from tests.decode_worker.cluster import LAYOUT, LIMITS, SECRET, Node, node

TIMEOUT_S = 60.0


@asynccontextmanager
async def router(*nodes: Node) -> AsyncIterator[RouterParts]:
    parts = compose(RouterConfig(), [node.address for node in nodes], SECRET)
    async with running(parts):
        await eventually(lambda: len(parts.view.workers) == len(nodes))
        await eventually(lambda: parts.index.counts.snapshots == len(nodes))
        yield parts


async def eventually(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while not holds():  # noqa: ASYNC110  # an engine's thread and a socket are waited for
            await asyncio.sleep(0.005)


async def ask(parts: RouterParts, first: int, length: int = 40) -> None:
    """Has `length` tokens of a text of its own prefilled and three drawn."""
    prompt = Prompt(prompt_tokens=text(first, length), sampling=SamplingParams(max_tokens=3))
    job = GenerationRequest(request_id=RequestId(f"r{first}"), prompt=prompt, timeout_s=TIMEOUT_S)
    async for _ in parts.generator.generate(job):
        pass


def text(first: int, length: int = 40) -> tuple[int, ...]:
    return tuple((first * 101 + at * 7) % LIMITS.vocab_size for at in range(length))


def depth(parts: RouterParts, node: Node, first: int) -> int:
    """How many blocks of a text the router believes this worker to hold."""
    root = root_key(SECRET, scope="", layout=LAYOUT)
    chain = fingerprints_of(joined(chain_keys(SECRET, root, text(first), LAYOUT.block_tokens)))
    worker = parts.view.find(node.identity.worker_id)
    assert worker is not None
    return parts.index.held_blocks(chain, asyncio.get_running_loop().time()).get(worker.slot, 0)


async def test_a_router_forgets_what_a_worker_evicts(tmp_path: Path):
    async with (
        node(Role.PREFILL, tmp_path) as p,
        node(Role.DECODE, tmp_path) as d,
        router(p, d) as parts,
    ):
        await ask(parts, 1)
        await eventually(lambda: parts.index.counts.events >= 20)
        assert depth(parts, p, 1) == depth(parts, d, 1) == 10
        p.engine.submit(FlushCache())
        await eventually(lambda: depth(parts, p, 1) == 0)
        assert depth(parts, d, 1) == 10


async def test_a_router_that_starts_anew_learns_from_a_snapshot(tmp_path: Path):
    async with node(Role.PREFILL, tmp_path) as p, node(Role.DECODE, tmp_path) as d:
        async with router(p, d) as before:
            await ask(before, 1)
            await eventually(lambda: before.index.counts.events >= 20)
        async with router(p, d) as after:
            assert depth(after, p, 1) == depth(after, d, 1) == 10


async def test_pages_that_run_out_are_evicted_and_the_index_follows(tmp_path: Path):
    async with node(Role.HYBRID, tmp_path) as h, router(h) as parts:
        for number in range(12):
            await ask(parts, number)
        cached = h.scheduler.load().blocks_cached
        await eventually(lambda: len(parts.index) == cached)
        assert depth(parts, h, 0) == 0
        assert depth(parts, h, 11) == 10


async def test_a_hybrid_worker_reports_each_block_once(tmp_path: Path):
    async with node(Role.HYBRID, tmp_path) as h, router(h) as parts:
        await ask(parts, 1)
        await eventually(lambda: len(parts.index) == h.scheduler.load().blocks_cached)
        assert parts.index.counts.events == len(parts.index) == 10
        assert parts.index.counts.refused == parts.index.counts.gaps == 0


async def test_metrics_tell_what_the_index_knows(tmp_path: Path):
    async with node(Role.HYBRID, tmp_path) as h, router(h) as parts:
        await ask(parts, 1)
        await eventually(lambda: len(parts.index) == 10)
        registry = CollectorRegistry()
        registry.register(IndexMetrics(parts.index))
        lines = generate_latest(registry).decode().splitlines()
    assert "baton_prefix_index_blocks 10.0" in lines
    assert "baton_prefix_index_events_total 10.0" in lines
    assert "baton_prefix_index_snapshots_total 1.0" in lines


async def test_the_story_of_a_request_has_the_parts_of_all_processes(tmp_path):
    async with (
        node(Role.PREFILL, tmp_path) as p,
        node(Role.DECODE, tmp_path) as d,
        router(p, d) as parts,
    ):
        await ask(parts, 1)
        stories = OperatorStories(parts.generator.story, parts.view, MonotonicClock())
        told = (await stories.tell("r1")).entries
        by_process = {entry.process for entry in told}
        workers = {str(each.identity.worker_id) for each in (p, d)}
        assert by_process == {"router", *workers}
        assert {entry.core for entry in told if entry.process != "router"} == {
            "leg",
            "outbox",
            "ledger",
            "engine",
            "cache",
        }
        times = [entry.at_s for entry in told]
        assert times == sorted(times)
        asked = [entry for entry in told if entry.event.startswith("asked to ")]
        assert {entry.process for entry in asked} == workers
