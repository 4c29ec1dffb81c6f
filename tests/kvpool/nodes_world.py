"""Several pool nodes that share a directory, each with a worker that puts and reads. Loopback and Unix sockets only."""

import asyncio
import contextlib
import json
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import xxhash
from prometheus_client import CollectorRegistry

from baton.config.schema import BatonConfig, ClusterConfig, PoolConfig, TransferConfig
from baton.ids import BlockKey, Incarnation, LayerName, WorkerId, WorkerIdentity
from baton.layout import KvLayout
from baton.redis_link import open_redis
from baton.rpc.channel import open_channel
from baton.rpc.v1 import pool_pb2 as pb
from baton.rpc.v1 import pool_pb2_grpc
from kv_transfer.memory.pages import Pages
from kvpool.client.node_client import GrpcPoolClient
from kvpool.directory.redis import RedisDirectory
from kvpool.messages import BlockLease, Owner, PutGrant
from kvpool.ports import AllowanceSource
from kvpool.service import run
from tests.redis_servers import no_refusals
from tests.waits import soon

LAYOUT = KvLayout(
    model_fingerprint="m",
    dtype="float32",
    block_tokens=4,
    num_kv_heads=2,
    head_dim=8,
    layers=(LayerName("a"), LayerName("b")),
)
ANNA = Owner(tenant="anna", scope="anna", model="m")
NUM_SLOTS = 64
SECRET = "5a" * 32
WAIT_S = 20.0
"""That a lease may wait for what lies elsewhere: a machine that runs tests may be slow."""


def pool_config(url: str, **settings: object) -> PoolConfig:
    base = PoolConfig(
        memory_bytes=LAYOUT.page_bytes * NUM_SLOTS,
        directory="redis",
        redis_url=url,
        redis_timeout_s=5.0,
        fetch_timeout_s=WAIT_S,
        replicate_reads=0.0,
    )
    return replace(base, **settings)  # type: ignore[arg-type]


def identity(name: str, incarnation: int = 1) -> WorkerIdentity:
    return WorkerIdentity(worker_id=WorkerId(name), incarnation=Incarnation(incarnation))


def keys(*numbers: int) -> list[BlockKey]:
    return [BlockKey(number.to_bytes(16, "little")) for number in numbers]


@dataclass
class Node:
    """A node, and the one worker of its host."""

    name: str
    folder: Path
    pool: PoolConfig
    layout: KvLayout = LAYOUT
    secret: str = SECRET
    peer_address: str = ""
    transfer: TransferConfig = TransferConfig()  # noqa: RUF009  # frozen
    allowances: AllowanceSource | None = None

    @property
    def address(self) -> str:
        return f"unix:{self.folder}/{self.name}.sock"

    @property
    def bound(self) -> str:
        return self.peer_address or f"unix:{self.folder}/{self.name}-peers.sock"

    @contextlib.asynccontextmanager
    async def started(self) -> AsyncIterator["Worker"]:
        """As a task of the test."""
        stop, ready = asyncio.Event(), asyncio.Event()
        running = asyncio.create_task(
            run(
                BatonConfig(
                    pool=self.pool,
                    transfer=self.transfer,
                    cluster=ClusterConfig(secret=self.secret),
                ),
                identity=identity(self.name),
                address=self.address,
                peer_address=self.bound,
                region_path=f"{self.folder}/{self.name}.kv",
                peer_region_path=f"{self.folder}/{self.name}-peers.kv",
                allowances=self.allowances,
                registry=CollectorRegistry(),
                refused=no_refusals(),
                ready=ready.set,
                stop=stop,
            )
        )
        await asyncio.wait(
            {running, asyncio.ensure_future(ready.wait())}, return_when="FIRST_COMPLETED"
        )
        try:
            async with self.attached() as worker:
                yield worker
        finally:
            stop.set()
            await running

    @contextlib.asynccontextmanager
    async def process(self, *, stall_at: str = "") -> AsyncIterator[Process]:
        """As a process of its own; killed at the end, if it lives then."""
        said = {
            "folder": str(self.folder),
            "name": self.name,
            "incarnation": 1,
            "pool": asdict(self.pool),
            "secret": self.secret,
            "backends": self.transfer.backends,
            "peer_address": self.bound,
            "stall_at": stall_at,
        }
        config = self.folder / f"{self.name}.json"
        config.write_text(json.dumps(said))
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.kvpool.node.node_process", str(config)), stdout=PIPE
        )
        assert process.stdout is not None
        try:
            assert await soon(process.stdout.readline(), 60) == b"ready\n"
            yield process
        finally:
            if process.returncode is None:
                process.kill()
            await soon(process.communicate())

    @contextlib.asynccontextmanager
    async def attached(self) -> AsyncIterator["Worker"]:
        worker = Worker(self)
        await worker.client.start()
        try:
            await worker.mapped()
            yield worker
        finally:
            await worker.client.close()


