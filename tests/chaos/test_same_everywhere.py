"""What comes out of pairs whose workers are killed all the time is what one hybrid worker gives, with guessed tokens
and without: grammars, calls of tools, reasoning, several samples, penalties, stop strings and least lengths,
drawn at random.
"""

import asyncio
import itertools
import json
import re
import socket
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest

from tests.baton_engine.tiny_models import make_model, random_prompts
from tests.e2e.served import Served, eventually, serve
from tests.e2e.test_tools import SCHEMAS, TEMPLATE

pytestmark = [pytest.mark.chaos, pytest.mark.alone, pytest.mark.timeout(1500)]

CASES = 300
AT_A_TIME = 12
COMMON = ("--dtype", "float32", "--kv-cache-memory", "32MiB")
HYBRID = ("--hybrid-workers", "1")
PAIRS = ("--prefill-workers", "2", "--decode-workers", "2")
DRAFTS = '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}'
GUESSING = ("--speculative-config", DRAFTS)
WORKERS = ("decode-0", "prefill-0", "decode-1", "prefill-1")
LEAST_KILLED = 3
"""Of each role, before no further round of all cases is begun."""
MOST_ROUNDS = 60
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
    {"allowed_token_ids": [66, 67, 68, 69]},
    {"structured_outputs": {"regex": "(ab|abc){8,60}"}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}},
    {"response_format": {"type": "json_object"}},
    {"structured_outputs": {"regex": "([a-c]{2,9}-[0-9]{1,9} ){4,30}"}},
    {"guided_choice": ["yes", "no, thank you very much, but not today", "perhaps"]},
    {"structured_outputs": {"grammar": 'start: "x" (WORD " ")* "."\nWORD: /[a-z]{3,20}/'}},
)
"""Of answers to either endpoint. The second and the third repeat themselves, so that something can be guessed."""
TOOLS = [
    {"type": "function", "function": {"name": name, "strict": True, "parameters": schema}}
    for name, schema in SCHEMAS.items()
]
NAMED = {"type": "function", "function": {"name": "weather"}}
THINKS = {"chat_template_kwargs": {"thinks": True}, "max_thinking_tokens": 9}
CHAT_FORMS: tuple[dict[str, Any], ...] = (
    {"tools": TOOLS},
    {"tools": TOOLS, "tool_choice": "required"},
    {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False, **THINKS},
    {"tools": TOOLS, "tool_choice": NAMED},
    {"tools": TOOLS, **THINKS},
    THINKS,
)
"""Those that chats alone may ask for: calls of the model's own accord, required and named ones, and reasoning."""

Choice = tuple[list[int], str, str]
"""Tokens, what was said, and why it ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A request: where it is sent, and what is asked there besides the model."""

    path: str
    fields: dict[str, Any]


def cases() -> list[Case]:
    rng = Random(17)
    prompts = random_prompts(CASES, 64, seed=17)
    return [_case(rng, number, prompt) for number, prompt in enumerate(prompts)]


def _case(rng: Random, number: int, prompt: list[int]) -> Case:
    if rng.random() < 0.7:
        asked: dict[str, Any] = {"prompt": prompt} | rng.choice(FORMS)
        return Case(path="/v1/completions", fields=asked | _steers(rng, number))
    words = " ".join(f"{token}" for token in prompt)
    asked = {"messages": [{"role": "user", "content": words}]} | rng.choice(FORMS + CHAT_FORMS)
    return Case(path="/v1/chat/completions", fields=asked | _steers(rng, number))


def _steers(rng: Random, number: int) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "seed": number,
        "temperature": rng.choice([0.0, 0.6, 1.0, 1.3]),
        "max_tokens": rng.randint(20, 160),
    }
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


