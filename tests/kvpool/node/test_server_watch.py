"""Routers that watch a node over gRPC: what they are told, in order, and when they start over."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.blocks import BlockChanges, split
from baton.ids import BlockKey
from baton.rpc.channel import open_channel
from baton.rpc.hello import identity_from_proto
from baton.rpc.v1 import pool_pb2 as pb
from baton.rpc.v1 import pool_pb2_grpc
from kvpool.node.server import WatchStreams
from tests.kvpool.test_service import ANNA, Node, Worker, identity, keys, node  # noqa: F401
from tests.waits import soon


class Watcher:
    """A router's side of one stream; `held` is what it has been told."""

    def __init__(self, address: str) -> None:
        self._channel = open_channel(address)
        self._call = pool_pb2_grpc.PoolStub(self._channel).Watch(pb.WatchPoolRequest())
        self.held: set[BlockKey] = set()
        self.numbers: list[int] = []

    async def next(self) -> pb.PoolFrame:
        async with asyncio.timeout(30):
            frame: pb.PoolFrame = await anext(aiter(self._call))
        note(self.held, frame)
        if frame.HasField("blocks"):
            self.numbers.append(frame.blocks.seq)
        return frame

    async def until(self, *numbers: int) -> None:
        """Listens until it believes that exactly these blocks are held."""
        while self.held != set(keys(*numbers)):
            await self.next()

    async def close(self) -> None:
        self._call.cancel()
        await self._channel.close(None)


def note(held: set[BlockKey], frame: pb.PoolFrame) -> None:
    if frame.blocks.first:
        held.clear()
    held -= set(split(frame.blocks.removed))
    held |= set(split(frame.blocks.stored))


@pytest.fixture
async def watcher(node: Node) -> AsyncIterator[Watcher]:  # noqa: F811
    watcher = Watcher(node.address)
    yield watcher
    await watcher.close()


@pytest.fixture
async def worker(node: Node) -> AsyncIterator[Worker]:  # noqa: F811
    worker = Worker(node.address, "p0")
    await worker.client.start()
    await worker.attached()
    yield worker
    await worker.client.close()


async def test_a_router_is_greeted_by_this_start_of_the_node(watcher):
    frame = await watcher.next()
    assert identity_from_proto(frame.hello.node) == identity("pool-0", 1)


async def test_a_node_without_blocks_says_so_and_then_that_it_lives(watcher):
    await watcher.next()
    empty = await watcher.next()
    assert empty.blocks.first
    assert empty.blocks.last
    assert not (await watcher.next()).HasField("blocks")


async def test_what_is_committed_and_flushed_is_told(watcher, worker, node):  # noqa: F811
    await worker.put(1, 2, 3)
    await watcher.until(1, 2, 3)
    async with open_channel(node.address) as channel:
        await pool_pb2_grpc.PoolStub(channel).Flush(pb.FlushPoolRequest(tenant=ANNA.tenant))
    await watcher.until()


async def test_a_router_that_comes_late_begins_with_all_there_is(worker, node):  # noqa: F811
    await worker.put(1, 2, 3)
    early, late = Watcher(node.address), Watcher(node.address)
    try:
        await early.until(1, 2, 3)
        await late.until(1, 2, 3)
    finally:
        await early.close()
        await late.close()


async def test_reports_are_numbered_from_one(watcher, worker):
    for number in (1, 2, 3):
        await worker.put(number)
        await watcher.until(*range(1, number + 1))
    assert watcher.numbers == list(range(1, len(watcher.numbers) + 1))


class Written:
    """A stream's context that keeps what is written, one frame at a time."""

    def __init__(self) -> None:
        self.frames: asyncio.Queue[pb.PoolFrame] = asyncio.Queue(maxsize=1)

    async def write(self, frame: pb.PoolFrame) -> None:
        await self.frames.put(frame)


key_sets = st.lists(st.sets(st.integers(1, 40), max_size=12), max_size=12)


@settings(max_examples=40, deadline=None)
@given(key_sets, st.integers(1, 10))
def test_however_slow_a_router_is_it_ends_up_knowing_what_is_held(states, max_waiting):
    """Each state is a set of blocks; a slow router reads only now and then, so changes pile up and become snapshots."""

    async def play() -> None:
        watchers = WatchStreams(identity("pool-0"), heartbeat_s=0.001, max_waiting=max_waiting)
        stream, held, before = Written(), set[BlockKey](), set[BlockKey]()
        serving = asyncio.create_task(watchers.serve(stream))  # type: ignore[arg-type]
        try:
            for number, state in enumerate(states):
                after = set(keys(*state))
                removed, stored = tuple(before - after), tuple(after - before)
                watchers.changed(BlockChanges(stored=stored, removed=removed))
                before = after
                if number % 3 == 0:
                    note(held, await soon(stream.frames.get()))
            async with asyncio.timeout(20):
                idle = 0
                while idle < 3:  # frames with nothing in them come only when all is told
                    frame = await stream.frames.get()
                    note(held, frame)
                    idle = 0 if frame.HasField("blocks") or frame.HasField("hello") else idle + 1
            assert held == before
        finally:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
        assert len(watchers) == 0

    asyncio.run(play())
