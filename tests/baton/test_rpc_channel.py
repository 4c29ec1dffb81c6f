"""Channels as they meet peers that are slow, late or restarted."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager, suppress
from pathlib import Path

import grpc
import pytest

from baton.errors import ConfigError
from baton.rpc.channel import bind, new_server, open_channel

SLOW_S = 1.0


@asynccontextmanager
async def serving(address: str) -> AsyncIterator[None]:
    server = new_server()
    bind(server, address)
    await server.start()
    try:
        yield
    finally:
        await server.stop(None)


async def answered(channel: grpc.aio.Channel, timeout_s: float = 20.0) -> grpc.StatusCode:
    """What a server without that method says; UNAVAILABLE where there was no connection in time."""
    call = channel.unary_unary("/baton.Nothing/Ask", bytes, bytes)
    try:
        await call(b"", timeout=timeout_s)
    except grpc.aio.AioRpcError as error:
        return error.code()
    raise AssertionError("nobody serves that")


async def test_a_peer_that_is_slow_to_greet_is_waited_for(tmp_path: Path) -> None:
    """One that computes, or has no processor for a moment, does not look like one that is gone."""
    near, far = tmp_path / "near", tmp_path / "far"
    relays: list[asyncio.Task[None]] = []

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there_reader, there_writer = await asyncio.open_unix_connection(far)
        await asyncio.gather(_pour(reader, there_writer, 0.0), _pour(there_reader, writer, SLOW_S))

    def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        relays.append(asyncio.create_task(relay(reader, writer)))

    async with (
        serving(f"unix:{far}"),
        await asyncio.start_unix_server(connected, near),
        open_channel(f"unix:{near}") as channel,
    ):
        assert await answered(channel) is grpc.StatusCode.UNIMPLEMENTED
        assert len(relays) == 1
    await asyncio.gather(*relays)


async def _pour(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, first_after_s: float
) -> None:
    with suppress(ConnectionError):  # either end may reset the connection when it closes
        while data := await reader.read(65536):
            await asyncio.sleep(first_after_s)
            first_after_s = 0.0
            writer.write(data)
    writer.close()
    with suppress(ConnectionError):
        await writer.wait_closed()


async def test_a_peer_that_is_restarted_is_found_soon(tmp_path: Path) -> None:
    address = f"unix:{tmp_path / 'socket'}"
    async with open_channel(address) as channel:
        async with serving(address):
            assert await answered(channel) is grpc.StatusCode.UNIMPLEMENTED
        assert await answered(channel) is grpc.StatusCode.UNAVAILABLE
        async with serving(address), asyncio.timeout(15):
            await channel.channel_ready()
            assert await answered(channel) is grpc.StatusCode.UNIMPLEMENTED


async def test_an_address_that_cannot_be_bound_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot bind"):
        bind(new_server(), f"unix:{tmp_path}/no/such/folder")


async def test_a_unix_socket_that_another_process_serves_is_not_taken_over(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/pool.sock"
    first, second = new_server(), new_server()
    bind(first, address)
    await first.start()
    with pytest.raises(ConfigError, match=f"cannot bind {address}: it is taken"):
        bind(second, address)
    await first.stop(None)
    (tmp_path / "pool.sock").unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(f"{tmp_path}/pool.sock")
    assert bind(second, address) == address
    await second.stop(None)


async def test_a_unix_socket_whose_process_lets_nobody_in_is_not_taken_over(tmp_path: Path) -> None:
    with ExitStack() as waiting:
        hung = waiting.enter_context(socket.socket(socket.AF_UNIX))
        hung.bind(f"{tmp_path}/pool.sock")
        hung.listen(0)
        for _ in range(2):
            client = waiting.enter_context(socket.socket(socket.AF_UNIX))
            client.setblocking(False)
            with suppress(BlockingIOError):
                client.connect(f"{tmp_path}/pool.sock")
        with pytest.raises(ConfigError, match="it is taken"):
            bind(new_server(), f"unix:{tmp_path}/pool.sock")
