"""A cluster each of whose processes runs on a host of its own: a network namespace. The packets of all of them pass
through one more namespace that forwards, in which a rule can swallow them, pair by pair and without telling anyone;
or a host's cable is pulled.

Nobody restarts a process of `baton run`, so this module does, as an orchestrator would.
"""

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil

from baton.errors import BatonError
from baton_cluster.cli.status import fetch
from baton_cluster.launch.runtime_dir import ROUTER_SOCKET
from tests.e2e.served import eventually, is_gone

RESTART_S = 0.5
READY_S = 120.0
_STOP_S = 30.0


def why_not() -> str:
    """Why there can be no hosts here; empty where there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    probe = f"baton-probe-{os.getpid()}"
    try:
        subprocess.run(
            ["ip", "netns", "add", probe], check=True, capture_output=True, timeout=_STOP_S
        )
        subprocess.run(
            ["ip", "netns", "del", probe], check=True, capture_output=True, timeout=_STOP_S
        )
    except (OSError, subprocess.CalledProcessError) as error:
        return f"no network namespaces here: {error}"
    return ""


class Hosts:
    """Namespaces by name, made at once; addresses are 10.N.1.2, 10.N.2.2 … in the order of the names."""

    def __init__(self, names: Sequence[str]) -> None:
        self._mark = f"b{os.getpid() % 100_000}"
        self._net = f"10.{64 + os.getpid() % 128}"
        self._number = {name: number for number, name in enumerate(names, start=1)}
        self._made: list[str] = []
        self._reaches_here = False

    def make(self) -> None:
        """Makes them; each reaches every other, and this process reaches all."""
        middle, net = self._add("mid"), self._net
        _ip("netns", "exec", middle, "sysctl", "-qw", "net.ipv4.ip_forward=1")
        _ip(
            "link",
            "add",
            f"{self._mark}-up",
            "type",
            "veth",
            "peer",
            "name",
            "outside",
            "netns",
            middle,
        )
        self._reaches_here = True
        _ip("addr", "add", f"{net}.0.2/24", "dev", f"{self._mark}-up")
        _ip("link", "set", f"{self._mark}-up", "up")
        _ip("-n", middle, "addr", "add", f"{net}.0.1/24", "dev", "outside")
        _ip("-n", middle, "link", "set", "outside", "up")
        _ip("route", "add", f"{net}.0.0/16", "via", f"{net}.0.1")
        for name, number in self._number.items():
            host, cable = self._add(name), f"to-{number}"
            _ip(
                "link",
                "add",
                cable,
                "netns",
                middle,
                "type",
                "veth",
                "peer",
                "name",
                "net",
                "netns",
                host,
            )
            _ip("-n", middle, "addr", "add", f"{net}.{number}.1/24", "dev", cable)
            _ip("-n", middle, "link", "set", cable, "up")
            _ip("-n", host, "link", "set", "lo", "up")
            _ip("-n", host, "addr", "add", f"{net}.{number}.2/24", "dev", "net")
            _ip("-n", host, "link", "set", "net", "up")
            _ip("-n", host, "route", "add", "default", "via", f"{net}.{number}.1")

    def remove(self) -> None:
        """Removes what was made. The kernel takes cables and rules with the namespaces, but in its own time: the one
        whose end is here is removed by name, so that the next test can have the name.
        """
        if self._reaches_here:
            _ip("link", "del", f"{self._mark}-up")
            self._reaches_here = False
        for namespace in reversed(self._made):
            _ip("netns", "del", namespace)
        self._made.clear()

    def address(self, name: str) -> str:
        """Of a host."""
        return f"{self._net}.{self._number[name]}.2"

    def command(self, name: str, *command: str) -> list[str]:
        """Runs there instead of here; the process that it starts is the command's own."""
        return ["ip", "netns", "exec", f"{self._mark}-{name}", *command]

    def swallow(self, source: str, target: str) -> None:
        """Packets from one host to another are dropped from now on."""
        self._rule("add", source, target)

    def let_pass(self, source: str, target: str) -> None:
        """Ends `swallow`."""
        self._rule("del", source, target)

    def swallows(self, source: str, target: str) -> bool:
        """Whether the kernel has the rule."""
        rules = _ip("-n", f"{self._mark}-mid", "rule", "list")
        return f"from {self.address(source)} to {self.address(target)} blackhole" in rules

    def unplug(self, name: str) -> None:
        """The host's cable carries nothing any more, and its routes are gone."""
        _ip("-n", f"{self._mark}-mid", "link", "set", f"to-{self._number[name]}", "down")

    def plug_in(self, name: str) -> None:
        """Ends `unplug`."""
        _ip("-n", f"{self._mark}-mid", "link", "set", f"to-{self._number[name]}", "up")

    def _rule(self, what: str, source: str, target: str) -> None:
        pair = ("from", self.address(source), "to", self.address(target))
        _ip("-n", f"{self._mark}-mid", "rule", what, *pair, "blackhole", "pref", "10")

    def _add(self, name: str) -> str:
        namespace = f"{self._mark}-{name}"
        _ip("netns", "add", namespace)
        self._made.append(namespace)
        return namespace


