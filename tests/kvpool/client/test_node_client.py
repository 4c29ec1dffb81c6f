"""The client of a pool node that ends while it owes an answer."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from baton.errors import OutOfMemoryError, PoolUnavailableError
from baton.ids import Incarnation, WorkerId, WorkerIdentity
from baton.rpc.channel import bind, new_server
from baton.rpc.hello import identity_to_proto
from baton.rpc.reports import failure_to_proto
from baton.rpc.v1 import pool_pb2 as pb
from baton.rpc.v1 import pool_pb2_grpc
from baton.telemetry import logs
from kv_transfer.memory.pages import Pages
from kv_transfer.memory.shared_region import SharedRegion, serve_region
from kvpool.client.node_client import GrpcPoolClient
from kvpool.messages import Owner
from tests.kvpool.client.arena_world import TIMEOUT_S, key, layout

NUM_SLOTS = 4
OWNER = Owner(tenant="t", scope="s", model="tiny")


def identity(name: str) -> WorkerIdentity:
    return WorkerIdentity(worker_id=WorkerId(name), incarnation=Incarnation(1))


class SilentNode(pool_pb2_grpc.PoolServicer):
    """Lets workers attach, and answers nothing else."""

    def __init__(self, region_path: str) -> None:
        self._path = region_path
        self._region = SharedRegion.create(NUM_SLOTS * layout().page_bytes)
        self._serving = serve_region(self._region, region_path)
        self.asked = asyncio.Event()

    async def Attach(self, request, context):  # noqa: N802  # gRPC's name
        return pb.AttachPoolReply(
            node=identity_to_proto(identity("node")),
            region_path=self._path,
            region_token=self._serving.issue_token(),
            num_slots=NUM_SLOTS,
            slot_bytes=layout().page_bytes,
        )

    async def Reserve(self, request, context):  # noqa: N802  # gRPC's name
        return await self._silence()

    async def Renew(self, request, context):  # noqa: N802  # gRPC's name
        return await self._silence()

    async def _silence(self):
        self.asked.set()
        await asyncio.Event().wait()

    async def end(self) -> None:
        """As workers see the end of its process: the slab's connection closes."""
        await asyncio.to_thread(self._serving.close)

    def close(self) -> None:
        self._serving.close()
        self._region.close()


@asynccontextmanager
async def attached(tmp_path: Path) -> AsyncIterator[tuple[SilentNode, GrpcPoolClient]]:
    node = SilentNode(str(tmp_path / "slab.sock"))  # type: ignore[abstract]  # nothing else is asked
    slabs: asyncio.Queue[list[Pages] | None] = asyncio.Queue()
    server, address = new_server(), f"unix:{tmp_path}/node.sock"
    pool_pb2_grpc.add_PoolServicer_to_server(node, server)
    bind(server, address)
    await server.start()
    client = GrpcPoolClient(address, identity("prefill-0"), layout(), slabs.put_nowait)
    await client.start()
    try:
        async with asyncio.timeout(TIMEOUT_S):
            while await slabs.get() is None:
                continue
            yield node, client
    finally:
        await client.close()
        await server.stop(0)
        node.close()


@pytest.mark.parametrize(
    "ask",
    [
        pytest.param(lambda client: client.reserve([key(1)], OWNER, 0), id="reserve"),
        pytest.param(lambda client: client.renew(["lease"], 1.0), id="renew"),
    ],
)
async def test_a_node_that_ends_while_it_is_asked_is_unavailable_and_cancels_nobody(
    ask, tmp_path: Path
):
    async with attached(tmp_path) as (node, client):
        asking = asyncio.create_task(ask(client))
        await node.asked.wait()
        await node.end()
        with pytest.raises(PoolUnavailableError, match="went before it answered"):
            await asking
        assert not asking.cancelled()


async def test_whoever_is_cancelled_while_asking_is(tmp_path: Path):
    async with attached(tmp_path) as (node, client):
        asking = asyncio.create_task(client.renew(["lease"], 1.0))
        await node.asked.wait()
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking


class FullNode(pool_pb2_grpc.PoolServicer):
    """Has no memory for its slab, each time a little less of it."""

    def __init__(self) -> None:
        self.asked = 0

    async def Attach(self, request, context):  # noqa: N802  # gRPC's name
        self.asked += 1
        error = OutOfMemoryError(f"{1000 - self.asked} bytes are available", param="memory")
        return pb.AttachPoolReply(failure=failure_to_proto(error))


class DistantNode(FullNode):
    """Its memory is served where this worker has no such path, as in another container."""

    async def Attach(self, request, context):  # noqa: N802  # gRPC's name
        self.asked += 1
        return pb.AttachPoolReply(
            node=identity_to_proto(identity("node")),
            region_path="/nowhere/slab.sock",
            region_token=bytes(32),
            num_slots=NUM_SLOTS,
            slot_bytes=layout().page_bytes,
        )


@pytest.mark.parametrize(
    ("node", "what", "why"),
    [
        (FullNode, "the pool refuses this worker", "bytes are available"),
        (DistantNode, "the pool's memory cannot be mapped", "/nowhere/slab.sock"),
    ],
)
async def test_a_node_that_cannot_be_used_at_any_attempt_is_logged_once(
    node: type[FullNode], what: str, why: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    asked = node()  # nothing else is asked
    server, address = new_server(), f"unix:{tmp_path}/node.sock"
    pool_pb2_grpc.add_PoolServicer_to_server(asked, server)
    bind(server, address)
    await server.start()
    client = GrpcPoolClient(address, identity("prefill-0"), layout(), lambda _slab: None)
    await client.start()
    try:
        async with asyncio.timeout(TIMEOUT_S):
            while asked.asked < 4:  # noqa: ASYNC110  # attempts go on
                await asyncio.sleep(0.01)
    finally:
        await client.close()
        await server.stop(0)
    (said,) = [one for one in caplog.records if one.levelno >= logging.WARNING]
    assert said.getMessage() == what
    assert said.exc_info is None
    assert why in logs.TextFormatter("worker").format(said)
