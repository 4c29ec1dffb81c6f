"""What comes before a request's body is bounded too, for nobody has been authorised by then."""

import asyncio

import pytest

from router.http.protocol import MAX_HEAD_BYTES
from tests.router.served import listening, serve
from tests.waits import soon

pytestmark = pytest.mark.timeout(30)


async def _send(url: str, parts: list[bytes]) -> bytes:
    """What the server answers until it hangs up."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rsplit(":", 1)[1]))
    try:
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0)
    except ConnectionError:
        pass  # It has hung up on us, as it should; what it said before can still be read.
    answer = bytearray()
    try:
        while chunk := await soon(reader.read(65536)):
            answer += chunk
    except ConnectionError:
        pass
    writer.close()
    return bytes(answer)


@pytest.mark.parametrize("endless", [b"X-A: " + b"a" * 1000, b"X-A: b\r\n" * 100])
async def test_headers_without_an_end_are_cut_off(endless: bytes):
    async with serve() as served, listening(served.app) as url:
        parts = [b"GET /health HTTP/1.1\r\nHost: x\r\n", *[endless] * (100 * MAX_HEAD_BYTES // 800)]
        answer = await _send(url, parts)
        assert b"200 OK" not in answer
        assert not answer or answer.startswith(b"HTTP/1.1 400")
        assert (await _send(url, [b"GET /health HTTP/1.0\r\n\r\n"])).startswith(b"HTTP/1.1 200")


async def test_a_long_body_does_not_count_as_headers():
    async with serve() as served, listening(served.app) as url:
        body = b" " * (2 * MAX_HEAD_BYTES) + b'{"prompt": "hi"}'
        head = b"POST /tokenize HTTP/1.1\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(
            body
        )
        answer = await _send(url, [head, *[body[i : i + 9999] for i in range(0, len(body), 9999)]])
        assert answer.startswith(b"HTTP/1.1 200")
