"""Workers without an engine for `bench.router_stream`: `python -m bench.stream_workers DIRECTORY TOKENIZER STEP_MS`.

A prefill and a decode worker over real gRPC. A prompt is prefilled as soon as it arrives; the decode worker then takes a step
for all its sequences whenever the router has taken the frame before, or at fixed times.
"""

import asyncio
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import uvloop
from tokenizers import Tokenizer

from baton.ids import Incarnation, LayerName, Role, WorkerId, WorkerIdentity
from baton.layout import KvLayout
from baton.rpc.channel import bind, new_server
from baton.rpc.frames import HEARTBEAT_S
from baton.rpc.hello import WorkerHello, hello_to_proto
from baton.rpc.v1 import (
    common_pb2,
    decode_pb2,
    decode_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
    transfer_pb2,
)

TEXT = (
    "The baton is handed over at full speed, and the runner who takes it must already be running. Whoever prefills reads "
    "the whole prompt at once; whoever decodes writes one word after another — patiently, and for everybody at once. "
)

DecodeContext = grpc.aio.ServicerContext[decode_pb2.DecodeCommand, decode_pb2.DecodeFrame]
PrefillContext = grpc.aio.ServicerContext[prefill_pb2.PrefillCommand, prefill_pb2.PrefillFrame]


def addresses(directory: Path) -> tuple[str, str]:
    """Where prefill and decode worker listen."""
    return f"unix:{directory}/prefill", f"unix:{directory}/decode"


@dataclass(slots=True, eq=False)
class _Sequence:
    """One leg on the decode worker."""

    leg_id: int
    position: int
    max_tokens: int


@dataclass(slots=True, eq=False)
class _Handover:
    """Hand-offs by transfer id: a leg runs once both workers have spoken of it."""

    expected: dict[str, _Sequence] = field(default_factory=dict)
    prefilled: set[str] = field(default_factory=set)
    running: dict[int, _Sequence] = field(default_factory=dict)
    news: asyncio.Event = field(default_factory=asyncio.Event)

    def expect(self, xfer_id: str, sequence: _Sequence) -> None:
        self.expected[xfer_id] = sequence
        self._start(xfer_id)

    def done(self, xfer_id: str) -> None:
        self.prefilled.add(xfer_id)
        self._start(xfer_id)

    def _start(self, xfer_id: str) -> None:
        if xfer_id in self.prefilled and xfer_id in self.expected:
            self.prefilled.remove(xfer_id)
            sequence = self.expected.pop(xfer_id)
            self.running[sequence.leg_id] = sequence
            self.news.set()


class _Prefill(prefill_pb2_grpc.PrefillServicer):
    def __init__(self, hello: WorkerHello, handover: _Handover, first_token: int) -> None:
        self._hello = hello
        self._handover = handover
        self._first_token = first_token

    async def Serve(  # type: ignore[override]  # noqa: N802  # the stub's name
        self, request_iterator: AsyncIterator[prefill_pb2.PrefillCommand], context: PrefillContext
    ) -> None:
        await context.write(prefill_pb2.PrefillFrame(hello=hello_to_proto(self._hello)))
        answers: asyncio.Queue[prefill_pb2.PrefillFrame] = asyncio.Queue()
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
        commands: AsyncIterator[prefill_pb2.PrefillCommand],
        answers: asyncio.Queue[prefill_pb2.PrefillFrame],
    ) -> None:
        async for command in commands:
            if command.WhichOneof("command") == "submit":
                answers.put_nowait(self._answer(command.submit.request.leg_id))
                permit = transfer_pb2.Permit.FromString(command.submit.permit.content)
                self._handover.done(permit.xfer_id)

    def _answer(self, leg_id: int) -> prefill_pb2.PrefillFrame:
        first = common_pb2.SampledToken(token=self._first_token)
        return prefill_pb2.PrefillFrame(
            first_tokens=[prefill_pb2.FirstTokens(leg_id=leg_id, tokens=[first])],
            handed_off=[prefill_pb2.HandedOff(leg_id=leg_id, blocks_sent=1, bytes_sent=1)],
        )


