"""An open-loop load: requests arrive when they do, whether or not earlier ones were answered.

`python -m bench.router.open_load` takes its orders as one line of JSON on standard input and prints what it saw as
another. A process of its own for each tenant, so that one's flood does not delay the stopwatch of another.
"""

import asyncio
import json
import os
import random
import re
import sys
import time
from dataclasses import asdict, dataclass, field

import httpx
import uvloop

_END_BYTES = 4096
_TIMING = re.compile(rb": baton ({.*})\n\ndata: \[DONE\]\n\n$")
"""How a reply ends that is whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Orders:
    """What is sent.

    Attributes:
        urls: Routers; each request goes to the next one.
        key: API key of the tenant.
        rate_per_s: Arrivals per second, exponentially spaced.
        requests: How many.
        prompt_tokens: Random token ids per prompt, from 100 to 199.
        output_tokens: Tokens generated per request.
        seed: Of arrivals.
    """

    urls: list[str]
    key: str
    rate_per_s: float
    requests: int
    prompt_tokens: int
    output_tokens: int
    seed: int


@dataclass(slots=True, kw_only=True)
class Seen:
    """What came back.

    Attributes:
        ttfts_s: Of the requests that were answered, in the order of their ends. In the same order:
        in_line_s: How long each waited in the router's line.
        at_worker_s: How long it was in the prefill worker until its first token.
        ends_s: When it ended, from the start.
        refused: Requests that were answered with 429.
        retry_afters_s: What those were told.
        failed: Answers that are neither.
    """

    ttfts_s: list[float] = field(default_factory=list)
    in_line_s: list[float] = field(default_factory=list)
    at_worker_s: list[float] = field(default_factory=list)
    ends_s: list[float] = field(default_factory=list)
    refused: int = 0
    retry_afters_s: list[int] = field(default_factory=list)
    failed: int = 0

    def add(self, other: "Seen") -> None:
        """Puts another load's with these."""
        self.ttfts_s += other.ttfts_s
        self.in_line_s += other.in_line_s
        self.at_worker_s += other.at_worker_s
        self.ends_s += other.ends_s
        self.refused += other.refused
        self.retry_afters_s += other.retry_afters_s
        self.failed += other.failed


async def send(orders: Orders) -> Seen:
    """Sends everything and waits for all answers."""
    rng = random.Random(orders.seed)
    seen = Seen()
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=200)
    headers = {"Authorization": f"Bearer {orders.key}", "Content-Type": "application/json"}
    headers["X-Baton-Timing"] = "1"
    async with httpx.AsyncClient(timeout=600.0, limits=limits, headers=headers) as client:
        begun_s = due_s = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for number in range(orders.requests):
                due_s += rng.expovariate(orders.rate_per_s)
                body = _body(orders)
                await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
                url = orders.urls[number % len(orders.urls)]
                group.create_task(_request(client, url, body, begun_s, seen))
    return seen


def _body(orders: Orders) -> bytes:
    # Cheap, for every moment spent here is taken from what is measured; and never the same, or it would be cached.
    prompt = [100 + byte % 100 for byte in os.urandom(orders.prompt_tokens)]
    asked = {"model": "bench", "prompt": prompt, "max_tokens": orders.output_tokens}
    return json.dumps(asked | {"ignore_eos": True, "stream": True}).encode()


async def _request(
    client: httpx.AsyncClient, url: str, body: bytes, begun_s: float, seen: Seen
) -> None:
    sent_s = time.perf_counter()
    async with client.stream("POST", f"{url}/v1/completions", content=body) as response:
        if response.status_code == 429:
            seen.refused += 1
            seen.retry_afters_s.append(int(response.headers.get("Retry-After", 0)))
            return
        first_s: float | None = None
        end = b""
        async for chunk in response.aiter_bytes():
            first_s = first_s or time.perf_counter()
            end = (end + chunk)[-_END_BYTES:]
    timing = _TIMING.search(end)
    if response.status_code != 200 or first_s is None or timing is None:
        seen.failed += 1
        return
    parts = json.loads(timing[1])
    seen.ttfts_s.append(first_s - sent_s)
    seen.in_line_s.append(parts["admission_s"])
    seen.at_worker_s.append(parts["queue_s"] + parts["prefill_s"])
    seen.ends_s.append(time.perf_counter() - begun_s)


def main() -> None:
    """Entry point."""
    orders = Orders(**json.loads(sys.stdin.readline()))
    seen = json.dumps(asdict(uvloop.run(send(orders))))
    # A write that waits for room in the pipe can be interrupted, as by what uvloop leaves of an io_uring. With
    # PYTHONUNBUFFERED `print` loses the rest of it; what has a buffer goes on.
    with open(sys.stdout.fileno(), "w", closefd=False) as output:
        output.write(seen + "\n")


if __name__ == "__main__":
    main()
