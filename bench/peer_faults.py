"""What another server's clients see when its processes fail:
`python -m bench.peer_faults --vllm-python PATH [--json FILE]`.

Ten clients stream from one server at a time, and a fault comes while all of them decode:

engine_killed     kill -9 of the process that computes; of a pair, of the one that decodes
prefill_killed    kill -9 of the one that computes prompts, of a pair only
engine_stopped    SIGSTOP of it, for `--stopped` seconds, then SIGCONT
server_killed     kill -9 of the process that speaks HTTP
clients_leave     five of the ten clients close their connections

All run the same model under the same faults: `vllm` (hybrid, as `vllm serve` starts it, but for `--enforce-eager`),
`vllm_nixl_pd` (vLLM's own prefill and decode server), `baton` (one hybrid worker), `baton_vllm` (the same with vLLM as
its engine) and `baton_vllm_pd` (a prefill and a decode worker with vLLM); the last two run in vLLM's environment, too.
Figures are numbers of streams, of the ten or of the five that stayed: `SERVER_FAULT_completed`, `_errors` (the stream
said so), `_broken` (the connection ended before the stream) and `_open` (not at its end `--patience` seconds after the
fault); `_late_tokens`, of those completed or open, which got tokens more than two seconds after the fault; of
`engine_stopped` also `_open_at_continue`, and `_went_on`, which got tokens after SIGCONT. And seconds after the fault:
`_known_s`, until the last of the failed streams had failed; `_served_s`, until a new request was answered, absent if
none was. A server that does not come up is absent, and `absent_SERVER_FAULT` among the settings says why.
"""

import argparse
import asyncio
import json
import re
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil

from bench.harness.report import Report
from bench.harness.server import serving
from bench.harness.shapes import SHAPES, write_model
from bench.harness.stopping import stoppable
from bench.peers.contest import FAULTS
from bench.peers.servers import vllm, vllm_nixl_pair

_CLIENTS = 10
_LEAVING = 5
_BEGUN_TOKENS = 5
"""A stream decodes once it has so many."""
_LATE_S = 2.0
"""Tokens that came so long after a fault were not on their way before it."""
_FAULTS = ("engine_killed", "prefill_killed", "engine_stopped", "server_killed", "clients_leave")
_OURS = {
    "baton": ("--hybrid-workers", "1"),
    "baton_vllm": ("--engine", "vllm", "--hybrid-workers", "1"),
    "baton_vllm_pd": ("--engine", "vllm", "--prefill-workers", "1", "--decode-workers", "1"),
}
_SERVERS = ("vllm", "vllm_nixl_pd", *_OURS)
_ROUTER = "baton_cluster.roles router"
_ENGINES = {
    "vllm": "VLLM::Worker",
    "vllm_nixl_pd": "VLLM::Worker",
    "baton": "baton_cluster.roles hybrid",
    "baton_vllm": "baton_cluster.roles hybrid",
    "baton_vllm_pd": "baton_cluster.roles decode",
}
_PREFILLS = {"vllm_nixl_pd": "VLLM::Worker", "baton_vllm_pd": "baton_cluster.roles prefill"}
_HTTP = {"vllm": "api_?server", "vllm_nixl_pd": "nixl_proxy", **dict.fromkeys(_OURS, _ROUTER)}
"""By what in their command lines each server's processes are known (patterns, in any case). Of vLLM's own pair the one
that prefills was started first.
"""


@dataclass(slots=True)
class Stream:
    """One client's.

    Attributes:
        tokens: That came.
        last_s: When the last of them did, on the monotonic clock.
        end: How it ended: `completed`, `errors` or `broken`; `open` until then.
        ended_s: When, on the same clock.
    """

    tokens: int = 0
    last_s: float = 0.0
    end: str = "open"
    ended_s: float = field(default=0.0)

    async def run(self, url: str, seed: int, max_tokens: int) -> None:
        """Streams until its end."""
        body = {
            "model": "bench",
            "prompt": [2 + (seed * 7919 + i) % 9000 for i in range(64)],
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
        }
        self.end = "open"
        end = "broken"
        try:
            async with (
                httpx.AsyncClient(timeout=None) as client,
                client.stream("POST", f"{url}/v1/completions", json=body) as reply,
            ):
                if reply.status_code != 200:
                    end = "errors"
                async for line in reply.aiter_lines():
                    if line.startswith("data: [DONE]"):
                        end = "completed" if end != "errors" else end
                    elif line.startswith("data: "):
                        end = "errors" if "error" in json.loads(line[6:]) else end
                        self.tokens += 1
                        self.last_s = time.monotonic()
        except httpx.HTTPError:
            pass  # `broken`, unless the stream had said more
        self.end, self.ended_s = end, time.monotonic()


@stoppable()
def main() -> None:
    """Entry point."""
    arguments = _arguments()
    settings = {
        name: getattr(arguments, name)
        for name in ("only", "faults", "dtype", "tokens", "patience", "stopped")
    }
    report = Report(benchmark="peer_faults", settings=settings)
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as directory:
        write_model(SHAPES["llama116m"], Path(directory))
        for name in arguments.only:
            for fault in arguments.faults:
                if fault == "prefill_killed" and name not in _PREFILLS:
                    continue
                try:
                    figures = _under_fault(name, fault, directory, arguments)
                except FAULTS as error:
                    report.settings[f"absent_{name}_{fault}"] = str(error)[-500:]
                    print(name, fault, f"absent: {error}", flush=True)
                else:
                    found = {f"{name}_{fault}_{key}": value for key, value in figures.items()}
                    report.figures |= found
                    print(name, fault, figures, flush=True)
                if arguments.json:
                    report.write(arguments.json)


