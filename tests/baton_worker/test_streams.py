import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from baton.blocks import BlockChanges
from baton.clock import ManualClock
from baton.errors import OverloadedError
from baton.generation import FinishReason, TokenLogprobs, WorkerLoad
from baton.ids import BlockKey, Incarnation, LayerName, LegId, Role, WorkerId, WorkerIdentity
from baton.layout import KvLayout
from baton.rpc.block_feed import HEARTBEAT_S, HeldBlocks
from baton.rpc.hello import WorkerHello, hello_from_proto
from baton.rpc.reports import load_from_proto
from baton.rpc.v1 import worker_pb2
from baton_worker import streams as module
from baton_worker.legs import StreamId
from baton_worker.messages import TokensMessage
from baton_worker.streams import LOAD_INTERVAL_S, RouterStream, RouterStreams
from tests.waits import soon

HELLO = WorkerHello(
    identity=WorkerIdentity(worker_id=WorkerId("w"), incarnation=Incarnation(1)),
    role=Role.HYBRID,
    layout=KvLayout(
        model_fingerprint="f",
        dtype="float32",
        block_tokens=4,
        num_kv_heads=1,
        head_dim=1,
        layers=(LayerName("a"),),
    ),
    max_model_len=100,
    vocab_size=10,
    num_blocks=10,
    max_num_seqs=4,
)


def drew(stream: RouterStream, *tokens: int) -> None:
    message = TokensMessage(
        stream=StreamId(1),
        leg_ids=[LegId(1)] * len(tokens),
        samples=[0] * len(tokens),
        tokens=list(tokens),
    )
    stream.builder.tokens(message)
    stream.wake()


async def load_of(stream: RouterStream) -> WorkerLoad | None:
    frame = await soon(stream.next())
    return load_from_proto(frame.load) if frame.HasField("load") else None


@pytest.fixture
async def stream() -> RouterStream:
    """One whose router has been told of all blocks."""
    stream = RouterStream(HeldBlocks().open_feed())
    stream.wake()
    await soon(stream.next())
    return stream


async def test_all_that_is_pending_leaves_in_one_frame(stream: RouterStream):
    drew(stream, 1, 2)
    drew(stream, 3)
    stream.report(WorkerLoad(running=1), 0.0)
    frame = await soon(stream.next())
    assert list(frame.tokens) == [1, 2, 3]
    assert frame.load.running == 1


async def test_a_changed_load_is_reported_at_once_and_once(stream: RouterStream):
    stream.report(WorkerLoad(running=1), 0.0)
    assert await load_of(stream) == WorkerLoad(running=1)
    stream.wake()
    assert await load_of(stream) is None


async def test_more_steps_and_other_blocks_alone_are_reported_every_so_often(stream: RouterStream):
    stream.report(WorkerLoad(running=1, steps=1), 0.0)
    await soon(stream.next())
    for of_steps in (
        {"steps": 2},
        {"step_s": 0.1},
        {"step_sequences": 3},
        {"step_context_tokens": 9},
        {"steps": 2, "blocks_free": 7, "blocks_used": 2, "blocks_cached": 1},
        {"prefix_hit_tokens": 4, "prefix_query_tokens": 9, "pool_hit_tokens": 2},
    ):
        stream.report(replace(WorkerLoad(running=1, steps=1), **of_steps), LOAD_INTERVAL_S / 2)
    stream.wake()
    assert await load_of(stream) is None
    later = WorkerLoad(running=1, steps=3)
    stream.report(later, LOAD_INTERVAL_S)
    assert await load_of(stream) == later


async def test_a_load_that_stays_the_same_is_repeated_as_a_sign_of_life(stream: RouterStream):
    load = WorkerLoad(running=1)
    stream.report(load, 0.0)
    await soon(stream.next())
    stream.report(load, HEARTBEAT_S / 2)
    stream.wake()
    assert await load_of(stream) is None
    stream.report(load, HEARTBEAT_S)
    assert await load_of(stream) == load


