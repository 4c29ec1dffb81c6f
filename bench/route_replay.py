"""The routing policies against each other on a real trace: `python -m bench.route_replay --trace FILE [--json FILE]`.

The first requests of a trace (Mooncake's format, `bench.harness.trace`) go through the router's own core, dispatch,
index, policy and learning included, against simulated workers (`bench.simulated.cluster`) on a simulated clock. What
the predictions begin with differs from what the workers really take: they are learned on the way,
from what real workers report too.

The cluster is mixed, as clusters become: of the prefill workers a third takes twice as long, of the decode workers one
in three half as long again, and links cross between two racks at a tenth of the speed within one. The speeds are about
those of a 70B model on nodes of eight GPUs, unless `--prefill-tokens-per-s` and `--step-s` say what a worker
takes that is not slow, as `baton run simulated` understands them. `--uniform` makes all alike.
Admission's line is left out: it would hide what routing does.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from baton.config.rules import POLICIES
from baton.errors import BatonError
from bench.harness.percentile import percentile
from bench.harness.report import Report, Setting
from bench.harness.trace import TracedRequest, read_trace
from bench.simulated.cluster import Outcome, Replay
from bench.simulated.hardware import SPEED, Hardware, Speed
from router.routing.policies import policy_named

TBT_TARGET_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """One policy at one load."""

    ttft_mean_s: float
    ttft_p90_s: float
    tbt_attainment: float
    cached_share: float
    prefill_busy_share: float
    on_decode: int

    @classmethod
    def of(cls, outcome: Outcome) -> "Summary":
        """Of a replay."""
        ttfts = [served.ttft_s for served in outcome.served]
        tbts = [served.tbt_s for served in outcome.served if served.output_tokens > 1]
        prompts = sum(served.input_tokens for served in outcome.served)
        return cls(
            ttft_mean_s=fmean(ttfts),
            ttft_p90_s=percentile(ttfts, 0.9),
            tbt_attainment=fmean([tbt_s <= TBT_TARGET_S for tbt_s in tbts]) if tbts else 1.0,
            cached_share=sum(served.cached_tokens for served in outcome.served) / prompts,
            prefill_busy_share=outcome.prefill_busy_share,
            on_decode=sum(served.local for served in outcome.served),
        )


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point."""
    arguments = _arguments(argv)
    try:
        for policy in arguments.policies:
            policy_named(policy)  # now, and not after the hours that those before it take
        requests = read_trace(arguments.trace, arguments.requests)
    except (BatonError, OSError) as error:
        sys.exit(str(error))
    report = Report(benchmark="route_replay", settings=_settings(arguments, requests))
    replay = Replay(requests, _hardware(arguments))
    for speedup, suffix in zip(arguments.speedups, ("", "_heavy"), strict=True):
        print(f"trace at {speedup:g} times its speed")
        for policy in arguments.policies:
            summary = Summary.of(replay.run(policy, speedup=speedup, seed=arguments.seed))
            _note(report, f"{policy}{suffix}", summary)
            if arguments.json:
                report.write(
                    arguments.json
                )  # each time: the last policies may be the slowest by far


def _note(report: Report, name: str, summary: Summary) -> None:
    figures = report.figures
    figures[f"ttft_mean_s_{name}"] = summary.ttft_mean_s
    figures[f"ttft_p90_s_{name}"] = summary.ttft_p90_s
    figures[f"tbt_attainment_{name}"] = summary.tbt_attainment
    figures[f"cached_share_{name}"] = summary.cached_share
    figures[f"prefill_busy_share_{name}"] = summary.prefill_busy_share
    print(
        f"{name:24} TTFT mean {summary.ttft_mean_s:7.2f} s  p90 {summary.ttft_p90_s:7.2f} s"
        f"  TBT kept {summary.tbt_attainment:6.1%}  cached {summary.cached_share:6.1%}"
        f"  prefill busy {summary.prefill_busy_share:4.0%}  on decode {summary.on_decode}",
        flush=True,
    )


def _hardware(arguments: argparse.Namespace) -> Hardware:
    return Hardware(
        prefill_workers=arguments.prefill_workers,
        decode_workers=arguments.decode_workers,
        uniform=arguments.uniform,
        speed=_speed(arguments),
    )


def _speed(arguments: argparse.Namespace) -> Speed:
    speed = SPEED
    if arguments.prefill_tokens_per_s:
        token_s = 1.0 / arguments.prefill_tokens_per_s
        speed = replace(speed, prompt_s=0.0, token_s=token_s, attention_s=0.0)
    if arguments.step_s:
        speed = replace(speed, step_s=arguments.step_s, sequence_s=0.0, context_s=0.0)
    return speed


def _settings(
    arguments: argparse.Namespace, requests: Sequence[TracedRequest]
) -> dict[str, Setting]:
    return {
        "requests": len(requests),
        "trace_span_s": requests[-1].at_s - requests[0].at_s,
        "policies": arguments.policies,
        "speedups": [str(speedup) for speedup in arguments.speedups],
        "prefill_workers": arguments.prefill_workers,
        "decode_workers": arguments.decode_workers,
        "uniform": arguments.uniform,
        "prefill_tokens_per_s": arguments.prefill_tokens_per_s,
        "step_s": arguments.step_s,
        "tbt_target_s": TBT_TARGET_S,
        "seed": arguments.seed,
    }


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trace", type=Path, required=True, help="a file in Mooncake's format")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--json", type=Path, help="write the report here")
    parser.add_argument(
        "--policies",
        nargs="+",
        default=list(POLICIES),
        metavar="POLICY",
        help=f"{'|'.join(POLICIES)}|package.module:Class",
    )
    parser.add_argument(
        "--speedups", type=float, nargs=2, default=[1.6, 2.0], help="a busy load and a heavy one"
    )
    parser.add_argument("--prefill-workers", type=int, default=6)
    parser.add_argument("--decode-workers", type=int, default=3)
    parser.add_argument("--uniform", action="store_true", help="all workers and links alike")
    parser.add_argument(
        "--prefill-tokens-per-s", type=float, help="prompt tokens that a worker computes per second"
    )
    parser.add_argument("--step-s", type=float, help="seconds of a decode step")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
