"""Workers that change their role while routers have requests on them."""

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from prometheus_client import CollectorRegistry

from baton.clock import ManualClock
from baton.config.schema import RouterConfig
from baton.errors import InvalidRequestError
from baton.generation import Prompt
from baton.ids import BlockKey, LegId, RequestId, Role, SeqId, WorkerId
from baton.rpc.channel import open_channel
from baton.rpc.generation import prompt_to_proto
from baton.rpc.hello import hello_from_proto, role_to_proto
from baton.rpc.v1 import control_pb2, control_pb2_grpc, worker_pb2
from baton.story import StoryEntry
from baton_engine.messages import Command
from baton_worker.legs import WorkerLegTable
from baton_worker.metrics import WorkerMetrics
from baton_worker.service import WorkerService
from kv_transfer.ticket import TicketOffice
from router.generator import ClusterGenerator
from router.ports import GenerationRequest, Timing
from router.roles.planning import WorkerControl
from router.service import compose, running
from tests.baton_worker.test_streams import HELLO
from tests.decode_worker.cluster import (
    SECRET,
    Node,
    Pair,
    Router,
    node,
    oracle,
    prompt,
    quiet,
)
from tests.waits import WAIT_S

pytestmark = pytest.mark.timeout(120)
CLIENTS = 4


async def set_role(worker: Node, role: Role, timeout_s: float = 30.0) -> control_pb2.SetRoleReply:
    async with open_channel(worker.address) as channel:
        request = control_pb2.SetRoleRequest(role=role_to_proto(role), timeout_s=timeout_s)
        return await control_pb2_grpc.ControlStub(channel).SetRole(request)


def roles_heard(at: Router) -> list[Role]:
    return [hello_from_proto(frame.hello).role for frame in at.frames if frame.HasField("hello")]


async def is_now(router: Router, role: Role) -> None:
    await router.until(lambda: bool(roles_heard(router)) and roles_heard(router)[-1] is role)


@asynccontextmanager
async def two(folder: Path, first: Role, second: Role):
    """A sending and a receiving worker of these roles with a router's stream to each."""
    async with node(first, folder, name="w0") as p, node(second, folder, name="w1") as d:
        both = Pair(p=p, d=d, to_p=Router(p), to_d=Router(d))
        try:
            yield both
            await both.settle()
        finally:
            await both.close()


class Clients:
    """Requests through a real router core, one after the other for each client, until they are told to stop."""

    def __init__(self, generator: ClusterGenerator, worker: Node) -> None:
        self.answered = 0
        self.timings: list[Timing] = []
        self._generator = generator
        self._runner = worker.runner
        self._enough = False
        self._moved = asyncio.Event()
        self._tasks = [asyncio.create_task(self._ask(number)) for number in range(CLIENTS)]

    async def more(self, answers: int) -> None:
        """Waits for so many more."""
        until = self.answered + answers
        while self.answered < until:
            self._moved.clear()
            moved = asyncio.create_task(self._moved.wait())
            done, _ = await asyncio.wait(
                {moved, *self._tasks}, timeout=30, return_when=asyncio.FIRST_COMPLETED
            )
            assert done, "the clients stand still"
            for task in done - {moved}:
                task.result()

    async def stop(self) -> None:
        self._enough = True
        await asyncio.gather(*self._tasks)

    async def _ask(self, number: int) -> None:
        asked = 0
        while not self._enough:
            asked += 1
            await self._one(f"job-{number}-{asked}", prompt(20 + 9 * number, first=asked))

    async def _one(self, name: str, asked: Prompt) -> None:
        request = GenerationRequest(request_id=RequestId(name), prompt=asked, timeout_s=30.0)
        texts: list[list[int]] = [[] for _ in asked.samples]
        async for event in self._generator.generate(request):
            if isinstance(event, Timing):
                self.timings.append(event)
            else:
                for token in event.samples:
                    texts[token.sample].append(token.token)
        assert texts == oracle(self._runner, asked)
        self.answered += 1
        self._moved.set()


