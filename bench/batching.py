"""What scheduling is worth, without a model: `python -m bench.batching [--seeds N] [--json FILE]`.

The engine's own scheduler, with steps that take what a formula says (`bench.simulated.engine`), in three comparisons:

- static against continuous batching: the share of its seats' time that an engine decodes in, when a batch is replaced
  once its last text has ended, and when texts join and leave between any two steps;
- a fixed token budget against one that keeps a time between tokens, while prompts of 2,000 tokens keep arriving;
- prompts by arrival against prompts by slack: whose promised first token comes in time, near the engine's capacity.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from random import Random
from statistics import fmean, median

from baton.generation import NO_SLO, Prompt, SamplingParams, SloTargets
from baton.ids import SeqId
from baton_engine.scheduling.limits import EngineLimits
from baton_engine.scheduling.ordering import SchedulingPolicy
from baton_engine.simulated import StepSpeed
from bench.harness.percentile import percentile
from bench.harness.report import Report
from bench.simulated.engine import Life, SteppedEngine

_SEATS = 64
_REQUESTS = 768
_LONGEST_OUTPUT = 1024
_TBT_S = 0.02
_TTFT_S = 0.25
LIMITS = EngineLimits(
    max_num_seqs=_SEATS,
    max_num_batched_tokens=2048,
    max_model_len=16_384,
    block_tokens=64,
    num_blocks=4096,
    vocab_size=2,
)
"""Of each engine."""


def _prompt(tokens: int, output: int, slo: SloTargets = NO_SLO) -> Prompt:
    sampling = SamplingParams(max_tokens=output, ignore_eos=True)
    return Prompt(prompt_tokens=(1,) * tokens, sampling=sampling, slo=slo)


def _conversation(rng: Random) -> Prompt:
    """Lengths spread as those of chats are: many short, few long."""
    tokens = 1 + min(4000, int(rng.lognormvariate(5.5, 1.0)))
    return _prompt(tokens, 1 + min(_LONGEST_OUTPUT - 1, int(rng.lognormvariate(5.0, 1.0))))


def _engine(policy: SchedulingPolicy | None = None) -> SteppedEngine:
    return SteppedEngine(LIMITS, policy or SchedulingPolicy(), StepSpeed())


def batches(seed: int, requests: int = _REQUESTS) -> dict[str, float]:
    """All requests are there from the start: once as batches, once as they fit."""
    rng = Random(seed)
    prompts = [_conversation(rng) for _ in range(requests)]
    tokens = sum(prompt.sampling.max_tokens for prompt in prompts)
    static, continuous = _engine(), _engine()
    for first in range(0, len(prompts), _SEATS):
        for n, prompt in enumerate(prompts[first : first + _SEATS], first):
            static.submit(SeqId(str(n)), prompt)
        static.run()
    for n, prompt in enumerate(prompts):
        continuous.submit(SeqId(str(n)), prompt)
    continuous.run()
    return {
        "utilisation_static": static.decode_seat_s / (static.now_s * _SEATS),
        "utilisation_continuous": continuous.decode_seat_s / (continuous.now_s * _SEATS),
        "tokens_per_s_static": tokens / static.now_s,
        "tokens_per_s_continuous": tokens / continuous.now_s,
    }


def pacing(seed: int) -> dict[str, float]:
    """32 texts decode all the time; a prompt of 2,000 tokens comes six times per second."""
    figures = {}
    for name, policy in (
        ("fixed", SchedulingPolicy()),
        ("paced", SchedulingPolicy(tbt_s=_TBT_S)),
    ):
        engine = _engine(policy)
        for n in range(32):
            engine.submit(SeqId(f"d{n}"), _prompt(500, 3000))
        arrivals = _arrivals(Random(seed), rate=6.0, count=90)
        feed(engine, [(at_s, _prompt(2000, 8)) for at_s in arrivals])
        decoding = [life for seq_id, life in engine.lives.items() if seq_id.startswith("d")]
        prompted = [life for seq_id, life in engine.lives.items() if seq_id.startswith("p")]
        gaps = [gap for life in decoding for gap in life.gaps_s[64:] if life.tokens_s]
        figures[f"tbt_p99_ms_{name}"] = 1e3 * percentile(gaps, 0.99)
        figures[f"tbt_worst_ms_{name}"] = 1e3 * max(gaps)
        figures[f"ttft_p50_ms_{name}"] = 1e3 * median(_ttfts(prompted))
    return figures


def ordering(seed: int) -> dict[str, float]:
    """Every third request was promised its first token in a quarter of a second; the others are long and were not."""
    figures = {}
    for name in ("arrival", "slack"):
        engine = _engine(SchedulingPolicy(prefill_order=name))
        rng = Random(seed)
        requests = [
            (at_s, _prompt(200, 16, SloTargets(ttft_s=_TTFT_S)))
            if n % 3 == 0
            else (at_s, _prompt(rng.randint(1000, 8000), 16))
            for n, at_s in enumerate(_arrivals(rng, rate=8.5, count=600))
        ]
        feed(engine, requests)
        lives = list(engine.lives.values())
        promised, others = lives[::3], [life for n, life in enumerate(lives) if n % 3]
        figures[f"promises_kept_{name}"] = fmean(t <= _TTFT_S for t in _ttfts(promised))
        figures[f"ttft_worst_unpromised_s_{name}"] = max(_ttfts(others))
    return figures


def _arrivals(rng: Random, *, rate: float, count: int) -> list[float]:
    """Times of a Poisson process."""
    at_s, times = 0.0, []
    for _ in range(count):
        at_s += rng.expovariate(rate)
        times.append(at_s)
    return times


def feed(engine: SteppedEngine, requests: Sequence[tuple[float, Prompt]]) -> None:
    """Submits each request once its time has come, and runs to the end of the last."""
    for n, (at_s, prompt) in enumerate(requests):
        while engine.now_s < at_s:
            if not engine.step():
                engine.now_s = at_s
        engine.submit(SeqId(f"p{n}"), prompt, arrived_s=at_s)
    engine.run()


def _ttfts(lives: Sequence[Life]) -> list[float]:
    return [life.ttft_s for life in lives]


def measure(seeds: int) -> dict[str, float]:
    """Means over so many seeds; the same on every machine."""
    runs = [batches(seed) | pacing(seed) | ordering(seed) for seed in range(seeds)]
    return {name: fmean(run[name] for run in runs) for name in runs[0]}


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the report here")
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args(argv)
    figures = measure(arguments.seeds)
    for name, value in figures.items():
        print(f"{name:32} {value:10.3f}")
    settings = {
        "seeds": arguments.seeds,
        "requests": _REQUESTS,
        "seats": _SEATS,
        "max_num_batched_tokens": LIMITS.max_num_batched_tokens,
        "tbt_target_s": _TBT_S,
        "ttft_promise_s": _TTFT_S,
    }
    report = Report(benchmark="batching", settings=settings, figures=figures)
    if arguments.json:
        report.write(arguments.json)


if __name__ == "__main__":
    main()
