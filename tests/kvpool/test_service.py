"""A pool node behind gRPC, its slab mapped by clients, as worker and node meet on one host.
Loopback of Unix sockets only.
"""

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import grpc
import httpx
import numpy as np
import pytest
import xxhash
from prometheus_client import CollectorRegistry

from baton.config.schema import BatonConfig, PoolConfig, TenantsConfig
from baton.errors import ConfigError, PoolUnavailableError
from baton.ids import BlockKey, Incarnation, LayerName, WorkerId, WorkerIdentity
from baton.layout import KvLayout
from baton.rpc.channel import open_channel
from baton.rpc.hello import identity_to_proto, layout_to_proto
from baton.rpc.v1 import common_pb2, pool_pb2_grpc
from baton.rpc.v1 import pool_pb2 as pb
from kv_transfer.memory.pages import Pages
from kv_transfer.memory.proof import ANSWER_BYTES, CHALLENGE_BYTES
from kvpool.client.node_client import GrpcPoolClient
from kvpool.messages import Allowance, Owner, PutGrant, PutRefusalReason, PutRefused
from kvpool.ports import AllowanceSource
from kvpool.service import run
from tests.redis_servers import no_refusals

LAYOUT = KvLayout(
    model_fingerprint="m",
    dtype="float32",
    block_tokens=4,
    num_kv_heads=2,
    head_dim=8,
    layers=(LayerName("a"), LayerName("b")),
)
ANNA = Owner(tenant="anna", scope="anna", model="m")
NUM_SLOTS = 8
POOL = PoolConfig(memory_bytes=LAYOUT.page_bytes * NUM_SLOTS, tenant_bytes=None)


def identity(name: str, incarnation: int = 1) -> WorkerIdentity:
    return WorkerIdentity(worker_id=WorkerId(name), incarnation=Incarnation(incarnation))


def keys(*numbers: int) -> list[BlockKey]:
    return [BlockKey(number.to_bytes(16, "little")) for number in numbers]


class Node:
    """A node's process, as a task of the test."""

    def __init__(
        self, folder: Path, pool: PoolConfig, allowances: AllowanceSource | None = None
    ) -> None:
        self.address = f"unix:{folder}/pool-0.sock"
        self._region_path = str(folder / "pool-0.kv")
        self._pool = pool
        self._allowances = allowances
        self._starts = 0
        self._stop = asyncio.Event()
        self._running: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._starts += 1
        self._stop, ready = asyncio.Event(), asyncio.Event()
        self._running = asyncio.create_task(
            run(
                BatonConfig(pool=self._pool, tenants=TenantsConfig(reload_s=0.01)),
                identity=identity("pool-0", self._starts),
                address=self.address,
                peer_address="",
                region_path=self._region_path,
                peer_region_path="",
                allowances=self._allowances,
                registry=CollectorRegistry(),
                refused=no_refusals(),
                ready=ready.set,
                stop=self._stop,
            )
        )
        waiting = asyncio.ensure_future(ready.wait())
        await asyncio.wait({self._running, waiting}, return_when=asyncio.FIRST_COMPLETED)
        if not ready.is_set():
            waiting.cancel()
            await self._running

    async def stop(self) -> None:
        self._stop.set()
        if self._running is not None:
            await self._running


class Worker:
    """A client that waits for what it is told of slabs."""

    def __init__(self, address: str, name: str, layout: KvLayout = LAYOUT) -> None:
        self.slabs: asyncio.Queue[list[Pages] | None] = asyncio.Queue()
        self.client = GrpcPoolClient(address, identity(name), layout, self.slabs.put_nowait)

    async def attached(self) -> list[Pages]:
        async with asyncio.timeout(30):
            while (slab := await self.slabs.get()) is None:
                continue
        return slab

    async def put(self, *numbers: int, owner: Owner = ANNA) -> int:
        """Puts blocks whose bytes are their number."""
        slab = self.client.slab()
        assert slab is not None
        grant = await self.client.reserve(keys(*numbers), owner, 0)
        assert isinstance(grant, PutGrant)
        sums = []
        for item in grant.items:
            for layer in slab:
                layer[item.slot] = item.key[0]
            sums.append(checksums(slab, item.slot))
        return await self.client.commit(grant.put_id, sums)


