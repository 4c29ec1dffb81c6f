"""`baton doctor`: what this machine offers, and what would stop a cluster. Exit status 1 if something would.

Each check is one function, which tries what it checks where trying is harmless.
"""

import argparse
import asyncio
import fcntl
import mmap
import os
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import partial
from importlib import metadata
from pathlib import Path

import msgspec
import psutil
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from baton import native
from baton.cgroups import memory_limit_bytes
from baton.config.setting import Setting
from baton.config.sizes import format_size
from baton.cpu_features import cpu_flags
from baton.errors import ConfigError, UnavailableError
from baton_cluster.cli import status
from baton_cluster.cli.router_control import configured_dir, of_environment
from baton_cluster.launch import listener
from baton_cluster.launch.machine import huge_pages, usable_cores
from baton_cluster.launch.runtime_dir import (
    ROUTER_SOCKET,
    RuntimeDir,
    default_dir,
    is_alive,
    parent_dir,
    running_clusters,
)
from baton_vllm.settings import installed_version, missing
from kv_transfer.backends.registry import BACKENDS
from kv_transfer.memory.shared_region import (
    HUGE_PAGES_SWITCH,
    available_bytes,
    shared_huge_pages,
)

_GIB = 1 << 30
_COMMAND_TIMEOUT_S = 20.0


class Verdict(Enum):
    """What a finding means for a cluster on this machine."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing about this machine.

    Attributes:
        name: Of what was looked at.
        verdict: `fail` would stop a cluster; `warn` makes it slower or smaller.
        found: What is there.
        advice: What to do, or nothing.
    """

    name: str
    verdict: Verdict
    found: str
    advice: str = ""


