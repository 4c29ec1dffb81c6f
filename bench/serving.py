"""Throughput and latency of a whole cluster on this machine, over HTTP: `python -m bench.serving [--json FILE]`.

Runs one prefill and one decode worker, then one hybrid worker on the same cores, at each level of concurrency. Figures
of the first are named plainly (`output_tok_s_c8`), those of the second begin with `hybrid_`.
"""

import argparse
import asyncio
import tempfile
from dataclasses import asdict
from pathlib import Path

from bench.harness.load import Load, Outcome, run_load
from bench.harness.report import Report
from bench.harness.server import serving
from bench.harness.shapes import SHAPES, write_model

TOPOLOGIES = {
    "": ("--prefill-workers", "1", "--decode-workers", "1"),
    "hybrid_": ("--prefill-workers", "0", "--decode-workers", "0", "--hybrid-workers", "1"),
}


def main() -> None:
    """Entry point."""
    arguments = _arguments()
    report = Report(
        benchmark="serving",
        settings={name: value for name, value in vars(arguments).items() if name != "json"},
    )
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as directory:
        write_model(SHAPES[arguments.shape], Path(directory))
        for prefix, flags in TOPOLOGIES.items():
            with serving(directory, "--dtype", arguments.dtype, *flags) as url:
                _measure(url, prefix, arguments, report)
    if arguments.json:
        report.write(arguments.json)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the report here")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama116m")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=3, help="requests per client")
    parser.add_argument("--input-tokens", type=int, default=256)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def _measure(url: str, prefix: str, arguments: argparse.Namespace, report: Report) -> None:
    for number, concurrency in enumerate([1, *arguments.concurrency]):
        load = Load(
            concurrency=concurrency,
            requests=concurrency * arguments.rounds,
            input_tokens=arguments.input_tokens,
            output_tokens=arguments.output_tokens,
            vocab=SHAPES[arguments.shape].vocab,
        )
        outcome = asyncio.run(run_load(url, "bench", load, seed=arguments.seed + number))
        if number:  # the first one warms up
            _record(outcome, prefix, concurrency, report)


def _record(outcome: Outcome, prefix: str, concurrency: int, report: Report) -> None:
    for name, value in asdict(outcome).items():
        report.figures[f"{prefix}{name}_c{concurrency}"] = value
    print(
        f"{prefix or '1P+1D_':8}c{concurrency:<3} {outcome.output_tok_s:8.1f} tok/s   "
        f"TTFT {outcome.ttft_ms:8.1f} ms   TPOT {outcome.tpot_ms:7.2f} ms",
        flush=True,
    )


if __name__ == "__main__":
    main()