def checksums(slab: list[Pages], slot: int) -> bytes:
    sums = [xxhash.xxh3_64_intdigest(np.ascontiguousarray(layer[slot]).data) for layer in slab]
    return np.array(sums, dtype="<u8").tobytes()


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    node = Node(tmp_path, POOL)
    await node.start()
    yield node
    await node.stop()


@contextlib.asynccontextmanager
async def a_worker(node: Node, name: str, layout: KvLayout = LAYOUT) -> AsyncIterator[Worker]:
    worker = Worker(node.address, name, layout)
    await worker.client.start()
    yield worker
    await worker.client.close()


async def usage(node: Node) -> pb.PoolUsageReply:
    async with open_channel(node.address) as channel:
        return await pool_pb2_grpc.PoolStub(channel).Usage(pb.PoolUsageRequest(hottest=5))


async def test_what_one_worker_puts_another_reads_in_the_same_memory(node: Node) -> None:
    async with a_worker(node, "prefill-0") as writer, a_worker(node, "decode-0") as reader:
        await writer.attached()
        slab = await reader.attached()
        assert await writer.put(1, 2, 3) == 3
        lease = await reader.client.lease(keys(1, 2, 3, 4), 30.0, 0.0)
        assert [held.key for held in lease.blocks] == keys(1, 2, 3)
        for held in lease.blocks:
            assert checksums(slab, held.slot) == held.checksums
            assert set(slab[1][held.slot].tolist()) == {held.key[0]}
        await reader.client.release([lease.lease_id])
        said = await usage(node)
        assert (said.hit_blocks, said.missed_blocks, said.leases) == (3, 1, 0)
        assert [(prefix.key, prefix.hits) for prefix in said.hottest] == [(keys(1)[0], 1)]
        assert [(owner.tenant, owner.blocks) for owner in said.owners] == [("anna", 3)]


async def test_the_story_of_a_block_is_told_by_its_key(node: Node) -> None:
    async def story(key: bytes) -> common_pb2.StoryReply:
        async with open_channel(node.address) as channel:
            return await pool_pb2_grpc.PoolStub(channel).Story(pb.BlockStoryRequest(key=key))

    (put,) = keys(1)
    assert not (await story(put)).entries
    async with a_worker(node, "prefill-0") as writer:
        await writer.attached()
        await writer.put(1)
    told = await story(put)
    assert [entry.event.split()[0] for entry in told.entries] == ["reserved", "committed"]
    assert {(entry.process, entry.core) for entry in told.entries} == {("pool-0", "pool")}
    assert told.entries[-1].at_s <= told.now_s
    with pytest.raises(grpc.aio.AioRpcError, match="key: a block's has 16 bytes, not 3") as refused:
        await story(b"abc")
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_block_that_is_held_or_being_put_is_not_granted_again(node: Node) -> None:
    async with a_worker(node, "prefill-0") as worker:
        await worker.attached()
        await worker.put(1)
        open_put = await worker.client.reserve(keys(1, 2), ANNA, 0)
        assert isinstance(open_put, PutGrant)
        assert [item.key for item in open_put.items] == keys(2)
        again = await worker.client.reserve(keys(1, 2), ANNA, 0)
        assert isinstance(again, PutGrant)
        assert again.items == ()


async def test_leased_blocks_stay_and_a_put_finds_the_node_full(node: Node) -> None:
    async with a_worker(node, "prefill-0") as worker:
        await worker.attached()
        numbers = range(1, NUM_SLOTS + 1)
        await worker.put(*numbers)
        lease = await worker.client.lease(keys(*numbers), 30.0, 0.0)
        assert len(lease.blocks) == NUM_SLOTS
        refused = await worker.client.reserve(keys(99), ANNA, 0)
        assert isinstance(refused, PutRefused)
        assert refused.reason is PutRefusalReason.FULL
        assert await worker.client.renew([lease.lease_id, "nobody's"], 30.0) == ("nobody's",)
        await worker.client.release([lease.lease_id])
        assert await worker.put(99) == 1


