"""How fast KV moves from one process to another, and what that costs a request:
`python -m bench.handoff [--json FILE]`.

Copying (`bench.transfer.copying`): for each page size every backend that is installed here pushes all pages of one
region into a region that another process owns, in random order, taking turns with plain memory copies and with the
libraries' own tools (`bench.transfer.perftools`). Medians over the rounds: `shm_16k_gb_s`, and the ratios
`shm_over_memcpy_16k` (one piece), `shm_over_memcpy_pages_16k` (the same pages in the same order),
`ucx_over_perftool_16k`.

Bookkeeping: `reserve_cpu_us`, `commit_cpu_us` and `release_cpu_us` of a transfer of 1,000 pages, and
`checksum_16k_gb_s`, what one core hashes of pages of a layer; see `bench.protocol`.

Serving: one prefill and one decode worker answer prompts of several lengths. `handoff_share_of_ttft_2k` is the part of
the hand-off that was not hidden behind computing (from the first token to the commit that the decode worker answered),
over the time to the first token as the router saw it. The prefill worker sends the first token at once, so it is the
second token that waits for this part. Prompts of 8k tokens take minutes to prefill on a few cores; there is one of
them, and standard error says how far the run is.
"""

import argparse
import random
import statistics
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import httpx

from bench import protocol
from bench.harness.report import Report
from bench.harness.server import WITH_HAND_OFF, serving
from bench.harness.shapes import SHAPES, write_model
from bench.transfer import copying
from bench.transfer.copying import Copying
from kv_transfer.backends.registry import BACKENDS

PAGE_BYTES = {"16k": 16 << 10, "64k": 64 << 10, "1m": 1 << 20, "8m": 8 << 20}
PROMPT_TOKENS = {
    "256": 256,
    "2k": 2048,
    "8k": 8000,
}  # 8k: what the model's 8192 positions leave for a prompt
STAGES = ("reserve", "commit", "release")
_REQUEST_TIMEOUT_S = 1800.0
_SETTINGS = WITH_HAND_OFF | {
    "BATON_ROUTER_REQUEST_TIMEOUT_S": str(_REQUEST_TIMEOUT_S),
    "BATON_TRANSFER_EXPECT_TIMEOUT_S": str(_REQUEST_TIMEOUT_S),
}


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
    if not arguments.without_copying:
        for label in arguments.sizes:
            _measure_copying(label, backends, arguments, report)
        _measure_bookkeeping(arguments, report)
    if arguments.json:
        report.write(arguments.json)  # before what takes minutes
    if not arguments.without_serving:
        _measure_serving(arguments, report)
        if arguments.json:
            report.write(arguments.json)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the report here")
    parser.add_argument("--sizes", nargs="+", choices=PAGE_BYTES, default=list(PAGE_BYTES))
    parser.add_argument("--region-mib", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--pages", type=int, default=1000, help="of a transfer whose CPU is told")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen370m")
    parser.add_argument("--prompts", type=int, default=3, help="requests of each length but 8k")
    parser.add_argument("--without-copying", action="store_true", help="serving only")
    parser.add_argument("--without-serving", action="store_true", help="copying and bookkeeping")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def _measure_copying(
    label: str, backends: list[str], arguments: argparse.Namespace, report: Report
) -> None:
    _tell(f"copying pages of {label}")
    rates = copying.measure(
        Copying(
            page_bytes=PAGE_BYTES[label],
            region_bytes=arguments.region_mib << 20,
            rounds=arguments.rounds,
            seed=arguments.seed,
        ),
        backends,
    )
    for name, rate in rates.items():
        report.figures[f"{name}_{label}_gb_s"] = rate
    for name in backends:
        for kind, baseline in _baselines(name).items():
            if baseline in rates:
                report.figures[f"{name}_over_{kind}_{label}"] = rates[name] / rates[baseline]
    shown = "   ".join(f"{name} {rate:5.2f}" for name, rate in rates.items())
    print(f"{label:>4} pages, GB/s:   {shown}", flush=True)


def _baselines(backend: str) -> Mapping[str, str]:
    return {
        "memcpy": "memcpy",
        "memcpy_pages": "memcpy_pages",
        "perftool": f"{backend}_perftool",
        "loop": f"{backend}_loop",
    }


def _measure_bookkeeping(arguments: argparse.Namespace, report: Report) -> None:
    _tell("bookkeeping")
    spent_us = protocol.measure(arguments.pages, repeat=10 * arguments.rounds)
    for stage in STAGES:
        report.figures[f"{stage}_cpu_us"] = max(spent_us[f"{stage}_p"], spent_us[f"{stage}_d"])
    shown = ", ".join(f"{stage} {report.figures[f'{stage}_cpu_us']:.0f}" for stage in STAGES)
    print(f"{arguments.pages} pages, us of CPU on the busier side: {shown}", flush=True)
    for label, page_bytes in PAGE_BYTES.items():
        rate = report.figures[f"checksum_{label}_gb_s"] = protocol.measure_checksums(page_bytes)
        print(f"{label:>4} pages of a layer, checksums: {rate:.2f} GB/s of one core", flush=True)


def _measure_serving(arguments: argparse.Namespace, report: Report) -> None:
    shape = SHAPES[arguments.shape]
    rng = random.Random(arguments.seed)
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as directory:
        write_model(shape, Path(directory))
        _tell("starting a cluster")
        with (
            serving(directory, "--kv-cache-memory", "512MiB", settings=_SETTINGS) as url,
            httpx.Client(base_url=url, timeout=_REQUEST_TIMEOUT_S) as http,
        ):
            ask(http, [rng.randrange(2, shape.vocab) for _ in range(64)])  # warms up
            for label, length in PROMPT_TOKENS.items():
                timings = []
                for number in range(1 if label == "8k" else arguments.prompts):
                    _tell(f"prompt {number + 1} of {label} tokens")
                    timings.append(
                        ask(http, [rng.randrange(2, shape.vocab) for _ in range(length)])
                    )
                _record_serving(label, timings, report)


def _tell(what: str) -> None:
    print(f"handoff: {what}", file=sys.stderr, flush=True)


def ask(http: httpx.Client, prompt: list[int]) -> dict[str, float]:
    """The router's account of one request.

    Raises:
        httpx.HTTPError: It was not answered.
        RuntimeError: One worker did all of it: what is told of its hand-off is none.
    """
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
    if timing["prefill_worker"] == timing["decode_worker"]:
        raise RuntimeError(f"a prompt of {len(prompt)} tokens without a hand-off: {timing}")
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
