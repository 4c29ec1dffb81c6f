import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
import pytest
from starlette.types import Message

from baton.errors import UnavailableError
from router.generation.generation_run import merged
from router.http.errors import ClientGoneError
from router.http.streaming import KEEP_ALIVE, EventStream, one_line_each, while_connected
from tests.waits import soon


async def _never() -> Message:
    await asyncio.Event().wait()
    raise AssertionError


def _ignore() -> None:
    pass


async def test_a_stream_makes_its_next_piece_only_when_the_last_one_is_sent():
    made = 0
    unsent: list[int] = []

    async def pieces() -> AsyncGenerator[bytes, None]:
        nonlocal made
        for _ in range(5):
            made += 1
            yield b"data: x\n\n"

    sent = 0

    async def send(message: Message) -> None:
        nonlocal sent
        await asyncio.sleep(0)
        if message.get("body"):
            sent += 1
            unsent.append(made - sent)

    await EventStream(pieces(), _ignore)({"path": "/"}, _never, send)
    assert (sent, unsent) == (5, [0] * 5)


async def test_a_stream_whose_client_leaves_is_closed_before_its_response_returns():
    waiting, left, closed = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def pieces() -> AsyncGenerator[bytes, None]:
        try:
            yield b"data: x\n\n"
            waiting.set()
            await asyncio.Event().wait()
        finally:
            closed.set()

    async def receive() -> Message:
        await soon(waiting.wait())
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        pass

    await EventStream(pieces(), left.set)({"path": "/"}, receive, send)
    assert closed.is_set()
    assert left.is_set()


async def test_work_is_cancelled_when_the_client_leaves():
    started, cancelled = asyncio.Event(), asyncio.Event()

    async def receive() -> Message:
        await soon(started.wait())
        return {"type": "http.disconnect"}

    async def work() -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    with pytest.raises(ClientGoneError):
        await while_connected(receive, work(), _ignore)
    assert cancelled.is_set()


async def test_work_that_ends_is_answered_though_the_client_is_silent():
    async def work() -> int:
        return 7

    assert await while_connected(_never, work(), _ignore) == 7


async def test_a_server_that_stops_cancels_the_work():
    started, cancelled = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    serving = asyncio.create_task(while_connected(_never, work(), _ignore))
    await soon(started.wait())
    serving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await serving
    assert cancelled.is_set()


async def _numbers(first: int, closed: list[int], gate: asyncio.Event) -> AsyncGenerator[int, None]:
    try:
        yield first
        await gate.wait()
        yield first + 1
    finally:
        closed.append(first)


async def test_merged_sources_all_come_through():
    closed: list[int] = []
    gate = asyncio.Event()
    gate.set()
    sources = [_numbers(first, closed, gate) for first in (10, 20, 30)]
    assert sorted([n async for n in merged(sources)]) == [10, 11, 20, 21, 30, 31]
    assert sorted(closed) == [10, 20, 30]


async def test_closing_merged_sources_closes_each():
    closed: list[int] = []
    stream = merged([_numbers(first, closed, asyncio.Event()) for first in (10, 20)])
    assert {await anext(stream), await anext(stream)} == {10, 20}
    await stream.aclose()
    assert sorted(closed) == [10, 20]


async def test_a_fault_of_one_source_closes_the_others_and_is_raised():
    closed: list[int] = []

    def fault() -> int:
        raise RuntimeError("broken")

    async def broken() -> AsyncGenerator[int, None]:
        yield fault()

    stream: Any = merged([_numbers(10, closed, asyncio.Event()), broken()])
    with pytest.raises(RuntimeError, match="broken"):
        async for _ in stream:
            pass
    assert closed == [10]


async def test_no_more_sources_are_begun_once_one_has_failed():
    begun = 0

    async def refused() -> AsyncGenerator[int, None]:
        nonlocal begun
        begun += 1
        if begun:
            raise RuntimeError("refused")
        yield 1

    with pytest.raises(RuntimeError, match="refused"):
        async for _ in merged([refused() for _ in range(100)]):
            pass
    assert begun < 20


@pytest.mark.parametrize("begun", [True, False], ids=["begun", "not begun"])
async def test_a_stream_without_pieces_is_kept_alive_until_there_are_more(begun: bool) -> None:
    alive = asyncio.Event()

    async def pieces() -> AsyncGenerator[bytes, None]:
        if begun:
            yield b"data: 1\n\n"
        await soon(alive.wait())
        yield b"data: 2\n\n"

    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)
        if message.get("body") in (b"event: ping\n\n", KEEP_ALIVE):
            alive.set()

    stream = EventStream(pieces(), _ignore, keep_alive=b"event: ping\n\n", interval_s=0.001)
    await stream({"path": "/"}, _never, send)
    assert sent.pop(0)["type"] == "http.response.start"
    said = [message["body"] for message in sent]
    if begun:
        assert said.pop(0) == b"data: 1\n\n"
    assert said[-2:] == [b"data: 2\n\n", b""]
    assert set(said[:-2]) == {b"event: ping\n\n" if begun else KEEP_ALIVE}


async def test_what_a_client_waited_before_its_stream_was_made_counts() -> None:
    alive = asyncio.Event()

    async def pieces() -> AsyncGenerator[bytes, None]:
        await soon(alive.wait())
        yield b"data: 1\n\n"

    async def send(message: Message) -> None:
        if message.get("body") == KEEP_ALIVE:
            alive.set()

    stream = EventStream(pieces(), _ignore, interval_s=600.0, waited_s=1800.0)
    await stream({"path": "/"}, _never, send)
    assert alive.is_set()


async def test_a_stream_that_began_without_pieces_tells_a_fault_as_an_event() -> None:
    alive = asyncio.Event()

    async def refused() -> AsyncGenerator[bytes, None]:
        await soon(alive.wait())
        if alive.is_set():
            raise UnavailableError("nobody is there")
        yield b""

    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)
        alive.set()

    await EventStream(refused(), _ignore, interval_s=0.001)({"path": "/"}, _never, send)
    assert [message["type"] for message in sent].count("http.response.start") == 1
    assert b'"nobody is there"' in sent[-2]["body"]


async def test_a_client_that_is_slow_is_not_sent_more_to_keep_it() -> None:
    asked, taken = asyncio.Event(), asyncio.Event()
    sent: list[bytes] = []

    async def pieces() -> AsyncGenerator[bytes, None]:
        yield b"data: 1\n\n"

    async def send(message: Message) -> None:
        sent.append(message.get("body", b""))
        if sent[-1].startswith(b"data"):
            asked.set()
            await soon(taken.wait())

    stream = EventStream(pieces(), _ignore, interval_s=0.0)
    serving = asyncio.create_task(stream({"path": "/"}, _never, send))
    await soon(asked.wait())
    for _ in range(100):  # in each it looks
        await asyncio.sleep(0)
    assert sent[-1] == b"data: 1\n\n"
    taken.set()
    await serving
    assert sent[-1] == b""


def test_what_unicode_takes_for_line_ends_is_escaped() -> None:
    said = "a\u2028b\u2029c\u0085d\u2026\u00e9"
    event = b"data: " + msgspec.json.encode({"content": said}) + b"\n\n"
    line, *rest = one_line_each(event).decode().splitlines()
    assert rest == [""]
    assert msgspec.json.decode(line.removeprefix("data: ")) == {"content": said}
    assert one_line_each(b"data: {}\n\n") == b"data: {}\n\n"