async def test_a_hybrid_worker_becomes_decode_and_hybrid_again_under_requests_and_none_fails(
    tmp_path: Path,
):
    async with two(tmp_path, Role.HYBRID, Role.HYBRID) as both:
        parts = compose(RouterConfig(), [both.p.address, both.d.address], SECRET)
        async with running(parts):
            while len(parts.view.workers) < 2:
                await parts.discovery.next_worker()
            view = parts.view.find(WorkerId("w1"))
            assert view is not None
            clients = Clients(parts.generator, both.p)
            await clients.more(2 * CLIENTS)
            for role in (Role.DECODE, Role.HYBRID, Role.PREFILL, Role.HYBRID):
                reply = await set_role(both.d, role)
                assert (reply.changed, reply.role) == (True, role_to_proto(role))
                await clients.more(3 * CLIENTS)
                assert view.hello.role is role
            assert parts.view.find(WorkerId("w1")) is view, "the same incarnation"
            await clients.stop()
            async with asyncio.timeout(WAIT_S):
                while parts.generator.in_flight():  # noqa: ASYNC110  # P's account of the last hand-offs
                    await asyncio.sleep(0.01)
            parts.generator.check_integrity()
        assert roles_heard(both.to_d)[0] is Role.HYBRID
        assert roles_heard(both.to_d)[-1] is Role.HYBRID


async def test_while_it_decodes_only_no_prompt_is_computed_there_for_another(tmp_path: Path):
    async with two(tmp_path, Role.HYBRID, Role.HYBRID) as both:
        assert (await set_role(both.p, Role.DECODE)).changed
        await both.ask(1, prompt(20))
        assert await both.failed(both.to_p, 1) == "wrong_role"
        await both.cancel(1)
        assert (await set_role(both.p, Role.HYBRID)).changed
        asked = prompt(20)
        await both.ask(2, asked)
        assert await both.finished(2, 1) == oracle(both.p.runner, asked)


async def test_the_prefix_cache_outlives_a_change_of_role(tmp_path: Path):
    async with two(tmp_path, Role.HYBRID, Role.HYBRID) as both:
        asked = prompt(41)
        await both.generate(1, asked)
        await both.to_d.until(lambda: bool(both.to_d.leg(1).finished))
        for role in (Role.DECODE, Role.PREFILL, Role.HYBRID):
            assert (await set_role(both.d, role)).changed
        await both.generate(2, asked)
        await both.to_d.until(lambda: bool(both.to_d.leg(2).finished))
        again = both.to_d.leg(2).prefilled
        assert again is not None
        assert again.cached_tokens == 40


def whole(leg_id: int, asked: Prompt) -> worker_pb2.Command:
    leg = prompt_to_proto(LegId(leg_id), RequestId("r"), asked)
    return worker_pb2.Command(generate=worker_pb2.Generate(request=leg))


async def test_a_prefill_worker_takes_only_whole_generations_until_it_has_handed_over_and_decodes_then(
    tmp_path: Path,
):
    async with two(tmp_path, Role.PREFILL, Role.DECODE) as both:
        first, second = prompt(40), prompt(40, first=200)
        xfer_id = await both.ask(1, first, expect=False)
        await both.to_p.until(lambda: bool(both.to_p.leg(1).first))
        change = asyncio.create_task(set_role(both.p, Role.DECODE))
        await both.to_p.until(lambda: both.to_p.load is not None and both.to_p.load.draining)
        await both.ask(2, second, expect=False)
        assert await both.failed(both.to_p, 2) == "wrong_role"
        assert not change.done()
        assert roles_heard(both.to_p) == [Role.PREFILL]
        assert both.to_p.load is not None
        assert both.to_p.load.changing_role
        await both.to_p.send(whole(4, second))
        await both.to_p.until(lambda: bool(both.to_p.leg(4).finished))
        assert both.to_p.leg(4).texts(1) == oracle(both.p.runner, second)
        assert not change.done()
        await both.ask(1, first, submit=False, xfer_id=xfer_id)
        assert await both.finished(1, 1) == oracle(both.p.runner, first)
        assert (await change).changed
        await is_now(both.to_p, Role.DECODE)
        await both.to_p.until(lambda: both.to_p.load is not None and not both.to_p.load.draining)
        assert not both.to_p.load.changing_role
        await both.to_p.send(whole(3, second))
        await both.to_p.until(lambda: bool(both.to_p.leg(3).finished))
        assert both.to_p.leg(3).texts(1) == oracle(both.p.runner, second)


