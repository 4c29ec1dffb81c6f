"""The load generator against a server that speaks just enough SSE."""

import asyncio
import json
from pathlib import Path

import pytest

from bench.harness import load
from bench.harness.load import Load, run_load, run_under
from bench.harness.report import Report
from tests.bench.conftest import Served

LOAD = Load(concurrency=2, requests=4, input_tokens=3, output_tokens=2, vocab=100)


async def test_every_request_is_sent_once_with_a_prompt_of_its_own(
    served: Served,
) -> None:
    outcome = await run_load(served.url, "bench", LOAD, seed=1)
    assert len(served.prompts) == 4
    assert len({tuple(prompt) for prompt in served.prompts}) == 4
    assert outcome.output_tok_s > 0


async def test_a_short_answer_is_an_error_and_no_figure(served: Served) -> None:
    asks_more = Load(concurrency=1, requests=1, input_tokens=3, output_tokens=5, vocab=100)
    with pytest.raises(ExceptionGroup) as caught:
        await run_load(served.url, "bench", asks_more, seed=1)
    assert "2 tokens generated, 5 asked" in str(caught.value.exceptions[0])


async def test_what_a_server_refuses_or_breaks_off_is_an_error_with_its_words(
    served: Served,
) -> None:
    served.status = 429
    with pytest.raises(ExceptionGroup) as refused:
        await run_load(served.url, "bench", LOAD, seed=1)
    assert "HTTP 429: b'refused'" in str(refused.value.exceptions[0])
    served.status, served.breaks_off = 200, True
    with pytest.raises(ExceptionGroup) as broken:
        await run_load(served.url, "bench", LOAD, seed=1)
    assert "HTTP 200: peer closed connection" in str(broken.value.exceptions[0])


async def test_an_answer_that_does_not_come_is_an_error_that_names_the_limit(monkeypatch) -> None:
    async def swallow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    monkeypatch.setattr(load, "_TIMEOUT_S", 0.2)
    alone = Load(concurrency=1, requests=1, input_tokens=3, output_tokens=2, vocab=100)
    async with await asyncio.start_server(swallow, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        with pytest.raises(ExceptionGroup) as caught:
            await run_load(f"http://{host}:{port}", "bench", alone, seed=1)
    message = f"no whole answer from {host}:{port} within 0.2 s"
    assert [str(error) for error in caught.value.exceptions] == [message]


def test_a_report_says_where_its_figures_come_from(tmp_path: Path) -> None:
    file = tmp_path / "results" / "x.json"
    Report(benchmark="x", settings={"seed": 1}, figures={"b": 2.0, "a": 1.0}).write(file)
    document = json.loads(file.read_text())
    assert list(document["figures"]) == ["a", "b"]
    assert {"revision", "hardware", "versions", "settings"} <= document.keys()


async def test_a_load_is_measured_while_another_is_sent_again_and_again(
    served: Served,
) -> None:
    prompts = Load(concurrency=1, requests=1, input_tokens=9, output_tokens=2, vocab=100)
    outcome, pressed = await run_under(served.url, "bench", LOAD, prompts, seed=1)
    lengths = [len(prompt) for prompt in served.prompts]
    assert lengths.count(3) == 4
    assert lengths.count(9) >= max(1, len(pressed))
    assert outcome.output_tok_s > 0
