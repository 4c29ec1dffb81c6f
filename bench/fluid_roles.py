"""Roles that follow the load against every fixed ratio of as many workers: `python -m bench.fluid_roles [--json FILE]`.

A day of requests, pressed into `--day` seconds, goes through the router's own core and its own planner
(`router.roles.planner`) against simulated workers on a simulated clock. Over the day prompts and outputs change their
lengths: conversations (short prompts, long answers) in the morning and the evening, documents (long prompts, short
answers) around noon and, fewer, at night, with an hour between them in which the one gives way to the other. The same
day is then served by each fixed ratio of as many workers.

A request is served well if its first token came within `--ttft` and its tokens within `--tbt` of each other on average.
`attainment_fluid` is their share with the planner, `attainment_best_fixed` that of the ratio which was best in
hindsight. A change of a role is an oscillation if another one takes it back before two cool-downs have passed.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from random import Random

from bench.harness.report import Report, Setting
from bench.harness.trace import TRACE_BLOCK_TOKENS, TracedRequest
from bench.simulated.cluster import Outcome, Replay, RoleChange
from bench.simulated.hardware import Hardware, Speed
from router.roles.planner import PlannerPolicy, RolePlanner
from router.slo import Slo

_SPEED = Speed(
    prompt_s=0.012, token_s=2e-4, attention_s=6e-10, step_s=0.02, sequence_s=1e-3, context_s=1e-6
)
"""About those of an 8B model on a small GPU: 5,000 tokens of prompt per second,
17 conversations at 50 ms between tokens.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of request: mean lengths, which vary by a third, and how many come per second at its height."""

    input_tokens: int
    output_tokens: int
    per_second: float


CONVERSATION = Kind(input_tokens=600, output_tokens=300, per_second=4.8)
DOCUMENT = Kind(input_tokens=8000, output_tokens=40, per_second=2.2)

_HOURS = 24
_DAY: tuple[tuple[int, float, float], ...] = (
    (0, 0.1, 0.5),
    (6, 0.3, 0.3),
    (8, 1.0, 0.05),
    (11, 0.9, 0.1),
    (12, 0.1, 1.0),
    (17, 0.1, 0.9),
    (18, 1.0, 0.05),
    (22, 0.9, 0.1),
    (24, 0.1, 0.5),
)
"""Hour, conversations, documents: shares of their rates at that hour; linear in between."""


def day(length_s: float, seed: int) -> list[TracedRequest]:
    """The requests of a day that takes so long; no two share a prefix."""
    rng, requests = Random(seed), []
    for kind, share in ((CONVERSATION, 1), (DOCUMENT, 2)):
        at_s = 0.0
        while (at_s := at_s + rng.expovariate(kind.per_second)) < length_s:
            if rng.random() < _share(at_s / length_s * _HOURS, share):
                requests.append(_request(kind, at_s, rng))
    return sorted(requests, key=lambda request: request.at_s)


def _share(hour: float, column: int) -> float:
    after = next(number for number, entry in enumerate(_DAY) if entry[0] >= hour)
    left, right = _DAY[max(0, after - 1)], _DAY[after]
    if right[0] == left[0]:
        return right[column]
    part = (hour - left[0]) / (right[0] - left[0])
    return left[column] + part * (right[column] - left[column])


def _request(kind: Kind, at_s: float, rng: Random) -> TracedRequest:
    input_tokens = max(16, round(kind.input_tokens * rng.uniform(2 / 3, 4 / 3)))
    blocks = -(-input_tokens // TRACE_BLOCK_TOKENS)
    return TracedRequest(
        at_s=at_s,
        input_tokens=input_tokens,
        output_tokens=max(2, round(kind.output_tokens * rng.uniform(2 / 3, 4 / 3))),
        blocks=tuple(rng.getrandbits(63) for _ in range(blocks)),
    )


def attainment(outcome: Outcome, *, ttft_s: float, tbt_s: float) -> float:
    """Share of the requests that were served well."""
    well = [one.ttft_s <= ttft_s and one.tbt_s <= tbt_s for one in outcome.served]
    return sum(well) / len(well)


def oscillations(changes: Sequence[RoleChange], within_s: float) -> int:
    """Changes that another one, of any worker, takes back within so long."""
    return sum(
        later.role is not earlier.role and later.decided_s - earlier.changed_s < within_s
        for earlier, later in pairwise(changes)
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point."""
    arguments = _arguments(argv)
    requests = day(arguments.day, arguments.seed)
    policy = PlannerPolicy(ttft_s=arguments.ttft, tbt_s=arguments.tbt)
    report = Report(benchmark="fluid_roles", settings=_settings(arguments, len(requests)))
    fixed = {
        prefill: _run(requests, prefill, arguments, None) for prefill in range(1, arguments.workers)
    }
    best = max(fixed.values(), key=lambda one: one[0])[0]
    fluid, outcome = _run(requests, arguments.workers // 2, arguments, RolePlanner(policy))
    changes = outcome.role_changes
    delays = sorted(change.changed_s - change.decided_s for change in changes)
    report.figures |= {
        "attainment_fluid": fluid,
        "attainment_best_fixed": best,
        **{f"attainment_fixed_{p}p{arguments.workers - p}d": one[0] for p, one in fixed.items()},
        "flips": len(changes),
        "flips_per_hour": len(changes) / (arguments.day / 3600.0),
        "oscillations": oscillations(changes, 2 * policy.cooldown_s),
        "flip_median_s": delays[len(delays) // 2] if delays else 0.0,
    }
    for name, figure in report.figures.items():
        print(f"{name:28} {figure:.3f}")
    for change in changes:
        hour = change.decided_s / arguments.day * _HOURS
        print(f"  {hour:5.1f} h: {change.worker} becomes a {change.role.value} worker")
    if arguments.json:
        report.write(arguments.json)


def _run(
    requests: Sequence[TracedRequest],
    prefill: int,
    arguments: argparse.Namespace,
    planner: RolePlanner | None,
) -> tuple[float, Outcome]:
    hardware = Hardware(
        prefill_workers=prefill,
        decode_workers=arguments.workers - prefill,
        uniform=True,
        cache_tokens=200_000,
        speed=_SPEED,
    )
    replay = Replay(requests, hardware)
    promise = Slo(ttft_s=arguments.ttft, tbt_s=arguments.tbt)
    outcome = replay.run(
        "predictive", speedup=1.0, seed=arguments.seed, planner=planner, promise=promise
    )
    share = attainment(outcome, ttft_s=arguments.ttft, tbt_s=arguments.tbt)
    name = f"{prefill}p{arguments.workers - prefill}d" + (
        " at first, then fluid" if planner else ""
    )
    print(f"{name}: {share:.1%}", flush=True)
    return share, outcome


def _settings(arguments: argparse.Namespace, requests: int) -> dict[str, Setting]:
    return {
        "requests": requests,
        "workers": arguments.workers,
        "day_s": arguments.day,
        "ttft_target_s": arguments.ttft,
        "tbt_target_s": arguments.tbt,
        "seed": arguments.seed,
    }


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.fluid_roles", description=__doc__)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--day", type=float, default=7200.0, metavar="SECONDS")
    parser.add_argument("--ttft", type=float, default=4.0, metavar="SECONDS")
    parser.add_argument("--tbt", type=float, default=0.05, metavar="SECONDS")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
