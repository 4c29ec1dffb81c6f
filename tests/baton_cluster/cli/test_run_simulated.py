"""Workers without a model, started as `baton run simulated`, serve a router as others do."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from baton_cluster.cli.main import main
from tests.baton_cluster.cli.test_run_role import SECRET, _free_ports
from tests.e2e.served import eventually

PROMPT = "def main" * 40


class Processes:
    """What `baton run` started here; all ended with the test."""

    def __init__(self, directory: Path, workers: list[int], http: int) -> None:
        self._directory = directory
        self.started: list[subprocess.Popen[bytes]] = []
        self._common = os.environ | {
            "BATON_CLUSTER_SECRET": SECRET,
            "BATON_CLUSTER_WORKERS": ",".join(f"127.0.0.1:{port}" for port in workers),
            "BATON_ROUTER_PORT": str(http),
            "BATON_ROUTER_LOCAL_PREFILL_TOKENS": "0",
        }

    def start(self, role: str, name: str, *flags: str) -> None:
        own = {"BATON_CLUSTER_RUNTIME_DIR": str(self._directory / name)}
        command = [sys.executable, "-m", "baton_cluster.cli.main", "run", role, "--name", name]
        self.started.append(subprocess.Popen([*command, *flags], env=self._common | own))

    def end(self) -> list[int]:
        for process in self.started:
            process.send_signal(signal.SIGTERM)
        return [process.wait(timeout=30) for process in self.started]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[tuple[Processes, httpx.Client]]:
    with ExitStack() as stack:
        prefill, decode, http = _free_ports(3)
        processes = Processes(tmp_path, [prefill, decode], http)
        stack.callback(_kill, processes.started)
        pace = ("--step-s", "0.002", "--prefill-tokens-per-s", "5000")
        for name, port in (("prefill", prefill), ("decode", decode)):
            listen = f"127.0.0.1:{port}"
            processes.start("simulated", f"{name}-0", "--role", name, "--listen", listen, *pace)
        processes.start("router", "router", "--host", "127.0.0.1")
        client = stack.enter_context(httpx.Client(base_url=f"http://127.0.0.1:{http}", timeout=60))
        eventually(lambda: _has_both(client), "the router has both workers", 60)
        yield processes, client


def test_a_router_serves_a_request_from_simulated_workers(cluster):
    processes, client = cluster
    body = {"model": "baton-demo", "prompt": PROMPT, "max_tokens": 8, "seed": 1}
    replies = [client.post("/v1/completions", json=body) for _ in range(2)]
    assert [reply.status_code for reply in replies] == [200, 200], replies[0].text
    first, second = (reply.json() for reply in replies)
    assert first["usage"]["completion_tokens"] == 8
    assert first["choices"][0]["text"] == second["choices"][0]["text"]
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] > 0, "blocks are reported"
    metrics = client.get("/metrics").text
    assert 'baton_route_decisions_total{kind="pair"} 2.0' in metrics, "the KV was handed off"
    assert all(b"torch" not in _maps(process) for process in processes.started)
    assert processes.end() == [0, 0, 0]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ((), "simulated hybrid worker at 127.0.0.1:7001"),
        (("--role", "decode"), "simulated decode worker at 127.0.0.1:7001"),
    ],
)
def test_a_check_says_which_role_a_simulated_worker_takes(
    flags, said, tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("BATON_CLUSTER_SECRET", SECRET)
    monkeypatch.setenv("BATON_CLUSTER_RUNTIME_DIR", str(tmp_path / "run"))
    assert main(["run", "simulated", "--check", *flags]) == 0
    assert said in capsys.readouterr().out


def test_a_role_that_there_is_not_is_refused_by_name(monkeypatch, capsys):
    monkeypatch.setenv("BATON_CLUSTER_SECRET", SECRET)
    assert main(["run", "simulated", "--check", "--role", "both"]) == 2
    assert "--role: must be prefill, decode or hybrid" in capsys.readouterr().err


def _maps(process: subprocess.Popen[bytes]) -> bytes:
    """What the process has mapped, libraries among it."""
    return Path(f"/proc/{process.pid}/maps").read_bytes()


def _kill(processes: list[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        if process.poll() is None:
            process.kill()
            process.wait(timeout=30)


def _has_both(client: httpx.Client) -> bool:
    try:
        return client.get("/metrics").text.count("vllm:cache_config_info{") == 2
    except httpx.TransportError:
        return False
