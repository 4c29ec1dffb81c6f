"""An honest client beside hostile ones, for `bench.hostile`: asks for `/health` and for short streamed completions all the time.

`python -m bench.router.canary` takes its orders as one line of JSON on standard input, asks until that is closed, and prints the
durations of all that it asked as another.
"""

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field

_PAUSE_S = 0.003
_LAST_CHUNK = b"0\r\n\r\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Orders:
    """What is asked of the canary: the router's port on this host, and the name of its model."""

    port: int
    model: str


@dataclass(slots=True, kw_only=True)
class Seen:
    """Seconds that each request took, and of a completion what came after its first token; how many were not answered with 200."""

    health_s: list[float] = field(default_factory=list)
    completion_s: list[float] = field(default_factory=list)
    gap_s: list[float] = field(default_factory=list)
    failed: int = 0


class _Connection:
    """One connection that is kept; a new one where the router has closed it."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, request: bytes, end: bytes) -> tuple[bool, float]:
        """Sends `request` and reads until the reply ends with `end`; whether it was answered with 200, and how long it took after
        its head, which comes with the first token."""
        try:
            return await self._ask(request, end)
        except (ConnectionError, asyncio.IncompleteReadError):
            self._streams = None
            return await self._ask(request, end)

    async def _ask(self, request: bytes, end: bytes) -> tuple[bool, float]:
        if self._streams is None:
            self._streams = await asyncio.open_connection("127.0.0.1", self._port)
        reader, writer = self._streams
        writer.write(request)
        head = await reader.readuntil(b"\r\n\r\n")
        begun_s = time.perf_counter()
        await reader.readuntil(end)
        return head.startswith(b"HTTP/1.1 200"), time.perf_counter() - begun_s


async def watch(orders: Orders, stopped: asyncio.Event) -> Seen:
    """Asks until `stopped`; what has been asked by then is waited for."""
    seen = Seen()
    body = {"model": orders.model, "prompt": [5], "max_tokens": 2, "stream": True}
    raw = json.dumps(body | {"ignore_eos": True}).encode()
    complete = (
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n%b" % (len(raw), raw)
    )
    health = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"

    async def repeat(
        ask: Callable[[], Awaitable[tuple[bool, float]]], took_s: list[float], gap_s: list[float]
    ) -> None:
        while not stopped.is_set():
            begun_s = time.perf_counter()
            answered, after_head_s = await ask()
            seen.failed += not answered
            gap_s.append(after_head_s)
            took_s.append(time.perf_counter() - begun_s)
            await asyncio.sleep(_PAUSE_S)

    one, other = _Connection(orders.port), _Connection(orders.port)
    async with asyncio.TaskGroup() as group:
        group.create_task(repeat(lambda: one.ask(health, b"}"), seen.health_s, []))
        group.create_task(
            repeat(lambda: other.ask(complete, _LAST_CHUNK), seen.completion_s, seen.gap_s)
        )
    return seen


async def _main() -> None:
    orders = Orders(**json.loads(sys.stdin.readline()))
    stopped = asyncio.Event()
    watching = asyncio.create_task(watch(orders, stopped))
    with contextlib.suppress(EOFError):
        await asyncio.to_thread(sys.stdin.read)
    stopped.set()
    print(json.dumps(asdict(await watching)))


if __name__ == "__main__":
    asyncio.run(_main())
