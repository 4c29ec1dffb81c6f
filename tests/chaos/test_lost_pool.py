"""The only worker of a role is killed again and again under load: the other one runs whole requests meanwhile."""

import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
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
MOST_S = 2.0


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture
def cluster(checkpoint: Path) -> Iterator[Served]:
    with serve(str(checkpoint), *FLAGS) as served:
        yield served


@dataclass(frozen=True)
class Reply:
    """What a client got, as a stream."""

    prompt: list[int]
    status: int
    tokens: list[int]
    first_token_s: float
    waited_s: float
    asked_s: float
    error: str


class Load:
    """A request every so often, until it is left."""

    def __init__(self, cluster: Served) -> None:
        self._http = httpx.Client(base_url=cluster.url, timeout=60.0)
        self._clients = ThreadPoolExecutor(32)
        self._asked: list[Future[Reply]] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._begun_s = time.monotonic()

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
            "stream": True,
        }
        begun_s = time.monotonic()
        first_token_s, tokens, error = float("inf"), [], ""
        with self._http.stream("POST", "/v1/completions", json=body) as answer:
            for line in answer.iter_lines():
                told = line.removeprefix("data: ")
                if not line.startswith("data: {") or "error" in json.loads(told):
                    error += line.replace("data: [DONE]", "")
                    continue
                tokens += [t for c in json.loads(told)["choices"] for t in c["token_ids"] or ()]
                first_token_s = min(first_token_s, time.monotonic() - begun_s)
        return Reply(
            prompt=prompt,
            status=answer.status_code,
            tokens=tokens,
            first_token_s=first_token_s,
            waited_s=time.monotonic() - begun_s,
            asked_s=begun_s - self._begun_s,
            error=error,
        )


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
    _assert_served(load.replies(), checkpoint)
    assert_at_rest(cluster)


def _assert_served(replies: list[Reply], checkpoint: Path) -> None:
    """No request failed, and every text is right."""
    failed = [reply for reply in replies if reply.status != 200 or reply.error]
    assert failed == []
    reference = Reference(checkpoint)
    for reply in replies:
        assert len(reply.tokens) == MAX_TOKENS
        reference.assert_greedy(reply.prompt, reply.tokens)
    first = sorted((reply.first_token_s, reply.asked_s) for reply in replies)
    waited = sorted(reply.waited_s for reply in replies)
    slowest = ", ".join(f"{s:.2f} s (asked at {at:.1f} s)" for s, at in first[-1:-6:-1])
    print(
        f"{len(replies)} requests; first token: median {first[len(first) // 2][0]:.2f} s, slowest {slowest}"
    )
    print(f"whole: median {waited[len(waited) // 2]:.2f} s, slowest {waited[-1]:.2f} s")


@pytest.mark.alone
@pytest.mark.timeout(400)
def test_kills_by_the_clock_delay_no_first_token_by_two_seconds(checkpoint: Path) -> None:
    """The only decode worker, then the only prefill worker, then each in turn, every five seconds,
    whether or not the others are back.
    """
    victims = [*("decode",) * 3, *("prefill",) * 3, *("decode", "prefill") * 6]
    with serve(str(checkpoint), *FLAGS, standby=True) as cluster:
        eventually(partial(_waits, cluster), "a standby process waits")
        with Load(cluster) as load:
            begun_s = time.monotonic()
            killed = [_kill_now(cluster, role, begun_s + 5.0 * n) for n, role in enumerate(victims)]
            for role in ("decode", "prefill"):
                eventually(partial(_serving, cluster, role), f"{role} is back", timeout_s=40)
        replies = load.replies()
        restarts = [line.strip() for line in cluster.output if "starting it again" in line]
        print("\n".join((f"{sum(killed)} kills", *restarts)))
        assert sum(killed) >= len(victims) - 2, "those that came while it started do not count"
        _assert_served(replies, checkpoint)
        assert max(reply.first_token_s for reply in replies) < MOST_S
        assert_at_rest(cluster)


def _waits(cluster: Served) -> bool:
    """Whether a standby process is there, and has nothing to do any more."""
    waiting = [child for child in cluster.children() if "standby" in child.cmdline()]
    return bool(waiting) and waiting[0].cpu_percent(0.3) == 0.0


def _kill_now(cluster: Served, role: str, at_s: float) -> bool:
    """Kills the one worker of a role at that time; whether it had a process."""
    time.sleep(max(0.0, at_s - time.monotonic()))
    for child in cluster.children():
        with suppress(psutil.Error):  # it ends
            if f"{role}-0" in child.cmdline():
                child.kill()
                return True
    return False
