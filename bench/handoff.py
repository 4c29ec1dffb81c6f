"""How fast KV moves from one process to another, and what that costs a request: `python -m bench.handoff [--json FILE]`.

Copying: for each page size, every backend that is installed here pushes all pages of one region into a region that another
process owns, in random order, alternating with plain memory copies of as many bytes. `memcpy` is one copy of the whole
region, the most that one core can do here; `memcpy_pages` copies the same pages in the same random order within this process,
one call for each. Figures are medians over the rounds: `shm_16k_gb_s`, and the ratios `shm_over_memcpy_16k` and
`shm_over_memcpy_pages_16k`.

Bookkeeping: `reserve_cpu_us`, `commit_cpu_us` and `release_cpu_us` of a transfer of 1,000 pages; see `bench.protocol`.

Serving: one prefill and one decode worker answer prompts of several lengths. `handoff_share_of_ttft_2k` is the part of the
hand-off that was not hidden behind computing (from the first token to the commit that the decode worker answered), over
the time to the first token as the router saw it. The prefill worker sends the first token at once, so it is the second
token that waits for this part.
"""

import argparse
import ctypes
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

import httpx
import numpy as np

from baton.errors import TransferError
from baton.ids import BlockId, LayerName, XferId
from baton.layout import KvLayout
from bench import protocol
from bench.report import Report
from bench.server import serving
from bench.shapes import SHAPES, write_model
from kv_transfer.backends import BACKENDS, open_receivers, open_senders
from kv_transfer.ports import KvWriter, Push, RegionHandle
from kv_transfer.regions import SharedRegion

PAGE_BYTES = {"16k": 16 << 10, "64k": 64 << 10, "1m": 1 << 20, "8m": 8 << 20}
PROMPT_TOKENS = {
    "256": 256,
    "2k": 2048,
    "8k": 8000,
}  # 8k: what the model's 8192 positions leave for a prompt
STAGES = ("reserve", "commit", "release")
_TIMEOUT_S = 120.0


def main() -> None:
    """Entry point."""
    arguments = _arguments()
    report = Report(
        benchmark="handoff",
        settings={name: value for name, value in vars(arguments).items() if name != "json"},
    )
    backends = [
        name for name, backend in BACKENDS.items() if backend.installed and backend.host_memory
    ]
    report.settings["backends"] = backends
    for label, page_bytes in PAGE_BYTES.items():
        _measure_copying(label, page_bytes, backends, arguments, report)
    _measure_bookkeeping(arguments, report)
    if not arguments.without_serving:
        _measure_serving(arguments, report)
    if arguments.json:
        report.write(arguments.json)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the report here")
    parser.add_argument("--region-mib", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--pages", type=int, default=1000, help="of a transfer whose CPU is told")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen370m")
    parser.add_argument("--prompts", type=int, default=3, help="requests of each length")
    parser.add_argument("--without-serving", action="store_true", help="copying only")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def _layout(page_bytes: int) -> KvLayout:
    """One layer whose page has that many bytes: float32 keys and values of 16 tokens and heads of 64."""
    heads = page_bytes // (2 * 16 * 64 * 4)
    return KvLayout(
        model_fingerprint="bench",
        dtype="float32",
        block_tokens=16,
        num_kv_heads=heads,
        head_dim=64,
        layers=(LayerName("layers.0"),),
    )


def _measure_copying(
    label: str, page_bytes: int, backends: list[str], arguments: argparse.Namespace, report: Report
) -> None:
    num_pages = (arguments.region_mib << 20) // page_bytes
    layout = _layout(page_bytes)
    rng = random.Random(arguments.seed)
    orders = [rng.sample(range(num_pages), num_pages) for _ in range(2)]
    push = Push(
        xfer_id=XferId("bench"),
        layer_index=0,
        source=tuple(BlockId(page) for page in orders[0]),
        target=tuple(BlockId(page) for page in orders[1]),
    )
    local = SharedRegion.create(layout.region_bytes(num_pages))
    np.frombuffer(local.memoryview, dtype=np.uint8)[:] = 1
    plain = _PlainCopies(local.memoryview, page_bytes)
    with _writers(backends, local, layout, num_pages) as writers:
        ways: dict[str, Callable[[], None]] = {
            "memcpy": plain.whole,
            "memcpy_pages": lambda: plain.pages(push),
        }
        ways |= {name: _pushing(writer, push) for name, writer in writers.items()}
        rates = _alternate(ways, len(local.memoryview), arguments.rounds)
    for name, rate in rates.items():
        report.figures[f"{name}_{label}_gb_s"] = rate
    for name in backends:
        for baseline in ("memcpy", "memcpy_pages"):
            report.figures[f"{name}_over_{baseline}_{label}"] = rates[name] / rates[baseline]
    shown = "   ".join(f"{name} {rate:5.2f}" for name, rate in rates.items())
    print(f"{label:>4} pages, GB/s:   {shown}", flush=True)
    local.close()


