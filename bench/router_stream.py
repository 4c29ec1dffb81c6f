"""How many tokens one router moves from workers to streaming clients: `python -m bench.router_stream [--json FILE]`.

A real `baton serve` without workers of its own, workers without an engine in another process and the clients in a
third. The router may use one core only. Decode workers step at an engine's pace, each for its share of the clients, so
that frames are as full as an engine's: with a step every `--step-ms` the router is offered more than it can move, and
every `--calm-step-ms` (figures that begin with `calm_`) less.

With `--transport tcp` router and workers speak TCP, in turn with TLS, as the product does, and in the clear: figures
begin with `tls_` and `plain_` and are medians of `--pairs` runs each, `tls_over_plain_router_cpu` is the median of the
pairs' ratios, and `connect_ms` is from dialling to the worker's greeting.

With `--reasoning-parser NAME` chats whose text has to be looked through for reasoning of that family, in turn with
chats whose text need not be: figures that begin with `parsed_` and `unparsed_`,
and `parsed_over_unparsed_router_cpu`, in the same way.

Figures: `tokens_per_s` is tokens per second of the router's CPU time, which is what a core of its own would move;
`wall_tokens_per_s` is what was moved on this machine beside whatever else ran there; `offered_tokens_per_s` what the
engines would draw if nothing held them up; `gap_*` is the time between two reads of one client.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from importlib import resources
from pathlib import Path
from statistics import median

import psutil

from bench.harness.report import Report
from bench.harness.server import serving
from bench.router.stream_clients import Counts, Orders
from bench.router.stream_workers import SECRET, Way

_WARM_UP_TOKENS = 256
_CONNECTIONS = 100
_CPU = "router_cpu_us_per_token"


def main() -> None:
    """Entry point."""
    arguments = _arguments()
    report = Report(
        benchmark="router_stream",
        settings={name: value for name, value in vars(arguments).items() if name != "json"},
    )
    with report.written_to(arguments.json):
        for prefix, step_ms in (("", arguments.step_ms), ("calm_", arguments.calm_step_ms)):
            if not step_ms:
                continue
            report.figures[f"{prefix}offered_tokens_per_s"] = arguments.streams / step_ms * 1e3
            for figures in _in_turn(_sides(step_ms, arguments), arguments.pairs):
                report.figures |= {prefix + name: value for name, value in figures.items()}
            for name, value in figures.items():
                print(f"{prefix + name:40}{value:12.3f}", flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the report here")
    parser.add_argument("--streams", type=int, default=200, help="clients at once")
    parser.add_argument("--rounds", type=int, default=2, help="requests per client")
    parser.add_argument("--output-tokens", type=int, default=1024)
    parser.add_argument("--decoders", type=int, default=4, help="decode workers")
    parser.add_argument("--step-ms", type=float, default=3.0)
    parser.add_argument("--calm-step-ms", type=float, default=20.0, help="0 for no such run")
    parser.add_argument("--transport", choices=("unix", "tcp"), default="unix")
    parser.add_argument(
        "--reasoning-parser", default="", help="a family of reasoning, such as qwen3"
    )
    parser.add_argument(
        "--pairs", type=int, default=3, help="runs of each side, where there are two"
    )
    return parser.parse_args()


def _sides(
    step_ms: float, arguments: argparse.Namespace
) -> dict[str, Callable[[], dict[str, float]]]:
    """What is measured, by the name that its figures begin with: one thing, or two."""
    name = arguments.reasoning_parser
    if arguments.transport == "tcp":
        return {
            "tls": partial(_measure, step_ms, Way.TLS, arguments),
            "plain": partial(_measure, step_ms, Way.PLAIN, arguments),
        }
    if name:
        return {
            "parsed": partial(_measure, step_ms, Way.UNIX, arguments, name),
            "unparsed": partial(_measure, step_ms, Way.UNIX, arguments),
        }
    return {"": partial(_measure, step_ms, Way.UNIX, arguments)}


def _in_turn(
    sides: dict[str, Callable[[], dict[str, float]]], pairs: int
) -> Iterator[dict[str, float]]:
    """Of two sides the medians of `pairs` runs each, each of them first in every other pair,
    and the pairs' ratio of the first to the second; anew after each pair.
    """
    if len(sides) == 1:
        (measure,) = sides.values()
        yield measure()
        return
    runs: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
    first, second = sides
    for number in range(pairs):
        for side in (first, second) if number % 2 else (second, first):
            runs[side].append(sides[side]())
        figures = {
            f"{side}_{figure}": median(run[figure] for run in runs[side])
            for side in runs
            for figure in runs[side][0]
        }
        both = zip(runs[first], runs[second], strict=True)
        figures[f"{first}_over_{second}_router_cpu"] = median(a[_CPU] / b[_CPU] for a, b in both)
        yield figures


def _measure(
    step_ms: float, way: Way, arguments: argparse.Namespace, reasoning_parser: str = "none"
) -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as name:
        directory = Path(name)
        config = directory / "cluster.yaml"
        model = str(resources.files("baton_engine.demo") / "model")
        with _workers(way, directory, model, step_ms, arguments.decoders) as addresses:
            config.write_text(_config(directory, addresses, reasoning_parser))
            figures = {"connect_ms": _connect_ms(way, addresses[0])}
            with serving(model, "-f", str(config), module=_COMMAND_LINES[way]) as url:
                router = _router()
                _pin(router)
                orders = _orders(url, arguments)
                _drive(replace(orders, rounds=1, output_tokens=_WARM_UP_TOKENS))
                before_s = _cpu_s(router)
                counts = _drive(orders)
                spent_s = _cpu_s(router) - before_s
    return figures | _figures(counts, spent_s)


_COMMAND_LINES = {
    Way.UNIX: "baton_cluster.cli.main",
    Way.TLS: "baton_cluster.cli.main",
    Way.PLAIN: "bench.router.plain_tcp",
}


def _figures(counts: Counts, spent_s: float) -> dict[str, float]:
    tokens = counts.tokens
    return {
        "tokens_per_s": tokens / spent_s,
        "wall_tokens_per_s": tokens / counts.elapsed_s,
        _CPU: spent_s / tokens * 1e6,
        "events_per_token": counts.events / tokens,
        "ttft_p50_ms": median(counts.ttfts_s) * 1e3,
        "gap_p50_ms": counts.gap_p50_s * 1e3,
        "gap_p99_ms": counts.gap_p99_s * 1e3,
    }


def _config(directory: Path, addresses: list[str], reasoning_parser: str) -> str:
    return json.dumps(
        {
            "router": {
                "local_prefill_tokens": 0,  # these decode workers cannot
                "reasoning_parser": reasoning_parser,
            },
            "cluster": {
                "prefill_workers": 0,
                "decode_workers": 0,
                "workers": addresses,
                "secret": SECRET.hex(),
                "runtime_dir": str(directory / "run"),
            },
        }
    )


def _connect_ms(way: Way, address: str) -> float:
    """Measured in a process of its own: gRPC and children that are started later do not go together."""
    command = [sys.executable, "-m", "bench.router.connect", way.value, address, str(_CONNECTIONS)]
    return float(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)


def _orders(url: str, arguments: argparse.Namespace) -> Orders:
    host, _, port = url.removeprefix("http://").rpartition(":")
    return Orders(
        host=host,
        port=int(port),
        model="bench",
        streams=arguments.streams,
        rounds=arguments.rounds,
        output_tokens=arguments.output_tokens,
    )


@contextmanager
def _workers(
    way: Way, directory: Path, model: str, step_ms: float, decoders: int
) -> Iterator[list[str]]:
    """Runs the workers; yields their addresses."""
    command = [sys.executable, "-m", "bench.router.stream_workers", way.value, str(directory)]
    command += [f"{model}/tokenizer.json", str(step_ms), str(decoders)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield json.loads(process.stdout.readline())
    finally:
        process.kill()
        process.communicate()


def _drive(orders: Orders) -> Counts:
    """Runs the clients in a process of their own."""
    ran = subprocess.run(
        [sys.executable, "-m", "bench.router.stream_clients"],
        input=json.dumps(asdict(orders)) + "\n",
        capture_output=True,
        text=True,
        check=False,
    )
    if ran.returncode:
        raise RuntimeError(f"the clients failed:\n{ran.stderr[-2000:]}")
    return Counts(**json.loads(ran.stdout))


def _router() -> psutil.Process:
    children = psutil.Process().children(recursive=True)
    return next(child for child in children if " router --name " in " ".join(child.cmdline()))


def _pin(process: psutil.Process) -> None:
    """One core for all its threads."""
    core = max(os.sched_getaffinity(0))
    for thread in process.threads():
        os.sched_setaffinity(thread.id, {core})


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


if __name__ == "__main__":
    main()
