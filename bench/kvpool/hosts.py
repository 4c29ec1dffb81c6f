"""Pool nodes as processes of a benchmark's own, each with a worker that puts and reads;
as if they stood on hosts of their own.
"""

import asyncio
import multiprocessing
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import xxhash
from prometheus_client import CollectorRegistry

from baton.config.schema import BatonConfig, ClusterConfig, PoolConfig, TransferConfig
from baton.ids import BlockKey, Incarnation, WorkerId, WorkerIdentity
from baton.layout import KvLayout
from baton.redis_link import RefusedValues
from kv_transfer.memory.pages import Pages
from kvpool.client.node_client import GrpcPoolClient
from kvpool.messages import Owner, PutGrant
from kvpool.service import run

SECRET = "5a" * 32
_OWNER = Owner(tenant="bench", scope="bench", model="bench")
_START_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """One node.

    Attributes:
        name: Of the node.
        folder: Of its sockets.
        pool: How it is configured, directory included.
        backend: By which nodes reach each other.
    """

    name: str
    folder: Path
    pool: PoolConfig
    backend: str

    @property
    def address(self) -> str:
        """Where its worker finds it."""
        return f"unix:{self.folder}/{self.name}.sock"


class HostWorker:
    """The worker of one host. For one event loop."""

    def __init__(self, host: Host, layout: KvLayout) -> None:
        self._mapped = asyncio.Event()
        self.client = GrpcPoolClient(
            host.address, _identity(f"worker-{host.name}"), layout, self._on_slab
        )

    async def attached(self) -> list[Pages]:
        """The node's slab, layer by layer."""
        async with asyncio.timeout(_START_S):
            await self._mapped.wait()
        slab = self.client.slab()
        assert slab is not None
        return slab

    async def put(self, keys: Sequence[BlockKey]) -> None:
        """Puts blocks of arbitrary bytes.

        Raises:
            RuntimeError: They were not all taken.
        """
        slab = await self.attached()
        grant = await self.client.reserve(keys, _OWNER, 0)
        if not isinstance(grant, PutGrant) or len(grant.items) < len(keys):
            raise RuntimeError(f"{len(keys)} blocks were not taken")
        sums = []
        for item in grant.items:
            layers = [layer[item.slot] for layer in slab]
            for layer in layers:
                layer[:] = item.slot % 251
            sums.append(b"".join(xxhash.xxh3_64_digest(layer)[::-1] for layer in layers))
        if await self.client.commit(grant.put_id, sums) < len(keys):
            raise RuntimeError(f"{len(keys)} blocks were not held")

    def _on_slab(self, slab: list[Pages] | None) -> None:
        if slab is not None:
            self._mapped.set()


@asynccontextmanager
async def running(host: Host, layout: KvLayout) -> AsyncIterator[HostWorker]:
    """The host's worker, while its node runs.

    Raises:
        TimeoutError: The node did not come up.
    """
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=_serve, args=(host,))
    process.start()
    worker = HostWorker(host, layout)
    try:
        await worker.client.start()
        await worker.attached()
        yield worker
    finally:
        await worker.client.close()
        process.terminate()
        await asyncio.to_thread(process.join)


def _identity(name: str) -> WorkerIdentity:
    return WorkerIdentity(worker_id=WorkerId(name), incarnation=Incarnation(1))


def _serve(host: Host) -> None:
    asyncio.run(_run(host))


async def _run(host: Host) -> None:
    config = BatonConfig(
        pool=host.pool,
        transfer=TransferConfig(backends=(host.backend,)),
        cluster=ClusterConfig(secret=SECRET),
    )
    await run(
        config,
        identity=_identity(host.name),
        address=host.address,
        peer_address=f"unix:{host.folder}/{host.name}-peers.sock",
        region_path=f"{host.folder}/{host.name}.kv",
        peer_region_path=f"{host.folder}/{host.name}-peers.kv",
        registry=(registry := CollectorRegistry()),
        refused=RefusedValues(registry),
        ready=lambda: None,
        stop=asyncio.Event(),
    )
