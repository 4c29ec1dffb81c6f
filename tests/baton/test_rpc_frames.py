from dataclasses import dataclass, field

import pytest

from baton.blocks import BlockReport
from baton.errors import OverloadedError
from baton.generation import WorkerLoad
from baton.rpc import frames
from baton.rpc.frames import HEARTBEAT_S, LOAD_INTERVAL_S, FrameStream

Frame = tuple[list[int], WorkerLoad | None]


@dataclass
class Builder:
    entries: list[int] = field(default_factory=list)

    def pending(self) -> int:
        return len(self.entries)

    def build(self, load: WorkerLoad | None, blocks: BlockReport | None) -> Frame:
        entries, self.entries = self.entries, []
        return entries, load


@pytest.fixture
def builder() -> Builder:
    return Builder()


@pytest.fixture
def stream(builder: Builder) -> FrameStream[Frame]:
    return FrameStream(builder)


async def test_all_that_is_pending_leaves_in_one_frame(builder: Builder, stream):
    builder.entries += [1, 2]
    stream.wake()
    builder.entries.append(3)
    stream.wake()
    stream.report(WorkerLoad(running=1), 0.0)
    assert await stream.next() == ([1, 2, 3], WorkerLoad(running=1))


async def test_a_changed_load_is_reported_at_once_and_once(builder: Builder, stream):
    stream.report(WorkerLoad(running=1), 0.0)
    assert (await stream.next())[1] == WorkerLoad(running=1)
    stream.wake()
    assert (await stream.next())[1] is None


async def test_more_steps_alone_are_reported_every_so_often(builder: Builder, stream):
    stream.report(WorkerLoad(running=1, steps=1), 0.0)
    await stream.next()
    stream.report(WorkerLoad(running=1, steps=2), LOAD_INTERVAL_S / 2)
    stream.wake()
    assert (await stream.next())[1] is None
    later = WorkerLoad(running=1, steps=3)
    stream.report(later, LOAD_INTERVAL_S)
    assert (await stream.next())[1] == later


async def test_a_load_that_stays_the_same_is_repeated_as_a_sign_of_life(stream):
    load = WorkerLoad(running=1)
    stream.report(load, 0.0)
    await stream.next()
    stream.report(load, HEARTBEAT_S / 2)
    stream.wake()
    assert (await stream.next())[1] is None
    stream.report(load, HEARTBEAT_S)
    assert (await stream.next())[1] == load


async def test_a_router_that_does_not_read_is_given_up(
    builder: Builder, stream, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(frames, "MAX_PENDING", 2)
    builder.entries += [1, 2, 3]
    stream.wake()
    with pytest.raises(OverloadedError):
        await stream.next()
