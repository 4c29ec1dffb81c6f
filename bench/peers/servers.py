"""Starts other people's servers on this machine with a model of ours, and stops them:
what `bench.cpu_vs_peers` compares with.

Peers live in environments of their own, since they bring their own torch; the command line says where. transformers,
which the tests need anyway, is that of this environment.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import httpx

_START_S = 600.0
_END_S = 3.0

MAX_MODEL_LEN = 4096
"""Tokens of the longest text of each of vLLM's servers."""

KV_GIB = 2
"""Memory for KV of each of vLLM's servers."""

_NOT_INHERITED = {"PYTHONPATH", "OMP_NUM_THREADS"}
"""A peer has its own packages, and takes all cores."""


@contextmanager
def vllm(python: str, model: str, dtype: str, *flags: str) -> Iterator[str]:
    """vLLM's CPU backend on all cores, from the environment that `python` belongs to; yields its URL.

    Raises:
        RuntimeError: It did not start; the end of what it printed is in the message.
    """
    port, cores = _free_port(), sorted(os.sched_getaffinity(0))
    with _running(_vllm(python, model, dtype, port, *flags), port, _on_cores(cores)) as url:
        yield url


@contextmanager
def vllm_nixl_pair(python: str, model: str, dtype: str, *flags: str) -> Iterator[str]:
    """vLLM's own prefill and decode server, each on half of the cores, that hand KV off by NIXL, behind a proxy;
    yields its URL.

    Raises:
        RuntimeError: One of them did not start, as without NIXL in that environment;
            the end of what it printed is in the message.
    """
    cores = sorted(os.sched_getaffinity(0))
    half = max(1, len(cores) // 2)
    transfer = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}
    urls = []
    with ExitStack() as servers:
        for share in (cores[:half], cores[-half:]):
            port, side_channel = _free_port(), _free_port()
            command = _vllm(python, model, dtype, port, *flags)
            command += ["--kv-transfer-config", json.dumps(transfer)]
            settings = _on_cores(share) | {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_channel)}
            urls.append(servers.enter_context(_running(command, port, settings)))
        port = _free_port()
        program = str(Path(__file__).with_name("nixl_proxy.py"))
        command = [python, "-P", program, "--port", str(port)]
        command += ["--prefill", urls[0], "--decode", urls[1]]
        yield servers.enter_context(_running(command, port, {}))


def _vllm(python: str, model: str, dtype: str, port: int, *flags: str) -> list[str]:
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", model]
    command += ["--served-model-name", "bench", "--port", str(port), "--dtype", dtype]
    command += ["--max-model-len", str(MAX_MODEL_LEN), "--no-enable-prefix-caching"]
    return [*command, *flags]


def _on_cores(cores: Sequence[int]) -> dict[str, str]:
    bound = ",".join(map(str, cores))
    return {"VLLM_CPU_OMP_THREADS_BIND": bound, "VLLM_CPU_KVCACHE_SPACE": str(KV_GIB)}


@contextmanager
def transformers(model: str, dtype: str) -> Iterator[str]:
    """transformers' `generate` in static batches (`bench.peers.transformers_server`) on all cores; yields its URL.

    Raises:
        RuntimeError: It did not start; the end of what it printed is in the message.
    """
    port = _free_port()
    # By its file, and without its folder among the packages: whose names must not hide the standard library's.
    program = str(Path(__file__).with_name("transformers_server.py"))
    command = [sys.executable, "-P", program, model, "--dtype", dtype, "--port", str(port)]
    with _running(command, port, {}) as url:
        yield url


@contextmanager
def llamacpp(server: str, gguf: str, slots: int, *flags: str) -> Iterator[str]:
    """llama.cpp's server on all cores with `slots` sequences at once; yields its URL.

    Raises:
        RuntimeError: It did not start; the end of what it printed is in the message.
    """
    port = _free_port()
    threads = str(len(os.sched_getaffinity(0)))
    command = [server, "-m", gguf, "--port", str(port), "-t", threads, "-np", str(slots)]
    command += ["-c", str(512 * slots), "--alias", "bench", *flags]
    with _running(command, port, {}) as url:
        yield url


@contextmanager
def _running(command: Sequence[str], port: int, settings: dict[str, str]) -> Iterator[str]:
    inherited = {name: value for name, value in os.environ.items() if name not in _NOT_INHERITED}
    program, *words = command
    if os.sep in program:  # not resolved: by its link Python knows its environment
        program = os.path.abspath(program)
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as folder:
        log = Path(folder) / "log"
        with log.open("w") as output:
            process = subprocess.Popen(
                [program, *words],
                env=inherited | settings,
                cwd=folder,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
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
    """Ends the server, and whatever it started and left behind: its process group, which is its own."""
    process.send_signal(signal.SIGINT)
    with suppress(subprocess.TimeoutExpired):
        process.wait(_END_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])
