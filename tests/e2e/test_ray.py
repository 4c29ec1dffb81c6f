"""`baton serve --launcher ray` on two nodes of Ray, as processes."""

import asyncio
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest

from baton_cluster.cli.main import main
from tests.e2e.served import eventually
from tests.redis_servers import REDIS_SERVER, fake_redis, real_redis

pytestmark = [
    pytest.mark.ray,
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None, reason="ray is not installed: make ray"
    ),
]

ENVIRONMENT = {**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "5e" * 32}
START_S = 90.0
PORT = 17_801
PORTS = f"{PORT}-{PORT + 7}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Nodes:
    """Two nodes of Ray, and the process that has them."""

    address: str
    process: subprocess.Popen[str]

    def tell(self, line: str) -> int:
        """Kills the head's server, or starts it again; its pid."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())


@contextmanager
def ray_nodes(**environment: str) -> Iterator[Nodes]:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.e2e.ray_nodes"],
        env={**ENVIRONMENT, **environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield Nodes(address=process.stdout.readline().strip(), process=process)
    finally:
        process.stdin.close()
        process.wait(timeout=60)
        process.stdout.close()


@pytest.fixture(scope="module")
def ray_address() -> Iterator[str]:
    with ray_nodes() as nodes:
        yield nodes.address


@contextmanager
def serving(tmp_path: Path, *arguments: str, **sections: object) -> Iterator[tuple[str, Path, int]]:
    """URL, log and pid of a cluster, not waited for."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    file, log = tmp_path / "cluster.yaml", tmp_path / "log"
    file.write_text(json.dumps({"router": {"port": port}, **sections}))
    command = [sys.executable, "-m", "baton_cluster.cli.main", "serve", "-f", str(file)]
    with log.open("w") as written:
        process = subprocess.Popen(
            [*command, "--launcher", "ray", *arguments],
            env=ENVIRONMENT,
            stdout=written,
            stderr=subprocess.STDOUT,
        )
    try:
        yield f"http://127.0.0.1:{port}", log, process.pid
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=60)
    finally:
        process.kill()
        process.wait(timeout=30)


def cluster_section(redis_url: str) -> dict[str, object]:
    return {"discovery": "redis", "redis_url": redis_url, "secret": "ab" * 32}


def workers() -> dict[str, psutil.Process]:
    """Those on Ray: children of an actor."""
    found = {}
    for process in psutil.process_iter(["cmdline", "ppid"]):
        line = process.info["cmdline"] or []
        if "baton_cluster.roles" in line and line[3] in ("prefill", "decode"):
            parent = psutil.Process(process.info["ppid"])
            if parent.name().startswith("ray::"):
                found[line[3]] = process
    return found


def names() -> set[str]:
    """Of the workers on Ray."""
    found = set()
    for process in psutil.process_iter(["cmdline"]):
        line = process.info["cmdline"] or []
        if "baton_cluster.roles" in line and line[3] in ("prefill", "decode"):
            found.add(line[5])
    return found


def listening() -> set[int]:
    """Ports at which the workers on Ray speak gRPC with routers: the ones that others are connected to."""
    found = set()
    for process in psutil.process_iter(["cmdline"]):
        line = process.info["cmdline"] or []
        if "baton_cluster.roles" in line and line[3] in ("prefill", "decode"):
            connections = process.net_connections("tcp")
            listens = {c.laddr.port for c in connections if c.status == psutil.CONN_LISTEN}
            found |= {c.laddr.port for c in connections if c.raddr and c.laddr.port in listens}
    assert len(found) >= 3
    return found


def ask(url: str) -> str:
    body = {"prompt": "import os", "max_tokens": 8, "temperature": 0}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
    answer.raise_for_status()
    return str(answer.json()["choices"][0]["text"])


def test_an_actor_that_is_killed_comes_back_while_requests_go_on(ray_address, tmp_path):
    with (
        fake_redis() as redis_url,
        serving(tmp_path, "--ray-address", ray_address, cluster=cluster_section(redis_url)) as (
            url,
            log,
            _,
        ),
    ):
        eventually(lambda: "baton: ready" in log.read_text(), "ready", START_S)
        text = ask(url)
        first = workers()
        assert set(first) == {"prefill", "decode"}
        actor = first["decode"].parent()
        assert actor is not None
        actor.kill()
        eventually(lambda: not first["decode"].is_running(), "the end of the actor's worker")
        assert ask(url) == text
        eventually(lambda: "process is back" in log.read_text(), "its next start", START_S)
        assert workers()["decode"].pid != first["decode"].pid
        assert workers()["prefill"].pid == first["prefill"].pid
        assert ask(url) == text
    eventually(lambda: not workers(), "the end of all workers")


def test_workers_for_which_there_is_no_room_are_named(ray_address, tmp_path):
    with (
        fake_redis() as redis_url,
        serving(
            tmp_path,
            "--ray-address",
            ray_address,
            cluster={**cluster_section(redis_url), "prefill_workers": 3},
            ray={"placement_timeout_s": 4},
        ) as (_, log, _),
    ):
        told = "Ray has no room for the prefill workers: bundle 2 (CPU 1): 2 nodes have room for 2 of 3"
        eventually(lambda: told in log.read_text(), "the reason", 60)


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"resources": {"CPU": 0.5}, "num_cpus": 0.5}, "Use the 'num_cpus' and 'num_gpus' keyword"),
        ({"labels": {"a b": "c"}}, "Invalid label key name"),
    ],
    ids=["resources", "labels"],
)
def test_what_ray_refuses_ends_the_start_with_its_reason(ray_address, tmp_path, asked, told):
    with (
        fake_redis() as redis_url,
        serving(
            tmp_path,
            "--ray-address",
            ray_address,
            cluster=cluster_section(redis_url),
            ray=asked,
        ) as (_, log, pid),
    ):
        eventually(lambda: "baton: error: " in log.read_text(), "the refusal", START_S)
        *_, last = log.read_text().splitlines()
        assert last.startswith("baton: error: Ray refuses what the section `ray` asks for: ")
        assert told in last
        eventually(lambda: psutil.Process(pid).status() == psutil.STATUS_ZOMBIE, "its end")


