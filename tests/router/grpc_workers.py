"""Workers without an engine, over real gRPC on Unix sockets: what they draw depends on sample and position alone."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc

from baton.errors import BatonError
from baton.generation import Prompt, WorkerLoad
from baton.ids import Role
from baton.rpc.channel import bind, new_server
from baton.rpc.generation import finish_to_proto, prompt_from_proto, sample_to_proto
from baton.rpc.hello import hello_to_proto
from baton.rpc.reports import failure_to_proto, load_to_proto
from baton.rpc.v1 import common_pb2, transfer_pb2, worker_pb2, worker_pb2_grpc
from tests.router.known_workers import drawn, hello


@dataclass(eq=False)
class FakeWorker:
    """One worker process, as far as a router can tell.

    Attributes:
        peers: All workers of the test by id: P finds D here instead of through a transfer.
        hold_at: Position that is not drawn before `gate` is opened.
        holding: Set when a leg waits at `gate`.
        refusal: What every new leg fails with, and every probe of a link.
        probes: Links that it was told to try.
        started: Commands that began a leg, in order.
        cancelled: Legs that were cancelled by command.
        reads: Cleared while commands are left unread.
        hung_up: Set when the router's stream ended.
        frames: Of the last stream that was opened.
    """

    name: str
    role: Role
    directory: Path
    peers: dict[str, "FakeWorker"]
    incarnation: int = 1
    hold_at: int | None = None
    refusal: BatonError | None = None
    probes: asyncio.Queue[worker_pb2.ProbeLink] = field(default_factory=asyncio.Queue)
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    holding: asyncio.Event = field(default_factory=asyncio.Event)
    started: list[Any] = field(default_factory=list)
    cancelled: asyncio.Queue[int] = field(default_factory=asyncio.Queue)
    reads: asyncio.Event = field(default_factory=asyncio.Event)
    hung_up: asyncio.Event = field(default_factory=asyncio.Event)
    server: grpc.aio.Server | None = None
    changes: dict[str, Any] = field(default_factory=dict)
    frames: asyncio.Queue[Any] = field(default_factory=asyncio.Queue)
    _handed: dict[str, asyncio.Event] = field(default_factory=dict)

    @property
    def address(self) -> str:
        return f"unix:{self.directory / self.name}"

    @property
    def hello(self):
        return hello(self.name, self.role, incarnation=self.incarnation, **self.changes)

    def __post_init__(self) -> None:
        self.reads.set()

    async def start(self) -> None:
        self.peers[self.name] = self
        self.server = new_server()
        worker_pb2_grpc.add_WorkerServicer_to_server(_Service(self), self.server)
        bind(self.server, self.address)
        await self.server.start()

    def greet_again(self, **changes: Any) -> None:
        """Says on an open stream what it is now."""
        again = replace(self.hello, **changes)
        self.frames.put_nowait(worker_pb2.Frame(hello=hello_to_proto(again)))

    async def kill(self) -> None:
        if self.server is not None:
            server, self.server = self.server, None
            await server.stop(grace=None)

    async def restart(self) -> None:
        await self.kill()
        self.incarnation += 1
        self.hold_at = None
        await self.start()

    def handed_off(self, xfer_id: str) -> asyncio.Event:
        return self._handed.setdefault(xfer_id, asyncio.Event())

    async def pause(self, position: int) -> None:
        if position == self.hold_at:
            self.holding.set()
            await self.gate.wait()


class _Stream:
    """Frames to one router; each leg is a task."""

    def __init__(self, worker: FakeWorker) -> None:
        self.worker = worker
        self.frames: asyncio.Queue[Any] = asyncio.Queue()
        worker.frames = self.frames
        self.legs: dict[int, asyncio.Task[None]] = {}

    async def serve(self, commands, first) -> AsyncIterator[Any]:
        yield first
        reader = asyncio.create_task(self.read(commands))
        try:
            while True:
                yield await self.frames.get()
        finally:
            self.worker.hung_up.set()
            for task in (reader, *self.legs.values()):
                task.cancel()

    async def read(self, commands) -> None:
        await self.worker.reads.wait()
        async for command in commands:
            if command.WhichOneof("command") == "cancel":
                leg_id = command.cancel.leg_id
                if leg_id in self.legs:
                    self.legs.pop(leg_id).cancel()
                self.worker.cancelled.put_nowait(leg_id)
                continue
            if command.WhichOneof("command") == "probe_link":
                self.probe(command.probe_link)
                continue
            begun = getattr(command, command.WhichOneof("command"))
            self.worker.started.append(begun)
            leg_id = begun.request.leg_id
            if self.worker.refusal is not None:
                failure = failure_to_proto(self.worker.refusal)
                failed = common_pb2.LegFailed(leg_id=leg_id, failure=failure)
                self.frames.put_nowait(worker_pb2.Frame(failed=[failed]))
            else:
                self.legs[leg_id] = asyncio.create_task(self.run(begun))

    def probe(self, asked: worker_pb2.ProbeLink) -> None:
        self.worker.probes.put_nowait(asked)
        error = self.worker.refusal
        failure = None if error is None else failure_to_proto(error)
        told = worker_pb2.LinkProbed(target=asked.target, failure=failure)
        self.frames.put_nowait(worker_pb2.Frame(links_probed=[told]))

    async def run(self, begun: Any) -> None:
        await (self.prefill(begun) if isinstance(begun, worker_pb2.Prefill) else self.decode(begun))

    async def prefill(self, submit: worker_pb2.Prefill) -> None:
        prompt = prompt_from_proto(submit.request)
        position = len(prompt.output_tokens)
        await self.worker.pause(position)
        tokens = [drawn(s, position, prompt.sampling.max_tokens) for s in prompt.samples]
        first = worker_pb2.Prefilled(
            leg_id=submit.request.leg_id,
            first_tokens=[sample_to_proto(token) for token in tokens],
            cached_tokens=3,
            queue_s=0.25,
            prefill_s=0.5,
        )
        self.frames.put_nowait(worker_pb2.Frame(prefilled=[first]))
        permit = transfer_pb2.Permit.FromString(submit.permit.content)
        self.worker.peers[permit.target.worker_id].handed_off(permit.xfer_id).set()
        done = worker_pb2.HandedOff(
            leg_id=submit.request.leg_id, blocks_sent=2, bytes_sent=64, reserve_wait_s=0.1
        )
        self.frames.put_nowait(
            worker_pb2.Frame(handed_off=[done], load=load_to_proto(WorkerLoad()))
        )

    async def decode(self, begun: worker_pb2.Receive | worker_pb2.Generate) -> None:
        prompt = prompt_from_proto(begun.request)
        position = len(prompt.output_tokens)
        leg_id = begun.request.leg_id
        if isinstance(begun, worker_pb2.Receive):
            permit = transfer_pb2.Permit.FromString(begun.permit.content)
            await self.worker.handed_off(permit.xfer_id).wait()
            position += 1
        else:
            local = worker_pb2.Prefilled(leg_id=leg_id, cached_tokens=4, prefill_s=0.5)
            self.frames.put_nowait(worker_pb2.Frame(prefilled=[local]))
        for step in range(position, prompt.sampling.max_tokens):
            await self.worker.pause(step)
            self.frames.put_nowait(self.step(leg_id, prompt, step))
            await asyncio.sleep(0)

    def step(self, leg_id: int, prompt: Prompt, step: int) -> worker_pb2.Frame:
        tokens = [drawn(s, step, prompt.sampling.max_tokens) for s in prompt.samples]
        return worker_pb2.Frame(
            step=step,
            leg_ids=[leg_id] * len(tokens),
            samples=[token.sample for token in tokens],
            tokens=[token.token for token in tokens],
            finished=[
                worker_pb2.SampleFinished(
                    leg_id=leg_id, sample=token.sample, reason=finish_to_proto(token.finish)
                )
                for token in tokens
                if token.finish is not None
            ],
        )


class _Service(worker_pb2_grpc.WorkerServicer):
    def __init__(self, worker: FakeWorker) -> None:
        self.worker = worker

    async def Serve(self, request_iterator, context):  # noqa: N802  # the stub's name
        first = worker_pb2.Frame(hello=hello_to_proto(self.worker.hello))
        async for frame in _Stream(self.worker).serve(request_iterator, first):
            yield frame


@asynccontextmanager
async def running(directory: Path, **roles: Role) -> AsyncIterator[dict[str, FakeWorker]]:
    """Workers by name, started; all killed at the end."""
    workers: dict[str, FakeWorker] = {}
    for name, role in roles.items():
        worker = FakeWorker(name=name, role=role, directory=directory, peers=workers)
        await worker.start()
    try:
        yield workers
    finally:
        for worker in workers.values():
            worker.gate.set()
            await worker.kill()
