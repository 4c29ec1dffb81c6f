"""Real processes that find each other: workers come, go, move and start again, and nobody changes a configuration."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from baton.errors import BatonError
from baton_cluster.cli.status import StatusReport, fetch, strangers
from baton_cluster.launch.runtime_dir import ROUTER_SOCKET
from tests.dns_server import DnsServer, dns_server
from tests.e2e.served import eventually
from tests.redis_servers import REDIS_SERVER, RealRedis

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

PORT = 7411
READY_S = 60.0
NAME = "workers.test."
BODY = {"model": "baton-demo", "prompt": "def", "max_tokens": 12, "ignore_eos": True}


@dataclass(slots=True, eq=False)
class Cluster:
    """A router, and simulated workers at addresses of this host: 127.0.0.2:7411, 127.0.0.3:7411 and so on."""

    folder: Path
    settings: dict[str, str]
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self, name: str, role: str, *flags: str, **settings: str) -> None:
        own = {"BATON_CLUSTER_RUNTIME_DIR": str(self.folder / name)}
        common = {"BATON_CLUSTER_SECRET": "5e" * 32, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "baton_cluster.cli.main", "run", role, "--name", name]
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [*command, *flags],
                stdout=log,
                stderr=log,
                env=os.environ | common | own | self.settings | settings,
            )

    def start_worker(self, name: str, host: int, **settings: str) -> None:
        flags = ("--role", "hybrid", "--listen", f"127.0.0.{host}:{PORT}", "--step-s", "0.002")
        self.start(name, "simulated", *flags, **settings)

    def end(self, name: str, how: signal.Signals = signal.SIGTERM) -> None:
        process = self.processes.pop(name)
        process.send_signal(how)
        process.wait(30)

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def status(self) -> StatusReport | None:
        """What the router says; None while it does not answer."""
        try:
            return asyncio.run(fetch(f"unix:{self.folder / 'router' / ROUTER_SOCKET}"))
        except BatonError:
            return None

    def workers(self) -> dict[str, str]:
        """Addresses of the workers that the router has, by name."""
        status = self.status()
        there = () if status is None else status.workers
        return {one.worker_id: one.address for one in there if one.worker_id}

    def has(self, **hosts: int) -> None:
        """Waits until the router has these workers and no others."""
        expected = {name: f"127.0.0.{host}:{PORT}" for name, host in hosts.items()}
        eventually(lambda: self.workers() == expected, f"{expected}, see {self.folder}", READY_S)


@dataclass(slots=True, eq=False)
class Traffic:
    """Asks all the time, one request after the other."""

    url: str
    replies: list[Any] = field(default_factory=list)
    _stop: threading.Event = field(default_factory=threading.Event)

    @contextmanager
    def running(self) -> Iterator["Traffic"]:
        asking = threading.Thread(target=self._ask, name="traffic")
        asking.start()
        try:
            yield self
        finally:
            self._stop.set()
            asking.join(READY_S)

    def _ask(self) -> None:
        with httpx.Client(base_url=self.url, timeout=30.0) as client:
            while not self._stop.is_set():
                self.replies.append(client.post("/v1/completions", json=BODY))

    def none_failed(self) -> None:
        more = len(self.replies) + 3
        eventually(lambda: len(self.replies) >= more, "replies")
        assert [one.text for one in self.replies if one.status_code != 200] == []
        assert {one.json()["usage"]["completion_tokens"] for one in self.replies} == {12}


@contextmanager
def cluster(**settings: str) -> Iterator[Cluster]:
    """A cluster without a process yet; all that it started ends with it."""
    with tempfile.TemporaryDirectory(prefix="bd-") as folder:
        made = Cluster(Path(folder), settings)
        try:
            yield made
        finally:
            for name in list(made.processes):
                made.processes[name].terminate()
            for name in list(made.processes):
                made.end(name)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def start_router(cluster: Cluster) -> str:
    """Its URL; it serves HTTP when this returns, and has nobody yet."""
    port = free_port()
    cluster.start("router", "router", "--host", "127.0.0.1", "--port", str(port))
    url = f"http://127.0.0.1:{port}"
    eventually(lambda: answers(url), f"the router answers, see {cluster.folder}", READY_S)
    return url


def answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health").status_code == 200
    except httpx.TransportError:
        return False


def metric(url: str, name: str) -> float:
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


def test_workers_that_dns_names_come_go_and_move_without_a_request_failing():
    with dns_server() as dns, by_dns(dns) as made:
        url = start_router(made)
        assert httpx.get(f"{url}/ready").status_code == 503

        def name(*hosts: int) -> None:
            dns.records = {NAME: {"A": [f"127.0.0.{host}" for host in hosts]}}

        come_go_and_move(made, url, name)
        dns.silent = True
        eventually(lambda: metric(url, "baton_discovery_failures_total") > 0, "a failure")
        status = made.status()
        assert status is not None
        assert strangers(status)[-1].startswith(f"discovery: {NAME}:{PORT}: no answer from DNS")
        assert httpx.post(f"{url}/v1/completions", json=BODY, timeout=30).status_code == 200


@contextmanager
def by_dns(dns: DnsServer) -> Iterator[Cluster]:
    with cluster(
        BATON_CLUSTER_DISCOVERY="dns",
        BATON_CLUSTER_WORKER_NAMES=f"{NAME}:{PORT}",
        BATON_CLUSTER_DNS_SERVERS=dns.address,
    ) as made:
        yield made


def come_go_and_move(made: Cluster, url: str, name: Callable[..., None]) -> None:
    """One worker after the other, under traffic; `name` tells discovery, where workers do not do so themselves."""
    name(2)  # before it answers, as with publishNotReadyAddresses
    made.start_worker("a", 2)
    made.has(a=2)
    with Traffic(url).running() as traffic:
        made.start_worker("b", 3)
        name(2, 3)
        made.has(a=2, b=3)
        made.end("a")
        name(3)
        made.has(b=3)
        made.start_worker("a", 4)
        name(3, 4)
        made.has(a=4, b=3)
        made.end("b", signal.SIGKILL)
        made.has(a=4)
        made.start_worker("b", 3)
        made.has(a=4, b=3)
        traffic.none_failed()


@pytest.mark.redis
@pytest.mark.skipif(REDIS_SERVER is None, reason="redis-server is not installed")
def test_workers_that_register_in_redis_come_go_and_move_without_a_request_failing(tmp_path):
    redis = RealRedis(tmp_path)
    with cluster(
        BATON_CLUSTER_DISCOVERY="redis",
        BATON_CLUSTER_REDIS_URL=redis.url,
        BATON_CLUSTER_LABELS='{"zone": "a"}',
    ) as made:
        url = start_router(made)  # Redis is not there yet
        made.start_worker("early", 9)
        eventually(lambda: "not registered in Redis" in made.log("early"), "it tries", READY_S)
        assert "discovery gets no answer" in made.log("router")
        with asyncio.Runner() as runner:
            try:
                runner.run(redis.start())
                made.has(early=9)
                made.end("early")
                come_go_and_move(made, url, lambda *hosts: None)
                flush(redis)
                assert set(made.workers()) == {"a", "b"}
                made.start_worker("c", 5)
                made.has(a=4, b=3, c=5)
                runner.run(redis.kill())
                eventually(lambda: metric(url, "baton_discovery_failures_total") > 2, "failures")
                made.has(a=4, b=3, c=5)
                assert httpx.post(f"{url}/v1/completions", json=BODY).status_code == 200
                runner.run(redis.start())
                made.start_worker("d", 6)
                made.has(a=4, b=3, c=5, d=6)
                status = made.status()
                assert status is not None
                assert {one.labels["zone"] for one in status.workers if one.worker_id} == {"a"}
            finally:
                runner.run(redis.kill())


def flush(redis: RealRedis) -> None:
    subprocess.run(
        ["redis-cli", "-u", redis.url, "flushall"], check=True, capture_output=True, timeout=30
    )


def test_a_worker_of_another_model_or_cluster_is_refused_by_field_and_the_others_serve():
    with dns_server() as dns, by_dns(dns) as made:
        url = start_router(made)
        dns.records = {NAME: {"A": ["127.0.0.2", "127.0.0.3", "127.0.0.4", "127.0.0.5"]}}
        made.start_worker("a", 2)
        made.has(a=2)
        made.start_worker("b", 3, BATON_MODEL_SERVED_MODEL_NAME="another")
        made.start_worker("c", 4, BATON_CLUSTER_SECRET="77" * 32)
        for by in ("model_fingerprint", "cluster.secret"):
            eventually(partial(refused_more_than_once, url, by), by, READY_S)
        made.has(a=2)
        status = made.status()
        assert status is not None
        told = dict(line.split(", sighted by", 1) for line in strangers(status))
        assert told.keys() == {f"127.0.0.{host}:{PORT}" for host in (3, 4, 5)}
        assert "is refused: model_fingerprint: b@" in told[f"127.0.0.3:{PORT}"]
        assert "is refused: cluster.secret: " in told[f"127.0.0.4:{PORT}"]
        assert made.log("router").count("worker cannot be used") == 2
        assert httpx.post(f"{url}/v1/completions", json=BODY).status_code == 200


def refused_more_than_once(url: str, by: str) -> bool:
    return metric(url, f'baton_workers_refused_total{{field="{by}"}}') > 1
