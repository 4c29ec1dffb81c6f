"""One engine, two fronts: `baton serve --engine vllm` beside `vllm serve` on this machine's CPU, over HTTP.

    python -m bench.vllm_engine --vllm-python .venv-vllm/bin/python [--json FILE]

Both run the same vLLM with the same settings, weights and prompts, and take turns on the same cores. Figures:

hybrid_over_vllm_serve_tok_s_cN   output tokens per second, a hybrid worker over vLLM's own server, N clients
pd_over_hybrid_tok_s_cN           one prefill and one decode worker over the hybrid one, where `--only` has both
ttft_over_vllm_serve_cN           time to first token, the hybrid worker's over vLLM's own
SERVER_FIGURE_cN                  what each measured, medians over the turns
"""

import argparse
import signal
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path

from bench.harness.load import Outcome
from bench.harness.report import Report
from bench.harness.server import serving
from bench.harness.shapes import SHAPES, write_model
from bench.peers.contenders import Contender
from bench.peers.contest import Contest, Sizes
from bench.peers.servers import vllm

_SERVERS = {
    "hybrid": ("--hybrid-workers", "1"),
    "pd": ("--prefill-workers", "1", "--decode-workers", "1"),
    "vllm_serve": (),
}


def main() -> None:
    """Entry point."""
    arguments = _arguments()
    # A signal that ends this process, as of a time limit, ends the server whose turn it is too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    report = Report(
        benchmark="vllm_engine",
        settings={
            name: value
            for name, value in vars(arguments).items()
            if name not in ("json", "vllm_python")
        },
    )
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as directory:
        folder = Path(directory)
        shape = SHAPES[arguments.shape]
        write_model(shape, folder)
        entries = _contenders(folder, arguments)
        sizes = Sizes(
            vocab=shape.vocab,
            requests=arguments.requests,
            input_tokens=arguments.input_tokens,
            output_tokens=arguments.output_tokens,
            prompt_tokens=0,
            prompt_clients=0,
        )
        contest = Contest(arguments.shape, entries, sizes)
        for _ in contest.run(arguments.rounds):
            report.figures |= engine_figures(contest.measured)
            if arguments.json:
                report.write(arguments.json)
    if contest.absent:
        sys.exit(f"absent: {contest.absent}")


def engine_figures(measured: Mapping[tuple[str, str], Sequence[Outcome]]) -> dict[str, float]:
    """What each server's turns gave, by its name and the number of clients (`c8`), as the figures of this benchmark."""
    figures = {
        f"{name}_{field.name}_{level}": statistics.median(
            getattr(outcome, field.name) for outcome in outcomes
        )
        for (name, level), outcomes in measured.items()
        for field in fields(Outcome)
    }
    for level in {level for _, level in measured}:
        for ratio, ours, other, of in (
            ("hybrid_over_vllm_serve_tok_s", "hybrid", "vllm_serve", "output_tok_s"),
            ("ttft_over_vllm_serve", "hybrid", "vllm_serve", "ttft_ms"),
            ("pd_over_hybrid_tok_s", "pd", "hybrid", "output_tok_s"),
        ):
            sides = [figures.get(f"{name}_{of}_{level}") for name in (ours, other)]
            if sides[0] is not None and sides[1]:
                figures[f"{ratio}_{level}"] = sides[0] / sides[1]
    return figures


def _contenders(model: Path, arguments: argparse.Namespace) -> dict[str, Contender]:
    cluster = model / "cluster.yaml"
    eager = str(arguments.eager).lower()
    cluster.write_text(f"engine:\n  vllm:\n    enforce_eager: {eager}\n")
    ours = ("-f", str(cluster), "--engine", "vllm", "--dtype", arguments.dtype)
    theirs = ("--enforce-eager",) if arguments.eager else ()
    python = arguments.vllm_python
    return {
        name: Contender(
            start=partial(vllm, python, str(model), arguments.dtype, *theirs)
            if name == "vllm_serve"
            else partial(serving, str(model), *ours, *_SERVERS[name], python=python),
            clients=arguments.concurrency,
        )
        for name in arguments.only
    }


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--json", type=Path, help="write the report here")
    add("--vllm-python", required=True, help="python of an environment with vLLM and Baton")
    add("--shape", choices=sorted(SHAPES), default="llama116m")
    add("--only", choices=[*_SERVERS], nargs="+", default=["hybrid", "vllm_serve"])
    add("--dtype", default="bfloat16")
    add("--eager", action="store_true", help="both without torch.compile")
    add("--concurrency", type=int, nargs="+", default=[8], help="numbers of clients")
    add("--rounds", type=int, default=2, help="turns of each server")
    add("--requests", type=int, default=3, help="of each client and turn")
    add("--input-tokens", type=int, default=64)
    add("--output-tokens", type=int, default=64)
    return parser.parse_args()


if __name__ == "__main__":
    main()