async def _beat(answers: asyncio.Queue[prefill_pb2.PrefillFrame]) -> None:
    while True:
        answers.put_nowait(prefill_pb2.PrefillFrame(load=common_pb2.WorkerLoad()))
        await asyncio.sleep(HEARTBEAT_S)


class _Decode(decode_pb2_grpc.DecodeServicer):
    def __init__(
        self, hello: WorkerHello, handover: _Handover, text: Sequence[int], step_s: float
    ) -> None:
        self._hello = hello
        self._handover = handover
        self._text = text
        self._step_s = step_s

    async def Serve(  # type: ignore[override]  # noqa: N802  # the stub's name
        self, request_iterator: AsyncIterator[decode_pb2.DecodeCommand], context: DecodeContext
    ) -> None:
        await context.write(decode_pb2.DecodeFrame(hello=hello_to_proto(self._hello)))
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

    async def _read(self, commands: AsyncIterator[decode_pb2.DecodeCommand]) -> None:
        async for command in commands:
            if command.WhichOneof("command") == "cancel":
                self._handover.running.pop(command.cancel.leg_id, None)
            elif command.WhichOneof("command") == "expect":
                request = command.expect.request
                permit = transfer_pb2.Permit.FromString(command.expect.permit.content)
                sequence = _Sequence(request.leg_id, 1, request.sampling.max_tokens)
                self._handover.expect(permit.xfer_id, sequence)

    async def _next_frame(self) -> decode_pb2.DecodeFrame:
        """The next step's, or an empty one when there is nothing to do for a while."""
        if not self._handover.running:
            self._handover.news.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._handover.news.wait(), HEARTBEAT_S)
        running, text = list(self._handover.running.values()), self._text
        frame = decode_pb2.DecodeFrame(
            leg_ids=[sequence.leg_id for sequence in running],
            samples=[0] * len(running),
            tokens=[text[(s.leg_id + s.position) % len(text)] for s in running],
        )
        for sequence in running:
            sequence.position += 1
            if sequence.position == sequence.max_tokens:
                del self._handover.running[sequence.leg_id]
                frame.finished.add(leg_id=sequence.leg_id, reason=common_pb2.FINISH_REASON_LENGTH)
        return frame


def _hello(name: str, role: Role, vocab_size: int, transfer_address: str) -> WorkerHello:
    layout = KvLayout(
        model_fingerprint="bench",
        dtype="float32",
        block_tokens=64,
        num_kv_heads=1,
        head_dim=8,
        layers=(LayerName("layers.0"),),
    )
    return WorkerHello(
        identity=WorkerIdentity(worker_id=WorkerId(name), incarnation=Incarnation(1)),
        role=role,
        layout=layout,
        max_model_len=8192,
        vocab_size=vocab_size,
        num_blocks=1 << 20,
        max_num_seqs=4096,
        transfer_address=transfer_address,
    )


async def _serve(directory: Path, tokenizer: Tokenizer, step_s: float) -> None:
    at_prefill, at_decode = addresses(directory)
    text = tokenizer.encode(TEXT, add_special_tokens=False).ids
    vocab, handover, server = tokenizer.get_vocab_size(), _Handover(), new_server()
    prefill = _Prefill(_hello("prefill-0", Role.PREFILL, vocab, ""), handover, text[0])
    decode = _Decode(_hello("decode-0", Role.DECODE, vocab, at_decode), handover, text, step_s)
    other = new_server()
    prefill_pb2_grpc.add_PrefillServicer_to_server(prefill, server)
    decode_pb2_grpc.add_DecodeServicer_to_server(decode, other)
    bind(server, at_prefill)
    bind(other, at_decode)
    await server.start()
    await other.start()
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(
        _serve(Path(sys.argv[1]), Tokenizer.from_file(sys.argv[2]), float(sys.argv[3]) / 1e3)
    )