def _alternate(
    ways: dict[str, Callable[[], None]], num_bytes: int, rounds: int
) -> dict[str, float]:
    """Median GB/s of each way; the first round warms up."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds + 1):
        for name, copy in ways.items():
            began_s = time.perf_counter()
            copy()
            seconds[name].append(time.perf_counter() - began_s)
    return {name: num_bytes / statistics.median(took[1:]) / 1e9 for name, took in seconds.items()}


class _PlainCopies:
    """libc's memcpy from the region into another of the same kind, touched before: what this process alone can do."""

    def __init__(self, source: memoryview, page_bytes: int) -> None:
        self._target_region = SharedRegion.create(len(source))
        target = np.frombuffer(self._target_region.memoryview, dtype=np.uint8)
        target[:] = 2
        self._source = np.frombuffer(source, dtype=np.uint8).ctypes.data
        self._target = target.ctypes.data
        self._num_bytes = len(source)
        self._page_bytes = page_bytes
        self._memcpy = ctypes.CDLL(None).memcpy
        self._memcpy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
        self._memcpy.restype = ctypes.c_void_p

    def whole(self) -> None:
        """Everything at once."""
        self._memcpy(self._target, self._source, self._num_bytes)

    def pages(self, push: Push) -> None:
        """The same pages as the push."""
        memcpy, size = self._memcpy, self._page_bytes
        for source, target in zip(push.source, push.target, strict=True):
            memcpy(self._target + target * size, self._source + source * size, size)


def _pushing(writer: KvWriter, push: Push) -> Callable[[], None]:
    """Pushes and waits until the bytes are there."""

    def copy() -> None:
        landed = threading.Event()
        errors: list[TransferError] = []

        def done(error: TransferError | None) -> None:
            if error is not None:
                errors.append(error)
            landed.set()

        writer.push(push, done)
        if not landed.wait(_TIMEOUT_S):
            raise RuntimeError(f"the push did not end in {_TIMEOUT_S:.0f} s")
        if errors:
            raise errors[0]

    return copy


@contextmanager
def _writers(
    backends: list[str], local: SharedRegion, layout: KvLayout, num_pages: int
) -> Iterator[dict[str, KvWriter]]:
    """An open way into another process's region for each backend."""
    here, there = get_context("spawn").Pipe()
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as folder:
        child = get_context("spawn").Process(
            target=_receive, args=(there, backends, layout, num_pages, folder)
        )
        child.start()
        there.close()  # a child that dies is then an end of file, not a wait for ever
        try:
            senders = open_senders(backends, local, num_blocks=num_pages)
            opened: dict[str, KvWriter] = {}
            for name in backends:
                here.send(name)
                handle = RegionHandle(backend=name, opaque=here.recv(), num_blocks=num_pages)
                opened[name] = senders[name].connect(handle, layout)
            yield opened
            for writer in opened.values():
                writer.close()
        finally:
            here.send("")
            child.join(30)


def _receive(
    asked: Connection, backends: list[str], layout: KvLayout, num_pages: int, folder: str
) -> None:
    """The other process: owns a region and gives handles to it."""
    region = SharedRegion.create(layout.region_bytes(num_pages))
    receivers = open_receivers(
        backends,
        region,
        gate_address=lambda name: f"unix:{folder}/{name}.kv",
        layout=layout,
        num_blocks=num_pages,
    )
    while name := asked.recv():
        asked.send(receivers[name].handle().opaque)
    for receiver in receivers.values():
        receiver.close()


def _measure_bookkeeping(arguments: argparse.Namespace, report: Report) -> None:
    spent_us = protocol.measure(arguments.pages, repeat=10 * arguments.rounds)
    for stage in STAGES:
        report.figures[f"{stage}_cpu_us"] = max(spent_us[f"{stage}_p"], spent_us[f"{stage}_d"])
    shown = ", ".join(f"{stage} {report.figures[f'{stage}_cpu_us']:.0f}" for stage in STAGES)
    print(f"{arguments.pages} pages, us of CPU on the busier side: {shown}", flush=True)


def _measure_serving(arguments: argparse.Namespace, report: Report) -> None:
    shape = SHAPES[arguments.shape]
    rng = random.Random(arguments.seed)
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as directory:
        write_model(shape, Path(directory))
        with (
            serving(directory, "--kv-cache-memory", "512MiB") as url,
            httpx.Client(base_url=url, timeout=600.0) as http,
        ):
            _ask(http, [rng.randrange(2, shape.vocab) for _ in range(64)])  # warms up
            for label, length in PROMPT_TOKENS.items():
                timings = [
                    _ask(http, [rng.randrange(2, shape.vocab) for _ in range(length)])
                    for _ in range(arguments.prompts)
                ]
                _record_serving(label, timings, report)


def _ask(http: httpx.Client, prompt: list[int]) -> dict[str, float]:
    """The router's account of one request."""
    body = {
        "model": "bench",
        "prompt": prompt,
        "max_tokens": 4,
        "ignore_eos": True,
        "temperature": 0,
    }
    reply = http.post("/v1/completions", json=body, headers={"X-Baton-Timing": "1"})
    reply.raise_for_status()
    timing: dict[str, float] = reply.json()["baton"]
    return timing


def _record_serving(label: str, timings: list[dict[str, float]], report: Report) -> None:
    def median(name: str) -> float:
        return statistics.median(timing[name] for timing in timings)

    shares = [timing["unhidden_s"] / timing["first_token_s"] for timing in timings]
    share = report.figures[f"handoff_share_of_ttft_{label}"] = statistics.median(shares)
    report.figures[f"ttft_ms_{label}"] = median("first_token_s") * 1e3
    report.figures[f"handoff_unhidden_ms_{label}"] = median("unhidden_s") * 1e3
    print(
        f"{label:>4} tokens: TTFT {median('first_token_s') * 1e3:8.1f} ms, "
        f"hand-off not hidden {median('unhidden_s') * 1e3:6.1f} ms, {share:.2%} of it",
        flush=True,
    )


if __name__ == "__main__":
    main()