class Worker:
    """Of one node's host."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.slabs: asyncio.Queue[list[Pages] | None] = asyncio.Queue()
        self.client = GrpcPoolClient(
            node.address, identity(f"worker-of-{node.name}"), node.layout, self.slabs.put_nowait
        )

    async def mapped(self) -> list[Pages]:
        async with asyncio.timeout(30):
            while (slab := await self.slabs.get()) is None:
                continue
        return slab

    @property
    def slab(self) -> list[Pages]:
        slab = self.client.slab()
        assert slab is not None
        return slab

    async def put(self, *numbers: int, owner: Owner = ANNA) -> int:
        """Puts blocks whose bytes are their number, layer by layer one more."""
        grant = await self.client.reserve(keys(*numbers), owner, 0)
        assert isinstance(grant, PutGrant)
        sums = []
        for item in grant.items:
            for index, layer in enumerate(self.slab):
                layer[item.slot] = item.key[0] + index
            sums.append(self.checksums(item.slot))
        return await self.client.commit(grant.put_id, sums)

    async def lease(self, *numbers: int, wait_s: float = WAIT_S, tenant: str = "") -> BlockLease:
        """Leases blocks, and shows that they have the bytes that they were put with."""
        lease = await self.client.lease(keys(*numbers), 30.0, wait_s)
        for held in lease.blocks:
            assert self.checksums(held.slot) == held.checksums
            assert set(self.slab[1][held.slot].tolist()) == {held.key[0] + 1}
        return lease

    async def has(self, *numbers: int, wait_s: float = WAIT_S) -> int:
        """How many leading blocks can be read; gives them back."""
        lease = await self.lease(*numbers, wait_s=wait_s)
        if lease.lease_id:
            await self.client.release([lease.lease_id])
        return len(lease.blocks)

    async def usage(self) -> pb.PoolUsageReply:
        async with open_channel(self.node.address) as channel:
            return await pool_pb2_grpc.PoolStub(channel).Usage(pb.PoolUsageRequest())

    async def found(self, *numbers: int) -> None:
        """Until the directory knows that the node holds these."""
        async with self.directory() as directory:

            async def known() -> bool:
                found = await directory.lookup(keys(*numbers))
                names = [{r.node.worker_id for r in replicas} for replicas in found]
                return len(names) == len(numbers) and all(self.node.name in one for one in names)

            await until(known)

    async def registered(self) -> None:
        """Until the directory knows that the node lives and has room."""
        async with self.directory() as directory:

            async def known() -> bool:
                states = await directory.nodes()
                room = {state.node.worker_id for state in states if state.free_bytes}
                return self.node.name in room

            await until(known)

    @contextlib.asynccontextmanager
    async def directory(self) -> AsyncIterator[RedisDirectory]:
        redis = open_redis(self.node.pool.redis_url, timeout_s=5.0)
        try:
            yield RedisDirectory(
                redis,
                prefix=self.node.pool.redis_prefix,
                secret=bytes.fromhex(self.node.secret),
                refused=no_refusals(),
            )
        finally:
            await redis.aclose()

    def checksums(self, slot: int) -> bytes:
        sums = [
            xxhash.xxh3_64_intdigest(np.ascontiguousarray(layer[slot]).data) for layer in self.slab
        ]
        return np.array(sums, dtype="<u8").tobytes()


async def until(holds: "Callable[[], asyncio.Future[bool]] | Callable[[], object]") -> None:
    """Asks again until it holds; another process has to do something, and tells nobody."""
    async with asyncio.timeout(60):
        while True:
            answer = holds()
            if await answer if asyncio.iscoroutine(answer) else answer:
                return
            await asyncio.sleep(0.02)
