"""Workers without an engine that take their time as real ones do: `python -m bench.paced_workers DIRECTORY` (see `Pace`).

One prefill and one decode worker over real gRPC, for any number of routers. The prefill worker computes one prompt after the
other, in the order in which they came; the decode worker takes a step for all sequences that have a seat. So what routers
send ahead waits inside them, as it would in an engine, and delays whoever comes after it.
"""

import asyncio
import json
import sys
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TypeVar

import grpc
import uvloop

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

TOKEN = 100
"""What every step draws."""

_Frame = TypeVar("_Frame", prefill_pb2.PrefillFrame, decode_pb2.DecodeFrame)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How fast the workers are.

    Attributes:
        prefill_tokens_per_s: Prompt tokens computed per second.
        step_s: Time of a decode step.
        seats: Sequences that decode at once.
        vocab_size: Of the served model.
    """

    prefill_tokens_per_s: float
    step_s: float
    seats: int
    vocab_size: int

    def to_json(self) -> str:
        """One line that `main` reads."""
        return json.dumps(asdict(self))


def addresses(directory: Path) -> tuple[str, str]:
    """Where prefill and decode worker listen."""
    return f"unix:{directory}/prefill", f"unix:{directory}/decode"


@dataclass(slots=True, eq=False)
class _Prompt:
    """One leg on the prefill worker."""

    leg_id: int
    tokens: int
    xfer_id: str
    frames: asyncio.Queue[prefill_pb2.PrefillFrame]
    came_s: float


@dataclass(slots=True, eq=False)
class _Sequence:
    """One leg on the decode worker."""

    leg_id: int
    max_tokens: int
    frames: asyncio.Queue[decode_pb2.DecodeFrame]
    position: int = 1
    gone: bool = False


@dataclass(slots=True, eq=False)
class _Decoder:
    """Sequences by where they stand: not handed over yet, waiting for a seat, running."""

    pace: Pace
    expected: dict[str, _Sequence] = field(default_factory=dict)
    early: set[str] = field(default_factory=set)
    waiting: deque[_Sequence] = field(default_factory=deque)
    running: list[_Sequence] = field(default_factory=list)
    steps: int = 0

    def expect(self, xfer_id: str, sequence: _Sequence) -> None:
        if xfer_id in self.early:
            self.early.remove(xfer_id)
            self.waiting.append(sequence)
        else:
            self.expected[xfer_id] = sequence

    def handed_over(self, xfer_id: str) -> None:
        sequence = self.expected.pop(xfer_id, None)
        if sequence is None:
            self.early.add(xfer_id)
        else:
            self.waiting.append(sequence)

    async def run(self) -> None:
        clock = asyncio.get_running_loop().time
        due_s = clock()
        while True:
            due_s = max(due_s + self.pace.step_s, clock())
            await asyncio.sleep(due_s - clock())
            self._step()

    def load(self) -> common_pb2.WorkerLoad:
        waiting = len(self.waiting) + len(self.expected)
        return common_pb2.WorkerLoad(running=len(self.running), waiting=waiting, steps=self.steps)

    def _step(self) -> None:
        self.running = [sequence for sequence in self.running if not sequence.gone]
        while self.waiting and len(self.running) < self.pace.seats:
            sequence = self.waiting.popleft()
            if not sequence.gone:
                self.running.append(sequence)
        self.steps += bool(self.running)
        frames: dict[asyncio.Queue[decode_pb2.DecodeFrame], decode_pb2.DecodeFrame] = {}
        for sequence in self.running:
            frame = frames.setdefault(sequence.frames, decode_pb2.DecodeFrame())
            frame.leg_ids.append(sequence.leg_id)
            frame.samples.append(0)
            frame.tokens.append(TOKEN)
            sequence.position += 1
            if sequence.position >= sequence.max_tokens:
                sequence.gone = True
                frame.finished.add(leg_id=sequence.leg_id, reason=common_pb2.FINISH_REASON_LENGTH)
        for queue, frame in frames.items():
            queue.put_nowait(frame)


@dataclass(slots=True, eq=False)
class _Prefiller:
    """Prompts in the order in which they came, from whichever router."""

    pace: Pace
    decoder: _Decoder
    prompts: asyncio.Queue[_Prompt] = field(default_factory=asyncio.Queue)
    cancelled: set[tuple[int, int]] = field(default_factory=set)
    pending_tokens: int = 0
    steps: int = 0

    async def run(self) -> None:
        clock = asyncio.get_running_loop().time
        free_s = clock()
        while True:
            prompt = await self.prompts.get()
            key = (id(prompt.frames), prompt.leg_id)
            if key in self.cancelled:
                self.cancelled.remove(key)
                self.pending_tokens -= prompt.tokens
                continue
            queue_s = clock() - prompt.came_s
            # Counted from when the one before was to be done, so that late wake-ups do not add up.
            free_s = max(free_s, clock() - 0.005) + prompt.tokens / self.pace.prefill_tokens_per_s
            await asyncio.sleep(max(0.0, free_s - clock()))
            # As an engine counts: what is being computed is not computed yet.
            self.pending_tokens -= prompt.tokens
            self.steps += 1
            first = common_pb2.SampledToken(token=TOKEN)
            prompt.frames.put_nowait(
                prefill_pb2.PrefillFrame(
                    first_tokens=[
                        prefill_pb2.FirstTokens(
                            leg_id=prompt.leg_id,
                            tokens=[first],
                            queue_s=queue_s,
                            prefill_s=prompt.tokens / self.pace.prefill_tokens_per_s,
                        )
                    ],
                    handed_off=[
                        prefill_pb2.HandedOff(leg_id=prompt.leg_id, blocks_sent=1, bytes_sent=1)
                    ],
                )
            )
            self.decoder.handed_over(prompt.xfer_id)

    def load(self) -> common_pb2.WorkerLoad:
        return common_pb2.WorkerLoad(
            waiting=self.prompts.qsize(),
            steps=self.steps,
            prefill_tokens_pending=self.pending_tokens,
        )


PrefillContext = grpc.aio.ServicerContext[prefill_pb2.PrefillCommand, prefill_pb2.PrefillFrame]
DecodeContext = grpc.aio.ServicerContext[decode_pb2.DecodeCommand, decode_pb2.DecodeFrame]


class _Prefill(prefill_pb2_grpc.PrefillServicer):
    def __init__(self, hello: WorkerHello, prefiller: _Prefiller) -> None:
        self._hello = hello
        self._prefiller = prefiller

    async def Serve(  # type: ignore[override]  # noqa: N802  # the stub's name
        self, request_iterator: AsyncIterator[prefill_pb2.PrefillCommand], context: PrefillContext
    ) -> None:
        await context.write(prefill_pb2.PrefillFrame(hello=hello_to_proto(self._hello)))
        frames: asyncio.Queue[prefill_pb2.PrefillFrame] = asyncio.Queue()

        def heartbeat() -> prefill_pb2.PrefillFrame:
            return prefill_pb2.PrefillFrame(load=self._prefiller.load())

        await _serve_frames(frames, heartbeat, context.write, self._read(request_iterator, frames))

    async def _read(
        self,
        commands: AsyncIterator[prefill_pb2.PrefillCommand],
        frames: asyncio.Queue[prefill_pb2.PrefillFrame],
    ) -> None:
        clock = asyncio.get_running_loop().time
        async for command in commands:
            if command.WhichOneof("command") == "cancel":
                self._prefiller.cancelled.add((id(frames), command.cancel.leg_id))
            elif command.WhichOneof("command") == "submit":
                request = command.submit.request
                permit = transfer_pb2.Permit.FromString(command.submit.permit.content)
                tokens = len(request.prompt_tokens) // 4  # 32-bit numbers
                self._prefiller.pending_tokens += tokens
                self._prefiller.prompts.put_nowait(
                    _Prompt(request.leg_id, tokens, permit.xfer_id, frames, clock())
                )


class _Decode(decode_pb2_grpc.DecodeServicer):
    def __init__(self, hello: WorkerHello, decoder: _Decoder) -> None:
        self._hello = hello
        self._decoder = decoder

    async def Serve(  # type: ignore[override]  # noqa: N802  # the stub's name
        self, request_iterator: AsyncIterator[decode_pb2.DecodeCommand], context: DecodeContext
    ) -> None:
        await context.write(decode_pb2.DecodeFrame(hello=hello_to_proto(self._hello)))
        frames: asyncio.Queue[decode_pb2.DecodeFrame] = asyncio.Queue()

        def heartbeat() -> decode_pb2.DecodeFrame:
            return decode_pb2.DecodeFrame(load=self._decoder.load())

        await _serve_frames(frames, heartbeat, context.write, self._read(request_iterator, frames))

    async def _read(
        self,
        commands: AsyncIterator[decode_pb2.DecodeCommand],
        frames: asyncio.Queue[decode_pb2.DecodeFrame],
    ) -> None:
        legs: dict[int, _Sequence] = {}
        async for command in commands:
            if command.WhichOneof("command") == "cancel":
                sequence = legs.pop(command.cancel.leg_id, None)
                if sequence is not None:
                    sequence.gone = True
            elif command.WhichOneof("command") == "expect":
                request = command.expect.request
                permit = transfer_pb2.Permit.FromString(command.expect.permit.content)
                sequence = _Sequence(request.leg_id, request.sampling.max_tokens, frames)
                legs[request.leg_id] = sequence
                self._decoder.expect(permit.xfer_id, sequence)
            else:  # a prompt that is cached here, as far as the router knows: computed at once
                request = command.generate.request
                sequence = _Sequence(
                    request.leg_id, request.sampling.max_tokens, frames, position=0
                )
                legs[request.leg_id] = sequence
                prefilled = decode_pb2.LocalPrefill(leg_id=request.leg_id)
                frames.put_nowait(decode_pb2.DecodeFrame(prefilled=[prefilled]))
                self._decoder.waiting.append(sequence)


async def _serve_frames(
    frames: asyncio.Queue[_Frame],
    heartbeat: Callable[[], _Frame],
    write: Callable[[_Frame], Awaitable[None]],
    reading: Awaitable[None],
) -> None:
    """Writes frames and heartbeats while commands are read."""
    reader = asyncio.ensure_future(reading)
    clock = asyncio.get_running_loop().time
    told_s = clock()
    try:
        while True:
            try:
                frame = await asyncio.wait_for(frames.get(), HEARTBEAT_S)
            except TimeoutError:
                frame = heartbeat()
                told_s = clock()
            await write(frame)
            if clock() - told_s > HEARTBEAT_S:
                told_s = clock()
                await write(heartbeat())
    finally:
        reader.cancel()


def _hello(name: str, role: Role, pace: Pace, transfer_address: str) -> WorkerHello:
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
        vocab_size=pace.vocab_size,
        num_blocks=1 << 20,
        max_num_seqs=pace.seats,
        transfer_address=transfer_address,
    )


async def _serve(directory: Path, pace: Pace) -> None:
    at_prefill, at_decode = addresses(directory)
    decoder = _Decoder(pace)
    prefiller = _Prefiller(pace, decoder)
    one, other = new_server(), new_server()
    prefill_pb2_grpc.add_PrefillServicer_to_server(
        _Prefill(_hello("prefill-0", Role.PREFILL, pace, ""), prefiller), one
    )
    decode_pb2_grpc.add_DecodeServicer_to_server(
        _Decode(_hello("decode-0", Role.DECODE, pace, at_decode), decoder), other
    )
    bind(one, at_prefill)
    bind(other, at_decode)
    await one.start()
    await other.start()
    await asyncio.gather(decoder.run(), prefiller.run())


def main() -> None:
    """Serves until it is ended."""
    uvloop.run(_serve(Path(sys.argv[1]), Pace(**json.loads(sys.argv[2]))))


if __name__ == "__main__":
    main()
