"""One engine, two fronts: `baton serve --engine vllm` beside `vllm serve` on this machine's CPU, over HTTP.

    python -m bench.vllm_engine --vllm-python .venv-vllm/bin/python [--json FILE]

All run the same vLLM with the same weights, prompts, longest text and memory for KV, without a prefix cache, and take
turns on the same cores: a hybrid worker and `vllm serve`; a prefill and a decode worker, which hand every request off,
and vLLM's own two servers with its NIXL connector, which need NIXL in that environment. The pairs are also measured
while prompts of 2,000 tokens keep arriving: that level is `prompts`, and `arriving` are these prompts. Figures:

hybrid_over_vllm_serve_tok_s_cN    output tokens per second, a hybrid worker over vLLM's own server, N clients
ttft_over_vllm_serve_cN            time to first token, the hybrid worker's over vLLM's own
pd_over_vllm_nixl_pd_tok_s_LEVEL   output tokens per second, our pair over vLLM's
itl_p99_over_vllm_nixl_pd_LEVEL    p99 of the time between two tokens, our pair's over vLLM's
pd_over_hybrid_tok_s_cN            our pair over the hybrid worker
handoff_share_of_ttft              part of a hand-off that was not hidden behind computing, over the time to the first token as our router
                                   saw it; prompts of 2,000 tokens, one after the other
SERVER_FIGURE_LEVEL                what each measured, medians over the turns
"""

import argparse
import random
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import fields
from functools import partial
from pathlib import Path

import httpx

from bench.harness.load import Outcome
from bench.harness.report import Report
from bench.harness.server import WITH_HAND_OFF, serving
from bench.harness.shapes import SHAPES, write_model
from bench.harness.stopping import stoppable
from bench.peers.contenders import Contender
from bench.peers.contest import Contest, Sizes
from bench.peers.servers import KV_GIB, MAX_MODEL_LEN, vllm, vllm_nixl_pair

_HYBRID = ("--hybrid-workers", "1")
_PAIR = ("--prefill-workers", "1", "--decode-workers", "1")
_TIMED_PROMPTS = 3
_NAMES = ("hybrid", "vllm_serve", "pd", "vllm_nixl_pd")


@stoppable()
def main() -> None:
    """Entry point."""
    arguments = _arguments()
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
        shares: list[float] = []
        entries = _contenders(folder, arguments, shares)
        sizes = Sizes(
            vocab=shape.vocab,
            requests=arguments.requests,
            input_tokens=arguments.input_tokens,
            output_tokens=arguments.output_tokens,
            prompt_tokens=arguments.prompt_tokens,
            prompt_clients=arguments.prompt_clients,
        )
        contest = Contest(arguments.shape, entries, sizes)
        for _ in contest.run(arguments.rounds):
            report.figures |= engine_figures(contest.measured)
            if shares:
                report.figures["handoff_share_of_ttft"] = statistics.median(shares)
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
            ("pd_over_vllm_nixl_pd_tok_s", "pd", "vllm_nixl_pd", "output_tok_s"),
            ("itl_p99_over_vllm_nixl_pd", "pd", "vllm_nixl_pd", "itl_p99_ms"),
            ("pd_over_hybrid_tok_s", "pd", "hybrid", "output_tok_s"),
        ):
            sides = [figures.get(f"{name}_{of}_{level}") for name in (ours, other)]
            if sides[0] is not None and sides[1]:
                figures[f"{ratio}_{level}"] = sides[0] / sides[1]
    return figures


def _contenders(
    model: Path, arguments: argparse.Namespace, shares: list[float]
) -> dict[str, Contender]:
    """Those that are asked for; our pair adds to `shares` what its hand-offs were of the time to the first token."""
    cluster = model / "cluster.yaml"
    eager = str(arguments.eager).lower()
    cluster.write_text(
        f"engine:\n  enable_prefix_caching: false\n  vllm:\n    enforce_eager: {eager}\n"
    )
    python, theirs = arguments.vllm_python, ("--enforce-eager",) if arguments.eager else ()
    flags = (
        *("-f", str(cluster), "--engine", "vllm", "--dtype", arguments.dtype),
        *("--max-model-len", str(MAX_MODEL_LEN), "--kv-cache-memory", f"{KV_GIB}GiB"),
    )
    ours = partial(serving, str(model), *flags, python=python)
    vocab, length = SHAPES[arguments.shape].vocab, arguments.prompt_tokens
    starts = {
        "hybrid": partial(ours, *_HYBRID),
        "vllm_serve": partial(vllm, python, str(model), arguments.dtype, *theirs),
        "pd": partial(_pair, partial(ours, *_PAIR, settings=WITH_HAND_OFF), vocab, length, shares),
        "vllm_nixl_pd": partial(vllm_nixl_pair, python, str(model), arguments.dtype, *theirs),
    }
    return {
        name: Contender(
            start=starts[name],
            clients=arguments.concurrency,
            under_prompts=name in ("pd", "vllm_nixl_pd"),
        )
        for name in arguments.only
    }


@contextmanager
def _pair(
    start: Callable[[], AbstractContextManager[str]],
    vocab: int,
    prompt_tokens: int,
    shares: list[float],
) -> Iterator[str]:
    """Our prefill and decode worker; once they have been measured, some prompts one after the other,
    of which the router tells the parts.
    """
    with start() as url:
        yield url
        rng = random.Random(len(shares))
        for _ in range(_TIMED_PROMPTS if prompt_tokens else 0):
            asked = {
                "model": "bench",
                "prompt": [rng.randrange(2, vocab) for _ in range(prompt_tokens)],
                "max_tokens": 4,
                "ignore_eos": True,
                "temperature": 0,
            }
            answer = httpx.post(
                f"{url}/v1/completions", json=asked, headers={"X-Baton-Timing": "1"}, timeout=60.0
            )
            answer.raise_for_status()
            told = answer.json()["baton"]
            shares.append(told["unhidden_s"] / told["first_token_s"])


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--json", type=Path, help="write the report here")
    add("--vllm-python", required=True, help="python of an environment with vLLM and Baton")
    add("--shape", choices=sorted(SHAPES), default="llama116m")
    add("--only", choices=_NAMES, nargs="+", default=_NAMES)
    add("--dtype", default="bfloat16")
    add("--eager", action="store_true", help="both without torch.compile")
    add("--concurrency", type=int, nargs="+", default=[8], help="numbers of clients")
    add("--rounds", type=int, default=1, help="turns of each server")
    add("--requests", type=int, default=3, help="of each client and turn")
    add("--input-tokens", type=int, default=64)
    add("--output-tokens", type=int, default=64)
    add("--prompt-tokens", type=int, default=2000, help="of prompts that keep arriving; 0: none")
    add("--prompt-clients", type=int, default=4, help="that decode while they arrive")
    return parser.parse_args()


if __name__ == "__main__":
    main()
