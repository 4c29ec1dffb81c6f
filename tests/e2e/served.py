"""A cluster started as a user starts it, seen from outside: HTTP, `baton status --json`, process ids."""

import io
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

from baton_cluster.cli.main import main

READY = re.compile(r"ready on (http://\S+)")


@dataclass(slots=True, eq=False, kw_only=True)
class Served:
    """A running `baton serve`.

    Attributes:
        process: The launcher.
        url: Base URL.
        runtime_dir: Where its sockets are.
        output: Everything printed so far.
        shared_files: Names in /dev/shm that its processes were seen to map or to have open.
    """

    process: subprocess.Popen[str]
    url: str
    runtime_dir: Path
    output: list[str] = field(default_factory=list)
    shared_files: set[str] = field(default_factory=set)

    def client(self, **settings: object) -> httpx.Client:
        """An HTTP client of the cluster."""
        return httpx.Client(base_url=self.url, timeout=60.0, **settings)  # type: ignore[arg-type]

    def told(self, *words: str) -> dict[str, Any]:
        """What `baton WORDS --json` says of it; nothing where that fails.

        Asked in this process: to start one takes longer than the answer, and the time of those that are served.
        """
        with redirect_stdout(io.StringIO()) as said:
            status = main([*words, "--json", "--runtime-dir", str(self.runtime_dir)])
        return json.loads(said.getvalue()) if status == 0 else {}

    def status(self) -> dict[str, Any]:
        """What `baton status --json` says."""
        status = self.told("status")
        assert status, "the router does not answer"
        return status

    def workers(self) -> list[dict[str, Any]]:
        """The workers of `status`."""
        workers: list[dict[str, Any]] = self.status()["workers"]
        return workers

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric of the router's over all that have these labels."""
        return metric(f"{self.url}/metrics", name, **labels)

    def children(self) -> list[psutil.Process]:
        """The launcher's child processes. Whoever kills one asks for it here: so what it shares is known before."""
        launcher = psutil.Process(self.process.pid)
        children = launcher.children(recursive=True)
        for process in (launcher, *children):
            self.shared_files |= _shared_files(process.pid)
        return children

    def child(self, role: str) -> psutil.Process:
        """The one child that runs `role` (as its command line shows)."""
        found = [p for p in self.children() if f"baton_cluster.roles {role}" in _command(p)]
        assert len(found) == 1, [_command(p) for p in self.children()]
        return found[0]


def metric(url: str, name: str, **labels: str) -> float:
    """The same of the metrics at an address."""
    samples = [
        sample
        for family in text_string_to_metric_families(httpx.get(url).text)
        for sample in family.samples
        if sample.name == name
    ]
    assert samples, f"no metric is called {name}"
    return sum(each.value for each in samples if labels.items() <= each.labels.items())


def _command(process: psutil.Process) -> str:
    """Its command line; nothing once it is gone."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def eventually(holds: Callable[[], object], what: str, timeout_s: float = 20.0) -> None:
    """Waits until `holds`; fails naming `what` when it does not come true in time."""
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(0.05)


def maps_pool(served: Served, *roles: str) -> bool:
    """Whether every worker of these roles reports that it maps the pool's node;
    what it computes before is not put there.
    """
    loads = [worker["load"] for worker in served.workers() if worker["role"] in roles]
    return bool(loads) and all(load.get("pool_node") for load in loads)


@contextmanager
def serve(model: str | None, *flags: str, standby: bool = False) -> Iterator[Served]:
    """Runs a cluster; at the end stops it and asserts that it left nothing behind.

    A test may end the launcher itself; what must not be left is the same. A standby process, whose imports take the
    time of those that serve, is kept only where a test is about it.
    """
    directory = tempfile.mkdtemp(prefix="baton-e2e-")
    runtime_dir = Path(directory) / "run"
    command = [sys.executable, "-m", "baton_cluster.cli.main", "serve", *([model] if model else [])]
    command += ["--port", "0", "--runtime-dir", str(runtime_dir), *flags]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "BATON_CLUSTER_STANDBY": str(standby).lower(),
    }
    shared_before = set(os.listdir("/dev/shm"))
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    )
    output: list[str] = []
    served: Served | None = None
    reader: threading.Thread | None = None
    try:
        url = _wait_ready(process, output)
        served = Served(process=process, url=url, runtime_dir=runtime_dir, output=output)
        reader = threading.Thread(target=_drain, args=(process, output), daemon=True)
        reader.start()
        yield served
        if process.poll() is None:  # unless the test ended it
            assert_at_rest(served)
    finally:
        if process.poll() is None:
            started = psutil.Process(process.pid).children(recursive=True)
            children = started if served is None else served.children()
            process.send_signal(signal.SIGTERM)
            process.wait(timeout=30)
            assert_gone(children)
        if reader is not None:
            reader.join(timeout=10)
        assert process.stdout is not None
        process.stdout.close()
    assert not runtime_dir.exists(), list(runtime_dir.iterdir())
    assert not _abandoned(shared_before, served.shared_files)
    os.rmdir(directory)


_BY_PYTHON = re.compile(r"(psm_|sem\.mp-)\w+")
"""Names that Python's multiprocessing gives: any process of the machine may have made them, also one that is not seen
from here.
"""


def _abandoned(before: set[str], own: set[str]) -> set[str]:
    """Files of shared memory that are new, and were the cluster's or are mapped by no process. Those of tests that run
    beside this one are mapped.
    """
    new = set(os.listdir("/dev/shm")) - before
    others = {name for name in new - own if not _BY_PYTHON.fullmatch(name)}
    for process in psutil.process_iter() if others else ():
        others -= _shared_files(process.pid)
    return (new & own | others) & set(os.listdir("/dev/shm"))


def _shared_files(pid: int) -> set[str]:
    """Names in /dev/shm that a process maps or has open."""
    paths: list[str] = []
    with suppress(OSError):  # it has ended, or is another user's
        mapped = Path(f"/proc/{pid}/maps").read_text().splitlines()
        paths += (line.split(maxsplit=5)[-1] for line in mapped)
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):  # it is closed
                paths.append(os.readlink(fd))
    return {path.removeprefix("/dev/shm/") for path in paths if path.startswith("/dev/shm/")}


def is_gone(process: psutil.Process) -> bool:
    """Whether the process has ended: it is not there any more, or only waits to be reaped."""
    try:
        return process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return True


def assert_gone(processes: list[psutil.Process]) -> None:
    """Every one of `processes` has ended. Those whose parent has ended too may be reaped later than in ten seconds."""
    _, alive = psutil.wait_procs(processes, timeout=10)
    assert [_command(p) for p in alive if not is_gone(p)] == []


def assert_at_rest(served: Served) -> None:
    """Nothing is in flight, and each worker's pages add up with none in use."""

    def at_rest() -> bool:
        status = served.status()
        loads = [worker["load"] for worker in status["workers"]]
        return status["requests_in_flight"] == 0 and all(
            load["running"] == load["waiting"] == load["blocks_used"] == 0
            and load["blocks_free"] + load["blocks_cached"] == load["blocks_total"] > 0
            for load in loads
        )

    eventually(at_rest, "cluster at rest")


def _wait_ready(process: subprocess.Popen[str], output: list[str]) -> str:
    assert process.stdout is not None
    for line in process.stdout:
        output.append(line)
        if found := READY.search(line):
            return found.group(1)
    raise AssertionError("the cluster did not start:\n" + "".join(output))


def _drain(process: subprocess.Popen[str], output: list[str]) -> None:
    assert process.stdout is not None
    output.extend(process.stdout)
