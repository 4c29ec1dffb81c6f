"""What another server's clients see when its processes fail: `python -m bench.peer_faults --vllm-python PATH [--json FILE]`.

Ten clients stream from one server at a time, and a fault comes while all of them decode:

engine_killed     kill -9 of the process that computes
engine_stopped    SIGSTOP of it, for `--stopped` seconds, then SIGCONT
server_killed     kill -9 of the process that speaks HTTP
clients_leave     five of the ten clients close their connections

Both sides run the same model under the same faults: `vllm` (hybrid, as `vllm serve` starts it, but for `--enforce-eager`) and `baton` (one
hybrid worker). Figures are numbers of streams, of the ten or of the five that stayed: `SERVER_FAULT_completed`, `_errors` (the stream
said so), `_broken` (the connection ended before the stream) and `_open` (not at its end `--patience` seconds after the fault); of
`engine_stopped` also `_open_at_continue`, and `_went_on`, which got tokens after SIGCONT. And seconds after the fault: `_known_s`, until the
last of the failed streams had failed; `_served_s`, until a new request was answered, absent if none was. A server that does not
come up is absent, and `absent_SERVER_FAULT` among the settings says why.
"""

import argparse
import asyncio
import json
import re
import signal
import sys
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
from bench.peers.servers import vllm

_CLIENTS = 10
_LEAVING = 5
_BEGUN_TOKENS = 5
"""A stream decodes once it has so many."""
_FAULTS = ("engine_killed", "engine_stopped", "server_killed", "clients_leave")
_SERVERS = ("vllm", "baton")
_ENGINES = {"vllm": "VLLM::Worker", "baton": "baton_cluster.roles hybrid"}
_HTTP = {"vllm": "api_?server", "baton": "baton_cluster.roles router"}
"""By what in their command lines each server's processes are known (patterns, in any case)."""


@dataclass(slots=True)
class Stream:
    """One client's.

    Attributes:
        tokens: That came.
        end: How it ended: `completed`, `errors` or `broken`; `open` until then.
        ended_s: When, on the monotonic clock.
    """

    tokens: int = 0
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
        except httpx.HTTPError:
            pass  # `broken`, unless the stream had said more
        self.end, self.ended_s = end, time.monotonic()


def main() -> None:
    """Entry point."""
    arguments = _arguments()
    settings = {
        name: getattr(arguments, name)
        for name in ("only", "faults", "tokens", "patience", "stopped")
    }
    # A signal that ends this process, as of a time limit, ends the server that is measured too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    report = Report(benchmark="peer_faults", settings=settings)
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as directory:
        write_model(SHAPES["llama116m"], Path(directory))
        for name in arguments.only:
            for fault in arguments.faults:
                try:
                    figures = _under_fault(name, fault, directory, arguments)
                except RuntimeError as error:
                    report.settings[f"absent_{name}_{fault}"] = str(error)[:500]
                    continue
                report.figures |= {f"{name}_{fault}_{key}": value for key, value in figures.items()}
                print(name, fault, figures, flush=True)
                if arguments.json:
                    report.write(arguments.json)


def _under_fault(
    name: str, fault: str, model: str, arguments: argparse.Namespace
) -> dict[str, float]:
    with _started(name, model, arguments.vllm_python) as url:
        return asyncio.run(_measure(name, fault, url, arguments))


@contextmanager
def _started(name: str, model: str, vllm_python: str) -> Iterator[str]:
    """One server of its own for each fault, since some do not survive it."""
    if name == "baton":
        with serving(model, "--hybrid-workers", "1") as url:
            yield url
    else:
        with vllm(vllm_python, model, "bfloat16", "--enforce-eager") as url:
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
        if any(task.done() for task in running):
            raise RuntimeError("a stream ended before the fault")
        await asyncio.sleep(0.01)
    began_s = time.monotonic()
    watched = streams
    match fault:
        case "clients_leave":
            for task in running[:_LEAVING]:
                task.cancel()
            watched, running = streams[_LEAVING:], running[_LEAVING:]
        case "engine_stopped":
            stopped = _process(_ENGINES[name])
            stopped.send_signal(signal.SIGSTOP)
            await asyncio.sleep(arguments.stopped)
            at_continue = [(stream.end, stream.tokens) for stream in streams]
            stopped.send_signal(signal.SIGCONT)
        case _:
            _process(_ENGINES[name] if fault == "engine_killed" else _HTTP[name]).kill()
    served = asyncio.create_task(_served_s(url, began_s, arguments.patience))
    left_s = began_s + arguments.patience - time.monotonic()
    await asyncio.wait(running, timeout=max(0.0, left_s))
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    ends = Counter(stream.end for stream in watched)
    figures = {key: float(ends[key]) for key in ("completed", "errors", "broken", "open")}
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


def _process(mark: str) -> psutil.Process:
    """The one of the server's processes whose command line has what `mark` describes.

    Raises:
        RuntimeError: There is none, or there are several.
    """
    found = [
        process
        for process in psutil.Process().children(recursive=True)
        if re.search(mark, " ".join(process.cmdline()), re.IGNORECASE)
    ]
    if len(found) != 1:
        raise RuntimeError(f"{len(found)} processes with {mark!r}")
    return found[0]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--json", type=Path, help="write the report here")
    add(
        "--only", choices=_SERVERS, nargs="+", default=list(_SERVERS), help="servers that take part"
    )
    add("--faults", choices=_FAULTS, nargs="+", default=list(_FAULTS))
    add("--vllm-python", default="", help="python of vLLM's environment")
    add("--tokens", type=int, default=400, help="of each stream")
    add("--patience", type=float, default=60.0, help="seconds after the fault that a client waits")
    add("--stopped", type=float, default=20.0, help="seconds that a stopped process stands still")
    return parser.parse_args()


if __name__ == "__main__":
    main()
