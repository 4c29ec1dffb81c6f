"""What the pool's directories take, in memory and in a redis-server of the benchmark's own. A part of `bench.pool`.

A node publishes many blocks, as chains; then the chains are looked up, whole and in turn. From Redis the answer comes
in columns and makes its objects where it is looked at: `lookup` counts what `Directory.lookup` takes,
`walked` also the objects of all blocks.
"""

import asyncio
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from prometheus_client import CollectorRegistry

from baton.clock import MonotonicClock
from baton.ids import BlockKey, Incarnation, WorkerId, WorkerIdentity
from baton.redis_link import RefusedValues, open_redis
from bench.harness.redis_server import redis_server
from kvpool.directory.memory import MemoryDirectory
from kvpool.directory.redis import RedisDirectory
from kvpool.messages import DirectoryChanges, NodeState, Owner, Stored, Tier
from kvpool.ports import Directory

_OWNER = Owner(tenant="bench", scope="bench", model="bench")
_NODE = WorkerIdentity(worker_id=WorkerId("pool-0"), incarnation=Incarnation(1))
_LEASE_S = 600.0
_LOOKUPS = 200

Chain = list[BlockKey]


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectorySpeed:
    """Of one directory.

    Attributes:
        lookup_s: Of a chain, median.
        walked_s: Of a chain whose every replica is looked at, median.
        published_per_s: Blocks.
    """

    lookup_s: float
    walked_s: float
    published_per_s: float


def measure_directories(chain_blocks: int, chains: int) -> dict[str, float]:
    """The figures, told as they come."""
    return asyncio.run(_measure_both(chain_blocks, chains))


async def _measure_both(chain_blocks: int, chains: int) -> dict[str, float]:
    keys = [[BlockKey(os.urandom(16)) for _ in range(chain_blocks)] for _ in range(chains)]
    memory = await _measure(MemoryDirectory(MonotonicClock()), keys)
    figures = _figures("memory", memory)
    with tempfile.TemporaryDirectory() as directory, redis_server(Path(directory)) as url:
        async with open_redis(url, timeout_s=5.0) as redis:
            empty_bytes = (await redis.info("memory"))["used_memory"]
            refused = RefusedValues(CollectorRegistry())
            shared = RedisDirectory(redis, prefix="b", secret=bytes(32), refused=refused)
            figures |= _figures("redis", await _measure(shared, keys))
            full_bytes = (await redis.info("memory"))["used_memory"]
    figures["redis_bytes_per_block"] = (full_bytes - empty_bytes) / (chains * chain_blocks)
    print(f"redis: {figures['redis_bytes_per_block']:.0f} bytes per block")
    return figures


def _figures(name: str, speed: DirectorySpeed) -> dict[str, float]:
    print(
        f"{name:8} lookup {1e3 * speed.lookup_s:.2f} ms, walked {1e3 * speed.walked_s:.2f} ms,"
        f" {speed.published_per_s:,.0f} blocks published/s"
    )
    return {
        f"lookup_2k_{name}_p50_ms": 1e3 * speed.lookup_s,
        f"lookup_2k_{name}_walked_p50_ms": 1e3 * speed.walked_s,
        f"publish_{name}_per_s": speed.published_per_s,
    }


async def _measure(directory: Directory, chains: Sequence[Chain]) -> DirectorySpeed:
    await directory.renew(NodeState(node=_NODE, address="unix:/bench"), _LEASE_S, 0)
    published_s = [await _publish(directory, chain) for chain in chains]
    looked_up_s, walked_s = list[float](), list[float]()
    for turn in range(_LOOKUPS):
        chain = chains[turn % len(chains)]
        begun_s = time.perf_counter()
        found = await directory.lookup(chain)
        looked_up_s.append(time.perf_counter() - begun_s)
        walked = list(found)
        walked_s.append(time.perf_counter() - begun_s)
        if len(walked) != len(chain):
            raise RuntimeError("blocks were not found")
    return DirectorySpeed(
        lookup_s=median(looked_up_s),
        walked_s=median(walked_s),
        published_per_s=len(chains[0]) / median(published_s),
    )


async def _publish(directory: Directory, chain: Chain) -> float:
    stored = tuple(
        Stored(key=key, owner=_OWNER, size_bytes=1 << 20, tier=Tier.DRAM, epoch=1) for key in chain
    )
    begun_s = time.perf_counter()
    await directory.publish(_NODE, DirectoryChanges(stored=stored))
    return time.perf_counter() - begun_s
