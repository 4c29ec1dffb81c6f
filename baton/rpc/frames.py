"""A worker's half of its stream with one router: commands in one by one, frames out in batches.

Whatever has become pending while the last frame was being written leaves in the next one: a router that keeps up gets a
frame per engine step, a slower one gets fewer and larger frames.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Generic, NewType, Protocol, TypeVar

import grpc

from baton.blocks import BlockReport
from baton.errors import OverloadedError
from baton.generation import WorkerLoad
from baton.ids import LegId
from baton.rpc.block_feed import BlockFeed
from baton.telemetry.logs import get_logger

StreamId = NewType("StreamId", int)
"""One router's stream, as the worker counts them."""

LegKey = tuple[StreamId, LegId]
"""One leg: routers number theirs themselves."""

LOAD_INTERVAL_S = 0.2
HEARTBEAT_S = 0.5
"""A router hears at least so often from a worker that is well, whether or not there is news."""

MAX_PENDING = 1_000_000

_log = get_logger(__name__)

Command = TypeVar("Command")
Frame = TypeVar("Frame")
Frame_co = TypeVar("Frame_co", covariant=True)


class FrameBuilder(Protocol[Frame_co]):
    """Collects what the next frame carries."""

    def pending(self) -> int:
        """How many entries wait."""

    def build(self, load: WorkerLoad | None, blocks: BlockReport | None) -> Frame_co:
        """A frame with what waits and, unless None, a report on the load and one on the blocks."""


class FrameStream(Generic[Frame]):
    """What waits to be sent to one router. Fill `builder`, then `wake`.

    Args:
        builder: Of this stream alone.
        blocks: What the router is to be told of this worker's blocks; None where another stream tells it.
    """

    def __init__(self, builder: FrameBuilder[Frame], blocks: BlockFeed | None = None) -> None:
        self._builder = builder
        self._blocks = blocks
        self._load: WorkerLoad | None = None
        self._reported = WorkerLoad()
        self._reported_s = float("-inf")
        self._ready = asyncio.Event()

    def report(self, load: WorkerLoad, now_s: float) -> None:
        """Reports the load if it changed in more than its steps, or if the last report is old."""
        if load == self._reported:
            wait_s = HEARTBEAT_S
        elif _but_for_steps(load, self._reported) == self._reported:
            wait_s = LOAD_INTERVAL_S
        else:
            wait_s = 0.0
        if now_s - self._reported_s < wait_s:
            return
        self._load, self._reported, self._reported_s = load, load, now_s
        self._ready.set()

    def wake(self) -> None:
        """Lets what is in the builder, or to be told of the blocks, go out."""
        self._ready.set()

    def send_snapshot(self) -> None:
        """Tells of all blocks anew: the router has lost count."""
        if self._blocks is not None:
            self._blocks.restart()
            self.wake()

    async def next(self) -> Frame:
        """Waits until something is pending and takes it all; of the blocks only as much as one report holds.

        Raises:
            OverloadedError: The router reads so slowly that too much has piled up.
        """
        await self._ready.wait()
        self._ready.clear()
        if self._builder.pending() > MAX_PENDING:
            raise OverloadedError("the router does not read what it asked for")
        load, self._load = self._load, None
        blocks = None if self._blocks is None else self._blocks.next()
        frame = self._builder.build(load, blocks)
        if self._blocks is not None and self._blocks.waits:
            self._ready.set()
        return frame


def _but_for_steps(load: WorkerLoad, other: WorkerLoad) -> WorkerLoad:
    """`load` with what `other` says of steps, which differs with each of them."""
    return replace(
        load,
        steps=other.steps,
        step_s=other.step_s,
        step_sequences=other.step_sequences,
        step_context_tokens=other.step_context_tokens,
    )


async def serve_stream(
    stream: FrameStream[Frame],
    hello: Frame,
    commands: AsyncIterator[Command],
    context: grpc.aio.ServicerContext[Command, Frame],
    on_command: Callable[[Command], None],
) -> None:
    """Greets the router, then carries frames and commands until either side ends the stream."""
    await context.write(hello)
    reading = asyncio.create_task(_read(commands, on_command))
    writing = asyncio.create_task(_write(stream, context))
    try:
        await asyncio.wait({reading, writing}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        reading.cancel()
        writing.cancel()
        outcomes = await asyncio.gather(reading, writing, return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, Exception):
                _log.warning("a router's stream ended", reason=str(outcome))


async def _read(commands: AsyncIterator[Command], on_command: Callable[[Command], None]) -> None:
    async for command in commands:
        on_command(command)


async def _write(
    stream: FrameStream[Frame], context: grpc.aio.ServicerContext[Command, Frame]
) -> None:
    while True:
        await context.write(await stream.next())
