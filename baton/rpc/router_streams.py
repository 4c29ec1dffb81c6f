"""All routers' streams with one service of a worker: who is there, and what each of them is told.

What a router says and what its frames carry is the service's business; how one stream is written is that of `frames.py`.
"""

from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from typing import Any, Generic, TypeVar

import grpc

from baton.blocks import BlockChanges
from baton.clock import Clock
from baton.generation import WorkerLoad
from baton.rpc.block_feed import BlockFeed, HeldBlocks
from baton.rpc.frames import Command, Frame, FrameBuilder, FrameStream, StreamId, serve_stream

Builder = TypeVar("Builder", bound=FrameBuilder[Any])


class RouterStream(Generic[Builder, Frame]):
    """One router's stream: fill `builder`, then wake `frames`."""

    def __init__(self, builder: Builder, blocks: BlockFeed | None) -> None:
        self.builder = builder
        self.blocks = blocks
        self.frames: FrameStream[Frame] = FrameStream(builder, blocks)


class RouterStreams(Generic[Builder, Frame]):
    """For one event loop.

    Args:
        hello: Every router's first frame.
        new_builder: Of the frames after it; one per stream.
        load: The worker's load as it is now.
        held: The worker's blocks; None where another service over the same engine tells routers of them.
        clock: Monotonic.
    """

    def __init__(
        self,
        *,
        hello: Frame,
        new_builder: Callable[[], Builder],
        load: Callable[[], WorkerLoad],
        held: HeldBlocks | None,
        clock: Clock,
    ) -> None:
        self._hello = hello
        self._new_builder = new_builder
        self._load = load
        self._held = held
        self._clock = clock
        self._streams: dict[StreamId, RouterStream[Builder, Frame]] = {}
        self._next = 0

    def __iter__(self) -> Iterator[RouterStream[Builder, Frame]]:
        """Those that are open."""
        return iter(self._streams.values())

    def ids(self) -> list[StreamId]:
        """Of those that are open."""
        return list(self._streams)

    def get(self, stream: StreamId) -> RouterStream[Builder, Frame] | None:
        """That stream, None once it is over."""
        return self._streams.get(stream)

    async def serve(
        self,
        commands: AsyncIterator[Command],
        context: grpc.aio.ServicerContext[Command, Frame],
        *,
        on_command: Callable[[StreamId, Command], None],
        on_gone: Callable[[StreamId], None],
    ) -> None:
        """Serves one more router until either side ends the stream; `on_gone` is called however that comes."""
        stream_id, stream = self._open()
        try:
            heard = partial(on_command, stream_id)
            await serve_stream(stream.frames, self._hello, commands, context, heard)
        finally:
            on_gone(stream_id)
            del self._streams[stream_id]
            if self._held is not None and stream.blocks is not None:
                self._held.close_feed(stream.blocks)

    def report_load(self) -> None:
        """Tells every router the load, as often as `FrameStream.report` finds it worth telling."""
        load, now_s = self._load(), self._clock.now_s()
        for stream in self:
            stream.frames.report(load, now_s)

    def blocks_changed(self, changes: BlockChanges) -> None:
        """Tells every router how the engine's blocks changed in one step."""
        if self._held is None:
            return
        self._held.apply(changes)
        for stream in self:
            stream.frames.wake()

    def send_snapshot(self, stream: StreamId) -> None:
        """A router has lost count of the blocks."""
        self._streams[stream].frames.send_snapshot()

    def _open(self) -> tuple[StreamId, RouterStream[Builder, Frame]]:
        self._next += 1
        stream_id = StreamId(self._next)
        blocks = None if self._held is None else self._held.open_feed()
        stream: RouterStream[Builder, Frame] = RouterStream(self._new_builder(), blocks)
        self._streams[stream_id] = stream
        stream.frames.report(self._load(), self._clock.now_s())
        return stream_id, stream
