"""Connections: kept for a while without a request, not for ever, and not at all once the router stops; and what counts
of clients that leave.
"""

import asyncio
import json
import socket
from contextlib import asynccontextmanager, suppress
from functools import partial

import httpx
import pytest

from baton.config.schema import RouterConfig
from baton.errors import BatonError
from baton.telemetry.metrics import new_registry
from router.http import protocol, server
from tests.router.served import listening, serve
from tests.waits import soon

pytestmark = pytest.mark.timeout(20)

KEEP_ALIVE_S = 0.3
_SAID = [{"role": "user", "content": "hi"}]
_GET = b"GET /health HTTP/1.1\r\nHost: x\r\n"


def completion(**fields: object) -> bytes:
    body = json.dumps({"model": "tiny", "prompt": "hi", "max_tokens": 50, **fields}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
    return head % len(body) + body


@asynccontextmanager
async def connection(url: str):
    reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rsplit(":", 1)[1]))
    try:
        yield reader, writer
    finally:
        writer.close()


async def answer(reader: asyncio.StreamReader) -> bytes:
    """One reply; empty when the server hangs up instead."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError as cut:
        return cut.partial
    length = next(line for line in head.split(b"\r\n") if line.startswith(b"content-length"))
    return head + await soon(reader.readexactly(int(length.split(b":")[1])))


@pytest.mark.parametrize(
    ("path", "asked", "sign"),
    [
        ("completions", {"prompt": "hi"}, b"\n\n:\n\n"),
        ("chat/completions", {"messages": _SAID}, b"\n\n:\n\n"),
        ("responses", {"input": "hi"}, b"\n\n:\n\n"),
        ("messages", {"messages": _SAID, "max_tokens": 50}, b'event: ping\ndata: {"type":"ping"}\n\n'),
    ],
)  # fmt: skip
async def test_a_stream_that_has_nothing_to_tell_for_a_while_is_kept_open(
    path: str, asked: dict[str, object], sign: bytes
) -> None:
    body = {"model": "tiny", "stream": True, **asked}
    async with (
        serve(sse_keep_alive_s=0.01) as served,
        listening(served.app) as url,
        httpx.AsyncClient(base_url=url) as client,
    ):
        served.says("hello world")
        served.generator.pause_after = 1
        async with client.stream("POST", f"/v1/{path}", json=body) as reply:
            got = b""
            async for piece in reply.aiter_raw():
                got += piece
                if sign in got.partition(b"data: ")[2]:
                    served.generator.gate.set()
        assert reply.status_code == 200
        assert sign in got.partition(b"data: ")[2]


async def test_a_connection_is_kept_for_the_next_request_and_closed_after_a_while():
    async with (
        serve() as served,
        listening(served.app, keep_alive_s=KEEP_ALIVE_S) as url,
        connection(url) as (reader, writer),
    ):
        for _ in range(3):
            writer.write(_GET + b"\r\n")
            assert b"200 OK" in await answer(reader)
        assert await answer(reader) == b""


@pytest.mark.parametrize("drip", [b"", b"\r\n"])
async def test_a_connection_on_which_no_request_comes_is_closed(drip: bytes):
    async with (
        serve() as served,
        listening(served.app, keep_alive_s=KEEP_ALIVE_S) as url,
        connection(url) as (reader, writer),
    ):
        closed = asyncio.create_task(reader.read())
        while not closed.done():  # bytes that begin no request do not count as one
            writer.write(drip)
            await asyncio.wait([closed], timeout=KEEP_ALIVE_S / 4)
        assert closed.result() == b""


async def test_a_request_whose_headers_never_end_is_closed(monkeypatch):
    monkeypatch.setattr(protocol, "MAX_HEAD_S", KEEP_ALIVE_S)
    async with (
        serve() as served,
        listening(served.app, keep_alive_s=60) as url,
        connection(url) as (reader, writer),
    ):
        writer.write(_GET)
        closed = asyncio.create_task(reader.read())
        while not closed.done():
            writer.write(b"X-A: b\r\n")
            await asyncio.wait([closed], timeout=KEEP_ALIVE_S / 4)
        assert closed.result() == b""


async def test_what_is_left_of_a_refused_body_does_not_keep_the_connection():
    async with (
        serve(max_body_bytes=100) as served,
        listening(served.app, keep_alive_s=KEEP_ALIVE_S) as url,
        connection(url) as (reader, writer),
    ):
        writer.write(b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n")
        assert b" 413 " in await answer(reader)
        closed = asyncio.create_task(reader.read())
        while not closed.done():
            writer.write(b" ")
            await asyncio.wait([closed], timeout=KEEP_ALIVE_S / 4)
        assert closed.result() == b""


async def test_a_body_that_does_not_come_in_time_is_408_and_the_connection_is_closed():
    async with (
        serve(http_body_timeout_s=KEEP_ALIVE_S) as served,
        listening(served.app, keep_alive_s=60) as url,
        connection(url) as (reader, writer),
    ):
        writer.write(b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n")
        closed = asyncio.create_task(reader.read())
        for _ in range(2):  # that some of it comes meanwhile does not count
            writer.write(b" ")
            await asyncio.wait([closed], timeout=KEEP_ALIVE_S / 4)
        reply = await closed
        assert b" 408 " in reply
        assert b'"code":"request_timeout"' in reply
        assert served.metric("baton_http_requests_total", route="/tokenize", status="408") == 1


async def test_an_answer_that_takes_longer_than_that_is_not_cut():
    async with (
        serve() as served,
        listening(served.app, keep_alive_s=KEEP_ALIVE_S) as url,
        connection(url) as (reader, writer),
    ):
        served.says("hello world and again")
        served.generator.pause_after = 2
        writer.write(completion())
        await soon(served.generator.paused.wait())
        writer.write(_GET)  # the next request, not yet whole
        await asyncio.sleep(2 * KEEP_ALIVE_S)
        served.generator.gate.set()
        assert b"hello world and again" in await answer(reader)
        writer.write(b"\r\n")
        assert b"200 OK" in await answer(reader)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_before_anything_is_sent_counts_as_499(stream: bool):
    async with serve() as served:
        served.says("hello")
        served.generator.pause_after = 0
        async with listening(served.app) as url, connection(url) as (_, writer):
            writer.write(completion(stream=stream))
            await soon(served.generator.paused.wait())
        # The server has stopped, so that its last request is counted.
        requests = partial(served.metric, "baton_http_requests_total", route="/v1/completions")
        assert (requests(status="499"), requests(status="500")) == (1, None)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("at_once", [True, False], ids=["at once", "later"])
async def test_a_client_that_leaves_with_another_request_sent_ahead_ends_the_first(
    stream: bool, at_once: bool
):
    first, second = completion(stream=stream), _GET + b"\r\n"
    async with serve() as served:
        served.says("hello")
        served.generator.pause_after = 0
        async with listening(served.app) as url:
            async with connection(url) as (_, writer):
                writer.write(first + second if at_once else first)
                await soon(served.generator.paused.wait())
                writer.write(b"" if at_once else second)
                await writer.drain()
            await soon(served.generator.cancelled.get())
        requests = partial(served.metric, "baton_http_requests_total", status="499")
        assert requests(route="/v1/completions") == 1


async def test_a_stream_that_fails_before_its_first_event_counts_as_500():
    async with serve() as served:
        served.generator.fault = BatonError("a fault of our own")
        assert (await soon(served.complete(stream=True))).status_code == 500
        requests = partial(served.metric, "baton_http_requests_total", route="/v1/completions")
        assert (requests(status="499"), requests(status="500")) == (None, 1)


async def test_a_stop_closes_idle_connections_at_once_and_lets_begun_answers_finish():
    listener = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    stop = asyncio.Event()
    async with (
        serve() as served,
        server.serving(
            served.app,
            [listener],
            max_connections=100,
            on_refused=server.ConnectionRefusals(served.registry),
            keep_alive_s=75,
            drain_timeout_s=60,
        ) as running,
        connection(url) as (idle, idle_writer),
        connection(url) as (silent, _),
        connection(url) as (asking, asking_writer),
    ):
        idle_writer.write(_GET + b"\r\n")
        assert b"200 OK" in await answer(idle)
        served.says("hello world and again")
        served.generator.pause_after = 2
        asking_writer.write(completion())
        await soon(served.generator.paused.wait())
        stop.set()
        await running.stopped_by(stop)
        async with asyncio.timeout(5):
            assert (await idle.read(), await silent.read()) == (b"", b"")
        served.generator.gate.set()
        assert b"hello world and again" in await asking.read()


async def zeros(scope, receive, send) -> None:
    """As many bytes as the path says."""
    body = bytes(int(scope["path"][1:]))
    headers = [(b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


@pytest.mark.parametrize(
    "size",
    [
        pytest.param(16 << 20, id="in the middle of a reply"),
        pytest.param(60_000, id="with less unread than is buffered"),
    ],
)
async def test_a_client_that_does_not_read_loses_its_place_to_one_that_does(
    size: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(protocol, "MAX_UNREAD_S", 0.1)
    registry = new_registry()
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    with socket.socket() as silent:
        silent.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        async with server.serving(
            zeros,
            [listener],
            max_connections=1,
            on_refused=server.ConnectionRefusals(registry),
            keep_alive_s=0.1,
            drain_timeout_s=10,
        ):
            silent.connect(listener.getsockname())
            silent.sendall(b"GET /%d HTTP/1.1\r\nHost: x\r\n\r\n" % size)
            async with asyncio.timeout(10):
                reply = b""
                while b" 200 " not in reply:
                    async with connection(url) as (reader, writer):
                        writer.write(b"GET /0 HTTP/1.1\r\nHost: x\r\n\r\n")
                        with suppress(ConnectionError):
                            reply = await reader.read(4096)
        refused = partial(registry.get_sample_value, "baton_http_connections_refused_total")
        assert refused({"reason": "unread"}) == 1


async def test_the_default_is_longer_than_load_balancers_keep_idle_connections():
    assert RouterConfig().http_keep_alive_s > 60
