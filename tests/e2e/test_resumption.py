"""A decode worker is killed in the middle of 50 streams: all of them finish, and nobody can tell from the text."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.e2e.reference import Reference
from tests.e2e.served import Served, assert_gone, serve
from tests.engine.tiny_models import make_model, random_prompts

STREAMS = 50
OUTPUT_TOKENS = 160
BEGUN_TOKENS = 3
ENOUGH = 40
KINDS: tuple[dict[str, Any], ...] = (
    {},
    {},
    {"logprobs": 1},
    {"presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
    {"n": 2, "min_tokens": 100, "logit_bias": {"7": 3.0}},
)
"""Streams of all kinds take part: what steers drawing has to be the same on both sides of the break."""


@dataclass(slots=True, eq=False)
class Stream:
    """One client. `tokens` and `scores` are by choice."""

    prompt: list[int]
    kind: dict[str, Any]
    tokens: dict[int, list[int]] = field(default_factory=dict)
    num_scored: int = 0
    finishes: list[str] = field(default_factory=list)
    timing: dict[str, Any] = field(default_factory=dict)
    done: bool = False

    @property
    def num_tokens(self) -> int:
        """Of the choice that is furthest behind."""
        lanes = self.tokens.values()
        return min(map(len, lanes)) if len(lanes) == self.kind.get("n", 1) else 0

    async def run(self, http: httpx.AsyncClient, model: str, news: asyncio.Event) -> None:
        body = {
            "model": model,
            "prompt": self.prompt,
            "max_tokens": OUTPUT_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": True,
        }
        request = http.stream(
            "POST", "/v1/completions", json=body | self.kind, headers={"X-Baton-Timing": "1"}
        )
        async with request as response:
            assert response.status_code == 200
            async for line in response.aiter_lines():
                self._take(line)
                news.set()

    def _take(self, line: str) -> None:
        if line.startswith(": baton "):
            self.timing = json.loads(line.removeprefix(": baton "))
        elif line == "data: [DONE]":
            self.done = True
        elif line:
            (choice,) = json.loads(line.removeprefix("data: "))["choices"]
            self.tokens.setdefault(choice["index"], []).extend(choice["token_ids"])
            self.finishes += [choice["finish_reason"]] if choice["finish_reason"] else []
            self.num_scored += len((choice["logprobs"] or {"tokens": []})["tokens"])


def _streams() -> list[Stream]:
    prompts = random_prompts(STREAMS, 48)
    return [Stream(prompt=p, kind=KINDS[i % len(KINDS)]) for i, p in enumerate(prompts)]


async def _all_at_once(
    cluster: Served, streams: list[Stream], in_the_middle: Callable[[], None] | None = None
) -> None:
    """Reads every stream to its end; calls `in_the_middle` once enough of them have begun."""
    limits, news = httpx.Limits(max_connections=STREAMS), asyncio.Event()
    async with httpx.AsyncClient(base_url=cluster.url, timeout=60.0, limits=limits) as http:
        model = (await http.get("/v1/models")).json()["data"][0]["id"]
        async with asyncio.TaskGroup() as group:
            for stream in streams:
                group.create_task(stream.run(http, model, news))
            while in_the_middle and sum(s.num_tokens >= BEGUN_TOKENS for s in streams) < ENOUGH:
                news.clear()
                await news.wait()
            if in_the_middle is not None:
                in_the_middle()


def _migrations(cluster: Served) -> float:
    name = 'baton_migrations_total{kind="resumed",'
    lines = httpx.get(f"{cluster.url}/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


def _decode_worker(cluster: Served, name: str) -> psutil.Process:
    (found,) = [p for p in cluster.children() if f"--name {name}" in " ".join(p.cmdline())]
    return found


def test_a_decode_worker_killed_in_the_middle_of_fifty_streams_is_not_missed(
    tmp_path: Path,
) -> None:
    checkpoint = make_model(tmp_path / "llama", "llama")
    flags = ("--decode-workers", "2", "--dtype", "float32", "--kv-cache-memory", "64MiB")
    calm, struck = _streams(), _streams()
    with serve(str(checkpoint), *flags) as cluster:
        asyncio.run(_all_at_once(cluster, calm))
        on_victim = {stream.timing["decode_worker"] for stream in calm}
        assert on_victim == {"decode-0", "decode-1"}, "both workers take part"
        victim = _decode_worker(cluster, "decode-0")
        progress: list[int] = []

        def kill() -> None:
            victim.kill()
            progress.extend(stream.num_tokens for stream in struck)

        asyncio.run(_all_at_once(cluster, struck, kill))
        assert_gone([victim])
        in_the_middle = [tokens for tokens in progress if BEGUN_TOKENS <= tokens < OUTPUT_TOKENS]
        assert len(in_the_middle) >= ENOUGH // 2, "the worker was killed in mid-stream"
        resumed = [stream for stream in struck if stream.timing["resumptions"]]
        assert len(resumed) >= STREAMS // 5, "the worker had its share of the streams"
        assert _migrations(cluster) == sum(s.timing["resumptions"] for s in resumed)
    _assert_equal(calm, struck, Reference(checkpoint))


def _assert_equal(calm: list[Stream], struck: list[Stream], reference: Reference) -> None:
    for before, after in zip(calm, struck, strict=True):
        choices = after.kind.get("n", 1)
        assert after.done
        assert after.finishes == ["length"] * choices
        assert [len(lane) for lane in after.tokens.values()] == [OUTPUT_TOKENS] * choices
        assert after.num_scored == (OUTPUT_TOKENS if "logprobs" in after.kind else 0)
        if after.tokens != before.tokens:  # allowed only where two logits were all but equal
            assert after.kind in ({}, {"logprobs": 1})
            reference.assert_greedy(after.prompt, after.tokens[0])
