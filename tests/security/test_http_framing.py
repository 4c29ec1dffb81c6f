"""What surrounds a body on the wire is bounded,
and nothing that comes after a request's headers is ever taken for one.
"""

import asyncio
import json
from collections import Counter

import pytest

from router.http.protocol import (
    MAX_FRAMING_BYTES,
    MAX_HEADER_FIELDS,
    MAX_PARSED_AT_ONCE,
    MAX_REQUESTS_AHEAD,
    BoundedProtocol,
)
from tests.router.served import MODEL, Served, listening, serve
from tests.waits import soon

pytestmark = pytest.mark.timeout(30)

_HEAD = b"POST %b HTTP/1.1\r\nHost: x\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
_COMPLETION = json.dumps({"model": MODEL, "prompt": "hi", "max_tokens": 2}).encode()


async def _answer(url: str, *sent: bytes) -> bytes:
    """What the server answers until it hangs up."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rsplit(":", 1)[1]))
    answer = b""
    try:
        for part in sent:
            writer.write(part)
            await writer.drain()
        while chunk := await soon(reader.read(65536)):
            answer += chunk
    except ConnectionError:
        pass  # it has hung up on us; what it said before that has been read
    writer.close()
    return answer


def _chunks(body: bytes, size: int, extension: bytes = b"") -> bytes:
    pieces = (body[i : i + size] for i in range(0, len(body), size))
    return b"".join(b"%x%b\r\n%b\r\n" % (len(p), extension, p) for p in pieces)


def _refused(served: Served, reason: str) -> float | None:
    return served.metric("baton_http_connections_refused_total", reason=reason)


@pytest.mark.parametrize("trailer", [b"X-Request-Id: from-a-trailer\r\n", b"x: y\r\n" * 100_000])
@pytest.mark.parametrize(
    "path", [b"/v1/completions", b"/v1/messages", b"/v1/messages/count_tokens"]
)
async def test_trailers_are_refused_and_never_become_headers(trailer: bytes, path: bytes):
    async with serve() as served, listening(served.app, registry=served.registry) as url:
        body = _chunks(_COMPLETION, 1000) + b"0\r\n"
        answer = await _answer(url, _HEAD % path + body, trailer, b"\r\n")
        assert b"from-a-trailer" not in answer
        head, _, said = answer.partition(b"\r\n\r\n")
        if said:  # lost where the rest of the trailers met a closed connection
            assert head.startswith(b"HTTP/1.1 400")
            assert "railers" in json.loads(said)["error"]["message"]
        assert served.generator.requests == []
        assert _refused(served, "trailers") == 1


async def test_a_trailer_behind_a_finished_reply_closes_the_connection_without_a_second_reply():
    async with serve() as served, listening(served.app, registry=served.registry) as url:
        head = b"GET /health HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rsplit(":", 1)[1]))
        writer.write(head)
        answer = await reader.readuntil(b"}")
        writer.write(b"0\r\nx: y\r\n\r\n")
        answer += await soon(reader.read())
        assert answer.count(b"HTTP/1.1") == 1
        assert _refused(served, "trailers") == 1
        writer.close()


@pytest.mark.parametrize(("size", "extension"), [(1, b""), (1, b";a=b"), (9, b";" + b"x" * 1000)])
async def test_the_framing_of_a_body_is_bounded(size: int, extension: bytes):
    body = b" " * (MAX_FRAMING_BYTES * 2) + _COMPLETION
    async with serve() as served, listening(served.app, registry=served.registry) as url:
        await _answer(
            url, _HEAD % b"/v1/completions", _chunks(body, size, extension) + b"0\r\n\r\n"
        )
        assert _refused(served, "framing_bytes") == 1
        assert served.generator.requests == []


async def test_a_long_body_in_chunks_of_use_is_served():
    body = b" " * 3_000_000 + _COMPLETION
    async with serve() as served, listening(served.app, registry=served.registry) as url:
        sent = _chunks(body, 100, b";a=b") + b"0\r\n\r\n"
        answer = await _answer(url, _HEAD % b"/v1/completions", sent)
        assert answer.startswith(b"HTTP/1.1 200")


async def test_the_loop_runs_between_the_tiny_chunks_of_one_read(monkeypatch: pytest.MonkeyPatch):
    turns, calls_by_turn = 0, Counter[int]()

    def next_turn() -> None:
        nonlocal turns
        turns += 1
        turning[0] = asyncio.get_running_loop().call_soon(next_turn)

    def on_body(protocol: BoundedProtocol, body: bytes) -> None:
        calls_by_turn[turns] += 1
        parse(protocol, body)

    parse = BoundedProtocol.on_body
    monkeypatch.setattr(BoundedProtocol, "on_body", on_body)
    body = b" " * 60_000 + _COMPLETION
    async with serve() as served, listening(served.app, registry=served.registry) as url:
        turning = [asyncio.get_running_loop().call_soon(next_turn)]
        answer = await _answer(url, _HEAD % b"/v1/completions", _chunks(body, 1) + b"0\r\n\r\n")
        turning[0].cancel()
    assert answer.startswith(b"HTTP/1.1 200")
    assert calls_by_turn.total() == len(body)
    assert max(calls_by_turn.values()) <= MAX_PARSED_AT_ONCE // len(b"1\r\n \r\n") + 1


async def test_a_client_that_leaves_with_tiny_chunks_unparsed_harms_nobody():
    async with serve() as served, listening(served.app, registry=served.registry) as url:
        _, writer = await asyncio.open_connection("127.0.0.1", int(url.rsplit(":", 1)[1]))
        writer.write(_HEAD % b"/v1/completions" + _chunks(b" " * 40_000, 1))
        await writer.drain()
        writer.transport.abort()
        answer = await _answer(
            url, _HEAD % b"/v1/completions" + _chunks(_COMPLETION, 9), b"0\r\n\r\n"
        )
        assert answer.startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("framing", ["length", "chunked"])
@pytest.mark.parametrize("is_cut", [False, True])
async def test_a_wish_for_another_protocol_is_passed_over_and_its_body_is_read(
    framing: str, is_cut: bool
):
    """As of Java's own client, which asks for HTTP/2 with its first request."""
    length = b"Content-Length: %d" % len(_COMPLETION)
    chunked = framing == "chunked"
    body = _chunks(_COMPLETION, 10) + b"0\r\n\r\n" if chunked else _COMPLETION
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n%b\r\n" % (
        b"Transfer-Encoding: chunked" if chunked else length
    )
    wish = (
        b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAA\r\n\r\n"
    )
    behind = b"GET /health HTTP/1.1\r\nHost: x\r\n" + wish
    last = head + b"Connection: close\r\n\r\n" + body
    sent = [head + wish, body, behind, last]
    async with serve() as served, listening(served.app, registry=served.registry) as url:
        # What follows the last request is passed over.
        answer = await _answer(url, *(sent if is_cut else [b"".join(sent) + behind]))
        assert answer.count(b"HTTP/1.1 200 OK") == answer.count(b"HTTP/1.1") == 3
        assert answer.count(b'"text_completion"') == 2