async def test_the_leases_of_a_worker_end_with_its_process(node: Node) -> None:
    async with a_worker(node, "decode-0") as reader:
        await reader.attached()
        await reader.put(1)
        await reader.client.lease(keys(1), 30.0, 0.0)
        assert (await usage(node)).leases == 1
    async with asyncio.timeout(30):
        while (await usage(node)).leases:  # noqa: ASYNC110  # another process: nothing to wait on
            await asyncio.sleep(0.01)


async def test_a_corrupt_block_is_given_up(node: Node) -> None:
    async with a_worker(node, "decode-0") as worker:
        await worker.attached()
        await worker.put(1, 2)
        await worker.client.corrupt(keys(1))
        assert (await worker.client.lease(keys(1, 2), 30.0, 0.0)).blocks == ()
        assert (await usage(node)).corrupt_blocks == 1


async def test_a_node_whose_memory_alters_blocks_takes_no_new_ones(node: Node) -> None:
    async with a_worker(node, "decode-0") as worker:
        await worker.attached()
        for _ in range(4):
            assert await worker.put(1, 2, 3, 4) == 4
            await worker.client.corrupt(keys(1, 2, 3, 4))
        async with asyncio.timeout(30):
            while not (await usage(node)).sick:  # noqa: ASYNC110  # the node looks several times per second
                await asyncio.sleep(0.01)
        refused = await worker.client.reserve(keys(5), ANNA, 0)
        assert isinstance(refused, PutRefused)
        assert refused.reason is PutRefusalReason.SICK


async def test_a_flush_gives_up_what_it_covers(node: Node) -> None:
    bert = Owner(tenant="bert", scope="bert", model="m")
    async with a_worker(node, "prefill-0") as worker, open_channel(node.address) as channel:
        await worker.attached()
        await worker.put(1, 2)
        await worker.put(3, owner=bert)
        stub = pool_pb2_grpc.PoolStub(channel)
        assert (await stub.Flush(pb.FlushPoolRequest(tenant="anna"))).blocks == 2
        assert (await worker.client.lease(keys(1), 30.0, 0.0)).blocks == ()
        assert len((await worker.client.lease(keys(3), 30.0, 0.0)).blocks) == 1


async def test_a_worker_finds_a_node_that_started_again_and_nothing_old_in_it(node: Node) -> None:
    async with a_worker(node, "prefill-0") as worker:
        await worker.attached()
        await worker.put(1)
        await node.stop()
        async with asyncio.timeout(30):
            assert await worker.slabs.get() is None
        with pytest.raises(PoolUnavailableError):
            await worker.client.lease(keys(1), 30.0, 0.0)
        await node.start()
        await worker.attached()
        assert (await worker.client.lease(keys(1), 30.0, 0.0)).blocks == ()
        assert await worker.put(1) == 1


async def test_a_worker_that_names_an_old_start_of_the_node_is_refused(node: Node) -> None:
    async with a_worker(node, "prefill-0") as worker, open_channel(node.address) as channel:
        await worker.attached()
        request = pb.LeaseBlocksRequest(
            reader=identity_to_proto(identity("prefill-0")),
            node=identity_to_proto(identity("pool-0", 77)),
            keys=keys(1)[0],
        )
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await pool_pb2_grpc.PoolStub(channel).Lease(request)
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert "node" in (caught.value.details() or "")


@pytest.mark.parametrize("packed", [b"short", bytes(16 * 20_000)])
async def test_malformed_keys_are_refused_by_name_and_nothing_else_suffers(
    node: Node, packed: bytes
) -> None:
    async with a_worker(node, "prefill-0") as worker, open_channel(node.address) as channel:
        await worker.attached()
        request = pb.ReservePutRequest(
            writer=identity_to_proto(identity("prefill-0")),
            node=identity_to_proto(identity("pool-0", 1)),
            keys=packed,
        )
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await pool_pb2_grpc.PoolStub(channel).Reserve(request)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "keys" in (caught.value.details() or "")
        assert await worker.put(1) == 1


