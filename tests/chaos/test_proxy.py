"""The fault proxy itself: what it passes, and that each of its faults happens and is counted."""

import asyncio
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from tests.chaos.proxy import FaultProxy, fault_proxy
from tests.waits import soon

TIMEOUT_S = 10


@asynccontextmanager
async def echo_server(address: str):
    """Sends back what it gets."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError, asyncio.CancelledError):
            while data := await reader.read(1024):
                writer.write(data)
                await writer.drain()
        writer.close()

    if address.startswith("unix:"):
        server = await asyncio.start_unix_server(echo, address.removeprefix("unix:"))
        yield address
    else:
        server = await asyncio.start_server(echo, "127.0.0.1", 0)
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    server.close()


@asynccontextmanager
async def dialled(address: str):
    if address.startswith("unix:"):
        reader, writer = await asyncio.open_unix_connection(address.removeprefix("unix:"))
    else:
        host, _, port = address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


@asynccontextmanager
async def connection():
    """A proxy before an echo, and a connection through it that has been used once."""
    async with (
        echo_server("127.0.0.1:0") as target,
        fault_proxy(target) as proxy,
        dialled(proxy.address) as (reader, writer),
    ):
        assert await ask(reader, writer, b"hello") == b"hello"
        yield proxy, reader, writer


async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, data: bytes) -> bytes:
    writer.write(data)
    async with asyncio.timeout(TIMEOUT_S):
        return await reader.readexactly(len(data))


async def until(proxy: FaultProxy, kind: str, count: int = 1) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while proxy.happened[kind] < count:  # noqa: ASYNC110 - the proxy counts, it does not announce
            await asyncio.sleep(0.001)


async def gone(reader: asyncio.StreamReader) -> bool:
    """Whether the connection ends without another byte."""
    async with asyncio.timeout(TIMEOUT_S):
        with suppress(ConnectionError):
            return await reader.read(1) == b""
        return True


@pytest.mark.parametrize("kind", ["unix", "tcp"])
async def test_it_passes_everything_over_tcp_and_unix_sockets(tmp_path: Path, kind: str):
    there = f"unix:{tmp_path}/there" if kind == "unix" else "127.0.0.1:0"
    here = f"unix:{tmp_path}/here" if kind == "unix" else "127.0.0.1:0"
    data = bytes(range(256)) * 4096
    async with (
        echo_server(there) as target,
        fault_proxy(target, here) as proxy,
        dialled(proxy.address) as (reader, writer),
    ):
        assert await ask(reader, writer, data) == data
        assert proxy.forward.passed_bytes == proxy.backward.passed_bytes == len(data)
        assert not proxy.happened


async def test_bytes_are_delayed():
    async with connection() as (proxy, reader, writer):
        proxy.forward.delay_s = 0.01
        assert await ask(reader, writer, b"abc") == b"abc"
        assert proxy.happened == {"delayed": 1}


async def test_bytes_are_throttled():
    async with connection() as (proxy, reader, writer):
        proxy.backward.bytes_per_s = 1e6
        assert await ask(reader, writer, b"abc") == b"abc"
        assert proxy.happened == {"throttled": 1}


async def test_bytes_are_held_until_they_are_released():
    async with connection() as (proxy, reader, writer):
        proxy.forward.hold()
        writer.write(b"abc")
        await until(proxy, "held")
        assert proxy.forward.passed_bytes == len(b"hello")
        proxy.forward.release()
        assert await soon(reader.readexactly(3)) == b"abc"


async def test_a_connection_is_cut_behind_the_last_byte_allowed():
    async with connection() as (proxy, reader, writer):
        proxy.backward.cut_after(4)
        writer.write(b"abcdefgh")
        assert await soon(reader.readexactly(4)) == b"abcd"
        assert await gone(reader)
        assert proxy.happened == {"cut": 1}


async def test_every_connection_is_cut_at_once_and_new_ones_pass():
    async with connection() as (proxy, reader, _):
        assert proxy.cut() == 1
        assert await gone(reader)
        assert proxy.happened == {"cut": 1}
        async with dialled(proxy.address) as (again, writer):
            assert await ask(again, writer, b"abc") == b"abc"


async def test_one_bit_is_flipped():
    async with connection() as (proxy, reader, writer):
        proxy.forward.flip_bit(after_bytes=2)
        assert await ask(reader, writer, b"aaaa") == b"aa`a"
        assert await ask(reader, writer, b"aaaa") == b"aaaa"
        assert proxy.happened == {"flipped": 1}


async def test_a_half_open_connection_still_passes_the_other_way():
    async with connection() as (proxy, reader, writer):
        proxy.backward.dropping = True
        writer.write(b"abc")
        await until(proxy, "dropped_bytes", 3)
        assert proxy.forward.passed_bytes == len(b"helloabc")
        proxy.backward.dropping = False
        assert await ask(reader, writer, b"def") == b"def"


async def test_a_black_hole_swallows_everything_and_accepts_more():
    async with connection() as (proxy, _, writer):
        proxy.black_hole()
        writer.write(b"abc")
        await until(proxy, "dropped_bytes", 3)
        async with dialled(proxy.address) as (_, another):
            another.write(b"def")
            await until(proxy, "dropped_bytes", 6)
        assert proxy.connections == 2
        assert proxy.forward.passed_bytes == len(b"hello")


async def test_a_target_that_is_away_refuses_through_the_proxy(tmp_path: Path):
    async with (
        fault_proxy(f"unix:{tmp_path}/nobody") as proxy,
        dialled(proxy.address) as (reader, _),
    ):
        assert await gone(reader)
        assert proxy.happened == {"refused": 1}
