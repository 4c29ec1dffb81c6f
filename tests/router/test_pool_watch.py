"""A router's watch of a pool node over loopback gRPC: whatever the node does, the index knows what it holds,
or nothing.
"""

import asyncio
from collections.abc import AsyncIterator, Callable

import grpc
import pytest

from baton.backoff import Backoff
from baton.blocks import BlockReport, joined
from baton.generation import WorkerLoad
from baton.ids import BlockKey, Incarnation, Role, WorkerId, WorkerIdentity
from baton.rpc.channel import bind, new_server
from baton.rpc.hello import PROTOCOL_VERSION, identity_to_proto
from baton.rpc.reports import blocks_to_proto
from baton.rpc.v1 import pool_pb2 as pb
from baton.rpc.v1 import pool_pb2_grpc
from router.discovery.ports import Sighting
from router.pool_watch import PoolWatch, WatchTiming, watching
from router.routing.index import PrefixIndex
from router.routing.table import fingerprints_of
from router.routing.view import ClusterView
from tests.router.known_workers import hello

KEYS = [BlockKey(bytes([number]) * 16) for number in range(1, 6)]
CHAIN = fingerprints_of(joined(KEYS))
TIMING = WatchTiming(backoff=Backoff(first_s=0.01, max_s=0.05), silence_s=30.0)


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not holds():  # noqa: ASYNC110  # what it waits for happens in another task, over a socket
            await asyncio.sleep(0.005)


class FakeNode(pool_pb2_grpc.PoolServicer):
    """Says what the test has it say, on every stream from the beginning."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.incarnation = 1
        self.version = PROTOCOL_VERSION
        self.reports: list[BlockReport] = []
        self.streams = 0
        self._more = asyncio.Event()
        self._server: grpc.aio.Server | None = None

    async def start(self) -> None:
        self._server = new_server()
        pool_pb2_grpc.add_PoolServicer_to_server(self, self._server)
        bind(self._server, self.address)
        await self._server.start()

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(None)

    def say(self, **fields) -> None:
        self.reports.append(BlockReport(**fields))
        self._more.set()

    def begin(self, *keys: BlockKey) -> None:
        """What streams begin with from now on."""
        self.reports = [
            BlockReport(seq=1, stored=joined(keys), snapshot=True, first=True, last=True)
        ]

    async def Watch(self, request, context) -> None:  # type: ignore[override]  # noqa: N802
        self.streams += 1
        node = WorkerIdentity(
            worker_id=WorkerId("pool-0"), incarnation=Incarnation(self.incarnation)
        )
        greeting = pb.PoolHello(protocol_version=self.version, node=identity_to_proto(node))
        await context.write(pb.PoolFrame(hello=greeting))
        told, reports = 0, self.reports  # as it began, whatever later streams begin with
        while True:
            while told < len(reports):
                await context.write(pb.PoolFrame(blocks=blocks_to_proto(reports[told])))
                told += 1
            self._more.clear()
            await self._more.wait()


class World:
    def __init__(self) -> None:
        self.index = PrefixIndex(max_blocks=1000)
        self.view = ClusterView(self.index)
        self.worker = self.view.join(hello("p0", Role.PREFILL), "unix:p0", 0.0)
        self.map(1)

    def map(self, incarnation: int) -> None:
        self.worker.report(WorkerLoad(pool_node="pool-0", pool_incarnation=incarnation), 0.0)
        self.view.pools.attach(self.worker)

    def depth(self) -> int:
        return self.index.held_blocks(CHAIN, 0.0).get(self.worker.pool_slot)

    async def until(self, depth: int) -> None:
        await until(lambda: self.depth() == depth)
        self.view.check_integrity()
        self.index.check_integrity()


@pytest.fixture
async def node(tmp_path) -> AsyncIterator[FakeNode]:
    made = FakeNode(f"unix:{tmp_path}/pool-0.sock")  # type: ignore[abstract]  # only watched
    made.begin(*KEYS[:3])
    await made.start()
    yield made
    await made.stop()


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
async def watch(node: FakeNode, world: World) -> AsyncIterator[PoolWatch]:
    async with watching([node.address], world.view.pools, timing=TIMING) as watches:
        (one,) = watches.watches
        yield one
    assert len(world.view.pools) == 0


async def test_a_nodes_blocks_come_into_the_index_and_its_changes_follow(watch, node, world):
    await world.until(3)
    node.say(seq=2, stored=KEYS[3])
    await world.until(4)
    node.say(seq=3, removed=KEYS[1])
    await world.until(1)
    assert str(watch.node) == "pool-0@1"


async def test_a_gap_is_mended_by_a_snapshot(watch, node, world):
    await world.until(3)
    node.say(seq=7, stored=KEYS[3])
    await until(lambda: node.streams > 1)
    node.begin(*KEYS[:2])
    await world.until(2)
    assert world.index.counts.gaps >= 1


async def test_a_dead_nodes_blocks_leave_at_once_and_come_back_with_the_next_start(
    watch, node, world
):
    await world.until(3)
    await node.stop()
    await world.until(0)
    node.incarnation = 2
    node.begin(*KEYS[:2])
    await node.start()
    world.map(2)
    await world.until(2)
    assert str(watch.node) == "pool-0@2"


async def test_what_a_restarted_node_holds_is_of_no_use_to_a_worker_that_maps_the_old_one(
    watch, node, world
):
    await world.until(3)
    await node.stop()
    node.incarnation = 2
    await node.start()
    await until(lambda: watch.node is not None and watch.node.incarnation == 2)
    assert world.depth() == 0


async def test_a_node_that_says_nothing_any_more_holds_nothing(node, world):
    timing = WatchTiming(backoff=Backoff(first_s=30.0, max_s=30.0), silence_s=0.5)
    async with watching([node.address], world.view.pools, timing=timing):
        await world.until(3)
        await world.until(0)


async def test_a_node_of_another_version_is_not_used(node, world):
    node.version = PROTOCOL_VERSION + 1
    async with watching([node.address], world.view.pools, timing=TIMING) as watches:
        (one,) = watches.watches
        await until(lambda: node.streams > 1)
        assert one.node is None
        assert world.depth() == 0


async def test_a_node_that_discovery_names_is_watched_and_stays_as_long_as_it_answers(node, world):
    async with watching([], world.view.pools, timing=TIMING) as watches:
        assert watches.addresses() == ()
        watches.follow([Sighting(address=node.address, source="test")])
        await world.until(3)
        assert watches.addresses() == (node.address,)
        watches.follow([])
        assert watches.addresses() == (node.address,)
    assert len(world.view.pools) == 0
