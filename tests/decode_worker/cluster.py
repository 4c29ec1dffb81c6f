"""A prefill worker and a decode worker in one process: real gRPC over Unix sockets, real shared memory,
real scheduling.

Only the model is fake (`baton_engine.fakes.engine`), and even its pages live in the shared arena, so a page that did
not arrive gives other tokens than the oracle's.
"""

import asyncio
import os
import threading
from array import array
from collections.abc import Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from prometheus_client import CollectorRegistry

from baton.clock import MonotonicClock
from baton.config.schema import TransferConfig, WorkerConfig
from baton.generation import Prompt, SamplingParams
from baton.ids import (
    BlockId,
    LayerName,
    LegId,
    RequestId,
    Role,
    WorkerId,
    WorkerIdentity,
    XferId,
    new_incarnation,
    new_xfer_id,
)
from baton.layout import SPARE_BLOCKS, KvLayout
from baton.rpc.channel import open_channel
from baton.rpc.generation import prompt_to_proto
from baton.rpc.hello import WorkerHello
from baton.rpc.v1 import common_pb2, worker_pb2, worker_pb2_grpc
from baton.telemetry.tracing import Tracer
from baton_engine.fakes.engine import FakeRunner
from baton_engine.host import ThreadEngineHost
from baton_engine.ports import EnginePort
from baton_engine.scheduling.limits import EngineLimits
from baton_engine.scheduling.plan import StepPlan, StepResult
from baton_engine.scheduling.scheduler import Scheduler
from baton_worker.legs import WorkerLegTable
from baton_worker.metrics import WorkerMetrics
from baton_worker.server import WorkerServer
from baton_worker.service import WorkerService
from decode_worker.receiver import PageReceiver
from kv_transfer.backends.shm import ShmReceiver, ShmSender
from kv_transfer.memory.arena import WorkerMemory
from kv_transfer.memory.page_hash import Checksum, ways_to_hash
from kv_transfer.session.handshake import SessionEndpoint
from kv_transfer.ticket import Permit, TicketOffice
from prefill_worker.sender import PageSender
from prefill_worker.sink import TransferSink

TIMEOUT_S = 20
SECRET = bytes(32)
LIMITS = EngineLimits(
    max_num_seqs=8,
    max_num_batched_tokens=16,
    max_model_len=256,
    block_tokens=4,
    num_blocks=48,
    vocab_size=1000,
)
REGION_BLOCKS = LIMITS.num_blocks + SPARE_BLOCKS
# One float32 key and value per token: eight bytes, in which the fake engine keeps its hash.
LAYOUT = KvLayout(
    model_fingerprint="fake",
    dtype="float32",
    block_tokens=LIMITS.block_tokens,
    num_kv_heads=1,
    head_dim=1,
    layers=(LayerName("layer.0"), LayerName("layer.1")),
)


class ArenaPages:
    """`FakeRunner.pages` over the first layer of a shared arena."""

    def __init__(self, memory: memoryview) -> None:
        size = LAYOUT.page_layer_bytes
        self._rows = [
            memory[at : at + size].cast("q") for at in range(0, size * LIMITS.num_blocks, size)
        ]
        for page in range(len(self._rows)):
            self[page] = [-1] * LAYOUT.block_tokens

    def __getitem__(self, page: int) -> memoryview:
        return self._rows[page]

    def __setitem__(self, page: int, values: list[int]) -> None:
        self._rows[page][:] = memoryview(array("q", values))


class GatedRunner(FakeRunner):
    """Computes in the arena; steps wait while the gate is closed, so that a test can act in the middle of one."""

    def __init__(self, memory: memoryview, sink: TransferSink | None) -> None:
        super().__init__(LIMITS, sink=sink, num_layers=len(LAYOUT.layers))
        self.pages = ArenaPages(memory)  # type: ignore[assignment]
        self.waiting = threading.Event()
        self._held = False
        self._permits = threading.Semaphore(0)
        self._broken: BaseException | None = None

    def hold(self) -> None:
        """From now on each step needs a permit of `allow`."""
        self.waiting.clear()
        self._held = True

    def allow(self, steps: int = 1) -> None:
        self.waiting.clear()
        self._permits.release(steps)

    def release(self) -> None:
        self._held = False
        self._permits.release(1000)

    def break_down(self) -> None:
        """The next step ends the engine's loop."""
        self._broken = SystemError("told to break")

    def execute(self, plan: StepPlan) -> StepResult:
        if self._broken is not None:
            raise _LoopEnd from self._broken
        if self._held:
            self.waiting.set()
            self._permits.acquire(timeout=TIMEOUT_S)
        return super().execute(plan)


