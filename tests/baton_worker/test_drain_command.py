"""Operators drain workers through a router, and take it back; over real routers' cores and workers."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest

from baton.config.schema import RouterConfig
from baton.ids import Role, WorkerId
from baton.rpc.channel import bind, new_server, open_channel
from baton.rpc.hello import role_to_proto
from baton.rpc.v1 import control_pb2 as pb
from baton.rpc.v1 import control_pb2_grpc
from router.admin.stories import OperatorStories
from router.control import RouterControl
from router.service import RouterParts, compose, running
from tests.baton_worker.test_role_change import CLIENTS, Clients, two
from tests.decode_worker.cluster import SECRET

pytestmark = pytest.mark.timeout(120)


@asynccontextmanager
async def routed(folder: Path, workers: list[str]) -> AsyncIterator[tuple[RouterParts, str]]:
    """A router's core with its Control service."""
    parts = compose(RouterConfig(), workers, SECRET)
    address, server = f"unix:{folder}/router", new_server()
    control = RouterControl(
        view=parts.view,
        links=parts.membership,
        in_flight=parts.generator.in_flight,
        stories=OperatorStories(parts.generator.story, parts.view, parts.clock),
        decisions=parts.decisions,
        clock=parts.clock,
        version="",
        model="",
    )
    control_pb2_grpc.add_ControlServicer_to_server(control, server)
    bind(server, address)
    async with running(parts):
        await server.start()
        while len(parts.view.workers) < len(workers):
            await parts.discovery.next_worker()
        yield parts, address
        await server.stop(None)


async def drained_by(router: str, name: str) -> str:
    """What a router says of the worker, once it has heard that it drains."""
    async with open_channel(router) as channel, asyncio.timeout(20):
        stub = control_pb2_grpc.ControlStub(channel)
        while True:
            for one in (await stub.Status(pb.StatusRequest())).workers:
                if one.identity.worker_id == name and one.state == "draining":
                    return one.drained_by
            await asyncio.sleep(0.01)


async def test_a_drained_worker_says_who_asked_and_takes_work_again_when_told(tmp_path: Path):
    async with (
        two(tmp_path, Role.HYBRID, Role.HYBRID) as both,
        routed(tmp_path, [both.p.address, both.d.address]) as (parts, address),
        open_channel(address) as channel,
    ):
        stub = control_pb2_grpc.ControlStub(channel)
        clients = Clients(parts.generator, both.p)
        await clients.more(CLIENTS)
        reply = await stub.Drain(pb.DrainRequest(worker="w1", by="kim, new disk", timeout_s=30.0))
        assert (reply.drained, reply.left) == (True, 0)
        told = {
            one.identity.worker_id: one for one in (await stub.Status(pb.StatusRequest())).workers
        }
        assert told["w1"].state == "draining"
        assert told["w1"].drained_by == "kim, new disk"
        assert told["w0"].drained_by == ""
        later = tmp_path / "later"
        later.mkdir()
        async with routed(later, [both.p.address, both.d.address]) as (_, other):
            assert await drained_by(other, "w1") == "kim, new disk"
        await clients.more(CLIENTS)
        await stub.Undrain(pb.UndrainRequest(worker="w1"))
        view = parts.view.find(WorkerId("w1"))
        assert view is not None
        async with asyncio.timeout(20):
            while parts.view.state(view, parts.clock.now_s()) != "ready":  # noqa: ASYNC110  # its next report
                await asyncio.sleep(0.01)
        story = await stub.Story(pb.StoryRequest(request_id="w1"))
        assert [one.event for one in story.entries if one.process == "w1"] == [
            "draining, by kim, new disk",
            "takes new work again, by a process of this user",
        ]
        await clients.stop()
        while parts.generator.in_flight():  # noqa: ASYNC110  # the account of the last hand-offs
            await asyncio.sleep(0.01)
        assert [one.drained_by for one in (await stub.Status(pb.StatusRequest())).workers] == [
            "",
            "",
        ]