async def test_a_worker_with_larger_blocks_goes_without_the_pool(node: Node) -> None:
    larger = replace(LAYOUT, head_dim=16)
    async with a_worker(node, "prefill-0") as first:
        await first.attached()  # the first one decides the size of the slots
        async with open_channel(node.address) as channel:
            request = pb.AttachPoolRequest(
                worker=identity_to_proto(identity("other")), layout=layout_to_proto(larger)
            )
            reply = await pool_pb2_grpc.PoolStub(channel).Attach(request)
        assert "block_bytes" in reply.failure.message
        assert await first.put(1) == 1


async def test_without_a_node_every_call_says_so_at_once(tmp_path: Path) -> None:
    client = GrpcPoolClient(
        f"unix:{tmp_path}/nobody.sock", identity("prefill-0"), LAYOUT, lambda _slab: None
    )
    await client.start()
    for call in (
        client.lease(keys(1), 1.0, 0.0),
        client.reserve(keys(1), ANNA, 0),
        client.commit("x", []),
        client.renew([], 1.0),
    ):
        with pytest.raises(PoolUnavailableError):
            await call
    await client.close()


async def test_a_stranger_without_a_token_does_not_get_the_slab(node: Node, tmp_path: Path) -> None:
    async with a_worker(node, "prefill-0") as worker:
        await worker.attached()
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger:
            stranger.connect(str(tmp_path / "pool-0.kv"))
            stranger.sendall(bytes(ANSWER_BYTES))
            heard = [await asyncio.to_thread(socket.recv_fds, stranger, 256, 1) for _ in range(2)]
        assert [(len(answer), fds) for answer, fds, _, _ in heard] == [
            (CHALLENGE_BYTES, []),
            (0, []),
        ]


async def test_what_memory_cannot_hold_goes_to_the_disk_and_comes_back_also_after_a_restart(
    tmp_path: Path,
) -> None:
    (tmp_path / "ssd").mkdir(mode=0o700)
    node = Node(tmp_path, replace(POOL, ssd_dir=str(tmp_path / "ssd"), ssd_bytes=16 << 20))
    await node.start()
    async with a_worker(node, "prefill-0") as worker:
        await worker.attached()
        for number in range(1, 3 * NUM_SLOTS + 1):
            await worker.put(number)
        async with asyncio.timeout(30):
            while not (await usage(node)).demoted_blocks:  # noqa: ASYNC110  # another thread: nothing to wait on
                await asyncio.sleep(0.01)
        await node.stop()
        await node.start()
        slab = await _again(worker)
        kept = (await usage(node)).ssd_blocks
        assert kept
        found = 0
        for number in range(1, 3 * NUM_SLOTS + 1):
            lease = await worker.client.lease(keys(number), 30.0, 1.0)
            for held in lease.blocks:
                assert checksums(slab, held.slot) == held.checksums
                assert set(slab[0][held.slot].tolist()) == {number}
            found += len(lease.blocks)
            await worker.client.release([lease.lease_id])
        assert found == kept
        assert (await usage(node)).promoted_blocks == kept
    await node.stop()


async def test_a_disk_that_cannot_be_opened_leaves_the_memory(tmp_path: Path) -> None:
    (tmp_path / "ssd").write_text("not a directory")
    node = Node(tmp_path, replace(POOL, ssd_dir=str(tmp_path / "ssd" / "x"), ssd_bytes=16 << 20))
    await node.start()
    async with a_worker(node, "prefill-0") as worker:
        await worker.attached()
        assert await worker.put(1) == 1
    await node.stop()


async def _again(worker: Worker) -> list[Pages]:
    """The slab after the node has gone and come."""
    async with asyncio.timeout(30):
        while await worker.slabs.get() is not None:
            continue
    return await worker.attached()