async def test_the_framing_of_a_body_behind_a_wish_for_another_protocol_is_held_to():
    async with serve() as served, listening(served.app, registry=served.registry) as url:
        head = (
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n"
        )
        answer = await _answer(url, head + b"Transfer-Encoding: gzip\r\n\r\nx")
        assert answer.startswith(b"HTTP/1.1 400")
        assert _refused(served, "malformed") == 1


async def test_header_fields_are_counted():
    async with serve() as served, listening(served.app, registry=served.registry) as url:
        for count, status in ((MAX_HEADER_FIELDS, b"200"), (MAX_HEADER_FIELDS + 1, b"400")):
            fields = b"Connection: close\r\n" + b"a:b\r\n" * (count - 1)
            answer = await _answer(url, b"GET /health HTTP/1.1\r\n" + fields + b"\r\n")
            assert answer.startswith(b"HTTP/1.1 " + status)
        assert str(MAX_HEADER_FIELDS).encode() in answer
        assert _refused(served, "header_fields") == 1


async def test_requests_sent_ahead_are_bounded():
    async with serve() as served, listening(served.app, registry=served.registry) as url:
        few = b"GET /health HTTP/1.1\r\n\r\n" * MAX_REQUESTS_AHEAD
        last = b"GET /health HTTP/1.1\r\nConnection: close\r\n\r\n"
        assert (await _answer(url, few + last)).count(b"200 OK") == MAX_REQUESTS_AHEAD + 1
        assert (await _answer(url, few * 1000)).count(b"200 OK") <= MAX_REQUESTS_AHEAD + 1
        assert _refused(served, "requests_ahead") == 1


async def test_what_is_no_http_is_answered_in_the_shape_of_every_error():
    async with serve() as served, listening(served.app, registry=served.registry) as url:
        answer = await _answer(url, b"\x16\x03\x01 hello\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 400")
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "invalid_request"
        assert _refused(served, "malformed") == 1
