"""How fast a pool node gets blocks from another one: `python -m bench.pool_peers [--json FILE]`.

Two nodes, each a process with a worker of its own, share a directory in a redis-server of the benchmark's. The worker
of one puts a text; the other's leases it, again and again until it has all of it: directory, question, session, bytes,
and every block hashed by the node that fetched it, as for a prompt. Each backend that is installed here, and one plain
copy of the same bytes by libc, in the same run.

Figures, medians over the rounds: `BACKEND_LABEL_gb_s`, `BACKEND_over_memcpy_LABEL`, by size of block (`bench.pool_copy`
says which model has which); `BACKEND_one_block_ms`, of a text of one 192 KiB block; `BACKEND_first_ms`, of the first
one, for which the session is opened.
"""

import argparse
import asyncio
import itertools
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median

import numpy as np
from prometheus_client import CollectorRegistry

from baton.config.schema import PoolConfig
from baton.ids import BlockKey
from baton.redis_link import RefusedValues, open_redis
from bench.harness.redis_server import redis_server
from bench.harness.report import Report
from bench.kvpool.hosts import SECRET, Host, HostWorker, running
from bench.pool_copy import BLOCK_BYTES, block_layout, memcpy
from kv_transfer.backends.registry import BACKENDS
from kv_transfer.memory.shared_region import SharedRegion
from kvpool.directory.redis import RedisDirectory

LABELS = ("192k", "8m")
_ONE_BLOCK = "192k"
_LEASE_S = 30.0
_WAIT_S = 1.0
_PATIENCE_S = 30.0
_SLAB_TEXTS = 8
"""Texts that a slab has room for; later ones push out earlier ones, as in a pool that has run for a while."""


class Pair:
    """Two nodes with their workers, and texts that go from one to the other."""

    def __init__(self, here: HostWorker, there: HostWorker, directory: RedisDirectory) -> None:
        self._here = here
        self._there = there
        self._directory = directory
        self._numbers = itertools.count(1)

    async def fetch_s(self, num_blocks: int) -> float:
        """Seconds until the worker here has a new text of the node there.

        Raises:
            TimeoutError: It does not come.
        """
        text = next(self._numbers).to_bytes(8)
        keys = [BlockKey(text + at.to_bytes(8)) for at in range(num_blocks)]
        async with asyncio.timeout(_PATIENCE_S):
            await self._there.put(keys)
            while len(await self._directory.lookup(keys)) < num_blocks:  # noqa: ASYNC110  # another process
                await asyncio.sleep(0.01)
            begin_s = time.perf_counter()
            while not await self._has(keys):
                continue
            return time.perf_counter() - begin_s

    async def _has(self, keys: Sequence[BlockKey]) -> bool:
        lease = await self._here.client.lease(keys, _LEASE_S, _WAIT_S)
        if lease.lease_id:
            await self._here.client.release([lease.lease_id])
        return len(lease.blocks) == len(keys)


@asynccontextmanager
async def a_pair(backend: str, label: str, memory_bytes: int) -> AsyncIterator[Pair]:
    """Two fresh nodes with a directory of their own."""
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as name:
        folder = Path(name)
        with redis_server(folder) as url:
            pool = PoolConfig(
                memory_bytes=memory_bytes,
                directory="redis",
                redis_url=url,
                redis_timeout_s=5.0,
                replicate_reads=0.0,
            )
            hosts = [
                Host(name=f"pool-{n}", folder=folder, pool=pool, backend=backend) for n in range(2)
            ]
            layout = block_layout(BLOCK_BYTES[label])
            redis = open_redis(url, timeout_s=5.0)
            directory = RedisDirectory(
                redis,
                prefix=pool.redis_prefix,
                secret=bytes.fromhex(SECRET),
                refused=RefusedValues(CollectorRegistry()),
            )
            async with running(hosts[0], layout) as here, running(hosts[1], layout) as there:
                yield Pair(here, there, directory)
            await redis.aclose()


async def measure(backend: str, label: str, text_bytes: int, rounds: int) -> dict[str, float]:
    """Figures of one backend and size of block."""
    num_blocks = max(1, text_bytes // BLOCK_BYTES[label])
    memory_bytes = _SLAB_TEXTS * num_blocks * BLOCK_BYTES[label]
    figures = {}
    async with a_pair(backend, label, memory_bytes) as pair:
        first_s = await pair.fetch_s(1)
        for _ in range(_SLAB_TEXTS):
            await pair.fetch_s(num_blocks)  # until every slot was written to once
        seconds = median([await pair.fetch_s(num_blocks) for _ in range(rounds)])
        figures[f"{backend}_{label}_gb_s"] = num_blocks * BLOCK_BYTES[label] / seconds / 1e9
        if label == _ONE_BLOCK:
            one_s = median([await pair.fetch_s(1) for _ in range(rounds)])
            figures[f"{backend}_first_ms"] = 1e3 * first_s
            figures[f"{backend}_one_block_ms"] = 1e3 * one_s
    return figures


def memcpy_gb_s(num_bytes: int, rounds: int) -> float:
    """One plain copy between two shared regions that were touched before, one thread."""
    source, target = (SharedRegion.create(num_bytes) for _ in range(2))
    for region in (source, target):
        np.frombuffer(region.memoryview, dtype=np.uint8)[:] = 1
    copy = memcpy(source.memoryview, target.memoryview)
    took_s = []
    for _ in range(rounds + 1):
        begin_s = time.perf_counter()
        copy()
        took_s.append(time.perf_counter() - begin_s)
    return num_bytes / median(took_s[1:]) / 1e9


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point."""
    arguments = _arguments(argv)
    backends = arguments.backends
    settings = {name: value for name, value in vars(arguments).items() if name != "json"}
    report = Report(benchmark="pool_peers", settings=settings)
    text_bytes = arguments.text_mib << 20
    with report.written_to(arguments.json):
        report.figures["memcpy_gb_s"] = plain = memcpy_gb_s(text_bytes, 4 * arguments.rounds)
        for label, backend in itertools.product(LABELS, backends):
            figures = asyncio.run(measure(backend, label, text_bytes, arguments.rounds))
            figures[f"{backend}_over_memcpy_{label}"] = figures[f"{backend}_{label}_gb_s"] / plain
            report.figures |= figures
            told = "   ".join(f"{name} {value:.2f}" for name, value in figures.items())
            print(told, flush=True)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the report here")
    parser.add_argument("--text-mib", type=int, default=64, help="of a text that is fetched")
    parser.add_argument("--rounds", type=int, default=7)
    able = [name for name, one in BACKENDS.items() if one.installed and one.host_memory]
    parser.add_argument("--backends", nargs="+", choices=able, default=able)
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
