"""A decode worker is killed in the middle of many streams: all of them finish, and nobody can tell from what came."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.baton_engine.tiny_models import make_model, random_prompts
from tests.e2e.reference import Reference
from tests.e2e.served import Served, assert_gone, eventually, serve
from tests.waits import soon

pytestmark = pytest.mark.alone

FLAGS = ("--decode-workers", "2", "--dtype", "float32", "--kv-cache-memory", "64MiB")
STREAMS = 50
OUTPUT_TOKENS = 240
ENOUGH = 10
"""Streams that a worker decodes when it is killed."""

KINDS: tuple[dict[str, Any], ...] = (
    {},
    {},
    {"logprobs": 1},
    {"presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
    {"n": 2, "min_tokens": 100, "logit_bias": {"7": 3.0}},
)
"""Greedy streams of all kinds take part: what steers drawing has to be the same on both sides of the break."""

EARLY_ENDS = [*range(6, 320, 3)]
"""Stop tokens that a draw meets soon: only `min_tokens` holds them off."""

SEEDED: tuple[dict[str, Any], ...] = (
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "min_p": 0.01, "n": 2},
    {"temperature": 1.0, "presence_penalty": 1.0, "frequency_penalty": 0.5},
    {"temperature": 1.0, "repetition_penalty": 1.2, "logit_bias": {"7": 3.0, "8": -100}},
    {"temperature": 1.0, "logprobs": 3},
    {"temperature": 1.0, "min_tokens": 120, "stop_token_ids": EARLY_ENDS},
    {"temperature": 1.0, "top_p": 0.7},
    {"temperature": 1.0, "allowed_token_ids": [*range(30, 300)], "bad_words": ["e", "th", "a b"]},
)
"""Draws with seeds, each by its own way of drawing."""


@dataclass(slots=True, eq=False)
class Stream:
    """One client. `tokens`, `texts` and `finishes` are by choice, `scores` those of all choices."""

    prompt: list[int]
    kind: dict[str, Any]
    tokens: dict[int, list[int]] = field(default_factory=dict)
    texts: dict[int, str] = field(default_factory=dict)
    finishes: dict[int, str] = field(default_factory=dict)
    scores: list[float] = field(default_factory=list)
    timing: dict[str, Any] = field(default_factory=dict)
    done: bool = False

    async def run(self, http: httpx.AsyncClient, model: str, begun: asyncio.Barrier) -> None:
        """Asks; reads the answer once all have `begun`: a client that reads is too busy to ask, and nobody would be in
        the middle of anything when the last ones ask.
        """
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
            assert response.status_code == 200, await response.aread()
            await soon(begun.wait())
            rest = b""
            async for piece in response.aiter_bytes():
                # Not by httpx's lines: it takes characters for their ends that stand in texts.
                *lines, rest = (rest + piece).split(b"\n")
                for line in lines:
                    self._take(line.decode())

    def _take(self, line: str) -> None:
        if line.startswith(": baton "):
            self.timing = json.loads(line.removeprefix(": baton "))
        elif line == "data: [DONE]":
            self.done = True
        elif line:
            (choice,) = json.loads(line.removeprefix("data: "))["choices"]
            index = choice["index"]
            self.tokens.setdefault(index, []).extend(choice["token_ids"])
            self.texts[index] = self.texts.get(index, "") + choice["text"]
            if choice["finish_reason"]:
                self.finishes[index] = choice["finish_reason"]
            self.scores += (choice["logprobs"] or {"token_logprobs": []})["token_logprobs"]


def _greedy() -> list[Stream]:
    prompts = random_prompts(STREAMS, 48)
    return [Stream(prompt=p, kind=KINDS[i % len(KINDS)]) for i, p in enumerate(prompts)]


def _seeded() -> list[Stream]:
    prompts = random_prompts(STREAMS, 48)
    return [
        Stream(prompt=p, kind=SEEDED[i % len(SEEDED)] | {"seed": i}) for i, p in enumerate(prompts)
    ]


def _stopped(calm: Stream) -> Stream:
    """The same draws again, with a stop string out of what came late in the calm run."""
    text = calm.texts[0]
    late = text[2 * len(text) // 3 :][:8]
    return Stream(prompt=calm.prompt, kind=calm.kind | {"stop": [late], "n": 1})


async def _all_at_once(
    cluster: Served, streams: list[Stream], in_the_middle: Callable[[], None] | None = None
) -> None:
    """Reads every stream to its end; calls `in_the_middle`, in a thread of its own, meanwhile."""
    limits = httpx.Limits(max_connections=STREAMS)
    async with httpx.AsyncClient(base_url=cluster.url, timeout=60.0, limits=limits) as http:
        model = (await http.get("/v1/models")).json()["data"][0]["id"]
        begun = asyncio.Barrier(len(streams))
        async with asyncio.TaskGroup() as group:
            for stream in streams:
                group.create_task(stream.run(http, model, begun))
            if in_the_middle is not None:
                group.create_task(asyncio.to_thread(in_the_middle))


def _decode_workers(cluster: Served) -> dict[str, psutil.Process]:
    """By their names."""
    commands = {process: process.cmdline() for process in cluster.children()}
    return {
        name: process
        for name in ("decode-0", "decode-1")
        for process, command in commands.items()
        if name in command
    }


def _strike(cluster: Served, streams: list[Stream]) -> None:
    """Has a decode worker killed in the middle of `streams`, and makes sure that it was the middle for some of them.

    The router is asked when that is: a client on a busy machine hears of tokens long after they were drawn.
    """
    before, workers = (
        cluster.metric("baton_migrations_total", kind="resumed"),
        _decode_workers(cluster),
    )
    victims: list[psutil.Process] = []

    def killed() -> bool:
        with cluster.client() as http:
            loads = {load["worker_id"]: load for load in http.get("/load").json()["workers"]}
        for name, process in workers.items():
            if min(loads[name]["running"], loads[name]["in_flight"]) >= ENOUGH:
                process.kill()
                victims.append(process)
                return True
        return False

    asyncio.run(
        _all_at_once(
            cluster, streams, lambda: eventually(killed, "a decode worker has enough to do", 60.0)
        )
    )
    assert_gone(victims)
    resumed = [stream for stream in streams if stream.timing["resumptions"]]
    assert len(resumed) >= STREAMS // 10, "the worker was killed in mid-stream"
    moved = sum(stream.timing["resumptions"] for stream in resumed)
    assert cluster.metric("baton_migrations_total", kind="resumed") - before == moved


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("llama"), "llama")


def test_a_decode_worker_killed_in_the_middle_of_fifty_streams_is_not_missed(
    checkpoint: Path,
) -> None:
    calm, struck = _greedy(), _greedy()
    with serve(str(checkpoint), *FLAGS) as cluster:
        asyncio.run(_all_at_once(cluster, calm))
        on_victim = {stream.timing["decode_worker"] for stream in calm}
        assert on_victim == {"decode-0", "decode-1"}, "both workers take part"
        _strike(cluster, struck)
    _assert_equal(calm, struck, Reference(checkpoint))


@pytest.fixture(scope="module")
def draws(checkpoint: Path) -> list[tuple[Stream, Stream]]:
    """Streams with seeds, undisturbed, and again with a decode worker killed; every second of these has a stop string.

    Not where `min_tokens` holds that off: stop strings are looked for behind it.
    """
    calm, again = _seeded(), _seeded()
    with serve(str(checkpoint), *FLAGS) as cluster:
        asyncio.run(_all_at_once(cluster, calm))
        struck = [
            _stopped(calm[i]) if i % 2 and "min_tokens" not in same.kind else same
            for i, same in enumerate(again)
        ]
        _strike(cluster, struck)
    return list(zip(calm, struck, strict=True))


@pytest.mark.slow
def test_draws_with_a_seed_go_on_where_they_were_and_end_where_they_would_have(
    draws: list[tuple[Stream, Stream]],
) -> None:
    for calm, struck in (pair for pair in draws if "stop" not in pair[1].kind):
        assert struck.done
        assert (struck.tokens, struck.texts) == (calm.tokens, calm.texts), struck.kind
        assert struck.finishes == calm.finishes
        assert struck.scores == pytest.approx(calm.scores, abs=1e-4)
        if "min_tokens" in struck.kind:
            assert struck.finishes == {0: "stop"}, "nothing but min_tokens held it off"
            assert 120 < len(struck.tokens[0]) < OUTPUT_TOKENS


def test_a_stop_string_behind_the_break_ends_a_text_where_it_would_have(
    draws: list[tuple[Stream, Stream]],
) -> None:
    for calm, struck in (pair for pair in draws if "stop" in pair[1].kind):
        (stop,), whole = struck.kind["stop"], calm.texts[0]
        assert struck.done
        assert struck.finishes == {0: "stop"}
        assert struck.texts[0] == whole[: whole.index(stop)], struck.kind
        told = struck.tokens[0]
        assert told == calm.tokens[0][: len(told)]


def _assert_equal(calm: list[Stream], struck: list[Stream], reference: Reference) -> None:
    for before, after in zip(calm, struck, strict=True):
        choices = after.kind.get("n", 1)
        assert after.done
        assert list(after.finishes.values()) == ["length"] * choices
        assert [len(lane) for lane in after.tokens.values()] == [OUTPUT_TOKENS] * choices
        assert len(after.scores) == (OUTPUT_TOKENS if "logprobs" in after.kind else 0)
        if after.tokens != before.tokens:  # allowed only where two logits were all but equal
            assert after.kind in ({}, {"logprobs": 1})
            reference.assert_greedy(after.prompt, after.tokens[0])
