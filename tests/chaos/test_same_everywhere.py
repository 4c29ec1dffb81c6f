"""What comes out of pairs whose workers are killed all the time is what one hybrid worker gives: grammars, several samples, penalties, stop
strings and least lengths, drawn at random.
"""

import asyncio
import itertools
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest

from tests.baton_engine.tiny_models import make_model, random_prompts
from tests.e2e.served import Served, serve

pytestmark = [pytest.mark.chaos, pytest.mark.alone, pytest.mark.timeout(1500)]

CASES = 300
AT_A_TIME = 12
COMMON = ("--dtype", "float32", "--kv-cache-memory", "32MiB")
PAIRS = ("--prefill-workers", "2", "--decode-workers", "2")
WORKERS = ("decode-0", "prefill-0", "decode-1", "prefill-1")
LEAST_KILLED = 3
"""Of each role, before no further round of all cases is begun."""
SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["one", "two"]},
        "name": {"type": "string", "maxLength": 30},
        "ages": {"type": "array", "items": {"type": "integer", "maximum": 99}, "maxItems": 9},
    },
    "required": ["kind", "name", "ages"],
    "additionalProperties": False,
}
FORMS: tuple[dict[str, Any], ...] = (
    {},
    {},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}},
    {"response_format": {"type": "json_object"}},
    {"structured_outputs": {"regex": "([a-c]{2,9}-[0-9]{1,9} ){4,30}"}},
    {"guided_choice": ["yes", "no, thank you very much, but not today", "perhaps"]},
    {"structured_outputs": {"grammar": 'start: "x" (WORD " ")* "."\nWORD: /[a-z]{3,20}/'}},
)

Choice = tuple[list[int], str, str]
"""Tokens, text, and why it ended."""


def cases() -> list[dict[str, Any]]:
    rng = Random(17)
    prompts = random_prompts(CASES, 64, seed=17)
    return [{"prompt": prompt} | _fields(rng, number) for number, prompt in enumerate(prompts)]


def _fields(rng: Random, number: int) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "seed": number,
        "temperature": rng.choice([0.6, 1.0, 1.3]),
        "max_tokens": rng.randint(20, 160),
    }
    fields |= rng.choice(FORMS)
    steers: list[dict[str, Any]] = [
        {"n": rng.randint(2, 4)},
        {"presence_penalty": 1.0, "frequency_penalty": 0.5},
        {"repetition_penalty": 1.2},
        {"stop": rng.sample(["a", "e", '"', "0", ",", " the"], 2), "min_tokens": rng.randint(0, 9)},
        {"min_tokens": rng.randint(5, 20)},
        {"logit_bias": {"7": 4.0, "66": 4.0, "98": 4.0}},
        {"top_p": 0.9, "top_k": 30},
        {"min_p": 0.02},
        {"bad_words": ["th", "a b"]},
        {"ignore_eos": True},
    ]
    for steer in rng.sample(steers, rng.randint(0, 4)):
        fields |= steer
    return fields


async def answers(cluster: Served, asked: list[dict[str, Any]]) -> list[list[Choice]]:
    """Of every request, some at a time. All have to be answered."""
    limits = httpx.Limits(max_connections=AT_A_TIME)
    turn = asyncio.Semaphore(AT_A_TIME)
    async with httpx.AsyncClient(base_url=cluster.url, timeout=120.0, limits=limits) as http:
        model = (await http.get("/v1/models")).json()["data"][0]["id"]

        async def answer(fields: dict[str, Any]) -> list[Choice]:
            async with turn:
                body = {"model": model, "return_token_ids": True} | fields
                reply = await http.post("/v1/completions", json=body)
            assert reply.status_code == 200, (reply.text, fields)
            found = sorted(reply.json()["choices"], key=lambda choice: int(choice["index"]))
            return [(c["token_ids"], c["text"], c["finish_reason"]) for c in found]

        return list(await asyncio.gather(*map(answer, asked)))


async def kill_in_turn(cluster: Served, killed: list[str]) -> None:
    """One worker after the other, each when both of its role are there, and it has something to do."""
    turns = itertools.cycle(WORKERS)
    name = next(turns)
    while True:
        if await asyncio.to_thread(_kill_busy, cluster, name):
            killed.append(name)
            name = next(turns)
        await asyncio.sleep(0.02)


def _kill_busy(cluster: Served, name: str) -> bool:
    workers = httpx.get(f"{cluster.url}/load", timeout=10.0).json()["workers"]
    in_flight = {worker["worker_id"]: worker["in_flight"] for worker in workers}
    role = name.split("-")[0]
    both_there = in_flight.keys() >= {f"{role}-0", f"{role}-1"}
    if not both_there or in_flight[name] < (2 if role == "decode" else 1):
        return False
    victim = next((p for p in cluster.children() if name in p.cmdline()), None)
    if victim is not None:
        victim.kill()
    return victim is not None


async def rounds_under_kills(
    cluster: Served, asked: list[dict[str, Any]], killed: list[str]
) -> list[list[list[Choice]]]:
    """What each round of all requests was answered."""
    found = []
    killing = asyncio.create_task(kill_in_turn(cluster, killed))
    while min(_killed_of(killed, "decode"), _killed_of(killed, "prefill")) < LEAST_KILLED:
        found.append(await answers(cluster, asked))
        assert not killing.done(), killing
    killing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await killing
    return found


def _killed_of(killed: list[str], role: str) -> int:
    return sum(name.startswith(role) for name in killed)


def _migrations(cluster: Served) -> float:
    lines = httpx.get(f"{cluster.url}/metrics").text.splitlines()
    found = [line for line in lines if line.startswith("baton_migrations_total{")]
    return sum(float(line.split()[-1]) for line in found)


def test_pairs_whose_workers_are_killed_give_what_one_worker_gives(tmp_path: Path) -> None:
    model, asked = make_model(tmp_path / "llama", "llama"), cases()
    with serve(str(model), "--hybrid-workers", "1", *COMMON) as cluster:
        expected = asyncio.run(answers(cluster, asked))
    killed: list[str] = []
    with serve(str(model), *PAIRS, *COMMON) as cluster:
        rounds = asyncio.run(rounds_under_kills(cluster, asked, killed))
        moved = _migrations(cluster)
        for found in rounds:
            both = zip(asked, expected, found, strict=True)
            assert [pair for pair in both if pair[1] != pair[2]] == []
        print(
            f"{len(rounds)} rounds of {CASES} cases, {moved:g} moved; killed: {killed}", flush=True
        )
        assert moved > 0
