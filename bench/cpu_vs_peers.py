"""Ours beside other servers on this machine's CPU, over HTTP: `python -m bench.cpu_vs_peers [--vllm-python PATH] [--json FILE]`.

One hybrid worker, one prefill and one decode worker, vLLM's CPU backend and llama.cpp take turns on the same cores with the same
random weights and prompts. A peer that is not named is absent, and the report says so. What the figures are called stands in
`bench.peer_figures`. Of int8 only one client is measured; of prefill and decode apart, one client and, as of the hybrid worker, a few
clients while long prompts keep arriving.
"""

import argparse
import asyncio
import tempfile
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from bench.load import Load, Outcome, run_load, run_under
from bench.peer_figures import Measured, over_all_shapes, peer_figures
from bench.peer_servers import llamacpp, vllm
from bench.report import Report
from bench.server import serving
from bench.shapes import SHAPES, write_model


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """One server.

    Attributes:
        start: Starts it and yields its URL.
        concurrency: Numbers of clients to measure it with.
        under_prompts: Whether it is also measured while long prompts keep arriving.
    """

    start: Callable[[], AbstractContextManager[str]]
    concurrency: list[int]
    under_prompts: bool = False


_SHAPES = ("llama116m", "qwen370m")
_HYBRID = ("--hybrid-workers", "1")
_PAIR = ("--prefill-workers", "1", "--decode-workers", "1")


def main() -> None:
    """Entry point."""
    arguments = _arguments()
    report = Report(
        benchmark="cpu_vs_peers",
        settings={name: value for name, value in vars(arguments).items() if name != "json"},
    )
    for shape in arguments.shape:
        with tempfile.TemporaryDirectory(prefix="baton-bench-") as directory:
            write_model(SHAPES[shape], Path(directory))
            outcomes = _take_turns(_contenders(shape, directory, arguments), shape, arguments)
        report.figures |= peer_figures(shape, outcomes)
    report.figures |= over_all_shapes(report.figures)
    if arguments.json:
        report.write(arguments.json)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the report here")
    parser.add_argument("--shape", choices=sorted(SHAPES), nargs="+", default=list(_SHAPES))
    parser.add_argument("--dtype", default="auto", help="of ours")
    parser.add_argument("--peer-dtype", default="bfloat16")
    parser.add_argument("--vllm-python", default="", help="python of vLLM's environment")
    parser.add_argument("--llamacpp-server", default="", help="llama-server")
    parser.add_argument("--gguf", nargs="*", default=[], metavar="SHAPE=FILE", help="for llama.cpp")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=1, help="turns of each server")
    parser.add_argument(
        "--requests",
        type=int,
        default=1,
        help="per client and turn; of one client three times as many",
    )
    parser.add_argument("--input-tokens", type=int, default=256)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument(
        "--prompt-tokens", type=int, default=2048, help="of prompts that keep arriving"
    )
    parser.add_argument("--prompt-clients", type=int, default=4, help="that decode meanwhile")
    return parser.parse_args()


def _contenders(shape: str, model: str, arguments: argparse.Namespace) -> dict[str, Contender]:
    levels = arguments.concurrency
    ours = partial(serving, model, "--dtype", arguments.dtype)
    contenders = {
        "hybrid": Contender(start=partial(ours, *_HYBRID), concurrency=levels, under_prompts=True),
        "pd": Contender(start=partial(ours, *_PAIR), concurrency=[1], under_prompts=True),
        "int8": Contender(start=partial(ours, "--quantization", "int8", *_HYBRID), concurrency=[1]),
    }
    if arguments.vllm_python:
        start = partial(vllm, arguments.vllm_python, model, arguments.peer_dtype)
        contenders["vllm"] = Contender(start=start, concurrency=levels)
    gguf = dict(entry.split("=", 1) for entry in arguments.gguf).get(shape)
    if arguments.llamacpp_server and gguf:
        start = partial(llamacpp, arguments.llamacpp_server, gguf, max(levels))
        contenders["llamacpp"] = Contender(start=start, concurrency=levels)
    for peer in ("vllm", "llamacpp"):
        if peer not in contenders:
            print(f"{shape}: {peer} is absent", flush=True)
    return contenders


def _take_turns(
    contenders: Mapping[str, Contender], shape: str, arguments: argparse.Namespace
) -> Measured:
    measured: Measured = {}
    for turn in range(arguments.rounds):
        for name, contender in contenders.items():
            with contender.start() as url:
                _run(url, shape, 1, -1 - turn, arguments)  # warms up
                for level in contender.concurrency:
                    outcome = _run(url, shape, level, turn, arguments)
                    measured.setdefault((name, f"c{level}"), []).append(outcome)
                    _print(shape, name, f"c{level}", outcome)
                if contender.under_prompts:
                    outcome = _run_under_prompts(url, shape, turn, arguments)
                    measured.setdefault((name, "prompts"), []).append(outcome)
                    _print(shape, name, "prompts", outcome)
    return measured


def _print(shape: str, name: str, level: str, outcome: Outcome) -> None:
    print(
        f"{shape} {name:9} {level:8} {outcome.output_tok_s:8.1f} tok/s   "
        f"TTFT {outcome.ttft_ms:8.1f} ms   TPOT {outcome.tpot_ms:7.2f} ms, p99 {outcome.tpot_p99_ms:7.2f}",
        flush=True,
    )


def _run(
    url: str, shape: str, concurrency: int, turn: int, arguments: argparse.Namespace
) -> Outcome:
    each = arguments.requests * (3 if concurrency == 1 else 1)
    load = _load(shape, concurrency, concurrency * each, arguments)
    # Every server gets the same prompts; a turn's are new, so that nobody's prefix cache helps.
    return asyncio.run(run_load(url, "bench", load, seed=1000 * turn + concurrency))


def _run_under_prompts(url: str, shape: str, turn: int, arguments: argparse.Namespace) -> Outcome:
    clients = arguments.prompt_clients
    load = _load(shape, clients, 2 * clients * arguments.requests, arguments)
    prompts = Load(
        concurrency=1,
        requests=1,
        input_tokens=arguments.prompt_tokens,
        output_tokens=1,
        vocab=SHAPES[shape].vocab,
    )
    return asyncio.run(run_under(url, "bench", load, prompts, seed=1000 * turn + 500))


def _load(shape: str, concurrency: int, requests: int, arguments: argparse.Namespace) -> Load:
    return Load(
        concurrency=concurrency,
        requests=requests,
        input_tokens=arguments.input_tokens,
        output_tokens=arguments.output_tokens,
        vocab=SHAPES[shape].vocab,
    )


if __name__ == "__main__":
    main()