class _LoopEnd(BaseException):
    """Not an Exception: nothing in the loop isolates it."""


@dataclass
class Node:
    """One worker process's worth of objects."""

    identity: WorkerIdentity
    address: str
    arena: WorkerMemory
    scheduler: Scheduler
    engine: ThreadEngineHost
    server: WorkerServer
    runner: GatedRunner
    receiver: ShmReceiver

    async def close(self) -> None:
        await self.server.close()
        self.runner.release()
        self.engine.close()
        self.arena.region.close()

    def pages_in_use(self) -> int:
        load = self.scheduler.load()
        assert load.blocks_free + load.blocks_used + load.blocks_cached == LIMITS.num_blocks
        return load.blocks_used


async def start_node(
    role: Role,
    folder: Path,
    *,
    name: str = "",
    transfer: TransferConfig | None = None,
    advertised: str = "",
    checksum: Checksum = Checksum.XXH3,
    tracer: Tracer | None = None,
) -> Node:
    """Composes a worker as a process of the cluster does: memory and sink, engine, services, server."""
    arena, sink = WorkerMemory(), TransferSink()
    memory = arena.allocate(LAYOUT.region_bytes(REGION_BLOCKS)).host_view
    runner = GatedRunner(memory, sink)
    scheduler = Scheduler(LIMITS, layout=LAYOUT, secret=SECRET)
    engine = ThreadEngineHost(scheduler, runner)
    hello, server, receiver = await start_server(
        role,
        folder,
        engine,
        arena,
        sink,
        name=name,
        transfer=transfer,
        advertised=advertised,
        checksum=checksum,
        tracer=tracer,
    )
    engine.start()
    return Node(
        identity=hello.identity,
        address=f"unix:{folder}/{name or role.value}.sock",
        arena=arena,
        scheduler=scheduler,
        engine=engine,
        server=server,
        runner=runner,
        receiver=receiver,
    )


async def start_server(
    role: Role,
    folder: Path,
    engine: EnginePort,
    arena: WorkerMemory,
    sink: TransferSink,
    *,
    name: str = "",
    transfer: TransferConfig | None = None,
    advertised: str = "",
    checksum: Checksum = Checksum.XXH3,
    tracer: Tracer | None = None,
) -> tuple[WorkerHello, WorkerServer, ShmReceiver]:
    """A worker's services around an engine with the pages of `LAYOUT` in `arena`; the engine is to be started then."""
    name = name or role.value
    address = f"unix:{folder}/{name}.sock"
    span, memory = arena.span, arena.span.host_view
    config = WorkerConfig(worker_id=name, role=role, address=address)
    identity = WorkerIdentity(worker_id=WorkerId(name), incarnation=new_incarnation())
    hello = WorkerHello(
        identity=identity,
        role=role,
        layout=LAYOUT,
        max_model_len=LIMITS.max_model_len,
        vocab_size=LIMITS.vocab_size,
        num_blocks=LIMITS.num_blocks,
        max_num_seqs=LIMITS.max_num_seqs,
        transfer_address=advertised or address,
    )
    clock = MonotonicClock()
    metrics = WorkerMetrics(
        CollectorRegistry(), block_tokens=LAYOUT.block_tokens, num_blocks=LIMITS.num_blocks
    )
    ways, office = ways_to_hash(span, LAYOUT, num_blocks=REGION_BLOCKS), TicketOffice(SECRET)
    hashes = {checksum: ways[checksum], **ways}
    here, legs = SessionEndpoint(identity=identity, layout=LAYOUT, office=office), WorkerLegTable()
    sender = PageSender(
        here=here,
        legs=legs,
        sink=sink,
        senders={"shm": ShmSender(memory, num_blocks=REGION_BLOCKS)},
        hashes=hashes,
        spare=BlockId(LIMITS.num_blocks),
        metrics=metrics,
        clock=clock,
    )
    receiver = ShmReceiver(arena.region, path=f"{folder}/{name}.kv", num_blocks=REGION_BLOCKS)
    service = WorkerService(
        engine=engine,
        hello=hello,
        legs=legs,
        sending=sender,
        receiving=PageReceiver(
            here=here,
            legs=legs,
            num_blocks=LIMITS.num_blocks,
            receivers={"shm": receiver},
            hashes=hashes,
            transfer=transfer or TransferConfig(),
            metrics=metrics,
        ),
        link_rate=sender.link_rate,
        office=office,
        metrics=metrics,
        clock=clock,
        tracer=tracer,
    )
    server = WorkerServer(config=config, engine=engine, service=service, metrics=metrics)
    await server.start()
    return hello, server, receiver