_COLORS = {Verdict.OK: "green", Verdict.WARN: "yellow", Verdict.FAIL: "red"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which port, and in what form."""
    parser.add_argument("--json", action="store_true", help="for machines")
    parser.add_argument("--port", help="port that HTTP shall get", metavar="PORT")


def run(arguments: argparse.Namespace) -> int:
    """Looks at everything, shows it."""
    flags = []
    if arguments.port is not None:
        flags.append(
            Setting(path="router.port", value=arguments.port, source="--port", is_text=True)
        )
    router = of_environment("router.host", "router.port", flags=flags).router
    findings = [_found_by(check) for check in all_checks(router.host, router.port)]
    stopped = any(finding.verdict is Verdict.FAIL for finding in findings)
    if arguments.json:
        report = {"ok": not stopped, "findings": findings}
        sys.stdout.write(msgspec.json.encode(report).decode() + "\n")
    else:
        _show(findings, stopped=stopped)
    return 1 if stopped else 0


def _found_by(check: Callable[[], Finding]) -> Finding:
    """What stops a check itself, as a host without any temporary directory does, is a finding like another."""
    try:
        return check()
    except OSError as error:
        name = getattr(check, "func", check).__name__.removeprefix("check_").replace("_", " ")
        return _fail(name, f"cannot be looked at: {error}", "")


def _show(findings: list[Finding], *, stopped: bool) -> None:
    console = Console(highlight=False)
    table = Table.grid(padding=(0, 2))
    for finding in findings:
        verdict = f"[{_COLORS[finding.verdict]}]{finding.verdict.value}[/]"
        advice = f"\n[dim]→ {escape(finding.advice)}[/]" if finding.advice else ""
        table.add_row(verdict, finding.name, escape(finding.found) + advice)
    console.print(table)
    if stopped:
        console.print("\n[red]A cluster would not start here as things are.[/]")
    else:
        console.print("\nA cluster can run here.")


def _ok(name: str, found: str, advice: str = "") -> Finding:
    return Finding(name=name, verdict=Verdict.OK, found=found, advice=advice)


def _warn(name: str, found: str, advice: str) -> Finding:
    return Finding(name=name, verdict=Verdict.WARN, found=found, advice=advice)


def _fail(name: str, found: str, advice: str) -> Finding:
    return Finding(name=name, verdict=Verdict.FAIL, found=found, advice=advice)


def check_cores() -> Finding:
    """Each worker computes with its share of the cores."""
    cores = usable_cores()
    found = f"{cores} usable of {os.cpu_count()}"
    if cores < 2:
        return _warn("cores", found, "prefill and decode will take turns on one core")
    return _ok("cores", found)


def check_instructions() -> Finding:
    """Wide vectors decide how fast the CPU kernels are."""
    known = (
        "amx_bf16",
        "amx_int8",
        "avx512_bf16",
        "avx512f",
        "avx2",
        "fma",
        "asimd",
        "bf16",
        "sve",
    )
    present = [name for name in known if name in cpu_flags()]
    if not {"avx2", "avx512f", "asimd"} & set(present):
        return _warn("instructions", ", ".join(present) or "none known", "computing will be slow")
    return _ok("instructions", ", ".join(present))


def check_cpu_products() -> Finding:
    """What multiplies bfloat16 weights here; measured, for some seconds, where no worker has done so. In a process of
    its own: importing torch takes seconds.
    """
    name = "bfloat16 on this CPU"
    command = [sys.executable, "-m", "baton_engine.kernels.cpu.product_choice"]
    try:
        told = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=_COMMAND_TIMEOUT_S
        )
    except (OSError, subprocess.SubprocessError) as error:
        return _warn(name, f"not known: {error}", "workers choose at their start")
    return _ok(name, told.stdout.strip())


def check_memory() -> Finding:
    """Weights once per worker, KV pages, and the processes themselves."""
    available, limit = available_bytes(), memory_limit_bytes()
    total = psutil.virtual_memory().total
    bound = f", limited to {format_size(limit)} by the cgroup" if limit is not None else ""
    found = f"{format_size(available)} available of {format_size(total)}{bound}"
    if available < _GIB:
        return _fail(
            "memory", found, "even the demo needs about 1 GiB: free some, or raise the limit"
        )
    if available < 4 * _GIB:
        return _warn("memory", found, "set --kv-cache-memory to what may be used")
    return _ok("memory", found)


def check_gpus() -> Finding:
    """Without one, workers compute on the CPU."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return _ok("GPUs", "none: workers compute on the CPU")
    query = [command, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        shown = subprocess.run(
            query, capture_output=True, text=True, timeout=_COMMAND_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        return _warn("GPUs", f"nvidia-smi fails: {error}", "look at the driver (dmesg | grep NVRM)")
    gpus = [line.strip() for line in shown.stdout.splitlines() if line.strip()]
    return _ok("GPUs", "; ".join(gpus) or "none: workers compute on the CPU")


def check_packages() -> Finding:
    """The two that a partial installation lacks; read from their metadata, for importing torch takes seconds."""
    found, missing = [], []
    for name in ("torch", "transformers"):
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            missing.append(name)
    if missing:
        return _fail("packages", f"{', '.join(missing)} not installed", "make install")
    return _ok("packages", ", ".join(found))


def check_engines() -> Finding:
    """Which engines `engine.kind` can name here; of vLLM only the metadata is read."""
    why = missing()
    vllm = f"vllm {installed_version()}" if why is None else f"not vllm: {why}"
    return _ok("engines", f"baton; {vllm}")


def check_shared_memory() -> Finding:
    """The `shm` transport: memory without a name, its descriptor sent over a Unix socket."""
    try:
        _share_a_page()
    except (OSError, AttributeError) as error:
        return _fail("transport shm", f"not working: {error}", "allow memfd_create and SCM_RIGHTS")
    return _ok("transport shm", "memfd passed by a Unix socket")


def _share_a_page() -> None:
    fd = os.memfd_create("baton-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    ours, theirs = socket.socketpair()
    with ours, theirs, os.fdopen(fd, "r+b", closefd=True):
        os.ftruncate(fd, mmap.PAGESIZE)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        socket.send_fds(ours, [b"x"], [fd])
        _, (received,), _, _ = socket.recv_fds(theirs, 1, 1)
        with os.fdopen(received, "r+b"), mmap.mmap(received, mmap.PAGESIZE) as page:
            page[0] = 1


def check_network_transports() -> Finding:
    """Only clusters of several hosts need one."""
    optional = [backend for backend in BACKENDS.values() if backend.modules]
    found = [backend.name for backend in optional if backend.installed]
    missing = [backend.remedy for backend in optional if not backend.installed]
    adapters = _rdma_adapters()
    nics = f"; RDMA adapters: {', '.join(adapters)}" if adapters else ""
    how = f" (for several hosts: {' or '.join(missing)})" if missing else ""
    return _ok("transports", f"{', '.join(found) or 'none between hosts'} installed{how}{nics}")


def _rdma_adapters() -> list[str]:
    adapters = Path("/sys/class/infiniband")
    return sorted(path.name for path in adapters.iterdir()) if adapters.is_dir() else []


def check_locked_memory() -> Finding:
    """RDMA registers memory by locking it; shared memory on one host needs none of that."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    found = "unlimited" if soft == resource.RLIM_INFINITY else format_size(soft)
    if _rdma_adapters() and soft != resource.RLIM_INFINITY:
        return _warn("ulimit memlock", found, "RDMA needs `ulimit -l unlimited`")
    return _ok("ulimit memlock", found)


def check_open_files() -> Finding:
    """Each client's connection takes a descriptor of the router."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < 256:
        return _fail("ulimit nofile", str(soft), f"raise it: ulimit -n {min(hard, 65536)}")
    if soft < 4096:
        return _warn("ulimit nofile", str(soft), "many clients at once need more: ulimit -n 65536")
    return _ok("ulimit nofile", str(soft))


def check_dev_shm() -> Finding:
    """Baton's own shared memory does not live there; NCCL's does."""
    name = "/dev/shm"  # noqa: S108  # looked at, not written to
    try:
        usage = shutil.disk_usage(name)
    except OSError:
        return _ok(name, "absent (not needed on one host)")
    return _ok(name, f"{format_size(usage.free)} free of {format_size(usage.total)}")


def check_huge_pages() -> Finding:
    """Large arenas have fewer page-table misses with them."""
    free, configured = huge_pages()
    chosen = shared_huge_pages()
    found = f"{free} of {configured} free; transparent for shared memory: {chosen}"
    if chosen in {"never", "deny"}:
        advice = (
            f"KV in host memory may be handed over faster after echo advise > {HUGE_PAGES_SWITCH}"
        )
        return _ok("huge pages", found, advice)
    return _ok("huge pages", found)


def check_compiled_code() -> Finding:
    """What is compiled when Baton is installed; without it Python and torch do the same, slower."""
    name, missing, variants = "compiled code", [], set()
    for library in native.LIBRARIES:
        try:
            variants.add(native.find(library).stem.removeprefix(f"{Path(library.path).name}_"))
        except native.NotBuiltError as error:
            missing.append(str(error))
    if missing:
        advice = "computing on the CPU is several times slower: install Baton where there is a C++ compiler"
        return _warn(name, "; ".join(missing), advice)
    return _ok(name, ", ".join(sorted(variants)))


def check_loopback() -> Finding:
    """Router and clients of this machine meet there."""
    try:
        with (
            listener.bind("127.0.0.1", 0) as server,
            socket.create_connection(server.getsockname(), timeout=5.0),
        ):
            return _ok("loopback", "127.0.0.1 accepts connections")
    except (ConfigError, OSError) as error:
        return _fail("loopback", str(error), "bring the interface up: ip link set lo up")


def check_port(host: str, port: int) -> Finding:
    """Where `baton serve` would listen."""
    name = f"port {port}"
    if is_alive(default_dir(port)):
        return _warn(
            name, "a cluster of this user serves there", "another one needs another --port"
        )
    try:
        listener.bind(host, port).close()
    except ConfigError as error:
        return _fail(name, error.message, "")
    return _ok(name, f"free on {host}")


def check_runtime_dir() -> Finding:
    """Where the sockets between the processes lie."""
    try:
        RuntimeDir.claim(parent_dir() / f"doctor-{os.getpid()}").release()
    except (ConfigError, OSError) as error:
        return _fail("runtime directory", str(error), "set TMPDIR to a short, private directory")
    return _ok("runtime directory", str(parent_dir()))


def check_drained_workers() -> Finding:
    """A drained worker of a cluster that runs here takes nothing new until an operator takes it back,
    or it starts again.
    """
    name, drained = "drained workers", []
    try:
        configured = configured_dir()
    except ConfigError as error:
        return _fail(name, error.message, "")
    for cluster in running_clusters() if configured is None else [configured]:
        if not (cluster / ROUTER_SOCKET).exists():
            continue
        try:
            told = asyncio.run(status.fetch(f"unix:{cluster / ROUTER_SOCKET}"))
        except UnavailableError as error:
            return _warn(name, f"{cluster.name}: {error.message}", "")
        drained += [
            f"{worker.worker_id} of {cluster.name}, by {worker.drained_by}"
            for worker in told.workers
            if worker.drained_by
        ]
    if not drained:
        return _ok(name, "none")
    advice = "baton undrain NAME takes one back; baton explain NAME --story says since when"
    return _warn(name, "; ".join(drained), advice)


def all_checks(host: str, port: int) -> list[Callable[[], Finding]]:
    """Every check, in the order in which they are shown."""
    return [
        check_cores,
        check_instructions,
        check_cpu_products,
        check_memory,
        check_gpus,
        check_packages,
        check_engines,
        check_compiled_code,
        check_shared_memory,
        check_network_transports,
        check_locked_memory,
        check_dev_shm,
        check_huge_pages,
        check_open_files,
        check_loopback,
        partial(check_port, host, port),
        check_runtime_dir,
        check_drained_workers,
    ]
