"""The only worker of a role is killed again and again under load: the other one runs whole requests meanwhile."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import httpx
import psutil
import pytest

from tests.baton_engine.tiny_models import make_model
from tests.e2e.reference import Reference
from tests.e2e.served import Served, assert_at_rest, eventually, serve

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(240)]

FLAGS = ("--dtype", "float32", "--kv-cache-memory", "32MiB", "--served-model-name", "m")
INTERVAL_S = 0.15
MAX_TOKENS = 24


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture
def cluster(checkpoint: Path) -> Iterator[Served]:
    with serve(str(checkpoint), *FLAGS) as served:
        yield served


@dataclass(frozen=True)
class Reply:
    """What a client got."""

    prompt: list[int]
    status: int
    tokens: list[int]
    waited_s: float


class Load:
    """A request every so often, until it is left."""

    def __init__(self, cluster: Served) -> None:
        self._http = httpx.Client(base_url=cluster.url, timeout=60.0)
        self._clients = ThreadPoolExecutor(32)
        self._asked: list[Future[Reply]] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> "Load":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(timeout=30)
        assert not self._thread.is_alive()

    def replies(self) -> list[Reply]:
        """All of them, once the last has come."""
        found = [asked.result(timeout=60) for asked in self._asked]
        self._clients.shutdown()
        self._http.close()
        return found

    def _run(self) -> None:
        number = 0
        while not self._over.wait(INTERVAL_S):
            number += 1
            prompt = [10 + (7 * number + place) % 200 for place in range(40 + number % 30)]
            self._asked.append(self._clients.submit(self._ask, prompt))

    def _ask(self, prompt: list[int]) -> Reply:
        body = {
            "model": "m",
            "prompt": prompt,
            "max_tokens": MAX_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        begun_s = time.monotonic()
        answer = self._http.post("/v1/completions", json=body)
        waited_s = time.monotonic() - begun_s
        tokens = answer.json()["choices"][0]["token_ids"] if answer.is_success else []
        return Reply(prompt=prompt, status=answer.status_code, tokens=tokens, waited_s=waited_s)


def _kill(cluster: Served, role: str) -> None:
    """Kills the one worker of a role, once it serves and so does the other."""
    for one in ("decode", "prefill"):
        eventually(partial(_serving, cluster, one), f"{one} serves", timeout_s=40)
    before, victim = _serving(cluster, role), cluster.child(role)
    victim.kill()
    eventually(lambda: not _lives(victim), f"the {role} worker is dead")
    eventually(lambda: _serving(cluster, role) != before, f"the router knows of {role}'s death")


def _serving(cluster: Served, role: str) -> object:
    """The incarnation of the one worker of a role that is ready; None while there is none."""
    workers = cluster.told("status").get("workers", [])
    ready = [w["incarnation"] for w in workers if w["role"] == role and w["state"] == "ready"]
    return ready[0] if ready else None


def _lives(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


@pytest.mark.parametrize(
    "victims",
    [("decode",) * 3, ("prefill",) * 3, ("decode", "prefill") * 2],
    ids=["decode", "prefill", "in_turn"],
)
def test_no_request_fails_while_one_worker_lives(
    cluster: Served, checkpoint: Path, victims: tuple[str, ...]
) -> None:
    with Load(cluster) as load:
        for victim in victims:
            _kill(cluster, victim)
        for role in ("decode", "prefill"):
            eventually(partial(_serving, cluster, role), f"{role} is back", timeout_s=40)
    replies = load.replies()
    assert [reply for reply in replies if reply.status != 200] == []
    reference = Reference(checkpoint)
    for reply in replies:
        assert len(reply.tokens) == MAX_TOKENS
        reference.assert_greedy(reply.prompt, reply.tokens)
    waited = sorted(reply.waited_s for reply in replies)
    print(
        f"{len(replies)} requests, slowest {waited[-1]:.2f} s, median {waited[len(waited) // 2]:.2f} s"
    )
    assert_at_rest(cluster)
