"""Workers without an engine that take their time as real ones do: `python -m bench.router.paced_workers DIRECTORY PACE`.

One prefill and one decode worker over real gRPC, for any number of routers. How they keep their pace stands in
`bench.router.pacing`.
"""

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import uvloop

from baton.rpc.block_feed import HEARTBEAT_S
from baton.rpc.hello import WorkerHello, hello_to_proto
from baton.rpc.v1 import worker_pb2, worker_pb2_grpc
from bench.router.fake_workers import (
    WorkerContext,
    hellos,
    serve_decode,
    serve_prefill,
    transfer_of,
)
from bench.router.pacing import Pace, PacedDecoder, PacedPrefiller, PacedPrompt, PacedSequence


class _Prefill(worker_pb2_grpc.WorkerServicer):
    def __init__(self, hello: WorkerHello, prefiller: PacedPrefiller) -> None:
        self._hello = hello
        self._prefiller = prefiller

    async def Serve(  # type: ignore[override]  # noqa: N802  # the stub's name
        self, request_iterator: AsyncIterator[worker_pb2.Command], context: WorkerContext
    ) -> None:
        await context.write(worker_pb2.Frame(hello=hello_to_proto(self._hello)))
        frames: asyncio.Queue[worker_pb2.Frame] = asyncio.Queue()

        def heartbeat() -> worker_pb2.Frame:
            return worker_pb2.Frame(load=self._prefiller.load())

        await _serve_frames(frames, heartbeat, context.write, self._read(request_iterator, frames))

    async def _read(
        self,
        commands: AsyncIterator[worker_pb2.Command],
        frames: asyncio.Queue[worker_pb2.Frame],
    ) -> None:
        clock = asyncio.get_running_loop().time
        async for command in commands:
            if command.WhichOneof("command") == "cancel":
                self._prefiller.cancelled.add((id(frames), command.cancel.leg_id))
            elif command.WhichOneof("command") == "prefill":
                request = command.prefill.request
                xfer_id = transfer_of(command.prefill.permit)
                tokens = len(request.prompt_tokens) // 4  # 32-bit numbers
                self._prefiller.pending_tokens += tokens
                self._prefiller.prompts.put_nowait(
                    PacedPrompt(request.leg_id, tokens, xfer_id, frames, clock())
                )


class _Decode(worker_pb2_grpc.WorkerServicer):
    def __init__(self, hello: WorkerHello, decoder: PacedDecoder) -> None:
        self._hello = hello
        self._decoder = decoder

    async def Serve(  # type: ignore[override]  # noqa: N802  # the stub's name
        self, request_iterator: AsyncIterator[worker_pb2.Command], context: WorkerContext
    ) -> None:
        await context.write(worker_pb2.Frame(hello=hello_to_proto(self._hello)))
        frames: asyncio.Queue[worker_pb2.Frame] = asyncio.Queue()

        def heartbeat() -> worker_pb2.Frame:
            return worker_pb2.Frame(load=self._decoder.load())

        await _serve_frames(frames, heartbeat, context.write, self._read(request_iterator, frames))

    async def _read(
        self,
        commands: AsyncIterator[worker_pb2.Command],
        frames: asyncio.Queue[worker_pb2.Frame],
    ) -> None:
        legs: dict[int, PacedSequence] = {}
        async for command in commands:
            if command.WhichOneof("command") == "cancel":
                sequence = legs.pop(command.cancel.leg_id, None)
                if sequence is not None:
                    sequence.gone = True
            elif command.WhichOneof("command") == "receive":
                request = command.receive.request
                xfer_id = transfer_of(command.receive.permit)
                sequence = PacedSequence(request.leg_id, request.sampling.max_tokens, frames)
                legs[request.leg_id] = sequence
                self._decoder.expect(xfer_id, sequence)
            else:  # a prompt that is cached here, as far as the router knows: computed at once
                request = command.generate.request
                sequence = PacedSequence(
                    request.leg_id, request.sampling.max_tokens, frames, position=0
                )
                legs[request.leg_id] = sequence
                prefilled = worker_pb2.Prefilled(leg_id=request.leg_id)
                frames.put_nowait(worker_pb2.Frame(prefilled=[prefilled]))
                self._decoder.waiting.append(sequence)


async def _serve_frames(
    frames: asyncio.Queue[worker_pb2.Frame],
    heartbeat: Callable[[], worker_pb2.Frame],
    write: Callable[[worker_pb2.Frame], Awaitable[None]],
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


async def _serve(directory: Path, pace: Pace) -> None:
    decoder = PacedDecoder(pace)
    prefiller = PacedPrefiller(pace, decoder)
    prefill, decode = hellos(directory, vocab_size=pace.vocab_size, max_num_seqs=pace.seats)
    _servers = [
        await serve_prefill(directory, _Prefill(prefill, prefiller)),
        await serve_decode(directory, _Decode(decode, decoder)),
    ]
    await asyncio.gather(decoder.run(), prefiller.run())


def main() -> None:
    """Serves until it is ended."""
    uvloop.run(_serve(Path(sys.argv[1]), Pace(**json.loads(sys.argv[2]))))


if __name__ == "__main__":
    main()
