"""What `bench.cpu_vs_peers` says about servers that took turns: their own figures, and how ours stand to them.

ratio_PEER_SHAPE_cN            output tokens per second, hybrid worker over PEER, N clients
ttft_over_PEER_SHAPE_c1        time to first token and time per output token, one client
tpot_over_PEER_SHAPE_c1
ratio_llamacpp_SHAPE_b1        speed of decoding alone over llama.cpp's, both with bfloat16 weights
ratio_llamacpp_int8_SHAPE_b1   the same, our int8 over its q8_0
int8_over_bf16_SHAPE_b1        the same, our int8 over our own
tpot_p99_pd_over_HYBRID_SHAPE  while long prompts keep arriving, prefill and decode apart over a hybrid worker
tpot_p99_pd_over_HYBRID        of the shape where that is worst

PEER is `vllm` or `transformers`, with bfloat16 weights, or with `_float32` behind it. HYBRID is `hybrid`, the worker as
it comes, or `hybrid_paced`, which was given a target for the time between tokens. A server's own figures are
`SERVER_SHAPE_FIGURE_LEVEL`; at the level `prompts` they are of the clients that decode while prompts arrive,
at `arriving` of these prompts.
"""

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import fields

from bench.harness.load import Outcome

Measured = dict[tuple[str, str], list[Outcome]]
"""What each server's turns gave, by its name and the level of load: `c8` for 8 clients,
`prompts` and `arriving` for arriving prompts.
"""

_HELD_AGAINST = {"hybrid": "pd", "hybrid_paced": "pd", "llamacpp_q8_0": "int8"}
"""Which of ours a server is compared with, if not with the hybrid worker."""


def peer_figures(shape: str, measured: Mapping[tuple[str, str], list[Outcome]]) -> dict[str, float]:
    """Medians over the turns, and their ratios where both sides are there."""
    medians = {key: _median(outcomes) for key, outcomes in measured.items()}
    figures: dict[str, float] = {}
    for (name, level), outcome in medians.items():
        # A prompt that arrives asks for one token: there is no time between its tokens.
        said = ["ttft_ms"] if level == "arriving" else [field.name for field in fields(outcome)]
        figures |= {f"{name}_{shape}_{field}_{level}": getattr(outcome, field) for field in said}
        ours = medians.get((_HELD_AGAINST.get(name, "hybrid"), level))
        if ours is not None:
            figures |= _ratios(shape, level, name, ours, outcome)
    return figures


def over_all_shapes(figures: Mapping[str, float], shapes: Iterable[str]) -> dict[str, float]:
    """What is said once for all shapes, of their figures."""
    worst: dict[str, float] = {}
    for name in ("tpot_p99_pd_over_hybrid", "tpot_p99_pd_over_hybrid_paced"):
        ratios = [figures[of] for shape in shapes if (of := f"{name}_{shape}") in figures]
        if ratios:
            worst[name] = max(ratios)
    return worst


def _ratios(shape: str, level: str, name: str, ours: Outcome, other: Outcome) -> dict[str, float]:
    sides = _sides(shape, level, name, ours, other)
    # There is no time per token after the first where one token was asked for, or all came at once.
    return {ratio: above / below for ratio, (above, below) in sides.items() if above and below}


def _sides(
    shape: str, level: str, name: str, ours: Outcome, other: Outcome
) -> dict[str, tuple[float, float]]:
    """What is divided by what."""
    alone = level == "c1"
    match name:
        case "vllm" | "vllm_float32" | "transformers" | "transformers_float32":
            sides = {f"ratio_{name}_{shape}_{level}": (ours.output_tok_s, other.output_tok_s)}
            if alone:
                sides[f"ttft_over_{name}_{shape}_c1"] = (ours.ttft_ms, other.ttft_ms)
                sides[f"tpot_over_{name}_{shape}_c1"] = (ours.tpot_ms, other.tpot_ms)
            return sides
        case "llamacpp" if alone:
            return {f"ratio_llamacpp_{shape}_b1": (other.tpot_ms, ours.tpot_ms)}
        case "llamacpp_q8_0" if alone:
            return {f"ratio_llamacpp_int8_{shape}_b1": (other.tpot_ms, ours.tpot_ms)}
        case "int8" if alone:
            return {f"int8_over_bf16_{shape}_b1": (ours.tpot_ms, other.tpot_ms)}
        case "hybrid" | "hybrid_paced" if level == "prompts":
            return {f"tpot_p99_pd_over_{name}_{shape}": (ours.tpot_p99_ms, other.tpot_p99_ms)}
    return {}


def _median(outcomes: list[Outcome]) -> Outcome:
    names = [field.name for field in fields(Outcome)]
    return Outcome(
        **{name: statistics.median(getattr(one, name) for one in outcomes) for name in names}
    )
