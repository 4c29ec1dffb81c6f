"""The pool on the operators' surface, with nodes behind loopback gRPC that note what they are asked."""

import contextlib
from collections.abc import AsyncIterator

import httpx
import pytest

from baton.clock import ManualClock
from baton.rpc.channel import bind, new_server
from baton.rpc.v1 import common_pb2, pool_pb2_grpc
from baton.rpc.v1 import pool_pb2 as pb
from router.admin.app import create_admin_app
from router.admin.pool_client import PoolAdminClient
from router.tenancy import tenancy_of_keys

OPERATOR = {"Authorization": "Bearer operator"}
USAGE = pb.PoolUsageReply(
    node=common_pb2.WorkerIdentity(worker_id="pool-0", incarnation=1),
    slots_total=8,
    slots_free=6,
    slot_bytes=1024,
    owners=[pb.OwnerUsage(tenant="acme", blocks=2, quota_bytes=4096, weight=2.0, hit_blocks=3)],
)


class FakeNode(pool_pb2_grpc.PoolServicer):
    def __init__(self) -> None:
        self.flushes: list[pb.FlushPoolRequest] = []

    async def Usage(self, request, context) -> pb.PoolUsageReply:  # noqa: N802
        return USAGE

    async def Story(self, request, context) -> common_pb2.StoryReply:  # noqa: N802
        if request.key != bytes(16):
            return common_pb2.StoryReply()
        told = common_pb2.StoryEntry(at_s=2.5, event="evicted", process="pool-0", core="pool")
        return common_pb2.StoryReply(entries=[told], now_s=3.0)

    async def Flush(self, request, context) -> pb.FlushPoolReply:  # noqa: N802
        self.flushes.append(request)
        return pb.FlushPoolReply(blocks=2)


@contextlib.asynccontextmanager
async def nodes(folder, count: int) -> AsyncIterator[tuple[list[FakeNode], list[str]]]:
    fakes, addresses, servers = [], [], []
    for number in range(count):
        fake, server = FakeNode(), new_server()  # type: ignore[abstract]  # operators ask no more
        pool_pb2_grpc.add_PoolServicer_to_server(fake, server)
        addresses.append(bind(server, f"unix:{folder}/{number}.sock"))
        await server.start()
        fakes.append(fake)
        servers.append(server)
    yield fakes, addresses
    for server in servers:
        await server.stop(None)


@contextlib.asynccontextmanager
async def operator(addresses: list[str]) -> AsyncIterator[httpx.AsyncClient]:
    app = create_admin_app(
        tenancy_of_keys((), ManualClock()), ("operator",), PoolAdminClient(lambda: addresses)
    )
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    async with httpx.AsyncClient(
        transport=transport, base_url="http://admin", headers=OPERATOR
    ) as client:
        yield client


async def test_a_flush_reaches_every_node_and_says_what_each_gave_up(tmp_path):
    async with nodes(tmp_path, 2) as (fakes, addresses), operator(addresses) as client:
        reply = await client.post("/admin/pool/flush", json={"tenant": "acme"})
        assert reply.status_code == 200
        assert reply.json()["blocks"] == 4
        assert [node["blocks"] for node in reply.json()["nodes"]] == [2, 2]
        assert [fake.flushes[0].tenant for fake in fakes] == ["acme", "acme"]
        reply = await client.post("/admin/pool/flush", json={"all": True})
        assert reply.json()["blocks"] == 4
        assert fakes[0].flushes[1] == pb.FlushPoolRequest()


@pytest.mark.parametrize("order", [{}, {"all": False}, {"all": True, "tenant": "acme"}])
async def test_everything_is_flushed_only_if_that_is_said_and_nothing_else(order, tmp_path):
    async with nodes(tmp_path, 1) as (fakes, addresses), operator(addresses) as client:
        reply = await client.post("/admin/pool/flush", json=order)
        assert reply.status_code == 400
        assert reply.json()["error"]["param"] == "all"
        assert fakes[0].flushes == []


async def test_an_unknown_field_flushes_nothing(tmp_path):
    async with nodes(tmp_path, 1) as (fakes, addresses), operator(addresses) as client:
        reply = await client.post("/admin/pool/flush", json={"tenent": "acme"})
        assert reply.status_code in (400, 422)
        assert fakes[0].flushes == []


async def test_a_node_that_is_away_is_named_and_the_others_are_flushed(tmp_path):
    away = f"unix:{tmp_path}/nobody.sock"
    async with nodes(tmp_path, 1) as (_, addresses), operator([*addresses, away]) as client:
        reply = await client.post("/admin/pool/flush", json={"all": True})
        assert reply.status_code == 200
        here, gone = reply.json()["nodes"]
        assert (here["blocks"], here["error"], gone["blocks"]) == (2, None, None)
        assert "UNAVAILABLE" in gone["error"]
        shown = (await client.get("/admin/pool")).json()
        assert (shown[0]["node"], shown[1]["node"]) == ("pool-0", None)


async def test_with_no_node_there_the_flush_is_an_error(tmp_path):
    async with operator([f"unix:{tmp_path}/nobody.sock"]) as client:
        assert (await client.post("/admin/pool/flush", json={"all": True})).status_code == 503


async def test_usage_shows_tenants_with_their_quotas(tmp_path):
    async with nodes(tmp_path, 1) as (_, addresses), operator(addresses) as client:
        (node,) = (await client.get("/admin/pool")).json()
        assert (node["dram_bytes"], node["dram_capacity_bytes"]) == (2048, 8192)
        (acme,) = node["tenants"]
        assert (acme["tenant"], acme["quota_bytes"], acme["weight"]) == ("acme", 4096, 2.0)


async def test_without_a_pool_there_is_nothing_to_ask(tmp_path):
    async with operator([]) as client:
        assert (await client.get("/admin/pool")).status_code == 404
        assert (await client.post("/admin/pool/flush", json={"all": True})).status_code == 404


async def test_the_story_of_a_block_is_told_by_each_node_that_knows_it(tmp_path):
    async with nodes(tmp_path, 2) as (_, addresses), operator(addresses) as client:
        told = (await client.get(f"/debug/block/{bytes(16).hex()}")).json()
        assert [node["address"] for node in told] == addresses
        assert told[0]["error"] is None
        assert told[0]["entries"] == [
            {"process": "pool-0", "core": "pool", "at_s": 2.5, "event": "evicted", "actions": []}
        ]
        unknown = await client.get(f"/debug/block/{'11' * 16}")
        assert unknown.status_code == 404
        malformed = await client.get("/debug/block/xyz")
        assert malformed.status_code == 400
        assert "32 hexadecimal digits" in malformed.json()["error"]["message"]
