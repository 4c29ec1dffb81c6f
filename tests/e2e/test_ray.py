"""`baton serve --launcher ray` on two nodes of Ray, as processes."""

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from tests.e2e.served import eventually
from tests.redis_servers import fake_redis

pytestmark = [
    pytest.mark.ray,
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None, reason="ray is not installed: make ray"
    ),
]

ENVIRONMENT = {**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "5e" * 32}
START_S = 90.0


@pytest.fixture(scope="module")
def ray_address() -> Iterator[str]:
    nodes = subprocess.Popen(
        [sys.executable, "-m", "tests.e2e.ray_nodes"],
        env=ENVIRONMENT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert nodes.stdin is not None
    assert nodes.stdout is not None
    try:
        yield nodes.stdout.readline().strip()
    finally:
        nodes.stdin.close()
        nodes.wait(timeout=60)
        nodes.stdout.close()


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