def test_workers_are_added_in_places_of_their_own_and_give_them_back(ray_address, tmp_path, capsys):
    with (
        fake_redis() as redis_url,
        serving(
            tmp_path,
            "--ray-address",
            ray_address,
            cluster={**cluster_section(redis_url), "runtime_dir": str(tmp_path / "run")},
            ray={"num_cpus": 0.5, "placement_timeout_s": 3, "worker_ports": PORTS},
        ) as (url, log, _),
    ):
        eventually(lambda: "baton: ready" in log.read_text(), "ready", START_S)
        text = ask(url)

        def scale(*words: str) -> int:
            return main(["scale", *words, "--runtime-dir", str(tmp_path / "run")])

        def ready() -> set[str]:
            capsys.readouterr()
            assert main(["status", "--json", "--runtime-dir", str(tmp_path / "run")]) == 0
            status = json.loads(capsys.readouterr().out)
            return {one["worker_id"] for one in status["workers"] if one["state"] == "ready"}

        assert scale("decode=3") == 0
        four = {"prefill-0", "decode-0", "decode-1", "decode-2"}
        eventually(lambda: ready() == four, "two more decode workers", START_S)
        assert ask(url) == text
        assert scale("decode=4") == 0
        told = "Ray has no room for decode-3: 1 bundles (CPU 0.5): nodes have as much in all, but not free"
        eventually(lambda: told in log.read_text(), "why there is no fifth worker", START_S)
        assert ask(url) == text
        assert scale("prefill=2", "decode=1") == 0
        eventually(lambda: ready() == {"prefill-0", "prefill-1", "decode-0"}, "the rest", START_S)
        assert ask(url) == text
        assert names() == {"prefill-0", "prefill-1", "decode-0"}
        assert all(port in range(PORT, PORT + 8) for port in listening()), listening()
    eventually(lambda: not names(), "the end of all workers")


HEAD_MAY_BE_AWAY = {"RAY_gcs_rpc_server_reconnect_timeout_s": "600"}


def kill_head(nodes: Nodes) -> None:
    head = psutil.Process(nodes.tell("kill head"))
    eventually(lambda: not head.is_running(), "the end of Ray's head")


def lose_decode_worker() -> psutil.Process:
    """The worker of which the actor was killed, which is over then."""
    worker = workers()["decode"]
    actor = worker.parent()
    assert actor is not None
    actor.kill()
    eventually(lambda: not worker.is_running(), "the end of the actor's worker")
    return worker


@pytest.mark.skipif(REDIS_SERVER is None, reason="redis-server is not installed")
async def test_a_head_with_its_state_in_redis_may_die_and_supervises_again_when_it_is_back(
    tmp_path,
):
    async with real_redis(tmp_path) as state:
        await asyncio.to_thread(lose_head_and_worker, tmp_path, state.url.removeprefix("redis://"))


def lose_head_and_worker(tmp_path: Path, state_address: str) -> None:
    with (
        fake_redis() as redis_url,
        ray_nodes(RAY_REDIS_ADDRESS=state_address, **HEAD_MAY_BE_AWAY) as nodes,
        serving(tmp_path, "--ray-address", nodes.address, cluster=cluster_section(redis_url)) as (
            url,
            log,
            _,
        ),
    ):
        eventually(lambda: "baton: ready" in log.read_text(), "ready", START_S)
        text, prefill = ask(url), workers()["prefill"]
        kill_head(nodes)
        assert ask(url) == text
        lost = lose_decode_worker()
        assert ask(url) == text
        nodes.tell("start head")
        eventually(lambda: "process is back" in log.read_text(), "its next start", START_S)
        assert workers()["decode"].pid != lost.pid
        assert workers()["prefill"].pid == prefill.pid
        assert ask(url) == text
    eventually(lambda: not workers(), "the end of all workers")


def test_workers_outlast_a_head_that_forgets_them_and_the_log_says_what_is_lost(tmp_path):
    with (
        fake_redis() as redis_url,
        ray_nodes(**HEAD_MAY_BE_AWAY) as nodes,
        serving(tmp_path, "--ray-address", nodes.address, cluster=cluster_section(redis_url)) as (
            url,
            log,
            _,
        ),
    ):
        eventually(lambda: "baton: ready" in log.read_text(), "ready", START_S)
        text, prefill = ask(url), workers()["prefill"]
        kill_head(nodes)
        lose_decode_worker()
        nodes.tell("start head")
        told = "Ray's head came back without its state"
        eventually(lambda: told in log.read_text(), "what is lost", START_S)
        assert ask(url) == text
        assert workers()["prefill"].pid == prefill.pid
    eventually(lambda: not workers(), "the end of all workers")


def test_a_cluster_ends_while_the_head_is_away(tmp_path):
    with fake_redis() as redis_url, ray_nodes(**HEAD_MAY_BE_AWAY) as nodes:
        section = cluster_section(redis_url)
        with serving(tmp_path, "--ray-address", nodes.address, cluster=section) as (_, log, _):
            eventually(lambda: "baton: ready" in log.read_text(), "ready", START_S)
            kill_head(nodes)
            lose_decode_worker()
        eventually(lambda: not workers(), "the end of all workers")
