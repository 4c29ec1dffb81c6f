"""All routers' streams with a worker: which are open, and what each of them is told.

Commands come in one by one, frames go out in batches: whatever has become pending while the last frame was being
written leaves in the next one. A router that keeps up gets a frame per engine step,
a slower one gets fewer and larger frames.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import fields
from functools import partial
from operator import attrgetter

import grpc

from baton.blocks import BlockChanges
from baton.clock import Clock
from baton.errors import OverloadedError
from baton.generation import WorkerLoad
from baton.rpc.block_feed import HEARTBEAT_S, BlockFeed, HeldBlocks
from baton.rpc.hello import WorkerHello, hello_to_proto
from baton.rpc.v1 import worker_pb2 as pb
from baton.telemetry.logs import get_logger
from baton_worker.frames import FrameBuilder
from baton_worker.legs import StreamId

Context = grpc.aio.ServicerContext[pb.Command, pb.Frame]

LOAD_INTERVAL_S = 0.2
MAX_PENDING = 1_000_000

_OF_STEPS = frozenset(
    {
        *("steps", "step_s", "step_sequences", "step_context_tokens"),
        *("blocks_free", "blocks_used", "blocks_cached"),
        *("prefix_hit_tokens", "prefix_query_tokens", "pool_hit_tokens"),
    }
)
_without_steps = attrgetter(*(f.name for f in fields(WorkerLoad) if f.name not in _OF_STEPS))
"""Of a load: all but what it says of steps, and of the blocks that sequences take and give with them, which differs
with nearly each of them.
"""

_log = get_logger(__name__)


class RouterStream:
    """What waits to be sent to one router. Fill `builder`, then `wake`.

    Args:
        blocks: What the router is to be told of this worker's blocks.
    """

    def __init__(self, blocks: BlockFeed) -> None:
        self.builder = FrameBuilder()
        self.blocks = blocks
        self._load: WorkerLoad | None = None
        self._reported = WorkerLoad()
        self._reported_s = float("-inf")
        self._ready = asyncio.Event()

    def report(self, load: WorkerLoad, now_s: float) -> None:
        """Reports the load if it changed in more than its steps and blocks, or if the last report is old."""
        if load == self._reported:
            wait_s = HEARTBEAT_S
        elif _without_steps(load) == _without_steps(self._reported):
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

    async def next(self) -> pb.Frame:
        """Waits until something is pending and takes it all; of the blocks only as much as one report holds.

        Raises:
            OverloadedError: The router reads so slowly that too much has piled up.
        """
        await self._ready.wait()
        self._ready.clear()
        if self.builder.pending() > MAX_PENDING:
            raise OverloadedError("the router does not read what it asked for")
        load, self._load = self._load, None
        frame = self.builder.build(load, self.blocks.next())
        if self.blocks.waits:
            self._ready.set()
        return frame


class RouterStreams:
    """For one event loop.

    Args:
        hello: Every router's first frame.
        load: The worker's load as it is now.
        clock: Monotonic.
    """

    def __init__(self, hello: WorkerHello, load: Callable[[], WorkerLoad], clock: Clock) -> None:
        self._hello = hello
        self._load = load
        self._clock = clock
        self._held = HeldBlocks()
        self._streams: dict[StreamId, RouterStream] = {}
        self._next = 0

    def __iter__(self) -> Iterator[RouterStream]:
        """Those that are open."""
        return iter(self._streams.values())

    def ids(self) -> list[StreamId]:
        """Of those that are open."""
        return list(self._streams)

    def get(self, stream: StreamId) -> RouterStream | None:
        """That stream, None once it is over."""
        return self._streams.get(stream)

    async def serve(
        self,
        commands: AsyncIterator[pb.Command],
        context: Context,
        *,
        on_command: Callable[[StreamId, pb.Command], None],
        on_gone: Callable[[StreamId], None],
    ) -> None:
        """Serves one more router until either side ends the stream; `on_gone` is called however that comes."""
        stream_id, stream = self._open()
        try:
            await context.write(pb.Frame(hello=hello_to_proto(self._hello)))
            await _carry(stream, commands, context, partial(on_command, stream_id))
        finally:
            on_gone(stream_id)
            del self._streams[stream_id]
            self._held.close_feed(stream.blocks)

    def report_load(self) -> None:
        """Tells every router the load, as often as `RouterStream.report` finds it worth telling."""
        load, now_s = self._load(), self._clock.now_s()
        for stream in self:
            stream.report(load, now_s)

    def blocks_changed(self, changes: BlockChanges) -> None:
        """Tells every router how the engine's blocks changed in one step."""
        self._held.apply(changes)
        for stream in self:
            stream.wake()

    def send_snapshot(self, stream_id: StreamId) -> None:
        """A router has lost count of the blocks: it is told of all of them anew."""
        stream = self._streams[stream_id]
        stream.blocks.restart()
        stream.wake()

    def greet_again(self, hello: WorkerHello) -> None:
        """Tells every router what the worker is from now on."""
        self._hello = hello
        for stream in self:
            stream.builder.hello(hello)
            stream.wake()

    def _open(self) -> tuple[StreamId, RouterStream]:
        self._next += 1
        stream_id = StreamId(self._next)
        stream = RouterStream(self._held.open_feed())
        self._streams[stream_id] = stream
        stream.report(self._load(), self._clock.now_s())
        return stream_id, stream


async def _carry(
    stream: RouterStream,
    commands: AsyncIterator[pb.Command],
    context: Context,
    on_command: Callable[[pb.Command], None],
) -> None:
    """Carries frames and commands until either side ends the stream."""
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


async def _read(
    commands: AsyncIterator[pb.Command], on_command: Callable[[pb.Command], None]
) -> None:
    async for command in commands:
        on_command(command)


async def _write(stream: RouterStream, context: Context) -> None:
    while True:
        await context.write(await stream.next())
