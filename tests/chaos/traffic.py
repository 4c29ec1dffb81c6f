"""Clients for chaos tests: seeded requests of all sizes over HTTP, each read to the one end that it must come to."""

import asyncio
import json
import random
from collections import Counter
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import httpx

GRACE_S = 15.0
"""A reply that has not ended so long after the request's deadline hangs."""


class End(Enum):
    """How a request ended for its client."""

    COMPLETED = "completed"
    REFUSED = "refused with a typed error"
    BROKEN_OFF = "a typed error in mid-stream"
    LEFT = "the client left"
    HUNG = "no end within its deadline"
    BROKEN = "the connection broke without an end"


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request.

    Attributes:
        prompt: Token ids.
        max_tokens: Tokens of each sample.
        samples: `n`.
        stream: Whether the client reads a stream.
        leaves_after: The client hangs up after so many chunks; None if it stays.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    samples: int = 1
    stream: bool = True
    leaves_after: int | None = None

    def body(self, model: str) -> dict[str, object]:
        """The JSON that asks for it: greedy, exactly `max_tokens` tokens."""
        return {
            "model": model,
            "prompt": list(self.prompt),
            "max_tokens": self.max_tokens,
            "n": self.samples,
            "stream": self.stream,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }


@dataclass(slots=True, eq=False)
class Reply:
    """What came back.

    Attributes:
        end: How it ended; None while it runs.
        tokens: Tokens of each sample.
        error: What the cluster said went wrong.
    """

    request: Request
    end: End | None = None
    tokens: dict[int, list[int]] = field(default_factory=dict)
    error: str = ""

    def add(self, chunk: dict[str, Any]) -> None:
        """Takes the tokens of a chunk, or of a whole reply."""
        for choice in chunk.get("choices", ()):
            self.tokens.setdefault(choice["index"], []).extend(choice["token_ids"])


def make_requests(count: int, *, seed: int, longest: int = 600, vocab: int = 320) -> list[Request]:
    """Requests of mixed sizes. Every third prompt begins like another one, so that cached pages are put to use."""
    rng = random.Random(seed)
    stems = [tuple(rng.randrange(6, vocab) for _ in range(longest)) for _ in range(8)]
    return [_request(rng, stems, longest, vocab) for _ in range(count)]


def _request(rng: random.Random, stems: list[tuple[int, ...]], longest: int, vocab: int) -> Request:
    length = rng.randint(1, longest)
    prompt = tuple(rng.randrange(6, vocab) for _ in range(length))
    if rng.random() < 1 / 3:
        shared = rng.randint(0, length - 1)
        prompt = rng.choice(stems)[:shared] + prompt[shared:]
    stream = rng.random() < 0.8
    return Request(
        prompt=prompt,
        max_tokens=rng.randint(1, 64),
        samples=rng.choice((1, 1, 1, 1, 2, 3)),
        stream=stream,
        leaves_after=rng.randint(1, 40) if stream and rng.random() < 0.08 else None,
    )


class Traffic:
    """A number of clients, each sending its next request when the last one has ended.

    Args:
        url: The cluster.
        requests: All of them.
        clients: How many at once.
        timeout_s: The deadline that the cluster gives each request.
        key: Of the tenant; empty where nobody needs one.
    """

    def __init__(
        self,
        url: str,
        requests: list[Request],
        *,
        clients: int,
        timeout_s: float,
        key: str = "",
    ) -> None:
        self._url = url
        self._waiting = list(reversed(requests))
        self._clients = clients
        self._timeout_s = timeout_s
        self._headers = {"authorization": f"Bearer {key}"} if key else {}
        self._leave: dict[Reply, asyncio.Event] = {}
        self.replies: list[Reply] = []

    async def run(self) -> None:
        """Sends everything and waits for every end."""
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        async with httpx.AsyncClient(
            base_url=self._url, timeout=None, limits=limits, headers=self._headers
        ) as http:
            model = (await http.get("/v1/models")).json()["data"][0]["id"]
            async with asyncio.TaskGroup() as group:
                for _ in range(self._clients):
                    group.create_task(self._client(http, model))

    @property
    def left(self) -> int:
        """Requests not sent yet."""
        return len(self._waiting)

    def hang_up(self, rng: random.Random) -> bool:
        """Makes one of the clients that wait now leave; whether there was one."""
        staying = [leave for leave in self._leave.values() if not leave.is_set()]
        if not staying:
            return False
        rng.choice(staying).set()
        return True

    def ends(self) -> Counter[End]:
        """How many requests came to which end."""
        return Counter(reply.end for reply in self.replies if reply.end is not None)

    async def _client(self, http: httpx.AsyncClient, model: str) -> None:
        while self._waiting:
            reply = Reply(request=self._waiting.pop())
            self.replies.append(reply)
            leave = self._leave[reply] = asyncio.Event()
            try:
                async with asyncio.timeout(self._timeout_s + GRACE_S):
                    reply.end = await _until_left(self._exchange(http, model, reply), leave)
            except TimeoutError:
                reply.end = End.HUNG
            finally:
                del self._leave[reply]

    async def _exchange(self, http: httpx.AsyncClient, model: str, reply: Reply) -> End:
        body = reply.request.body(model)
        try:
            async with http.stream("POST", "/v1/completions", json=body) as response:
                if response.status_code != 200:
                    reply.error = (await response.aread()).decode()
                    return End.REFUSED if "error" in json.loads(reply.error) else End.BROKEN
                if reply.request.stream:
                    return await _read_stream(response.aiter_lines(), reply)
                reply.add(json.loads(await response.aread()))
                return End.COMPLETED
        except httpx.TransportError as error:
            reply.error = repr(error)
            return End.BROKEN


async def _read_stream(lines: AsyncIterator[str], reply: Reply) -> End:
    chunks = 0
    async for line in lines:
        if line == "data: [DONE]":
            return End.COMPLETED if not reply.error else End.BROKEN_OFF
        if not line.startswith("data: "):
            continue
        chunk = json.loads(line[6:])
        if "error" in chunk:
            reply.error = json.dumps(chunk)
            continue
        reply.add(chunk)
        chunks += 1
        if chunks == reply.request.leaves_after:
            return End.LEFT
    return End.BROKEN_OFF if reply.error else End.BROKEN


async def _until_left(exchange: Coroutine[None, None, End], leave: asyncio.Event) -> End:
    """The end of an exchange, or `LEFT` if the client is made to hang up before."""
    talking = asyncio.create_task(exchange)
    leaving = asyncio.create_task(leave.wait())
    try:
        await asyncio.wait({talking, leaving}, return_when=asyncio.FIRST_COMPLETED)
        return talking.result() if talking.done() else End.LEFT
    finally:
        talking.cancel()
        leaving.cancel()
        await asyncio.gather(talking, leaving, return_exceptions=True)