@asynccontextmanager
async def node(role: Role, folder: Path, **options: Any):
    """A worker that is closed at the end."""
    started = await start_node(role, folder, **options)
    try:
        yield started
    finally:
        await started.close()


@dataclass
class Heard:
    """Everything that workers told one router about one leg."""

    first: dict[int, int] = field(default_factory=dict)
    tokens: dict[int, list[int]] = field(default_factory=dict)
    finished: dict[int, int] = field(default_factory=dict)
    handed_off: worker_pb2.HandedOff | None = None
    prefilled: worker_pb2.Prefilled | None = None
    failed: str = ""
    writer_lost: int = 0

    def texts(self, samples: int) -> list[list[int]]:
        return [
            [*([self.first[i]] if i in self.first else []), *self.tokens.get(i, [])]
            for i in range(samples)
        ]


class Router:
    """A router's stream to one worker."""

    def __init__(self, node: Node) -> None:
        self._channel = open_channel(node.address)
        stub: Any = worker_pb2_grpc.WorkerStub(self._channel)
        self._call = stub.Serve()
        self.hello: common_pb2.WorkerHello | None = None
        self.load: common_pb2.WorkerLoad | None = None
        self.frames: list[Any] = []
        self.ended = False
        self._news = asyncio.Event()
        self._legs: dict[int, Heard] = {}
        self._reading = asyncio.create_task(self._read())

    def leg(self, leg_id: int) -> Heard:
        return self._legs.setdefault(leg_id, Heard())

    async def send(self, command: Any) -> None:
        await self._call.write(command)

    async def until(self, true: Callable[[], bool]) -> None:
        """Waits for news until the condition holds."""
        async with asyncio.timeout(TIMEOUT_S):
            while not true():
                self._news.clear()
                await self._news.wait()

    async def close(self) -> None:
        self._call.cancel()
        await asyncio.wait([self._reading])
        await self._channel.close(None)

    async def _read(self) -> None:
        try:
            async for frame in self._call:
                self.frames.append(frame)
                if frame.HasField("hello"):
                    self.hello = frame.hello
                if frame.HasField("load"):
                    self.load = frame.load
                self._take(frame)
                self._news.set()
        except (grpc.aio.AioRpcError, asyncio.CancelledError):
            pass  # the test ended the stream, or the worker did: `ended` tells
        self.ended = True
        self._news.set()

    def _take(self, frame: Any) -> None:
        for failed in frame.failed:
            self.leg(failed.leg_id).failed = failed.failure.code
        for lost in frame.writers_lost:
            self.leg(lost.leg_id).writer_lost = lost.attempt
        for prefilled in frame.prefilled:
            leg = self.leg(prefilled.leg_id)
            leg.prefilled = prefilled
            for token in prefilled.first_tokens:
                leg.first[token.sample] = token.token
                if token.finish:
                    leg.finished[token.sample] = token.finish
        for done in frame.handed_off:
            self.leg(done.leg_id).handed_off = done
        for leg_id, sample, token in zip(frame.leg_ids, frame.samples, frame.tokens, strict=True):
            self.leg(leg_id).tokens.setdefault(sample, []).append(token)
        for end in frame.finished:
            self.leg(end.leg_id).finished[end.sample] = end.reason


def prompt(tokens: int, *, samples: int = 1, max_tokens: int = 6, first: int = 1) -> Prompt:
    return Prompt(
        prompt_tokens=tuple(range(first, first + tokens)),
        samples=tuple(range(samples)),
        sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0),
    )


def oracle(runner: FakeRunner, asked: Prompt) -> list[list[int]]:
    texts = []
    for sample in asked.samples:
        draws = runner.draw_all(tuple(asked.prompt_tokens), sample)
        texts.append([next(draws) for _ in range(asked.sampling.max_tokens)])
    return texts


