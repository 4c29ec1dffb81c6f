"""Decode workers that have not room for everybody, with a pool to leave prompts in."""

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.baton_engine.tiny_models import make_model
from tests.e2e.reference import Reference
from tests.e2e.served import Served, assert_gone, eventually, maps_pool, metric, serve

PROMPT_TOKENS = 320
OUTPUT_TOKENS = 400
NUM_STREAMS = 12
NUM_PROMPTS = 72  # that differ from their first token on
# Of the tiny model a page takes 8 KiB; each stream ends with 45 pages, so that three of them fill a worker.
FLAGS = ("--dtype", "float32", "--kv-cache-memory", "1MiB")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture
def pooled(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setenv("BATON_POOL_ENABLED", "true")
    monkeypatch.setenv("BATON_POOL_LOOKUP_TIMEOUT_S", "5")
    monkeypatch.setenv("BATON_ROUTER_LOCAL_PREFILL_TOKENS", "0")
    return monkeypatch


@pytest.fixture
def cluster(checkpoint: Path, pooled: pytest.MonkeyPatch) -> Iterator[Served]:
    pooled.setenv("BATON_TRANSFER_POOL_AFTER_S", "0.05")
    with serve(str(checkpoint), *FLAGS) as served:
        eventually(lambda: maps_pool(served, "prefill", "decode"), "workers map the pool", 60.0)
        yield served


def _prompt(number: int) -> list[int]:
    return [10 + (number * 7 + place * 3) % 80 for place in range(PROMPT_TOKENS)]


class _Crowd:
    """Streams that are all read at once, of the prompts from number `first` on."""

    def __init__(self, cluster: Served, *, first: int = 0) -> None:
        self._first = first
        with cluster.client() as http:
            self._model = http.get("/v1/models").json()["data"][0]["id"]
        self._url = f"{cluster.url}/v1/completions"
        self.tokens: list[list[int]] = [[] for _ in range(NUM_STREAMS)]
        self.last = [""] * NUM_STREAMS
        self._threads = [
            threading.Thread(target=self._read, args=(number,), daemon=True)
            for number in range(NUM_STREAMS)
        ]
        for thread in self._threads:
            thread.start()

    def _read(self, number: int) -> None:
        body: dict[str, Any] = {
            "model": self._model,
            "prompt": _prompt(self._first + number),
            "max_tokens": OUTPUT_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": True,
        }
        with httpx.stream("POST", self._url, json=body, timeout=120.0) as response:
            for line in filter(None, response.iter_lines()):
                self.last[number] = line
                if line.startswith("data: {"):
                    for choice in json.loads(line.removeprefix("data: "))["choices"]:
                        self.tokens[number] += choice["token_ids"]

    def assert_right(self, checkpoint: Path) -> None:
        """Waits for all of them; every one ended well, with the model's own tokens."""
        for thread in self._threads:
            thread.join(120)
        assert self.last == ["data: [DONE]"] * NUM_STREAMS
        reference = Reference(checkpoint)
        for number, tokens in enumerate(self.tokens):
            assert len(tokens) == OUTPUT_TOKENS
            reference.assert_greedy(_prompt(self._first + number), tokens)


def test_prompts_without_room_wait_in_the_pool_and_nobody_sees_more_than_a_pause(
    cluster: Served, checkpoint: Path
) -> None:
    firsts = iter(range(0, NUM_PROMPTS, NUM_STREAMS))

    def waits() -> bool:
        """Of a crowd that is there at once, on a busy machine perhaps not the first. Every crowd has prompts of its
        own: what comes from the pool was put there because it found no room.
        """
        _Crowd(cluster, first=next(firsts)).assert_right(checkpoint)
        without_room = cluster.metric("baton_handoff_fallbacks_total", fallback="no_room")
        return without_room > 0 and cluster.metric("baton_pool_hits_total") >= PROMPT_TOKENS * 0.9

    eventually(waits, "a prompt waits in the pool and comes back from it", 90.0)
    assert cluster.metric("baton_handoff_fallbacks_total", fallback="refused") == 0


@pytest.mark.slow
@pytest.mark.parametrize("role", ["decode", "prefill"])
def test_a_worker_that_is_killed_while_prompts_wait_in_the_pool_costs_no_token(
    cluster: Served, checkpoint: Path, role: str
) -> None:
    crowd = _Crowd(cluster)
    eventually(
        lambda: cluster.metric("baton_handoff_fallbacks_total", fallback="no_room") > 0,
        "a prompt went to the pool",
        60.0,
    )
    victim = cluster.child(role)
    victim.kill()
    assert_gone([victim])
    crowd.assert_right(checkpoint)


@pytest.mark.slow
def test_what_was_preempted_comes_back_from_the_pool(
    checkpoint: Path, pooled: pytest.MonkeyPatch
) -> None:
    metrics = _two_free_ports()
    pooled.setenv("BATON_CLUSTER_METRICS_PORT", str(metrics))
    pooled.setenv("BATON_TRANSFER_POOL_AFTER_S", "600")
    # All prompts fit at once, and what is generated does not.
    with serve(str(checkpoint), "--dtype", "float32", "--kv-cache-memory", "2304KiB") as cluster:
        eventually(lambda: maps_pool(cluster, "prefill", "decode"), "workers map the pool", 60.0)
        url = f"http://127.0.0.1:{metrics + 1}/metrics"

        def comes_back() -> bool:
            """Of a crowd that is there at once, on a busy machine perhaps not the first; and what is quicker computed
            is not fetched.
            """
            _Crowd(cluster).assert_right(checkpoint)
            decode = next(worker for worker in cluster.workers() if worker["role"] == "decode")
            fetched = metric(url, "baton_pool_fetched_blocks_total")
            return bool(decode["load"]["preemptions"] > 0 and fetched > 0)

        eventually(comes_back, "a text is preempted and comes back from the pool", 90.0)
        assert cluster.metric("baton_handoff_fallbacks_total") == 0, "nobody began anew"


def _two_free_ports() -> int:
    """The first of two that follow each other."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as one:
            port: int = one.getsockname()[1]
            with suppress(OSError), socket.create_server(("127.0.0.1", port + 1)):
                return port
