"""Ours beside other servers on this machine's CPU, over HTTP: `python -m bench.cpu_vs_peers [--vllm-python PATH] [--json FILE]`.

One hybrid worker, one prefill and one decode worker, vLLM's CPU backend and llama.cpp take turns on the same cores with the same
random weights and prompts. A peer that is not named is absent, and the report says so. `ratio_vllm_qwen370m_c8` is the hybrid worker's
output tokens per second over vLLM's with 8 clients; `ratio_llamacpp_llama116m_b1` the same of decoding alone with one.
"""

import argparse
import asyncio
import statistics
import tempfile
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

from bench.load import Load, Outcome, run_load
from bench.peer_servers import llamacpp, vllm
from bench.report import Report
from bench.server import serving
from bench.shapes import SHAPES, write_model

Contender = Callable[[], AbstractContextManager[str]]
"""Starts a server and yields its URL."""

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
        _record(outcomes, shape, report)
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
    parser.add_argument("--rounds", type=int, default=2, help="turns of each server")
    parser.add_argument("--requests", type=int, default=2, help="per client and turn")
    parser.add_argument("--input-tokens", type=int, default=256)
    parser.add_argument("--output-tokens", type=int, default=64)
    return parser.parse_args()


def _contenders(shape: str, model: str, arguments: argparse.Namespace) -> dict[str, Contender]:
    contenders: dict[str, Contender] = {
        "hybrid": partial(serving, model, "--dtype", arguments.dtype, *_HYBRID),
        "pd": partial(serving, model, "--dtype", arguments.dtype, *_PAIR),
        "int8": partial(serving, model, "--quantization", "int8", *_HYBRID),
    }
    if arguments.vllm_python:
        contenders["vllm"] = partial(vllm, arguments.vllm_python, model, arguments.peer_dtype)
    gguf = dict(entry.split("=", 1) for entry in arguments.gguf).get(shape)
    if arguments.llamacpp_server and gguf:
        slots = max(arguments.concurrency)
        contenders["llamacpp"] = partial(llamacpp, arguments.llamacpp_server, gguf, slots)
    for peer in {"vllm", "llamacpp"} - contenders.keys():
        print(f"{shape}: {peer} is absent", flush=True)
    return contenders


def _take_turns(
    contenders: Mapping[str, Contender], shape: str, arguments: argparse.Namespace
) -> dict[tuple[str, int], list[Outcome]]:
    outcomes: dict[tuple[str, int], list[Outcome]] = {}
    for turn in range(arguments.rounds):
        for name, contender in contenders.items():
            with contender() as url:
                _run(url, shape, 1, -1 - turn, arguments)  # warms up
                for concurrency in arguments.concurrency:
                    outcome = _run(url, shape, concurrency, turn, arguments)
                    outcomes.setdefault((name, concurrency), []).append(outcome)
                    print(
                        f"{shape} {name:9} c{concurrency:<3} {outcome.output_tok_s:8.1f} tok/s   "
                        f"TTFT {outcome.ttft_ms:8.1f} ms   TPOT {outcome.tpot_ms:7.2f} ms",
                        flush=True,
                    )
    return outcomes


def _run(
    url: str, shape: str, concurrency: int, turn: int, arguments: argparse.Namespace
) -> Outcome:
    load = Load(
        concurrency=concurrency,
        requests=concurrency * arguments.requests,
        input_tokens=arguments.input_tokens,
        output_tokens=arguments.output_tokens,
        vocab=SHAPES[shape].vocab,
    )
    # Every server gets the same prompts; a turn's are new, so that nobody's prefix cache helps.
    return asyncio.run(run_load(url, "bench", load, seed=1000 * turn + concurrency))


def _record(outcomes: Mapping[tuple[str, int], list[Outcome]], shape: str, report: Report) -> None:
    medians: dict[tuple[str, int, str], float] = {}
    for (name, concurrency), several in outcomes.items():
        for figure in ("output_tok_s", "ttft_ms", "tpot_ms", "tpot_p99_ms"):
            median = statistics.median(getattr(outcome, figure) for outcome in several)
            medians[name, concurrency, figure] = median
            report.figures[f"{name}_{shape}_{figure}_c{concurrency}"] = median
    for name, concurrency in outcomes:
        ours = medians["hybrid", concurrency, "output_tok_s"]
        if name == "vllm":
            ratio = ours / medians[name, concurrency, "output_tok_s"]
            report.figures[f"ratio_vllm_{shape}_c{concurrency}"] = ratio
        faster = medians[name, concurrency, "tpot_ms"] / medians["hybrid", concurrency, "tpot_ms"]
        if name == "llamacpp" and concurrency == 1:
            report.figures[f"ratio_llamacpp_{shape}_b1"] = faster
        if name == "int8" and concurrency == 1:
            report.figures[f"int8_over_bf16_b1_{shape}"] = 1 / faster


if __name__ == "__main__":
    main()
