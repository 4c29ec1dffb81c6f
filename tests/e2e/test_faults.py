"""Processes of a serving cluster are killed; what clients see, and what is left behind."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.baton_engine.tiny_models import make_model
from tests.e2e.reference import Reference
from tests.e2e.served import Served, assert_at_rest, assert_gone, eventually, serve

FLAGS = ("--dtype", "float32", "--kv-cache-memory", "32MiB")
PROMPT = list(range(10, 90))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture
def cluster(checkpoint: Path) -> Iterator[Served]:
    with serve(str(checkpoint), *FLAGS) as served:
        yield served


@pytest.fixture(scope="module")
def struck(checkpoint: Path) -> Iterator[Served]:
    with serve(str(checkpoint), *FLAGS) as served:
        yield served


@pytest.fixture
def healed(struck: Served) -> Served:
    """A cluster that several tests strike one after the other, whole again."""

    def is_whole() -> bool:
        workers = struck.told("status").get("workers", [])
        return {worker["role"] for worker in workers} == {"prefill", "decode"}

    eventually(is_whole, "both workers are back", timeout_s=40)
    return struck


def _body(cluster: Served, max_tokens: int, **more: object) -> dict[str, Any]:
    with cluster.client() as http:
        model = http.get("/v1/models").json()["data"][0]["id"]
    return {
        "model": model,
        "prompt": PROMPT,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    } | more


def _incarnation(cluster: Served, role: str) -> object:
    """Of the one worker in that role; None while it is away."""
    found = [w["incarnation"] for w in cluster.workers() if w["role"] == role]
    return found[0] if found else None


def _answers(cluster: Served) -> bool:
    try:
        return httpx.get(f"{cluster.url}/ready", timeout=30.0).status_code == 200
    except httpx.TransportError:
        return False


class _Stream(threading.Thread):
    """A streamed completion read in the background."""

    def __init__(self, cluster: Served, max_tokens: int) -> None:
        super().__init__(daemon=True)
        self._url = f"{cluster.url}/v1/completions"
        self._body = _body(cluster, max_tokens, stream=True)
        self.lines: list[str] = []
        self.begun = threading.Event()

    def run(self) -> None:
        with httpx.stream("POST", self._url, json=self._body, timeout=60.0) as response:
            for line in response.iter_lines():
                if line:
                    self.lines.append(line)
                if len(self.lines) > 3:
                    self.begun.set()

    def tokens(self) -> list[int]:
        """Token ids received so far."""
        chunks = [httpx.Response(200, text=line[6:]).json() for line in self.lines[:-1]]
        return [token for c in chunks if c.get("choices") for token in c["choices"][0]["token_ids"]]


@pytest.mark.parametrize("role", [pytest.param("prefill", marks=pytest.mark.slow), "decode"])
def test_a_killed_worker_is_restarted_and_new_requests_are_served(
    healed: Served, role: str
) -> None:
    before = _incarnation(healed, role)
    victim = healed.child(role)
    victim.kill()
    assert_gone([victim])
    with healed.client() as http:
        response = http.post("/v1/completions", json=_body(healed, 8))
    assert response.status_code == 200, response.text
    eventually(lambda: _incarnation(healed, role) not in (None, before), "a new incarnation")
    with healed.client() as http:
        assert http.post("/v1/completions", json=_body(healed, 8)).status_code == 200


def test_a_drain_is_undone_by_a_restart(healed: Served) -> None:
    (drained,) = (one for one in healed.workers() if one["role"] == "decode")
    told = healed.told("drain", drained["worker_id"], "--force", "--reason", "new disk")
    assert told == {"drained": True, "left": 0}

    def shown() -> tuple[str, str]:
        return next(
            (one["state"], one["drained_by"].partition(", ")[2])
            for one in healed.workers()
            if one["address"] == drained["address"]
        )

    eventually(lambda: shown() == ("draining", "new disk"), "who asked")
    healed.child("decode").kill()
    eventually(lambda: shown() == ("ready", ""), "it takes work again")
    assert _incarnation(healed, "decode") != drained["incarnation"]
    with healed.client() as http:
        assert http.post("/v1/completions", json=_body(healed, 8)).status_code == 200


def test_a_stream_whose_decode_worker_is_killed_goes_on_without_a_wrong_token(
    cluster: Served, checkpoint: Path
) -> None:
    stream = _Stream(cluster, max_tokens=1500)
    stream.start()
    assert stream.begun.wait(30)
    victim = cluster.child("decode")
    victim.kill()
    assert_gone([victim])
    stream.join(60)
    assert not stream.is_alive()
    assert stream.lines[-1] == "data: [DONE]"
    tokens = stream.tokens()
    assert len(tokens) == 1500
    Reference(checkpoint).assert_greedy(PROMPT, tokens)


def test_a_client_that_leaves_frees_both_legs(cluster: Served) -> None:
    body = _body(cluster, 1900, stream=True)
    with cluster.client() as http, http.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()  # kept: httpx hangs up when it is collected
        next(lines)
        assert cluster.metric("baton_requests_in_flight") == 1
    assert_at_rest(cluster)
    assert cluster.metric("baton_client_disconnects_total") == 1


def test_a_router_that_is_asked_to_leave_finishes_its_streams(healed: Served) -> None:
    stream = _Stream(healed, max_tokens=1500)
    stream.start()
    assert stream.begun.wait(30)
    router = healed.child("router")
    router.terminate()
    assert stream.is_alive(), "it was asked in mid-stream"
    stream.join(60)
    assert stream.lines[-1] == "data: [DONE]"
    assert len(stream.tokens()) == 1500
    assert_gone([router])
    eventually(lambda: _answers(healed), "another router answers", timeout_s=40)


def test_a_killed_router_is_restarted_on_the_same_port(healed: Served) -> None:
    victim = healed.child("router")
    victim.kill()
    assert_gone([victim])
    eventually(lambda: _answers(healed), "the router answers again", timeout_s=40)
    with healed.client() as http:
        assert http.post("/v1/completions", json=_body(healed, 8)).status_code == 200


def test_a_killed_launcher_leaves_no_process_port_socket_or_memory(cluster: Served) -> None:
    children = cluster.children()
    assert len(children) == 3
    cluster.process.kill()
    cluster.process.wait(timeout=10)
    assert_gone(children)
    with pytest.raises(httpx.ConnectError):
        httpx.get(cluster.url)
    # The fixture then finds neither the runtime directory nor new shared memory.