async def answers(cluster: Served, asked: list[Case]) -> list[list[Choice]]:
    """Of every request, some at a time. All have to be answered."""
    limits = httpx.Limits(max_connections=AT_A_TIME)
    turn = asyncio.Semaphore(AT_A_TIME)
    async with httpx.AsyncClient(base_url=cluster.url, timeout=120.0, limits=limits) as http:
        model = (await http.get("/v1/models")).json()["data"][0]["id"]

        async def answer(case: Case) -> list[Choice]:
            async with turn:
                body = {"model": model, "return_token_ids": True} | case.fields
                reply = await http.post(case.path, json=body)
            assert reply.status_code == 200, (reply.text, case)
            found = sorted(reply.json()["choices"], key=lambda choice: int(choice["index"]))
            return [(c["token_ids"], _said(c), c["finish_reason"]) for c in found]

        return list(await asyncio.gather(*map(answer, asked)))


def _said(choice: dict[str, Any]) -> str:
    """The text of a completion, or all of a chat's message but the ids of its calls."""
    if "text" in choice:
        return str(choice["text"])
    message: dict[str, Any] = choice["message"]
    for call in message.get("tool_calls") or ():
        del call["id"]
    return json.dumps(message)


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
    cluster: Served, asked: list[Case], killed: list[str]
) -> list[list[list[Choice]]]:
    """What each round of all requests was answered."""
    found: list[list[list[Choice]]] = []
    killing = asyncio.create_task(kill_in_turn(cluster, killed))
    while min(_killed_of(killed, "decode"), _killed_of(killed, "prefill")) < LEAST_KILLED:
        assert len(found) < MOST_ROUNDS, (killed, cluster.status(), cluster.output[-50:])
        found.append(await answers(cluster, asked))
        assert not killing.done(), killing
    killing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await killing
    return found


def _killed_of(killed: list[str], role: str) -> int:
    return sum(name.startswith(role) for name in killed)


def _differences(
    asked: list[Case], expected: list[list[Choice]], found: list[list[Choice]]
) -> list[tuple[Case, list[Choice], list[Choice]]]:
    both = zip(asked, expected, found, strict=True)
    return [each for each in both if each[1] != each[2]]


@pytest.mark.parametrize("guessing", [False, True], ids=["plain", "with drafts"])
def test_pairs_whose_workers_are_killed_give_what_one_worker_gives(
    tmp_path: Path, guessing: bool
) -> None:
    """With drafts a row's place among others changes, so that its bits may depend on them but for `--deterministic`."""
    model, asked = make_model(tmp_path / "llama", "llama"), cases()
    template = tmp_path / "template.jinja"
    template.write_text(TEMPLATE)
    common: tuple[str, ...] = (*COMMON, "--chat-template", str(template))
    if guessing:
        common = (*common, "--deterministic")
    with serve(str(model), *HYBRID, *common) as cluster:
        expected = asyncio.run(answers(cluster, asked))
    said = [text for choices in expected for _, text, _ in choices]
    assert sum('"tool_calls": [' in text for text in said) > CASES / 20, "hardly any calls"
    assert sum('"reasoning": "' in text for text in said) > CASES / 20, "hardly any reasoning"
    if guessing:
        common = (*common, *GUESSING)
        port = _free_port()
        with serve(str(model), *HYBRID, *common, "--worker-metrics-port", str(port)) as cluster:
            found = asyncio.run(answers(cluster, asked))
            accepted = _accepted(port)
        assert _differences(asked, expected, found) == []
        assert accepted > CASES / 10, "hardly anything was guessed"
    killed: list[str] = []
    with serve(str(model), *PAIRS, *common) as cluster:
        eventually(lambda: len(cluster.workers()) == len(WORKERS), "all workers are there")
        rounds = asyncio.run(rounds_under_kills(cluster, asked, killed))
        moved = cluster.metric("baton_migrations_total")
        for found in rounds:
            assert _differences(asked, expected, found) == []
        print(
            f"{len(rounds)} rounds of {CASES} cases, {moved:g} moved; killed: {killed}", flush=True
        )
        assert moved > 0


def _accepted(port: int) -> float:
    told = httpx.get(f"http://127.0.0.1:{port}/metrics").text
    found = re.search(r"^vllm:spec_decode_num_accepted_tokens_total (\S+)$", told, re.M)
    return float(found[1]) if found else 0.0


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as one:
        port: int = one.getsockname()[1]
        return port
