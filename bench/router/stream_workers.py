"""Workers without an engine for `bench.router_stream`:
`python -m bench.router.stream_workers WAY DIRECTORY TOKENIZER STEP_MS DECODERS`.

A prefill worker and some decode workers over real gRPC, which print their addresses as a line of JSON once they serve.
A prompt is prefilled as soon as it arrives; each decode worker then takes a step for all its sequences at fixed times,
or late if the router has not taken the frame before. They do as little as can be per token, so that the benchmark reads
what the router costs; `baton run simulated` runs a whole worker, which shares the cores with it.
"""

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

import grpc
import uvloop
from tokenizers import Tokenizer

from baton.ids import Incarnation, LayerName, Role, WorkerId, WorkerIdentity, XferId
from baton.layout import KvLayout
from baton.rpc.block_feed import HEARTBEAT_S
from baton.rpc.channel import bind, new_server
from baton.rpc.credentials import ClusterCredentials
from baton.rpc.hello import WorkerHello, hello_to_proto
from baton.rpc.identity import PeerRole, ProcessIdentity
from baton.rpc.v1 import common_pb2, transfer_pb2, worker_pb2, worker_pb2_grpc

TEXT = (
    "The baton is handed over at full speed, and the runner who takes it must already be running. Whoever prefills reads "
    "the whole prompt at once; whoever decodes writes one word after another — patiently, and for everybody at once. "
)

SECRET = bytes(range(32))
"""Of the cluster, where connections are TLS."""

WorkerContext = grpc.aio.ServicerContext[worker_pb2.Command, worker_pb2.Frame]


class Way(Enum):
    """How router and workers reach each other. In the clear over TCP only these workers can, and no router but that of
    `bench.router.plain_tcp`."""

    UNIX = "unix"
    PLAIN = "plain"
    TLS = "tls"


def own_credentials(way: Way, role: PeerRole) -> ClusterCredentials | None:
    """What a process shows its peers."""
    if way is not Way.TLS:
        return None
    return ClusterCredentials(ProcessIdentity(role=role, name="bench"), SECRET)


def _hello(role: Role, number: int, *, vocab_size: int, transfer_address: str) -> WorkerHello:
    layout = KvLayout(
        model_fingerprint="bench",
        dtype="float32",
        block_tokens=64,
        num_kv_heads=1,
        head_dim=8,
        layers=(LayerName("layers.0"),),
    )
    return WorkerHello(
        identity=WorkerIdentity(
            worker_id=WorkerId(f"{role.value}-{number}"), incarnation=Incarnation(1)
        ),
        role=role,
        layout=layout,
        max_model_len=8192,
        vocab_size=vocab_size,
        num_blocks=1 << 20,
        max_num_seqs=4096,
        transfer_address=transfer_address,
    )


def _first_token(leg_id: int, token: int) -> worker_pb2.Frame:
    """The frame of a prompt that is computed and handed off."""
    return worker_pb2.Frame(
        prefilled=[
            worker_pb2.Prefilled(leg_id=leg_id, first_tokens=[common_pb2.SampledToken(token=token)])
        ],
        handed_off=[worker_pb2.HandedOff(leg_id=leg_id, blocks_sent=1, bytes_sent=1)],
    )


def _transfer_of(permit: common_pb2.Signed) -> XferId:
    """The transfer that a router's permit is for; signatures are not checked here."""
    return XferId(transfer_pb2.Permit.FromString(permit.content).xfer_id)


@dataclass(slots=True, eq=False)
class _Sequence:
    """One leg on the decode worker."""

    leg_id: int
    position: int
    max_tokens: int


@dataclass(slots=True, eq=False)
class _Batch:
    """What one decode worker runs."""

    running: dict[int, _Sequence] = field(default_factory=dict)
    news: asyncio.Event = field(default_factory=asyncio.Event)

    def join(self, sequence: _Sequence) -> None:
        self.running[sequence.leg_id] = sequence
        self.news.set()


@dataclass(slots=True, eq=False)
class _HandOffs:
    """Hand-offs by transfer id: a leg runs once both workers have spoken of it."""

    expected: dict[str, tuple[_Sequence, _Batch]] = field(default_factory=dict)
    prefilled: set[str] = field(default_factory=set)

    def expect(self, xfer_id: str, sequence: _Sequence, batch: _Batch) -> None:
        self.expected[xfer_id] = sequence, batch
        self._start(xfer_id)

    def done(self, xfer_id: str) -> None:
        self.prefilled.add(xfer_id)
        self._start(xfer_id)

    def _start(self, xfer_id: str) -> None:
        if xfer_id in self.prefilled and xfer_id in self.expected:
            self.prefilled.remove(xfer_id)
            sequence, batch = self.expected.pop(xfer_id)
            batch.join(sequence)


