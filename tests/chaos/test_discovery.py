"""Three network namespaces as hosts: router, DNS and Redis on one, prefill workers on the second, decode workers on the
third. Workers are added, removed and moved, hosts are cut off, Redis is killed and emptied, under requests whose tokens
are known: none fails, none is wrong.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from baton.errors import BatonError
from baton_cluster.cli.status import StatusReport, fetch
from baton_cluster.launch.runtime_dir import ROUTER_SOCKET
from kv_transfer.backends import registry
from tests.baton_engine.tiny_models import make_model
from tests.chaos.hosts import Hosts, why_not
from tests.e2e.served import eventually
from tests.redis_servers import REDIS_SERVER

pytest.importorskip("ucxx", reason="pages between hosts need a transport: make transports")
pytestmark = [pytest.mark.alone, pytest.mark.chaos, pytest.mark.timeout(600)]

WAIT_S = 120.0
BACKENDS = ["ucx", "nixl"]
CONFIG = """\
model: {{model: {model}, served_model_name: [m], dtype: float32}}
engine: {{kv_cache_memory_bytes: 8MiB}}
transfer: {{backends: [{backend}]}}
router: {{policy: prefix_affinity}}
"""


@dataclass(slots=True, eq=False)
class Bare:
    """Processes on hosts, which nobody supervises."""

    hosts: Hosts
    folder: Path
    settings: dict[str, str]
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    at: dict[str, str] = field(default_factory=dict)
    took_s: dict[str, float] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return f"http://{self.hosts.address('r')}:8000"

    def spawn(self, name: str, host: str, *command: str) -> None:
        own = {"BATON_CLUSTER_RUNTIME_DIR": str(self.folder / name)}
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                self.hosts.command(host, *command),
                stdout=log,
                stderr=log,
                env=os.environ | self.settings | own,
            )

    def start(self, name: str, role: str, host: str, port: int) -> None:
        """Starts a worker, or the router, and has DNS name it."""
        command = [sys.executable, "-m", "baton_cluster.cli.main", "run", role]
        command += ["--name", name, "-f", str(self.folder / "cluster.yaml")]
        if role == "router":
            self.spawn(name, host, *command, "--host", self.hosts.address(host), "--port", "8000")
            return
        self.at[name] = f"{self.hosts.address(host)}:{port}"
        self.name_workers()
        self.spawn(name, host, *command, "--listen", self.at[name])

    def end(self, name: str, how: signal.Signals) -> None:
        process = self.processes.pop(name)
        process.send_signal(how)
        process.wait(WAIT_S)
        if self.at.pop(name, None):
            self.name_workers()

    def name_workers(self) -> None:
        """Writes the records that DNS serves: a service, and a name for each worker."""
        records: dict[str, dict[str, list[str]]] = {
            "_w._tcp.test.": {
                "SRV": [f"0 0 {at.rpartition(':')[2]} {w}.test." for w, at in self.at.items()]
            }
        }
        for worker, at in self.at.items():
            records[f"{worker}.test."] = {"A": [at.rpartition(":")[0]]}
        new = self.folder / "records.new"
        new.write_text(json.dumps(records))
        new.rename(self.folder / "records.json")

    def start_redis(self) -> None:
        assert REDIS_SERVER is not None
        at = ("--bind", self.hosts.address("r"), "--port", "6379", "--protected-mode", "no")
        self.spawn("redis", "r", REDIS_SERVER, *at, "--save", "", "--dir", str(self.folder))

    def flush(self) -> None:
        at = ("-h", self.hosts.address("r"))
        subprocess.run(["redis-cli", *at, "flushall"], check=True, capture_output=True, timeout=30)

    def status(self) -> StatusReport | None:
        try:
            return asyncio.run(fetch(f"unix:{self.folder / 'r' / ROUTER_SOCKET}"))
        except BatonError:
            return None

    def is_ready(self, name: str) -> bool:
        return (self.folder / f"{name}.log").read_text().count("ready") >= 1

    def there(self) -> dict[str, str]:
        """Addresses of the workers that are ready for the router."""
        status = self.status()
        return {w.worker_id: w.address for w in status.workers if w.ready} if status else {}

    def has_all(self, what: str) -> None:
        """Waits until the router has exactly those that run, and notes how long after the last of them served,
        or left, that was.
        """
        eventually(lambda: all(map(self.is_ready, self.at)), f"serving, see {self.folder}", WAIT_S)
        served_s = time.monotonic()
        eventually(lambda: self.there() == self.at, f"{what}, see {self.folder}", WAIT_S)
        self.took_s[what] = time.monotonic() - served_s

    def at_rest(self) -> bool:
        status = self.status()
        loads = [w.load for w in status.workers if w.worker_id] if status else []
        return (
            status is not None
            and status.requests_in_flight == 0
            and len(loads) == len(self.at)
            and all(
                load.running == load.waiting == load.blocks_used == 0
                and load.blocks_free + load.blocks_cached == load.blocks_total > 0
                for load in loads
            )
        )


@contextmanager
def bare(model: Path, discovery: str, backend: str) -> Iterator[Bare]:
    hosts = Hosts(["r", "p", "d"])
    redis = f"redis://{hosts.address('r')}:6379"
    by = {
        "redis": {"BATON_CLUSTER_REDIS_URL": redis},
        "dns": {
            "BATON_CLUSTER_WORKER_NAMES": "_w._tcp.test.",
            "BATON_CLUSTER_DNS_SERVERS": f"{hosts.address('r')}:53",
        },
    }
    common = {
        "BATON_CLUSTER_DISCOVERY": discovery,
        "BATON_CLUSTER_SECRET": "5e" * 32,
        "OMP_NUM_THREADS": "1",
        "UCX_TLS": "tcp,self",
    }
    with tempfile.TemporaryDirectory(prefix="bd-") as folder:
        made = Bare(hosts, Path(folder), common | by[discovery])
        config = CONFIG.format(model=model, backend=backend)
        (made.folder / "cluster.yaml").write_text(config)
        try:
            hosts.make()
            yield made
        finally:
            for process in made.processes.values():
                process.terminate()
            for process in made.processes.values():
                try:
                    process.wait(30)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait(30)
            hosts.remove()


@dataclass(slots=True, eq=False)
class Traffic:
    """Asks all the time, and compares."""

    url: str
    expected: dict[int, list[int]]
    asked: int = 0
    wrong: list[str] = field(default_factory=list)
    _stop: threading.Event = field(default_factory=threading.Event)

    @contextmanager
    def running(self) -> Iterator["Traffic"]:
        asking = [threading.Thread(target=self._ask, name=f"traffic {n}") for n in range(2)]
        for thread in asking:
            thread.start()
        try:
            yield self
        finally:
            self._stop.set()
            for thread in asking:
                thread.join(WAIT_S)

    def _ask(self) -> None:
        while not self._stop.is_set():
            for first, tokens in self.expected.items():
                try:
                    found = ask(self.url, first)
                except (AssertionError, httpx.HTTPError) as error:
                    self.wrong.append(f"{type(error).__name__}: {error}")
                else:
                    if found != tokens:
                        self.wrong.append(f"{first}: {found}, not {tokens}")
                self.asked += 1

    def goes_on(self) -> None:
        more = self.asked + 3
        eventually(lambda: self.asked >= more, "replies", WAIT_S)
        assert self.wrong == []


def ask(url: str, first: int) -> list[int]:
    body = {
        "model": "m",
        "prompt": [first, *range(6, 206)],
        "max_tokens": 40,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    reply = httpx.post(f"{url}/v1/completions", json=body, timeout=60.0)
    assert reply.status_code == 200, reply.text
    tokens: list[int] = reply.json()["choices"][0]["token_ids"]
    return tokens


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("discovery", ["redis", "dns"])
def test_workers_on_three_hosts_come_go_and_move_and_no_stream_notices(
    tmp_path: Path, discovery: str, backend: str
) -> None:
    if reason := why_not():
        pytest.skip(reason)
    if discovery == "redis" and REDIS_SERVER is None:
        pytest.skip("redis-server is not installed")
    if not registry.BACKENDS[backend].installed:
        pytest.skip(f"not installed: {registry.BACKENDS[backend].remedy}")
    with bare(make_model(tmp_path, "llama"), discovery, backend) as made:
        if discovery == "redis":
            made.start_redis()
        else:
            made.name_workers()
            serve = (sys.executable, "-m", "tests.dns_server", made.hosts.address("r"), "53")
            made.spawn("dns", "r", *serve, str(made.folder / "records.json"))
        made.start("r", "router", "r", 8000)
        made.start("p0", "prefill", "p", 7001)
        made.start("d0", "decode", "d", 7001)
        made.has_all("the first two")
        expected = {first: ask(made.url, first) for first in range(10, 13)}
        with Traffic(made.url, expected).running() as traffic:
            made.start("d1", "decode", "d", 7002)
            made.has_all("one is added")
            made.end("d0", signal.SIGTERM)
            made.has_all("one is removed")
            made.end("d1", signal.SIGKILL)
            (made.folder / "d1.log").unlink()
            made.start("d1", "decode", "p", 7003)
            made.has_all("one is moved to another host")
            traffic.goes_on()
            (made.folder / "d0.log").unlink()
            made.start("d0", "decode", "d", 7001)
            made.has_all("one is back")
            cut_off(made, "d")
            traffic.goes_on()
            if discovery == "redis":
                made.flush()
                made.start("p1", "prefill", "p", 7004)
                made.has_all("one is added after a flush")
                made.end("redis", signal.SIGKILL)
                traffic.goes_on()
                assert made.there() == made.at
                made.start_redis()
                made.start("d2", "decode", "d", 7005)
                made.has_all("one is added after Redis was killed")
            traffic.goes_on()
        eventually(made.at_rest, f"at rest, see {made.folder}", WAIT_S)
        print(f"{discovery}, {backend}: {traffic.asked} requests; seconds: {made.took_s}")


def cut_off(made: Bare, host: str) -> None:
    """A host reaches nobody and is reached by nobody, for longer than a connection or a lease lasts."""
    others = [other for other in ("r", "p", "d") if other != host]
    pairs = [pair for other in others for pair in ((host, other), (other, host))]
    for pair in pairs:
        made.hosts.swallow(*pair)
    try:
        time.sleep(12.0)  # not for anything to happen: the length of the partition is the fault
    finally:
        for pair in pairs:
            made.hosts.let_pass(*pair)
    made.has_all("a partition has healed")
