"""A closed-loop load generator: so many clients, each sending its next streamed request when the last one ended.

The server under test has the same cores, so that a client does next to nothing while tokens come: it notes when bytes
arrive, and makes a response of them once the stream is over.
"""

import asyncio
import itertools
import json
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from urllib.parse import SplitResult, urlsplit

import h11

from bench.harness.percentile import percentile

_TIMEOUT_S = 3600.0
"""Of a request: the slowest of peers takes 25 minutes for the last of 32 prompts of 2,048 tokens."""
_MOST_BYTES = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """One level of load.

    Attributes:
        concurrency: Clients.
        requests: Requests in all.
        input_tokens: Random token ids per prompt, all prompts different.
        output_tokens: Tokens generated per request, whatever they are.
        vocab: Token ids are drawn below this.
    """

    concurrency: int
    requests: int
    input_tokens: int
    output_tokens: int
    vocab: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """When things happened to one request, in seconds of `perf_counter`."""

    sent_s: float
    arrivals_s: tuple[float, ...]
    output_tokens: int

    @property
    def ttft_s(self) -> float:
        """Time to the first token."""
        return self.arrivals_s[0] - self.sent_s

    @property
    def gaps_s(self) -> list[float]:
        """Times between two chunks."""
        return [later - earlier for earlier, later in itertools.pairwise(self.arrivals_s)]

    @property
    def tpot_s(self) -> float:
        """Mean time per output token after the first."""
        return (self.arrivals_s[-1] - self.arrivals_s[0]) / max(1, self.output_tokens - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one level of load measured.

    Attributes:
        ttft_ms: Time to the first token, and its p99, over the requests.
        tpot_ms: A request's mean time per token after the first, and its p99, over the requests.
        itl_p99_ms: p99 over all times between two chunks of any request.
    """

    output_tok_s: float
    ttft_ms: float
    ttft_p99_ms: float
    tpot_ms: float
    tpot_p99_ms: float
    itl_p99_ms: float


async def run_load(url: str, model: str, load: Load, *, seed: int) -> Outcome:
    """Sends the load and waits for all of it.

    Raises:
        RuntimeError: A request failed or gave another number of tokens than asked.
    """
    rng = random.Random(seed)
    prompts = [
        [rng.randrange(2, load.vocab) for _ in range(load.input_tokens)]
        for _ in range(load.requests)
    ]
    timelines: list[Timeline] = []
    server = urlsplit(url)

    async def worker() -> None:
        while prompts:
            timelines.append(await _request(server, model, prompts.pop(), load.output_tokens))

    started_s = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(load.concurrency):
            group.create_task(worker())
    elapsed_s = time.perf_counter() - started_s
    return _summary(timelines, elapsed_s)


async def run_under(
    url: str, model: str, load: Load, pressure: Load, *, seed: int
) -> tuple[Outcome, list[Outcome]]:
    """The same, while `pressure` is sent again and again; it is broken off when the load has been served.

    Returns:
        What the load measured, and each of those times that the pressure was served to its end.

    Raises:
        RuntimeError: As `run_load`, of either load.
    """
    pressed: list[Outcome] = []

    async def press() -> None:
        for again in itertools.count():
            outcome = await run_load(url, model, pressure, seed=seed + 1 + again)
            pressed.append(outcome)

    async with asyncio.TaskGroup() as group:
        pressing = group.create_task(press())
        outcome = await run_load(url, model, load, seed=seed)
        pressing.cancel()
    return outcome, pressed


async def _request(
    server: SplitResult, model: str, prompt: list[int], output_tokens: int
) -> Timeline:
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": output_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    connection = h11.Connection(h11.CLIENT)
    asked = _posted(connection, server.netloc, json.dumps(body).encode())
    sent_s = time.perf_counter()
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            pieces = await _exchange(server, asked)
    except TimeoutError as error:
        raise TimeoutError(
            f"no whole answer from {server.netloc} within {_TIMEOUT_S:g} s"
        ) from error
    arrivals, generated = _read(_answered(connection, pieces))
    if generated != output_tokens:
        raise RuntimeError(f"{generated} tokens generated, {output_tokens} asked")
    return Timeline(sent_s=sent_s, arrivals_s=tuple(arrivals), output_tokens=generated)


async def _exchange(server: SplitResult, asked: bytes) -> list[tuple[float, bytes]]:
    """What comes back until the server closes the connection, and when."""
    reader, writer = await asyncio.open_connection(server.hostname, server.port)
    try:
        writer.write(asked)
        pieces = []
        while piece := await reader.read(_MOST_BYTES):
            pieces.append((time.perf_counter(), piece))
        return pieces
    finally:
        writer.close()


def _posted(connection: h11.Connection, host: str, body: bytes) -> bytes:
    """A request on a connection of its own: some servers close theirs after a stream although they promised not to."""
    head = h11.Request(
        method="POST",
        target="/v1/completions",
        headers=[
            ("host", host),
            ("connection", "close"),
            ("content-type", "application/json"),
            ("content-length", str(len(body))),
        ],
    )
    events = (head, h11.Data(data=body), h11.EndOfMessage())
    return b"".join(connection.send(event) or b"" for event in events)


def _answered(
    connection: h11.Connection, pieces: Sequence[tuple[float, bytes]]
) -> Iterator[tuple[float, bytes]]:
    """The response's body, each part with the time of the bytes that completed it.

    Raises:
        RuntimeError: The request was refused, or the connection ended too early.
    """
    status = 0
    try:
        for at_s, piece in (*pieces, (time.perf_counter(), b"")):  # empty: the connection has ended
            connection.receive_data(piece)
            while (event := connection.next_event()) is not h11.NEED_DATA:
                match event:
                    case h11.Response():
                        status = event.status_code
                    case h11.Data() if status == 200:
                        yield at_s, bytes(event.data)
                    case h11.Data():
                        raise RuntimeError(f"HTTP {status}: {bytes(event.data)[:500]!r}")
                    case h11.EndOfMessage() if status == 200:
                        return
    except h11.RemoteProtocolError as error:
        raise RuntimeError(f"HTTP {status}: {error}") from error
    raise RuntimeError(f"HTTP {status}: nothing more came")


def _read(parts: Iterator[tuple[float, bytes]]) -> tuple[list[float], int]:
    """When chunks with text arrived, and how many tokens there were.

    Raises:
        RuntimeError: The stream says that it failed.
    """
    arrivals: list[float] = []
    generated, unread = 0, b""
    for at_s, part in parts:
        *lines, unread = (unread + part).split(b"\n")
        for line in lines:
            if not line.startswith(b"data: {"):
                continue
            chunk = json.loads(line[6:])
            if "error" in chunk:
                raise RuntimeError(f"stream failed: {chunk['error']}")
            if chunk.get("usage"):
                generated = chunk["usage"]["completion_tokens"]
            else:
                arrivals.append(at_s)
    return arrivals, generated


def _summary(timelines: list[Timeline], elapsed_s: float) -> Outcome:
    ttfts = [timeline.ttft_s * 1e3 for timeline in timelines]
    tpots = [timeline.tpot_s * 1e3 for timeline in timelines]
    gaps = [gap * 1e3 for timeline in timelines for gap in timeline.gaps_s]
    return Outcome(
        output_tok_s=sum(timeline.output_tokens for timeline in timelines) / elapsed_s,
        ttft_ms=statistics.median(ttfts),
        ttft_p99_ms=percentile(ttfts, 0.99),
        tpot_ms=statistics.median(tpots),
        tpot_p99_ms=percentile(tpots, 0.99),
        itl_p99_ms=percentile(gaps, 0.99) if gaps else 0.0,
    )