def _under_fault(
    name: str, fault: str, model: str, arguments: argparse.Namespace
) -> dict[str, float]:
    with _started(name, model, arguments.dtype, arguments.vllm_python) as url:
        return asyncio.run(_measure(name, fault, url, arguments))


@contextmanager
def _started(name: str, model: str, dtype: str, vllm_python: str) -> Iterator[str]:
    """One server of its own for each fault, since some do not survive it."""
    if name != "baton" and not vllm_python:
        raise RuntimeError("no --vllm-python was named")
    if name == "baton":
        with serving(model, "--dtype", dtype, *_OURS[name]) as url:
            yield url
    elif name in _OURS:
        with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
            file.write("engine: {vllm: {enforce_eager: true}}\n")
            file.flush()
            flags = ("-f", file.name, "--dtype", dtype, *_OURS[name])
            with serving(model, *flags, python=vllm_python) as url:
                yield url
    else:
        start = vllm if name == "vllm" else vllm_nixl_pair
        with start(vllm_python, model, dtype, "--enforce-eager") as url:
            yield url


async def _measure(
    name: str, fault: str, url: str, arguments: argparse.Namespace
) -> dict[str, float]:
    streams = [Stream() for _ in range(_CLIENTS)]
    running = [
        asyncio.create_task(stream.run(url, seed, arguments.tokens))
        for seed, stream in enumerate(streams)
    ]
    while not all(stream.tokens >= _BEGUN_TOKENS for stream in streams):
        for stream, task in zip(streams, running, strict=True):
            if task.done():
                raise RuntimeError(
                    f"a stream ended before the fault, {stream.end} after {stream.tokens} tokens"
                )
        await asyncio.sleep(0.01)
    began_s = time.monotonic()
    watched = streams
    match fault:
        case "clients_leave":
            for task in running[:_LEAVING]:
                task.cancel()
            watched, running = streams[_LEAVING:], running[_LEAVING:]
        case "engine_stopped":
            stopped = _process(name, fault)
            stopped.send_signal(signal.SIGSTOP)
            await asyncio.sleep(arguments.stopped)
            at_continue = [(stream.end, stream.tokens) for stream in streams]
            stopped.send_signal(signal.SIGCONT)
        case _:
            _process(name, fault).kill()
    served = asyncio.create_task(_served_s(url, began_s, arguments.patience))
    left_s = began_s + arguments.patience - time.monotonic()
    await asyncio.wait(running, timeout=max(0.0, left_s))
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    ends = Counter(stream.end for stream in watched)
    figures = {key: float(ends[key]) for key in ("completed", "errors", "broken", "open")}
    late_s = began_s + _LATE_S
    lasting = [stream for stream in watched if stream.end in ("completed", "open")]
    figures["late_tokens"] = float(sum(stream.last_s > late_s for stream in lasting))
    failed = [stream.ended_s for stream in watched if stream.end in ("errors", "broken")]
    if failed:
        figures["known_s"] = max(failed) - began_s
    if fault == "engine_stopped":
        after = zip(streams, at_continue, strict=True)
        figures["open_at_continue"] = float(sum(end == "open" for end, _ in at_continue))
        figures["went_on"] = float(sum(stream.tokens > before for stream, (_, before) in after))
    answered_s = await served
    if answered_s is not None:
        figures["served_s"] = answered_s
    return figures


async def _served_s(url: str, began_s: float, patience_s: float) -> float | None:
    """Seconds after the fault until a new request was answered."""
    body = {"model": "bench", "prompt": [5, 6, 7], "max_tokens": 1, "temperature": 0}
    async with httpx.AsyncClient(timeout=patience_s) as client:
        while time.monotonic() - began_s < patience_s:
            with suppress(httpx.HTTPError):
                reply = await client.post(f"{url}/v1/completions", json=body)
                if reply.status_code == 200:
                    return time.monotonic() - began_s
            await asyncio.sleep(0.1)
    return None


def _process(name: str, fault: str) -> psutil.Process:
    """Whose turn it is at `fault`.

    Raises:
        RuntimeError: There are not as many such processes as this server has.
    """
    marks = {"server_killed": _HTTP, "prefill_killed": _PREFILLS}.get(fault, _ENGINES)
    found = [
        process
        for process in psutil.Process().children(recursive=True)
        if re.search(marks[name], " ".join(process.cmdline()), re.IGNORECASE)
    ]
    if len(found) != (2 if name == "vllm_nixl_pd" and marks is not _HTTP else 1):
        raise RuntimeError(f"{len(found)} processes with {marks[name]!r}")
    found.sort(key=lambda process: process.create_time())
    return found[0] if fault == "prefill_killed" else found[-1]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--json", type=Path, help="write the report here")
    add(
        "--only", choices=_SERVERS, nargs="+", default=list(_SERVERS), help="servers that take part"
    )
    add("--faults", choices=_FAULTS, nargs="+", default=list(_FAULTS))
    add("--vllm-python", default="", help="python of an environment with vLLM, NIXL and Baton")
    add("--dtype", default="bfloat16", help="that all compute in")
    add("--tokens", type=int, default=400, help="of each stream")
    add("--patience", type=float, default=60.0, help="seconds after the fault that a client waits")
    add("--stopped", type=float, default=20.0, help="seconds that a stopped process stands still")
    return parser.parse_args()


if __name__ == "__main__":
    main()
