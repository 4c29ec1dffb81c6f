"""An honest client beside hostile ones, for `bench.hostile`:
asks for `/health` and for short streamed completions all the time.

`python -m bench.router.canary` takes its orders as one line of JSON on standard input, asks until that is closed, and
prints the durations of all that it asked as another.
"""

import asyncio
import contextlib
import json
import re
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

_PAUSE_S = 0.003
_LAST_CHUNK = b"0\r\n\r\n"
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)\r\n", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Orders:
    """What is asked of the canary: the router's port on this host, its process, and the name of its model."""

    port: int
    process_id: int
    model: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """How long the canary waited for something, and what became of that time.

    Attributes:
        wall_s: All of it.
        loop_cpu_s: In which the thread of the router's event loop computed, for whomever.
        run_delay_s: In which that thread, or the canary, could have run,
            while the kernel gave the processors to others.
    """

    wall_s: float
    loop_cpu_s: float
    run_delay_s: float


@dataclass(slots=True, kw_only=True)
class Seen:
    """How long each request took, and of a completion what came after its first token;
    how many were not answered with 200.
    """

    health: list[Wait] = field(default_factory=list)
    completions: list[Wait] = field(default_factory=list)
    gaps: list[Wait] = field(default_factory=list)
    failed: int = 0


class _Stopwatch:
    """Measures waits.

    Args:
        process_id: The router; its event loop has its first thread.
    """

    def __init__(self, process_id: int) -> None:
        self._loop = Path(f"/proc/{process_id}/task/{process_id}/schedstat")
        self._own = Path("/proc/self/schedstat")

    def now(self) -> Wait:
        """The clocks as they are."""
        loop_cpu_ns, loop_delay_ns = map(int, self._loop.read_bytes().split()[:2])
        own_delay_ns = int(self._own.read_bytes().split()[1])
        return Wait(
            wall_s=time.perf_counter(),
            loop_cpu_s=loop_cpu_ns / 1e9,
            run_delay_s=(loop_delay_ns + own_delay_ns) / 1e9,
        )

    def since(self, begun: Wait) -> Wait:
        """What has passed since then."""
        now = self.now()
        return Wait(
            wall_s=now.wall_s - begun.wall_s,
            loop_cpu_s=now.loop_cpu_s - begun.loop_cpu_s,
            run_delay_s=now.run_delay_s - begun.run_delay_s,
        )


class _Connection:
    """One connection that is kept; a new one where the router has closed it."""

    def __init__(self, port: int, watch: _Stopwatch) -> None:
        self._port = port
        self._watch = watch
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, request: bytes) -> tuple[bool, Wait]:
        """Sends `request` and reads the whole reply; whether it was answered with 200, and how long it took after its
        head, which comes with the first token.
        """
        try:
            return await self._ask(request)
        except (ConnectionError, asyncio.IncompleteReadError):
            self._streams = None
            return await self._ask(request)

    def close(self) -> None:
        """Closes it."""
        if self._streams is not None:
            self._streams[1].close()

    async def _ask(self, request: bytes) -> tuple[bool, Wait]:
        if self._streams is None:
            self._streams = await asyncio.open_connection("127.0.0.1", self._port)
        reader, writer = self._streams
        writer.write(request)
        head = await reader.readuntil(b"\r\n\r\n")
        begun = self._watch.now()
        if (length := _LENGTH.search(head)) is not None:  # of /health, and of what is refused
            await reader.readexactly(int(length[1]))
        else:
            await reader.readuntil(_LAST_CHUNK)
        return head.startswith(b"HTTP/1.1 200"), self._watch.since(begun)


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
        ask: Callable[[], Awaitable[tuple[bool, Wait]]], took: list[Wait], gaps: list[Wait]
    ) -> None:
        while not stopped.is_set():
            begun = stopwatch.now()
            answered, after_head = await ask()
            seen.failed += not answered
            gaps.append(after_head)
            took.append(stopwatch.since(begun))
            await asyncio.sleep(_PAUSE_S)

    stopwatch = _Stopwatch(orders.process_id)
    one, other = (_Connection(orders.port, stopwatch) for _ in range(2))
    async with asyncio.TaskGroup() as group:
        group.create_task(repeat(lambda: one.ask(health), seen.health, []))
        group.create_task(repeat(lambda: other.ask(complete), seen.completions, seen.gaps))
    one.close()
    other.close()
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
