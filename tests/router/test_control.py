"""A router's control service, asked for other numbers of workers."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import pytest

from baton.clock import ManualClock
from baton.errors import InvalidRequestError, UnavailableError
from baton.generation import WorkerLoad
from baton.ids import Role
from baton.rpc.channel import bind, new_server, open_channel
from baton.rpc.hello import role_to_proto
from baton.rpc.v1 import control_pb2 as pb
from baton.rpc.v1 import control_pb2_grpc
from router.admin.stories import OperatorStories
from router.control import RouterControl
from router.routing.explanation import DecisionLog
from router.routing.index import PrefixIndex
from router.routing.view import ClusterView
from router.workers.links import WorkerLinks
from tests.router.known_workers import hello
from tests.waits import soon

if TYPE_CHECKING:
    from baton.rpc.v1.control_pb2_grpc import ControlAsyncStub  # exists for type checkers only


class Launcher:
    """Has one prefill and two decode workers."""

    def __init__(self, error: InvalidRequestError | UnavailableError | None = None) -> None:
        self.error = error
        self.asked: list[tuple[dict[str, int], str]] = []

    def pools(self) -> Mapping[str, int]:
        return {"prefill": 1, "decode": 2, "hybrid": 0}

    def follow(self, told):
        raise NotImplementedError

    async def scale(self, pools, *, by):
        self.asked.append((dict(pools), by))
        if self.error is not None:
            raise self.error
        return {**self.pools(), **pools}


@asynccontextmanager
async def asked(
    folder: Path, launcher: Launcher | None, roles: Mapping[str, Role]
) -> AsyncIterator["ControlAsyncStub"]:
    """The control service of a router that is connected to workers of these names and roles."""
    clock, view = ManualClock(), ClusterView(PrefixIndex(max_blocks=100))
    for name, role in roles.items():
        view.join(hello(name, role, transfer_address=f"unix:/{name}"), f"unix:{name}", 0.0)
    for worker in view.workers:
        worker.report(WorkerLoad(), clock.now_s())
    control = RouterControl(
        view=view,
        links=WorkerLinks([], lambda _: None),
        in_flight=lambda: 0,
        stories=OperatorStories(lambda _: (), view, clock),
        decisions=DecisionLog("least_time"),
        clock=clock,
        version="",
        model="",
        counts=launcher,
    )
    address, server = f"unix:{folder}/router", new_server()
    control_pb2_grpc.add_ControlServicer_to_server(control, server)
    bind(server, address)
    await server.start()
    async with open_channel(address) as channel:
        yield control_pb2_grpc.ControlStub(channel)
    await server.stop(None)


AS_STARTED = {"prefill-0": Role.PREFILL, "decode-0": Role.DECODE, "decode-1": Role.DECODE}


async def test_the_launcher_is_asked_and_both_numbers_are_told(tmp_path):
    launcher = Launcher()
    async with asked(tmp_path, launcher, AS_STARTED) as stub:
        reply = await stub.Scale(pb.ScaleRequest(pools={"decode": 5}, by="kim"))
    assert dict(reply.before) == {"prefill": 1, "decode": 2, "hybrid": 0}
    assert dict(reply.now) == {"prefill": 1, "decode": 5, "hybrid": 0}
    ((pools, by),) = launcher.asked
    assert pools == {"decode": 5}
    assert "kim" in by


async def test_what_a_caller_says_of_itself_reaches_the_launcher_in_short(tmp_path):
    launcher = Launcher()
    async with asked(tmp_path, launcher, AS_STARTED) as stub:
        await stub.Scale(pb.ScaleRequest(pools={"decode": 5}, by='"' * 40_000))
    ((_, by),) = launcher.asked
    assert len(by) <= 200


async def refusal(stub: "ControlAsyncStub", **pools: int) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await stub.Scale(pb.ScaleRequest(pools=pools))
    return refused.value.code(), refused.value.details() or ""


async def test_a_drain_that_names_no_worker_is_refused_with_those_that_are_there(tmp_path):
    async with asked(tmp_path, None, AS_STARTED) as stub:
        with pytest.raises(grpc.aio.AioRpcError, match="there are decode-0, decode-1, prefill-0"):
            await stub.Drain(pb.DrainRequest())


class SlowWorkers(control_pb2_grpc.ControlServicer):
    """Workers that are told to drain, or to take another role, and have not reported it yet."""

    def __init__(self) -> None:
        self.told, self.done = asyncio.Event(), asyncio.Event()

    async def Drain(self, request: pb.DrainRequest, context: object) -> pb.DrainReply:  # noqa: N802
        self.told.set()
        await self.done.wait()
        return pb.DrainReply()

    async def SetRole(self, request: pb.SetRoleRequest, context: object) -> pb.SetRoleReply:  # noqa: N802
        self.told.set()
        await self.done.wait()
        return pb.SetRoleReply(changed=True)


@pytest.mark.parametrize("first", ["Drain", "SetRole"])
async def test_of_two_commands_at_once_the_one_that_would_take_the_last_worker_is_refused(
    tmp_path, monkeypatch, first
):
    monkeypatch.chdir(tmp_path)
    workers, server = SlowWorkers(), new_server()  # type: ignore[abstract]  # what is asked here
    control_pb2_grpc.add_ControlServicer_to_server(workers, server)
    for name in AS_STARTED:
        bind(server, f"unix:{name}")
    await server.start()
    prefill = role_to_proto(Role.PREFILL)
    async with asked(tmp_path, None, AS_STARTED) as stub:
        begun = asyncio.ensure_future(
            stub.Drain(pb.DrainRequest(worker="decode-0"))
            if first == "Drain"
            else stub.SetRole(pb.SetRoleRequest(worker="decode-0", role=prefill))
        )
        await soon(workers.told.wait())
        with pytest.raises(grpc.aio.AioRpcError, match="no worker would be left that decodes"):
            await soon(stub.Drain(pb.DrainRequest(worker="decode-1")))
        with pytest.raises(grpc.aio.AioRpcError, match="none would be left that decodes"):
            await soon(stub.SetRole(pb.SetRoleRequest(worker="decode-1", role=prefill)))
        workers.done.set()
        await soon(begun)
        assert await soon(stub.Drain(pb.DrainRequest(worker="decode-1"))) == pb.DrainReply()
    await server.stop(None)


async def test_a_router_that_no_launcher_started_says_what_to_use_instead(tmp_path):
    async with asked(tmp_path, None, AS_STARTED) as stub:
        code, why = await refusal(stub, decode=5)
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert "kubectl scale statefulset/decode --replicas 5" in why
    assert "baton run" in why


async def test_the_last_worker_that_decodes_stays_although_its_pool_would_keep_one(tmp_path):
    launcher = Launcher()
    roles = {"prefill-0": Role.PREFILL, "decode-0": Role.PREFILL, "decode-1": Role.DECODE}
    async with asked(tmp_path, launcher, roles) as stub:
        code, why = await refusal(stub, decode=1)
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert "without decode-1 no worker would be left that decodes" in why
    assert launcher.asked == []


async def test_workers_that_are_started_by_the_same_command_may_take_their_place(tmp_path):
    launcher = Launcher()
    async with asked(tmp_path, launcher, AS_STARTED) as stub:
        pools = {"prefill": 0, "decode": 0, "hybrid": 2}
        reply = await stub.Scale(pb.ScaleRequest(pools=pools))
    assert dict(reply.now) == pools


async def test_an_empty_pool_is_for_the_launcher_to_refuse(tmp_path):
    launcher = Launcher(InvalidRequestError("decode=0: no worker would be left that decodes"))
    async with asked(tmp_path, launcher, AS_STARTED) as stub:
        assert (await refusal(stub, decode=0))[1].startswith("decode=0: no worker")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InvalidRequestError("cluster.max_workers is 8"), grpc.StatusCode.FAILED_PRECONDITION),
        (UnavailableError("the launcher does not answer"), grpc.StatusCode.UNAVAILABLE),
    ],
)
async def test_what_the_launcher_says_is_passed_on(tmp_path, error, code):
    async with asked(tmp_path, Launcher(error), AS_STARTED) as stub:
        assert await refusal(stub, decode=9) == (code, error.message)