async def test_a_planner_changes_a_role_or_hears_why_not(tmp_path: Path):
    control = WorkerControl(None)
    async with two(tmp_path, Role.HYBRID, Role.DECODE) as both:
        assert await control(both.p.address, Role.PREFILL, 5.0) == ""
        await is_now(both.to_p, Role.PREFILL)
        assert await control(both.p.address, Role.DECODE, 5.0) == ""
        await is_now(both.to_p, Role.DECODE)
        await both.p.server.drain(1.0)
        refusal = await control(both.p.address, Role.PREFILL, 5.0)
        assert refusal == "unavailable: this worker is leaving"


async def test_a_worker_that_cannot_finish_in_time_stays_what_it_is(tmp_path: Path):
    async with two(tmp_path, Role.HYBRID, Role.DECODE) as both:
        asked = prompt(40)
        xfer_id = await both.ask(1, asked, expect=False)
        await both.to_p.until(lambda: bool(both.to_p.leg(1).first))
        reply = await set_role(both.p, Role.DECODE, timeout_s=0.2)
        assert (reply.changed, reply.left) == (False, 1)
        await both.to_p.until(lambda: len(roles_heard(both.to_p)) == 3)
        assert roles_heard(both.to_p) == [Role.HYBRID, Role.DECODE, Role.HYBRID]
        await both.ask(1, asked, submit=False, xfer_id=xfer_id)
        assert await both.finished(1, 1) == oracle(both.p.runner, asked)
        again = prompt(20, first=300)
        await both.ask(2, again)
        assert await both.finished(2, 1) == oracle(both.p.runner, again)


async def test_a_worker_that_is_leaving_changes_no_role(tmp_path: Path):
    async with node(Role.HYBRID, tmp_path) as worker:
        assert await worker.server.drain(1.0)
        with pytest.raises(grpc.aio.AioRpcError, match="leaving") as refused:
            await set_role(worker, Role.DECODE)
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        await quiet(worker)


class _NoEngine:
    def submit(self, command: Command) -> None:
        raise NotImplementedError

    def attach(self, listener) -> None:
        self.listener = listener

    def progress_s(self) -> float | None:
        return None

    def failure(self) -> BaseException | None:
        return None

    def story(self, about: SeqId | BlockKey) -> tuple[StoryEntry, ...]:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError


def test_a_role_whose_legs_it_can_never_take_is_refused():
    def worker(role: Role) -> WorkerService:
        return WorkerService(
            engine=_NoEngine(),
            hello=replace(HELLO, role=role),
            legs=WorkerLegTable(),
            sending=None,
            receiving=None,
            office=TicketOffice(SECRET),
            metrics=WorkerMetrics(CollectorRegistry(), block_tokens=4, num_blocks=10),
            clock=ManualClock(),
        )

    with pytest.raises(InvalidRequestError, match="cannot be a decode worker") as refused:
        worker(Role.PREFILL).narrow_role(Role.DECODE)
    assert refused.value.param == "role"


@pytest.mark.parametrize("role", [Role.PREFILL, Role.HYBRID])
async def test_a_worker_stays_what_it_is_if_whoever_asked_goes_away(role: Role, tmp_path: Path):
    async with two(tmp_path, role, Role.DECODE) as both:
        asked, again = prompt(40), prompt(20, first=300)
        xfer_id = await both.ask(1, asked, expect=False)
        await both.to_p.until(lambda: bool(both.to_p.leg(1).first))
        change = asyncio.create_task(set_role(both.p, Role.DECODE))
        narrower = Role.DECODE if role is Role.HYBRID else role
        await both.to_p.until(
            lambda: (
                both.to_p.load is not None
                and (both.to_p.load.changing_role or roles_heard(both.to_p)[-1] is not role)
            )
        )
        assert both.p.server.state().hello.role is narrower
        change.cancel()
        await asyncio.wait([change])
        await both.to_p.until(
            lambda: (
                both.to_p.load is not None
                and not both.to_p.load.changing_role
                and roles_heard(both.to_p)[-1] is role
            )
        )
        await both.ask(1, asked, submit=False, xfer_id=xfer_id)
        assert await both.finished(1, 1) == oracle(both.p.runner, asked)
        await both.ask(2, again)
        assert await both.finished(2, 1) == oracle(both.p.runner, again)
