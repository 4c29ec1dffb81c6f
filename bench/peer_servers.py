"""Starts other people's servers on this machine with a model of ours, and stops them: what `bench.cpu_vs_peers` compares with.

Peers live in environments of their own, since they bring their own torch; whoever runs the benchmark says where.
"""

import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil

_START_S = 600.0


@contextmanager
def vllm(python: str, model: str, dtype: str) -> Iterator[str]:
    """vLLM's CPU backend on all cores, from the environment that `python` belongs to; yields its URL.

    Raises:
        RuntimeError: It did not start; the end of what it printed is in the message.
    """
    port = _free_port()
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", model]
    command += ["--served-model-name", "bench", "--port", str(port), "--dtype", dtype]
    command += ["--max-model-len", "4096", "--no-enable-prefix-caching"]
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    settings = {"VLLM_CPU_OMP_THREADS_BIND": cores, "VLLM_CPU_KVCACHE_SPACE": "2"}
    with _running(command, port, settings) as url:
        yield url


@contextmanager
def llamacpp(server: str, gguf: str, slots: int) -> Iterator[str]:
    """llama.cpp's server on all cores with `slots` sequences at once; yields its URL.

    Raises:
        RuntimeError: It did not start; the end of what it printed is in the message.
    """
    port = _free_port()
    threads = str(len(os.sched_getaffinity(0)))
    command = [server, "-m", gguf, "--port", str(port), "-t", threads, "-np", str(slots)]
    with _running([*command, "-c", str(512 * slots), "--alias", "bench"], port, {}) as url:
        yield url


@contextmanager
def _running(command: Sequence[str], port: int, settings: dict[str, str]) -> Iterator[str]:
    # None of our own path: the peer has its own packages.
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as folder:
        log = Path(folder) / "log"
        with log.open("w") as output:
            process = subprocess.Popen(
                command,
                env=inherited | settings,
                cwd=folder,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        try:
            url = f"http://127.0.0.1:{port}"
            _wait_ready(process, url, log)
            yield url
        finally:
            _end(process)


def _wait_ready(process: "subprocess.Popen[bytes]", url: str, log: Path) -> None:
    until_s = time.monotonic() + _START_S
    while time.monotonic() < until_s and process.poll() is None:
        try:
            if httpx.get(f"{url}/health", timeout=1.0).status_code == 200:
                return
        except httpx.TransportError:
            pass  # it does not listen yet
        time.sleep(0.2)
    raise RuntimeError(f"{process.args!r} did not start:\n{log.read_text()[-2000:]}")


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Ends the server and whatever it started, by process id."""
    try:
        family = psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        family = []
    process.send_signal(signal.SIGINT)
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for child in family:
        if child.is_running():
            child.kill()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])