def _ip(*words: str) -> str:
    done = subprocess.run(
        ["ip", *words], capture_output=True, text=True, check=False, timeout=_STOP_S
    )
    assert done.returncode == 0, f"ip {' '.join(words)}: {done.stderr}"
    return done.stdout


@dataclass(slots=True, eq=False)
class HostedCluster:
    """Processes of one cluster, by name, each restarted when it dies.

    Attributes:
        hosts: One for each process.
        folder: Of runtime directories and logs.
        settings: What all of them get in their environment.
        config: Of all of them, YAML.
        roles: By name, `router` among them; a name is also its host's.
        restarts: By name.
    """

    hosts: Hosts
    folder: Path
    settings: dict[str, str]
    config: Path
    roles: dict[str, str]
    restarts: dict[str, int] = field(default_factory=dict)
    _processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def url(self) -> str:
        """Of the router."""
        return f"http://{self.hosts.address('router')}:8000"

    def start(self, name: str) -> None:
        """Starts a process on its host."""
        role, address = self.roles[name], self.hosts.address(name)
        flags = ["--name", name, "-f", str(self.config)]
        if role == "router":
            flags += ["--host", address, "--port", "8000"]
        elif role != "pool":
            flags += ["--listen", f"{address}:7001"]
        command = self.hosts.command(
            name, sys.executable, "-m", "baton_cluster.cli.main", "run", role, *flags
        )
        own = {"BATON_CLUSTER_RUNTIME_DIR": str(self.folder / name)}
        with (self.folder / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                command, stdout=log, stderr=log, env=os.environ | self.settings | own
            )

    def process(self, name: str) -> psutil.Process | None:
        """The one that runs now; None while it is away."""
        held = self._processes[name]
        if held.poll() is not None:
            return None
        found = psutil.Process(held.pid)
        return None if is_gone(found) else found

    async def keep_running(self) -> None:
        """Starts again what has died, until cancelled."""
        while True:
            for name, process in self._processes.items():
                if process.poll() is not None:
                    self.restarts[name] = self.restarts.get(name, 0) + 1
                    await asyncio.sleep(RESTART_S)
                    self.start(name)
                    break
            await asyncio.sleep(0.1)

    async def joined(self) -> set[str]:
        """Workers that the router has, and knows to be well."""
        status = await fetch(f"unix:{self.folder / 'router' / ROUTER_SOCKET}")
        return {worker.worker_id for worker in status.workers if worker.worker_id}

    async def at_rest(self) -> bool:
        """Whether nothing is in flight, every worker is there, and no page is used or lost."""
        status = await fetch(f"unix:{self.folder / 'router' / ROUTER_SOCKET}")
        there = [worker for worker in status.workers if worker.worker_id]
        workers = [name for name, role in self.roles.items() if role not in ("router", "pool")]
        return (
            status.requests_in_flight == 0
            and len(there) == len(workers)
            and all(
                load.running == load.waiting == load.blocks_used == 0
                and load.blocks_free + load.blocks_cached == load.blocks_total > 0
                for load in (worker.load for worker in there)
            )
        )

    def stop(self) -> None:
        """Ends all of them in good order; kills what does not end."""
        for process in self._processes.values():
            if process.poll() is None:
                process.terminate()
        for process in self._processes.values():
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(_STOP_S)


@contextmanager
def hosted(
    folder: Path, roles: dict[str, str], *, config: str, settings: dict[str, str]
) -> Iterator[HostedCluster]:
    """A cluster that is ready.

    Args:
        folder: For runtime directories, logs and the configuration; a short path, for sockets are made in it.
        roles: By name; `router` is one of the names.
        config: YAML of all processes.
        settings: Environment of all processes.
    """
    hosts = Hosts(list(roles))
    file = folder / "cluster.yaml"
    file.write_text(config)
    workers = [name for name, role in roles.items() if role not in ("router", "pool")]
    addresses = ",".join(f"{hosts.address(name)}:7001" for name in workers)
    common = {"OMP_NUM_THREADS": "1", "BATON_CLUSTER_SECRET": "5e" * 32}
    cluster = HostedCluster(
        hosts=hosts,
        folder=folder,
        settings=common | {"BATON_CLUSTER_WORKERS": addresses} | settings,
        config=file,
        roles=roles,
    )
    try:
        hosts.make()
        for name in sorted(roles, key=lambda name: roles[name] != "pool"):
            cluster.start(name)
        eventually(lambda: _is_ready(cluster, len(workers)), f"ready, see {folder}", READY_S)
        yield cluster
    finally:
        cluster.stop()
        hosts.remove()


def _is_ready(cluster: HostedCluster, workers: int) -> bool:
    try:
        ready = httpx.get(f"{cluster.url}/ready").status_code == 200
        return ready and len(asyncio.run(cluster.joined())) == workers
    except (httpx.TransportError, BatonError):  # the router is still starting
        return False
