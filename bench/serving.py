"""Throughput and latency of a whole cluster on this machine, over HTTP: `python -m bench.serving [--json FILE]`.

One prefill and one decode worker, and one hybrid worker on the same cores, take turns at all levels of concurrency;
figures are medians over the turns. Those of the first are named plainly (`output_tok_s_c8`), those of the second begin
with `hybrid_`. The router is as it comes, so that the decode worker may compute a short prompt.
"""

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from statistics import median

from bench.harness.load import Outcome
from bench.harness.report import Report
from bench.harness.server import serving
from bench.harness.shapes import SHAPES, write_model
from bench.peers.contenders import Contender
from bench.peers.contest import Contest, Sizes

_TOPOLOGIES = {
    "1P+1D": ("--prefill-workers", "1", "--decode-workers", "1"),
    "hybrid": ("--hybrid-workers", "1"),
}
_PREFIXES = {"1P+1D": "", "hybrid": "hybrid_"}


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point."""
    arguments = _arguments(argv)
    report = Report(
        benchmark="serving",
        settings={name: value for name, value in vars(arguments).items() if name != "json"},
    )
    with (
        report.written_to(arguments.json),
        tempfile.TemporaryDirectory(prefix="baton-bench-") as directory,
    ):
        write_model(SHAPES[arguments.shape], Path(directory))
        clusters = {
            name: Contender(
                start=partial(serving, directory, "--dtype", arguments.dtype, *flags),
                clients=arguments.concurrency,
            )
            for name, flags in _TOPOLOGIES.items()
        }
        contest = Contest(arguments.shape, clusters, _sizes(arguments))
        for _ in contest.run(arguments.turns):
            report.figures |= _figures(contest.measured)
        if contest.absent:
            sys.exit(f"absent: {contest.absent}")


def _figures(measured: Mapping[tuple[str, str], Sequence[Outcome]]) -> dict[str, float]:
    return {
        f"{_PREFIXES[cluster]}{field.name}_{level}": median(
            getattr(outcome, field.name) for outcome in outcomes
        )
        for (cluster, level), outcomes in measured.items()
        for field in fields(Outcome)
    }


def _sizes(arguments: argparse.Namespace) -> Sizes:
    return Sizes(
        vocab=SHAPES[arguments.shape].vocab,
        requests=arguments.rounds,
        input_tokens=arguments.input_tokens,
        output_tokens=arguments.output_tokens,
        prompt_tokens=0,
        prompt_clients=0,
    )


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the report here")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama116m")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--turns", type=int, default=2, help="of each cluster")
    parser.add_argument(
        "--rounds",
        type=int,
        default=2,
        help="requests per client and turn; of one client three times",
    )
    parser.add_argument("--input-tokens", type=int, default=256)
    parser.add_argument("--output-tokens", type=int, default=64)
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
