import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest

from baton.blocks import BlockChanges, BlockReport
from baton.clock import ManualClock
from baton.generation import WorkerLoad
from baton.ids import BlockKey
from baton.rpc.block_feed import HeldBlocks
from baton.rpc.frames import StreamId
from baton.rpc.router_streams import RouterStreams

Frame = tuple[str, BlockReport | None]
HELLO: Frame = ("hello", None)


@dataclass
class Builder:
    said: list[str] = field(default_factory=list)

    def pending(self) -> int:
        return len(self.said)

    def build(self, load: WorkerLoad | None, blocks: BlockReport | None) -> Frame:
        said, self.said = " ".join(self.said), []
        return said, blocks


class Router:
    """A router's end: what it says goes into `commands`, what it hears lies in `heard`."""

    def __init__(self) -> None:
        self.commands: asyncio.Queue[str | None] = asyncio.Queue()
        self.heard: asyncio.Queue[Frame] = asyncio.Queue()

    async def write(self, frame: Frame) -> None:
        self.heard.put_nowait(frame)

    async def says(self) -> AsyncIterator[str]:
        while (command := await self.commands.get()) is not None:
            yield command


@pytest.fixture
def held() -> HeldBlocks:
    return HeldBlocks()


@pytest.fixture
def streams(held: HeldBlocks) -> RouterStreams[Builder, Frame]:
    return RouterStreams(
        hello=HELLO, new_builder=Builder, load=WorkerLoad, held=held, clock=ManualClock()
    )


class Served:
    """A router that is being served, and what the service was told of it."""

    def __init__(self, streams: RouterStreams[Builder, Frame]) -> None:
        self.router = Router()
        self.told: list[tuple[StreamId, str]] = []
        self.known_at_end = False
        self._streams = streams
        self.done = asyncio.create_task(
            streams.serve(
                self.router.says(),
                self.router,  # type: ignore[arg-type]  # all of a context that is used
                on_command=lambda stream, command: self.told.append((stream, command)),
                on_gone=self._gone,
            )
        )

    def _gone(self, stream: StreamId) -> None:
        self.told.append((stream, "gone"))
        self.known_at_end = self._streams.get(stream) is not None

    async def end(self) -> None:
        self.router.commands.put_nowait(None)
        await self.done


async def test_a_router_is_greeted_and_then_told_of_all_blocks(streams, held: HeldBlocks):
    held.apply(BlockChanges(stored=(BlockKey(b"a" * 16),)))
    served = Served(streams)
    assert await served.router.heard.get() == HELLO
    _, blocks = await served.router.heard.get()
    assert blocks is not None
    assert (blocks.snapshot, blocks.stored) == (True, b"a" * 16)
    await served.end()


async def test_commands_come_with_their_stream_and_its_end_is_told_last(streams):
    one, other = Served(streams), Served(streams)
    one.router.commands.put_nowait("go")
    await one.end()
    await other.end()
    assert one.told == [(StreamId(1), "go"), (StreamId(1), "gone")]
    assert other.told == [(StreamId(2), "gone")]


async def test_a_stream_is_known_until_its_end_has_been_told(streams):
    served = Served(streams)
    await served.router.heard.get()
    assert streams.ids() == [StreamId(1)]
    await served.end()
    assert served.known_at_end
    assert streams.ids() == []


async def test_changed_blocks_reach_every_router_and_one_that_is_gone_costs_nothing(streams):
    here, gone = Served(streams), Served(streams)
    for served in (here, gone):
        await served.router.heard.get()
        await served.router.heard.get()
    await gone.end()
    streams.blocks_changed(BlockChanges(stored=(BlockKey(b"b" * 16),)))
    _, blocks = await here.router.heard.get()
    assert blocks is not None
    assert (blocks.snapshot, blocks.stored) == (False, b"b" * 16)
    await here.end()


async def test_where_another_service_tells_of_blocks_nothing_is_told_here():
    streams: RouterStreams[Builder, Frame] = RouterStreams(
        hello=HELLO, new_builder=Builder, load=WorkerLoad, held=None, clock=ManualClock()
    )
    served = Served(streams)
    await served.router.heard.get()
    (stream,) = streams
    streams.blocks_changed(BlockChanges(stored=(BlockKey(b"b" * 16),)))
    streams.send_snapshot(StreamId(1))
    stream.builder.said.append("token")
    stream.frames.wake()
    reports = [await served.router.heard.get()]
    while reports[-1][0] != "token":
        reports.append(await served.router.heard.get())
    assert all(blocks is None for _, blocks in reports)
    await served.end()
