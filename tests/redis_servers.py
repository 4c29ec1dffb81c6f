"""Redis for tests: fakeredis' TCP server in a thread, or a real redis-server of the test's own. Loopback only."""

import asyncio
import contextlib
import shutil
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import redis.asyncio
from fakeredis import TcpFakeServer
from prometheus_client import CollectorRegistry

from baton.redis_link import RefusedValues
from tests.waits import join, soon

REDIS_SERVER = shutil.which("redis-server")

KINDS = [
    "fakeredis",
    pytest.param(
        "redis",
        marks=[
            pytest.mark.redis,
            pytest.mark.skipif(REDIS_SERVER is None, reason="redis-server is not installed"),
        ],
    ),
]
"""For `pytest.mark.parametrize`."""


def no_refusals() -> RefusedValues:
    """For tests that do not look at what was refused."""
    return RefusedValues(CollectorRegistry())


@contextlib.asynccontextmanager
async def a_redis(kind: str, directory: Path) -> AsyncIterator[str]:
    """The URL of a fresh and empty server."""
    if kind == "fakeredis":
        with fake_redis() as url:
            yield url
        return
    async with real_redis(directory) as server:
        yield server.url


@contextlib.contextmanager
def fake_redis() -> Iterator[str]:
    """The URL of a fresh and empty server in a thread."""
    server = TcpFakeServer(("127.0.0.1", 0), server_type="redis")
    serving = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    serving.start()
    try:
        yield f"redis://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        join(serving)
        server.server_close()


class RealRedis:
    """One redis-server process, which a test may stop and start again."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._port = _free_port()
        self._process: asyncio.subprocess.Process | None = None
        self.url = f"redis://127.0.0.1:{self._port}"
        self.socket = directory / "redis.sock"

    async def follow(self, master: "RealRedis") -> None:
        """Becomes a replica, and breaks no connection for it."""
        client = redis.asyncio.Redis.from_url(self.url)
        try:
            await client.execute_command("REPLICAOF", "127.0.0.1", str(master._port))
        finally:
            await client.aclose()

    @property
    def pid(self) -> int:
        """Of the process."""
        assert self._process is not None
        return self._process.pid

    async def start(self) -> None:
        """Returns once it answers."""
        assert REDIS_SERVER is not None
        settings = ["--bind", "127.0.0.1", "--port", str(self._port), "--dir", str(self._directory)]
        self._process = await asyncio.create_subprocess_exec(
            REDIS_SERVER,
            *settings,
            *("--unixsocket", str(self.socket)),
            *("--save", "", "--appendonly", "no", "--daemonize", "no"),
            stdout=asyncio.subprocess.DEVNULL,
        )
        client = redis.asyncio.Redis.from_url(self.url)
        try:
            async with asyncio.timeout(30):
                while not await _answers(client):  # noqa: ASYNC110  # another process: nothing to wait on
                    await asyncio.sleep(0.01)
        finally:
            await client.aclose()

    async def kill(self) -> None:
        """Ends it at once, with all that it held."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await soon(self._process.wait())


@contextlib.asynccontextmanager
async def real_redis(directory: Path) -> AsyncIterator[RealRedis]:
    """A redis-server that ends with the test."""
    server = RealRedis(directory)
    try:
        await server.start()
        yield server
    finally:
        await server.kill()


async def _answers(client: "redis.asyncio.Redis") -> bool:
    try:
        return bool(await client.ping())
    except redis.exceptions.ConnectionError:
        return False


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])
