"""A cluster with its pool node, seen from outside."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.baton_engine.tiny_models import make_model
from tests.e2e.reference import Reference
from tests.e2e.served import Served, assert_gone, eventually, maps_pool, serve

FLAGS = ("--dtype", "float32", "--kv-cache-memory", "32MiB")
PROMPT_TOKENS = 400


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("llama"), "llama", max_position=4096)


@pytest.fixture
def cluster(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    monkeypatch.setenv("BATON_POOL_ENABLED", "true")
    # A machine that runs tests may be slow to answer; the pool is waited for.
    monkeypatch.setenv("BATON_POOL_LOOKUP_TIMEOUT_S", "5")
    # Prompts go to the prefill worker, also those that the decode worker could compute quickly.
    monkeypatch.setenv("BATON_ROUTER_LOCAL_PREFILL_TOKENS", "0")
    with serve(str(checkpoint), *FLAGS) as served:
        eventually(lambda: maps_pool(served, "prefill", "decode"), "workers map the pool", 60.0)
        yield served


def _prompt(number: int) -> list[int]:
    """Different ones have no block in common."""
    return [10 + (number * 7 + place * 3) % 80 for place in range(PROMPT_TOKENS)]


def _body(cluster: Served, prompt: list[int], max_tokens: int, **more: object) -> dict[str, Any]:
    with cluster.client() as http:
        model = http.get("/v1/models").json()["data"][0]["id"]
    return {
        "model": model,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    } | more


def _ask(cluster: Served, prompt: list[int]) -> list[int]:
    with cluster.client() as http:
        body = _body(cluster, prompt, 8)
        reply = http.post("/v1/completions", json=body)
    assert reply.status_code == 200, reply.text
    tokens: list[int] = reply.json()["choices"][0]["token_ids"]
    return tokens


def _usage(cluster: Served) -> dict[str, Any]:
    """What `baton pool top --json` says; nothing while there is no node."""
    return cluster.told("pool", "top")


def _explained(cluster: Served, prompt: list[int]) -> dict[str, Any]:
    """What `baton explain --json` says of one more request."""
    with cluster.client() as http:
        request_id = http.post("/v1/completions", json=_body(cluster, prompt, 8)).json()["id"]
    return cluster.told("explain", request_id)


class _Stream(threading.Thread):
    """A streamed completion read in the background."""

    def __init__(self, cluster: Served, prompt: list[int], max_tokens: int) -> None:
        super().__init__(daemon=True)
        self._url = f"{cluster.url}/v1/completions"
        self._body = _body(cluster, prompt, max_tokens, stream=True)
        self.tokens: list[int] = []
        self.last = ""
        self._enough = threading.Condition()

    def run(self) -> None:
        with httpx.stream("POST", self._url, json=self._body, timeout=60.0) as response:
            for line in filter(None, response.iter_lines()):
                self.last = line
                if line.startswith("data: {"):
                    self._take(json.loads(line.removeprefix("data: ")))

    def _take(self, chunk: dict[str, Any]) -> None:
        with self._enough:
            for choice in chunk["choices"]:
                self.tokens += choice["token_ids"]
            self._enough.notify_all()

    def wait_for(self, count: int) -> None:
        """Until so many tokens have come."""
        with self._enough:
            assert self._enough.wait_for(lambda: len(self.tokens) >= count, timeout=60)


def test_a_prefill_worker_that_starts_again_finds_its_prompts_in_the_pool(
    cluster: Served, checkpoint: Path
) -> None:
    prompts = [_prompt(number) for number in range(4)]
    before = [_ask(cluster, prompt) for prompt in prompts]
    blocks = len(prompts) * (PROMPT_TOKENS // 16)
    eventually(lambda: _usage(cluster).get("stored_blocks", 0) >= blocks, "all are put", 60.0)
    victim = cluster.child("prefill")
    victim.kill()
    assert_gone([victim])
    workers = {"prefill", "decode"}
    eventually(lambda: {w["role"] for w in cluster.workers()} == workers, "the worker is back")
    eventually(lambda: maps_pool(cluster, "prefill"), "the worker maps the pool")
    assert [_ask(cluster, prompt) for prompt in prompts] == before
    pooled = cluster.metric("baton_prompt_tokens_pooled_total")
    assert pooled >= 0.9 * PROMPT_TOKENS, f"{pooled} tokens, which is not even one prompt"
    told = _explained(cluster, prompts[0])
    assert told["pool_node"] == "pool-0"
    assert told["held_by_pool"] >= 0.9 * PROMPT_TOKENS
    for prompt, tokens in zip(prompts, before, strict=True):
        Reference(checkpoint).assert_greedy(prompt, tokens)


def test_a_stream_whose_decode_worker_is_killed_goes_on_with_its_tokens_from_the_pool(
    cluster: Served, checkpoint: Path
) -> None:
    # On a busy machine what is read lags behind what is generated, by hundreds of tokens.
    stream = _Stream(cluster, _prompt(1), max_tokens=3500)
    stream.start()
    victim = cluster.child("decode")
    stream.wait_for(1000)
    victim.kill()
    known = len(stream.tokens)
    assert_gone([victim])
    stream.join(60)
    assert stream.last == "data: [DONE]"
    assert len(stream.tokens) == 3500
    assert cluster.metric("baton_migrations_total") == 1
    Reference(checkpoint).assert_greedy(_prompt(1), stream.tokens)
    # What the prefill worker computed itself it has in its own cache. The pool gives the rest, but for the last tokens,
    # which the decode worker had not published yet when it died: how many depends on the machine.
    assert cluster.metric("baton_pool_hits_total") >= 0.5 * known


def test_nobody_misses_a_pool_node_that_is_killed(cluster: Served, checkpoint: Path) -> None:
    stream = _Stream(cluster, _prompt(2), max_tokens=1200)
    stream.start()
    stream.wait_for(10)
    victim = cluster.child("pool")
    victim.kill()
    assert_gone([victim])
    tokens = _ask(cluster, _prompt(3))
    Reference(checkpoint).assert_greedy(_prompt(3), tokens)
    stream.join(60)
    assert stream.last == "data: [DONE]"
    Reference(checkpoint).assert_greedy(_prompt(2), stream.tokens)
    eventually(lambda: _usage(cluster).get("node") == "pool-0", "another node answers")
    tokens = _ask(cluster, _prompt(4))
    Reference(checkpoint).assert_greedy(_prompt(4), tokens)
