"""A server for the load generator that speaks just enough SSE."""

import json
from collections.abc import AsyncIterator

import httpx
import pytest


def _transport(most_tokens: int, seen: list[list[int]]) -> httpx.MockTransport:
    async def stream(tokens: int) -> AsyncIterator[bytes]:
        for _ in range(tokens):
            yield b'data: {"choices": [{"text": "x"}]}\n\n'
        usage = json.dumps({"choices": [], "usage": {"completion_tokens": tokens}})
        yield f"data: {usage}\n\ndata: [DONE]\n\n".encode()

    def answer(request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        seen.append(body["prompt"])
        return httpx.Response(200, content=stream(min(body["max_tokens"], most_tokens)))

    return httpx.MockTransport(answer)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Routes the generator's client to a server that gives two tokens at most; returns the prompts it saw."""
    seen: list[list[int]] = []
    client = httpx.AsyncClient

    def with_transport(**settings: object) -> httpx.AsyncClient:
        return client(transport=_transport(2, seen), base_url="http://bench")

    monkeypatch.setattr("bench.harness.load.httpx.AsyncClient", with_transport)
    return seen