@pytest.mark.parametrize(("name", "what"), [("w1", "decodes"), ("w0", "prefills for others")])
async def test_the_last_worker_of_its_kind_is_drained_by_force_only(
    tmp_path: Path, name: str, what: str
):
    async with (
        two(tmp_path, Role.PREFILL, Role.DECODE) as both,
        routed(tmp_path, [both.p.address, both.d.address]) as (_, address),
        open_channel(address) as channel,
    ):
        stub = control_pb2_grpc.ControlStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Drain(pb.DrainRequest(worker=name, timeout_s=1.0))
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert f"without {name} no worker would be left that {what}" in str(caught.value.details())
        states = {one.state for one in (await stub.Status(pb.StatusRequest())).workers}
        assert states == {"ready"}
        forced = pb.DrainRequest(worker=name, timeout_s=5.0, force=True)
        assert (await stub.Drain(forced)).drained


@pytest.mark.parametrize(
    ("name", "role", "what"),
    [("w1", Role.PREFILL, "decodes"), ("w0", Role.DECODE, "prefills for others")],
)
async def test_the_last_worker_of_its_kind_takes_another_role_by_force_only(
    tmp_path: Path, name: str, role: Role, what: str
):
    async with (
        two(tmp_path, Role.PREFILL, Role.DECODE) as both,
        routed(tmp_path, [both.p.address, both.d.address]) as (_, address),
        open_channel(address) as channel,
    ):
        stub = control_pb2_grpc.ControlStub(channel)
        asked = pb.SetRoleRequest(worker=name, role=role_to_proto(role), by="kim", timeout_s=5.0)
        with pytest.raises(grpc.aio.AioRpcError, match=f"none would be left that {what}") as caught:
            await stub.SetRole(asked)
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        asked.force = True
        assert (await stub.SetRole(asked)).changed
        story = await stub.Story(pb.StoryRequest(request_id=name))
        assert [one.event for one in story.entries if one.process == name] == [
            f"to be a {role.value} worker, by kim",
            f"a {role.value} worker now, by kim",
        ]


async def test_a_role_that_leaves_one_of_each_kind_is_taken_unforced(tmp_path: Path):
    async with (
        two(tmp_path, Role.HYBRID, Role.DECODE) as both,
        routed(tmp_path, [both.p.address, both.d.address]) as (_, address),
        open_channel(address) as channel,
    ):
        stub = control_pb2_grpc.ControlStub(channel)
        role = role_to_proto(Role.PREFILL)
        assert (
            await stub.SetRole(pb.SetRoleRequest(worker="w0", role=role, timeout_s=5.0))
        ).changed


async def test_an_unknown_worker_is_refused_with_those_that_are_there(tmp_path: Path):
    async with (
        two(tmp_path, Role.PREFILL, Role.DECODE) as both,
        routed(tmp_path, [both.p.address, both.d.address]) as (_, address),
        open_channel(address) as channel,
    ):
        stub = control_pb2_grpc.ControlStub(channel)
        with pytest.raises(grpc.aio.AioRpcError, match="there are w0, w1"):
            await stub.Drain(pb.DrainRequest(worker="w7"))
        with pytest.raises(grpc.aio.AioRpcError, match="there are w0, w1"):
            await stub.Undrain(pb.UndrainRequest(worker="w7"))
        with pytest.raises(grpc.aio.AioRpcError, match="there are w0, w1"):
            await stub.SetRole(pb.SetRoleRequest(worker="w7"))


async def test_a_worker_that_is_about_to_end_is_not_called_back(tmp_path: Path):
    async with two(tmp_path, Role.PREFILL, Role.DECODE) as both:
        await both.d.server.drain(5.0)
        async with open_channel(both.d.address) as channel:
            with pytest.raises(grpc.aio.AioRpcError, match="about to end"):
                await control_pb2_grpc.ControlStub(channel).Undrain(pb.UndrainRequest())