@dataclass
class Pair:
    """A prefill and a decode worker with a router's streams to both."""

    p: Node
    d: Node
    to_p: Router
    to_d: Router

    async def ask(
        self,
        leg_id: int,
        asked: Prompt,
        *,
        expect: bool = True,
        submit: bool = True,
        xfer_id: XferId | None = None,
        target: WorkerIdentity | None = None,
        attempt: int = 1,
    ) -> XferId:
        """Sends the router's two messages, or one of them."""
        request = prompt_to_proto(LegId(leg_id), RequestId("r"), asked)
        xfer_id = xfer_id or new_xfer_id()
        permit = self.permit(xfer_id, asked, attempt=attempt, target=target)
        if expect:
            announced = worker_pb2.Receive(request=request, permit=permit)
            await self.to_d.send(worker_pb2.Command(receive=announced))
        if submit:
            submitted = worker_pb2.Prefill(
                request=request, permit=permit, transfer_address=self.d.address
            )
            await self.to_p.send(worker_pb2.Command(prefill=submitted))
        return xfer_id

    async def announce(self, leg_id: int, asked: Prompt, permit: common_pb2.Signed) -> None:
        """Tells the decode worker only, with a permit for whoever it names."""
        request = prompt_to_proto(LegId(leg_id), RequestId("r"), asked)
        announced = worker_pb2.Receive(request=request, permit=permit)
        await self.to_d.send(worker_pb2.Command(receive=announced))

    async def reassign(
        self,
        leg_id: int,
        asked: Prompt,
        xfer_id: XferId,
        *,
        attempt: int,
        other: Node,
        to_other: Router,
    ) -> None:
        """Gives the prefill of a leg to another worker."""
        permit = self.permit(xfer_id, asked, attempt=attempt, source=other.identity)
        reassign = worker_pb2.Reassign(leg_id=leg_id, permit=permit)
        await self.to_d.send(worker_pb2.Command(reassign=reassign))
        submitted = worker_pb2.Prefill(
            request=prompt_to_proto(LegId(leg_id), RequestId("r"), asked),
            permit=permit,
            transfer_address=self.d.address,
        )
        await to_other.send(worker_pb2.Command(prefill=submitted))

    def permit(
        self,
        xfer_id: XferId,
        asked: Prompt,
        *,
        attempt: int = 1,
        source: WorkerIdentity | None = None,
        target: WorkerIdentity | None = None,
    ) -> common_pb2.Signed:
        """What a router would sign."""
        permit = Permit(
            xfer_id=xfer_id,
            attempt=attempt,
            cache_scope=asked.cache_scope,
            layout_digest=LAYOUT.content_digest(),
            source=source or self.p.identity,
            target=target or self.d.identity,
            num_blocks=LAYOUT.num_blocks_for(len(asked.tokens)),
        )
        return TicketOffice(SECRET).sign_permit(permit)

    async def cancel(self, leg_id: int, *, on_p: bool = True, on_d: bool = True) -> None:
        cancel = common_pb2.Cancel(leg_id=leg_id)
        if on_p:
            await self.to_p.send(worker_pb2.Command(cancel=cancel))
        if on_d:
            await self.to_d.send(worker_pb2.Command(cancel=cancel))

    def heard(self, leg_id: int) -> Heard:
        """Both workers' word on one leg."""
        at_p, at_d = self.to_p.leg(leg_id), self.to_d.leg(leg_id)
        return Heard(
            first=at_p.first, tokens=at_d.tokens, finished={**at_p.finished, **at_d.finished}
        )

    async def failed(self, router: Router, leg_id: int) -> str:
        await router.until(lambda: router.leg(leg_id).failed != "")
        return router.leg(leg_id).failed

    async def finished(self, leg_id: int, samples: int) -> list[list[int]]:
        await self.to_p.until(lambda: len(self.to_p.leg(leg_id).first) == samples)
        left = samples - len(self.to_p.leg(leg_id).finished)
        await self.to_d.until(lambda: len(self.to_d.leg(leg_id).finished) == left)
        return self.heard(leg_id).texts(samples)

    async def settle(self) -> None:
        """Waits until neither worker has anything left, then checks the pages."""
        for node in (self.p, self.d):
            node.runner.release()
            await quiet(node)
            assert node.pages_in_use() == 0

    async def stepping(self, node: Node) -> None:
        """Waits until a held engine stands before a step."""
        assert await asyncio.to_thread(node.runner.waiting.wait, TIMEOUT_S)

    async def generate(self, leg_id: int, asked: Prompt) -> None:
        request = prompt_to_proto(LegId(leg_id), RequestId("r"), asked)
        generate = worker_pb2.Generate(request=request)
        await self.to_d.send(worker_pb2.Command(generate=generate))

    async def close(self) -> None:
        await self.to_p.close()
        await self.to_d.close()


async def quiet(node: Node) -> None:
    """Waits until a worker has no leg, sequence or transfer."""
    async with asyncio.timeout(TIMEOUT_S):
        await node.server.idle()
    assert node.server.state().transfers_in_flight == 0


@asynccontextmanager
async def pair(folder: Path, **options: Any):
    """Two workers and a router's streams; at the end nothing is left of any of it."""
    async with node(Role.PREFILL, folder) as p, node(Role.DECODE, folder, **options) as d:
        both = Pair(p=p, d=d, to_p=Router(p), to_d=Router(d))
        try:
            yield both
            await both.settle()
        finally:
            await both.close()
    assert [name for name in os.listdir(folder) if name.endswith(".kv")] == []
