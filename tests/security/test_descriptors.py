"""A router with few file descriptors: as many connections as it takes, and probes are answered still."""

import asyncio
import contextlib
import json
import socket
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import pytest

from router.http.connections import SPARE_CONNECTIONS, ConnectionLimit, connections_that_fit
from tests.waits import soon

pytestmark = pytest.mark.timeout(60)

_COMPLETION = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{"


@contextlib.asynccontextmanager
async def _router(directory: Path, descriptors: int) -> AsyncIterator[int]:
    """The port of a router whose process may have so many open files."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    config = directory / "cluster.yaml"
    cluster = {"workers": [f"unix:{directory}/nobody.sock"], "secret": "5e" * 32}
    model = {"model": str(resources.files("baton_engine.demo") / "model")}
    runtime = {"runtime_dir": str(directory / "run")}
    config.write_text(json.dumps({"model": model, "cluster": cluster | runtime}))
    command = f"{sys.executable} -m baton_cluster.cli.main run router --port {port} -f {config}"
    process = await asyncio.create_subprocess_shell(f"ulimit -n {descriptors}; exec {command}")
    try:
        while not await _asked(port, "/health"):
            assert process.returncode is None
            await asyncio.sleep(0.05)
        yield port
    finally:
        process.terminate()
        await soon(process.wait())


async def _asked(port: int, path: str) -> bytes:
    """The status that a client of its own gets; nothing if it is not answered."""
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
    except ConnectionError:
        return b""
    try:
        writer.write(b"GET %b HTTP/1.1\r\nHost: x\r\n\r\n" % path.encode())
        return (await soon(reader.read(4096)))[9:12]
    except ConnectionError:
        return b""
    finally:
        writer.close()


async def test_a_full_router_with_64_descriptors_answers_probes(tmp_path: Path):
    async with _router(tmp_path, 64) as port:
        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(100)]
        assert [await _asked(port, "/health") for _ in range(5)] == [b"200"] * 5
        for _, writer in silent:
            writer.close()
        busy = [await asyncio.open_connection("127.0.0.1", port) for _ in range(100)]
        for _, writer in busy:
            writer.write(_COMPLETION)
        assert [await _asked(port, "/health") for _ in range(5)] == [b"200"] * 5
        assert await _asked(port, "/v1/models") == b"503"
        for _, writer in busy:
            writer.close()
        async with asyncio.timeout(10):
            for writer in (writer for _, writer in busy):
                with contextlib.suppress(ConnectionError):
                    await writer.wait_closed()
        assert await _asked(port, "/health") == b"200"


@dataclass(eq=False)
class _Connection:
    """One that is closed at once, or, `unread`, not before its client has read what was sent."""

    limit: ConnectionLimit
    unread: bool = False
    told_to_close: bool = False

    def close(self) -> None:
        self.told_to_close = True
        if not self.unread:
            self.limit.closed(self)


def _opened(limit: ConnectionLimit, count: int, **kind: bool) -> list[_Connection]:
    made = [_Connection(limit, **kind) for _ in range(count)]
    assert [limit.opened(connection, 0.0) for connection in made] == [None] * count
    return made


def test_the_connection_that_waits_longest_gives_way_and_one_with_a_request_never_does():
    limit = ConnectionLimit(3, spare=2)
    asking, first, second = _opened(limit, 3)
    assert limit.asked(asking)
    assert limit.opened(_Connection(limit), 5.0) is first
    assert limit.opened(_Connection(limit), 5.0) is second
    assert first.told_to_close
    assert second.told_to_close
    limit.answered(asking, 6.0)
    assert limit.opened(_Connection(limit), 9.0) not in (None, asking)


def test_young_connections_are_left_time_to_ask_while_there_are_spare_ones():
    limit = ConnectionLimit(1, spare=2)
    oldest, *others = _opened(limit, 3)
    assert limit.opened(_Connection(limit), 0.1) is oldest
    assert limit.opened(_Connection(limit), 0.1) is others[0]


def test_beyond_the_limit_only_probes_are_answered_until_there_is_room():
    limit = ConnectionLimit(2, spare=2)
    seated = _opened(limit, 2)
    assert all(limit.asked(connection) for connection in seated)
    beyond = _opened(limit, 2)
    assert not any(limit.asked(connection) for connection in beyond)
    refused = _Connection(limit)
    assert limit.opened(refused, 9.0) is refused
    assert refused.told_to_close
    limit.closed(seated[0])
    assert limit.asked(beyond[0])
    assert not limit.asked(beyond[1])


def test_connections_that_have_given_way_count_until_they_are_closed():
    limit = ConnectionLimit(3, spare=2)
    unread = _opened(limit, 3, unread=True)
    taken = [_Connection(limit) for _ in range(2)]
    assert [limit.opened(connection, 5.0) for connection in taken] == unread[:2]
    assert all(limit.asked(connection) for connection in taken)
    refused = _Connection(limit)
    assert limit.opened(refused, 5.0) is refused
    assert unread[2].told_to_close
    limit.closed(unread[2])
    assert limit.opened(_Connection(limit), 5.0) is None


def test_the_default_leaves_descriptors_for_the_router_itself(monkeypatch):
    monkeypatch.setattr("resource.getrlimit", lambda _: (1024, 4096))
    fit = connections_that_fit(workers=10)
    assert 800 < fit < 1024 - SPARE_CONNECTIONS - 20
    monkeypatch.setattr("resource.getrlimit", lambda _: (20, 20))
    assert connections_that_fit(workers=10) > 0