class _Prefill(worker_pb2_grpc.WorkerServicer):
    def __init__(self, hello: WorkerHello, hand_offs: _HandOffs, first_token: int) -> None:
        self._hello = hello
        self._hand_offs = hand_offs
        self._first_token = first_token

    async def Serve(  # type: ignore[override]  # noqa: N802  # the stub's name
        self, request_iterator: AsyncIterator[worker_pb2.Command], context: WorkerContext
    ) -> None:
        await context.write(worker_pb2.Frame(hello=hello_to_proto(self._hello)))
        answers: asyncio.Queue[worker_pb2.Frame] = asyncio.Queue()
        tasks = [
            asyncio.create_task(self._read(request_iterator, answers)),
            asyncio.create_task(_beat(answers)),
        ]
        try:
            while True:
                await context.write(await answers.get())
        finally:
            for task in tasks:
                task.cancel()

    async def _read(
        self,
        commands: AsyncIterator[worker_pb2.Command],
        answers: asyncio.Queue[worker_pb2.Frame],
    ) -> None:
        async for command in commands:
            if command.WhichOneof("command") == "prefill":
                answers.put_nowait(_first_token(command.prefill.request.leg_id, self._first_token))
                xfer_id = _transfer_of(command.prefill.permit)
                self._hand_offs.done(xfer_id)


async def _beat(answers: asyncio.Queue[worker_pb2.Frame]) -> None:
    while True:
        answers.put_nowait(worker_pb2.Frame(load=common_pb2.WorkerLoad()))
        await asyncio.sleep(HEARTBEAT_S)


class _Decode(worker_pb2_grpc.WorkerServicer):
    def __init__(
        self, hello: WorkerHello, hand_offs: _HandOffs, text: Sequence[int], step_s: float
    ) -> None:
        self._hello = hello
        self._hand_offs = hand_offs
        self._batch = _Batch()
        self._text = text
        self._step_s = step_s

    async def Serve(  # type: ignore[override]  # noqa: N802  # the stub's name
        self, request_iterator: AsyncIterator[worker_pb2.Command], context: WorkerContext
    ) -> None:
        await context.write(worker_pb2.Frame(hello=hello_to_proto(self._hello)))
        reading = asyncio.create_task(self._read(request_iterator))
        clock = asyncio.get_running_loop().time
        told_s = 0.0
        try:
            while True:
                due_s = clock() + self._step_s
                frame = await self._next_frame()
                if clock() - told_s > HEARTBEAT_S:
                    told_s = clock()
                    frame.load.CopyFrom(common_pb2.WorkerLoad())
                await context.write(frame)
                await asyncio.sleep(max(0.0, due_s - clock()))
        finally:
            reading.cancel()

    async def _read(self, commands: AsyncIterator[worker_pb2.Command]) -> None:
        async for command in commands:
            if command.WhichOneof("command") == "cancel":
                self._batch.running.pop(command.cancel.leg_id, None)
            elif command.WhichOneof("command") == "receive":
                request = command.receive.request
                xfer_id = _transfer_of(command.receive.permit)
                sequence = _Sequence(request.leg_id, 1, request.sampling.max_tokens)
                self._hand_offs.expect(xfer_id, sequence, self._batch)

    async def _next_frame(self) -> worker_pb2.Frame:
        """The next step's, or an empty one when there is nothing to do for a while."""
        batch = self._batch
        if not batch.running:
            batch.news.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(batch.news.wait(), HEARTBEAT_S)
        running, text = list(batch.running.values()), self._text
        frame = worker_pb2.Frame(
            leg_ids=[sequence.leg_id for sequence in running],
            samples=[0] * len(running),
            tokens=[text[(s.leg_id + s.position) % len(text)] for s in running],
        )
        for sequence in running:
            sequence.position += 1
            if sequence.position == sequence.max_tokens:
                del batch.running[sequence.leg_id]
                frame.finished.add(leg_id=sequence.leg_id, reason=common_pb2.FINISH_REASON_LENGTH)
        return frame


def _bound(way: Way, socket: Path) -> tuple[grpc.aio.Server, str]:
    """A server, and its address: at `socket`, or at any free port."""
    credentials = own_credentials(way, PeerRole.WORKER)
    server = new_server(credentials)
    match way:
        case Way.UNIX:
            return server, bind(server, f"unix:{socket}")
        case Way.TLS:
            return server, bind(server, "127.0.0.1:0", credentials)
        case Way.PLAIN:
            return server, f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"


async def _serve(
    way: Way, directory: Path, tokenizer: Tokenizer, step_s: float, decoders: int
) -> None:
    text = tokenizer.encode(TEXT, add_special_tokens=False).ids
    vocab_size = tokenizer.get_vocab_size()
    hand_offs = _HandOffs()
    server, address = _bound(way, directory / "prefill")
    hello = _hello(Role.PREFILL, 0, vocab_size=vocab_size, transfer_address="")
    worker_pb2_grpc.add_WorkerServicer_to_server(_Prefill(hello, hand_offs, text[0]), server)
    servers, addresses = [server], [address]
    for number in range(decoders):
        server, address = _bound(way, directory / f"decode-{number}")
        hello = _hello(Role.DECODE, number, vocab_size=vocab_size, transfer_address=address)
        worker = _Decode(hello, hand_offs, text, step_s)
        worker_pb2_grpc.add_WorkerServicer_to_server(worker, server)
        servers.append(server)
        addresses.append(address)
    for server in servers:
        await server.start()
    print(json.dumps(addresses), flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(
        _serve(
            Way(sys.argv[1]),
            Path(sys.argv[2]),
            Tokenizer.from_file(sys.argv[3]),
            float(sys.argv[4]) / 1e3,
            int(sys.argv[5]),
        )
    )
