"""The load generator against a server that speaks just enough SSE."""

import json
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from bench.load import Load, run_load, run_under
from bench.report import Report

LOAD = Load(concurrency=2, requests=4, input_tokens=3, output_tokens=2, vocab=100)


def _transport(tokens: int, seen: list[list[int]]) -> httpx.MockTransport:
    async def stream() -> AsyncIterator[bytes]:
        for _ in range(tokens):
            yield b'data: {"choices": [{"text": "x"}]}\n\n'
        usage = json.dumps({"choices": [], "usage": {"completion_tokens": tokens}})
        yield f"data: {usage}\n\ndata: [DONE]\n\n".encode()

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(json.loads(request.content)["prompt"])
        return httpx.Response(200, content=stream())

    return httpx.MockTransport(answer)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Routes the generator's client to a server that gives two tokens; returns the prompts it saw."""
    seen: list[list[int]] = []
    client = httpx.AsyncClient

    def with_transport(**settings: object) -> httpx.AsyncClient:
        return client(transport=_transport(2, seen), base_url="http://bench")

    monkeypatch.setattr("bench.load.httpx.AsyncClient", with_transport)
    return seen


async def test_every_request_is_sent_once_with_a_prompt_of_its_own(
    served: list[list[int]],
) -> None:
    outcome = await run_load("http://bench", "bench", LOAD, seed=1)
    assert len(served) == 4
    assert len({tuple(prompt) for prompt in served}) == 4
    assert outcome.output_tok_s > 0


async def test_a_short_answer_is_an_error_and_no_figure(served: list[list[int]]) -> None:
    asks_more = Load(concurrency=1, requests=1, input_tokens=3, output_tokens=5, vocab=100)
    with pytest.raises(ExceptionGroup) as caught:
        await run_load("http://bench", "bench", asks_more, seed=1)
    assert "2 tokens generated, 5 asked" in str(caught.value.exceptions[0])


def test_a_report_says_where_its_figures_come_from(tmp_path: Path) -> None:
    file = tmp_path / "results" / "x.json"
    Report(benchmark="x", settings={"seed": 1}, figures={"b": 2.0, "a": 1.0}).write(file)
    document = json.loads(file.read_text())
    assert list(document["figures"]) == ["a", "b"]
    assert {"revision", "hardware", "versions", "settings"} <= document.keys()


async def test_a_load_is_measured_while_another_is_sent_again_and_again(
    served: list[list[int]],
) -> None:
    prompts = Load(concurrency=1, requests=1, input_tokens=9, output_tokens=2, vocab=100)
    outcome = await run_under("http://bench", "bench", LOAD, prompts, seed=1)
    lengths = [len(prompt) for prompt in served]
    assert lengths.count(3) == 4
    assert lengths.count(9) >= 1
    assert outcome.output_tok_s > 0
