"""What the canary says of its waits, asked beside a server that computes while it is waited for."""

import asyncio
import os
import time
from pathlib import Path

import pytest

from bench.router.canary import Orders, Seen, watch

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/schedstat").exists(), reason="this kernel does not count run delays"
)
COMPUTES_S = 0.02
REFUSED = (
    b"HTTP/1.1 429 Too Many Requests\r\ncontent-type: application/json\r\n"
    b'content-length: 13\r\n\r\n{"error": {}}'
)
STREAMED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n\r\n"


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    refused = False
    try:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            until_s = time.thread_time() + COMPUTES_S
            while time.thread_time() < until_s:
                pass
            if head.startswith(b"GET /health "):
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
                continue
            length = int(head.lower().partition(b"content-length:")[2].split()[0])
            await reader.readexactly(length)
            refused = not refused
            writer.write(REFUSED if refused else STREAMED)
    except asyncio.IncompleteReadError:
        writer.close()


@pytest.fixture
async def seen() -> Seen:
    server = await asyncio.start_server(_answer, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        stopped = asyncio.Event()
        orders = Orders(port=port, process_id=os.getpid(), model="bench")
        watching = asyncio.ensure_future(watch(orders, stopped))
        await asyncio.sleep(0.2)
        stopped.set()
        return await watching


async def test_a_wait_tells_what_the_loop_computed_and_no_more_than_passed(seen: Seen) -> None:
    assert seen.health
    for wait in (*seen.health, *seen.completions):
        assert wait.wall_s >= COMPUTES_S
        assert wait.loop_cpu_s > 0
        assert wait.run_delay_s >= 0
    assert sum(wait.loop_cpu_s for wait in seen.health) >= COMPUTES_S * 0.5 * len(seen.health)


async def test_what_is_not_answered_with_200_is_read_to_its_end_and_counted(seen: Seen) -> None:
    assert len(seen.completions) == len(seen.gaps) > 0
    assert seen.failed == (len(seen.completions) + 1) // 2  # every other one, from the first on