async def test_a_router_that_does_not_read_is_given_up(
    stream: RouterStream, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(module, "MAX_PENDING", 2)
    drew(stream, 1, 2, 3)
    with pytest.raises(OverloadedError):
        await soon(stream.next())


class Router:
    """A router's end: what it says goes into `commands`, what it hears lies in `heard`."""

    def __init__(self) -> None:
        self.commands: asyncio.Queue[worker_pb2.Command | None] = asyncio.Queue()
        self.heard: asyncio.Queue[worker_pb2.Frame] = asyncio.Queue()

    async def write(self, frame: worker_pb2.Frame) -> None:
        self.heard.put_nowait(frame)

    async def says(self) -> AsyncIterator[worker_pb2.Command]:
        while (command := await self.commands.get()) is not None:
            yield command


@pytest.fixture
def streams() -> RouterStreams:
    return RouterStreams(HELLO, WorkerLoad, ManualClock())


class Served:
    """A router that is being served, and what the service was told of it."""

    def __init__(self, streams: RouterStreams) -> None:
        self.router = Router()
        self.told: list[tuple[StreamId, str]] = []
        self.known_at_end = False
        self._streams = streams
        self.done = asyncio.create_task(
            streams.serve(
                self.router.says(),
                self.router,  # type: ignore[arg-type]  # all of a context that is used
                on_command=lambda stream, command: self.told.append(
                    (stream, command.WhichOneof("command") or "")
                ),
                on_gone=self._gone,
            )
        )

    def _gone(self, stream: StreamId) -> None:
        self.told.append((stream, "gone"))
        self.known_at_end = self._streams.get(stream) is not None

    async def end(self) -> None:
        self.router.commands.put_nowait(None)
        await self.done


async def test_a_router_is_greeted_and_then_told_of_all_blocks(streams: RouterStreams):
    streams.blocks_changed(BlockChanges(stored=(BlockKey(b"a" * 16),)))
    served = Served(streams)
    assert hello_from_proto((await soon(served.router.heard.get())).hello) == HELLO
    blocks = (await soon(served.router.heard.get())).blocks
    assert (blocks.snapshot, blocks.stored) == (True, b"a" * 16)
    await served.end()


async def test_commands_come_with_their_stream_and_its_end_is_told_last(streams: RouterStreams):
    one, other = Served(streams), Served(streams)
    one.router.commands.put_nowait(worker_pb2.Command(generate=worker_pb2.Generate()))
    await one.end()
    await other.end()
    assert one.told == [(StreamId(1), "generate"), (StreamId(1), "gone")]
    assert other.told == [(StreamId(2), "gone")]


async def test_a_stream_is_known_until_its_end_has_been_told(streams: RouterStreams):
    served = Served(streams)
    await soon(served.router.heard.get())
    assert streams.ids() == [StreamId(1)]
    await served.end()
    assert served.known_at_end
    assert streams.ids() == []


async def test_changed_blocks_reach_every_router_and_one_that_is_gone_costs_nothing(
    streams: RouterStreams,
):
    here, gone = Served(streams), Served(streams)
    for served in (here, gone):
        await soon(served.router.heard.get())
        await soon(served.router.heard.get())
    await gone.end()
    streams.blocks_changed(BlockChanges(stored=(BlockKey(b"b" * 16),)))
    blocks = (await soon(here.router.heard.get())).blocks
    assert (blocks.snapshot, blocks.stored) == (False, b"b" * 16)
    await here.end()


async def test_a_role_that_changed_is_told_to_who_is_there_and_to_who_comes(
    streams: RouterStreams,
):
    here = Served(streams)
    for _ in range(2):
        await soon(here.router.heard.get())
    decodes = replace(HELLO, role=Role.DECODE)
    streams.greet_again(decodes)
    assert hello_from_proto((await soon(here.router.heard.get())).hello) == decodes
    comes = Served(streams)
    assert hello_from_proto((await soon(comes.router.heard.get())).hello) == decodes
    await here.end()
    await comes.end()


async def test_columns_of_several_steps_keep_their_figures_and_ends(stream: RouterStream):
    figures = TokenLogprobs(logprob=-0.5, rank=2)
    for step, finish in ((0, {}), (1, {1: FinishReason.STOP})):
        stream.builder.tokens(
            TokensMessage(
                stream=StreamId(1),
                leg_ids=[LegId(1), LegId(2)],
                samples=[0, 3],
                tokens=[10 * step + 1, 10 * step + 2],
                finish_reasons=finish,
                logprobs={1: figures} if step else {},
            )
        )
    stream.wake()
    frame = await soon(stream.next())
    assert (list(frame.leg_ids), list(frame.samples)) == ([1, 2, 1, 2], [0, 3, 0, 3])
    assert list(frame.tokens) == [1, 2, 11, 12]
    assert [entry.rank for entry in frame.logprobs] == [0, 0, 0, 2]
    assert [(end.leg_id, end.sample) for end in frame.finished] == [(2, 3)]
