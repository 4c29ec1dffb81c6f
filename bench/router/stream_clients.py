"""Clients for `bench.router_stream`: many streams at once, read with as little work as can be, counted and timed.

`python -m bench.router.stream_clients` takes its orders as one line of JSON on standard input and prints what it
counted as another.
"""

import asyncio
import json
import sys
import time
from dataclasses import asdict, dataclass
from statistics import median
from typing import cast

import uvloop

from bench.harness.percentile import percentile

_EVENT_END = b"\n\n"
_LAST_CHUNK = b"0\r\n\r\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Orders:
    """What is asked of the clients.

    Attributes:
        host: Of the router.
        port: Its HTTP port.
        model: Name to ask for.
        streams: Clients; each sends its next request when the last one ended.
        rounds: Requests per client.
        output_tokens: Tokens per request, on average: each client asks for another number, so that they end one by one.
    """

    host: str
    port: int
    model: str
    streams: int
    rounds: int
    output_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """What the clients asked for and saw: tokens, events, the time from each request to its first byte,
    and between two reads.
    """

    tokens: int
    events: int
    elapsed_s: float
    ttfts_s: list[float]
    gap_p50_s: float
    gap_p99_s: float


class _Client(asyncio.Protocol):
    """One connection. An answer that is not a whole stream fails it."""

    def __init__(self, request: bytes, rounds: int) -> None:
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.events = 0
        self.ttfts_s: list[float] = []
        self.gaps_s: list[float] = []
        self._request = request
        self._rounds = rounds
        self._tail = b""
        self._last = b""
        self._begun = False
        self._sent_s = self._read_s = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's do not say so
        self._send()

    def data_received(self, data: bytes) -> None:
        now_s = time.perf_counter()
        if self._begun:
            self.gaps_s.append(now_s - self._read_s)
        else:
            self._begin(data)
        self._read_s = now_s
        seen = self._tail + data
        self.events += seen.count(_EVENT_END)
        self._tail = seen[-1:] if not seen.endswith(_EVENT_END) else b""
        if data.endswith(_LAST_CHUNK):
            self._end(self._last + data)
        self._last = data

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(f"the router hung up: {exc}")

    def _begin(self, data: bytes) -> None:
        self._begun = True
        self.ttfts_s.append(time.perf_counter() - self._sent_s)
        if not data.startswith(b"HTTP/1.1 200 "):
            self._fail(data[:500].decode(errors="replace"))

    def _end(self, data: bytes) -> None:
        if b"data: [DONE]" not in data:
            self._fail(data[-500:].decode(errors="replace"))
            return
        self._rounds -= 1
        if self._rounds:
            self._send()
        elif not self.done.done():
            self.done.set_result(None)

    def _send(self) -> None:
        self._begun, self._tail = False, b""
        self._sent_s = time.perf_counter()
        self._transport.write(self._request)

    def _fail(self, why: str) -> None:
        if not self.done.done():
            self.done.set_exception(RuntimeError(why))


def _output_tokens(orders: Orders, client: int) -> int:
    """Half of the average to one and a half of it."""
    return orders.output_tokens // 2 + orders.output_tokens * client // orders.streams


def _request(orders: Orders, output_tokens: int) -> bytes:
    body = json.dumps(
        {
            "model": orders.model,
            "messages": [{"role": "user", "content": "Who hands the baton over, and to whom?"}],
            "max_tokens": output_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
        }
    )
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {orders.host}:{orders.port}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return (head + body).encode()


async def _connect(orders: Orders, output_tokens: int) -> _Client:
    request = _request(orders, output_tokens)
    _, client = await asyncio.get_running_loop().create_connection(
        lambda: _Client(request, orders.rounds), orders.host, orders.port
    )
    return client


async def _run(orders: Orders) -> Counts:
    wanted = [_output_tokens(orders, client) for client in range(orders.streams)]
    begun_s = time.perf_counter()
    clients = [await _connect(orders, output_tokens) for output_tokens in wanted]
    await asyncio.gather(*(client.done for client in clients))
    gaps_s = [gap_s for client in clients for gap_s in client.gaps_s]
    return Counts(
        tokens=sum(wanted) * orders.rounds,
        events=sum(client.events for client in clients),
        elapsed_s=time.perf_counter() - begun_s,
        ttfts_s=[ttft_s for client in clients for ttft_s in client.ttfts_s],
        gap_p50_s=median(gaps_s),
        gap_p99_s=percentile(gaps_s, 0.99),
    )


if __name__ == "__main__":
    given = Orders(**json.loads(sys.stdin.readline()))
    sys.stdout.write(json.dumps(asdict(uvloop.run(_run(given)))) + "\n")