class Said:
    """An operator's word on tenants, which may change."""

    def __init__(self, **max_blocks: int) -> None:
        self.fresh: dict[str, Allowance] | None = None
        self.say(**max_blocks)

    def say(self, **max_blocks: int) -> None:
        self.fresh = {
            tenant: Allowance(max_bytes=count * LAYOUT.page_bytes, weight=2.0)
            for tenant, count in max_blocks.items()
        }

    async def next(self) -> dict[str, Allowance] | None:
        fresh, self.fresh = self.fresh, None
        return fresh


async def test_a_tenants_quota_holds_from_the_first_put_and_changes_while_it_puts(
    tmp_path: Path,
) -> None:
    said = Said(anna=2)
    node = Node(tmp_path, POOL, said)
    await node.start()
    async with a_worker(node, "prefill-0") as worker:
        await worker.attached()
        for number in range(1, 6):
            await worker.put(number)
        (anna,) = (await usage(node)).owners
        assert (anna.blocks, anna.quota_bytes, anna.weight) == (2, 2 * LAYOUT.page_bytes, 2.0)
        said.say(anna=4)
        async with asyncio.timeout(30):
            while (await usage(node)).owners[0].quota_bytes != 4 * LAYOUT.page_bytes:
                continue  # asking takes a while
        for number in range(11, 16):
            await worker.put(number)
        assert (await usage(node)).owners[0].blocks == 4
    await node.stop()


async def test_hits_and_misses_are_counted_for_whom_they_were_asked(node: Node) -> None:
    async with a_worker(node, "prefill-0") as worker:
        await worker.attached()
        await worker.put(1, 2)
        await worker.client.lease(keys(1, 2, 3), 30.0, 0.0, "bert")
        owners = {owner.tenant: owner for owner in (await usage(node)).owners}
        assert (owners["bert"].hit_blocks, owners["bert"].missed_blocks) == (2, 1)
        assert (owners["anna"].hit_blocks, owners["anna"].blocks) == (0, 2)


async def test_a_node_whose_address_cannot_be_bound_says_so_and_leaves_nothing(
    tmp_path: Path,
) -> None:
    node = Node(tmp_path, POOL)
    node.address = f"unix:{tmp_path}/missing/pool.sock"
    with pytest.raises(ConfigError, match="cannot bind"):
        await node.start()


async def test_a_node_answers_prometheus_where_it_is_asked_to(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    node = Node(tmp_path, replace(POOL, metrics_address=f"127.0.0.1:{port}"))
    await node.start()
    async with a_worker(node, "prefill-0") as worker, httpx.AsyncClient() as http:
        await worker.attached()
        await worker.put(1, 2)
        text = ""
        async with asyncio.timeout(30):
            while "baton_pool_stored_blocks_total 2.0" not in text:
                text = (await http.get(f"http://127.0.0.1:{port}/metrics")).text
                await asyncio.sleep(0.01)
        assert f'baton_pool_bytes{{tier="dram"}} {2.0 * LAYOUT.page_bytes}' in text
        assert 'baton_pool_tier_state{tier="dram"} 1.0' in text
        assert 'baton_pool_tier_state{tier="ssd"} 0.0' in text
        assert "anna" not in text
    await node.stop()


async def test_a_slab_whose_socket_cannot_be_bound_is_said_and_leaves_no_memory(
    tmp_path: Path, node: Node
) -> None:
    (tmp_path / "pool-0.kv").mkdir()  # in the way of the socket
    before = open_slabs()
    async with open_channel(node.address) as channel:
        request = pb.AttachPoolRequest(
            worker=identity_to_proto(identity("w")), layout=layout_to_proto(LAYOUT)
        )
        for _ in range(2):
            reply = await pool_pb2_grpc.PoolStub(channel).Attach(request, timeout=30)
            assert str(tmp_path / "pool-0.kv") in reply.failure.message
    assert open_slabs() <= before  # slabs of earlier tests may go meanwhile


def open_slabs() -> set[int]:
    """The memory of each, by its inode."""
    inodes: set[int] = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the listing itself
            if "baton-kv" in os.readlink(f"/proc/self/fd/{fd}"):
                inodes.add(os.stat(f"/proc/self/fd/{fd}").st_ino)
    return inodes
