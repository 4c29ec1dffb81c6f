"""What `bench.cpu_vs_peers` says about servers that took turns: their own figures, and how ours stand to them.

ratio_vllm_SHAPE_cN            output tokens per second, hybrid worker over vLLM, N clients
ttft_over_vllm_SHAPE_c1        time to first token and time per output token, one client
tpot_over_vllm_SHAPE_c1
ratio_llamacpp_SHAPE_b1        speed of decoding alone, over llama.cpp's
int8_over_bf16_SHAPE_b1        the same of int8 weights, over our own
tpot_p99_pd_over_hybrid_SHAPE  while long prompts keep arriving, prefill and decode apart over the hybrid worker
tpot_p99_pd_over_hybrid        of the shape where that is worst
"""

import statistics
from collections.abc import Mapping
from dataclasses import fields

from bench.load import Outcome

Measured = dict[tuple[str, str], list[Outcome]]
"""What each server's turns gave, by its name and the level of load: `c8` for 8 clients, `prompts` for arriving prompts."""


def peer_figures(shape: str, measured: Mapping[tuple[str, str], list[Outcome]]) -> dict[str, float]:
    """Medians over the turns, and their ratios where both sides are there."""
    medians = {key: _median(outcomes) for key, outcomes in measured.items()}
    figures: dict[str, float] = {}
    for (name, level), outcome in medians.items():
        for field in fields(outcome):
            figures[f"{name}_{shape}_{field.name}_{level}"] = getattr(outcome, field.name)
        hybrid = medians.get(("hybrid", level))
        if hybrid is not None:
            figures |= _ratios(shape, level, name, hybrid, outcome)
    return figures


def over_all_shapes(figures: Mapping[str, float]) -> dict[str, float]:
    """What is said once for all shapes, of their figures."""
    prefix = "tpot_p99_pd_over_hybrid"
    ratios = [value for name, value in figures.items() if name.startswith(f"{prefix}_")]
    return {prefix: max(ratios)} if ratios else {}


def _ratios(shape: str, level: str, name: str, hybrid: Outcome, other: Outcome) -> dict[str, float]:
    alone = level == "c1"
    match name:
        case "vllm":
            ratios = {f"ratio_vllm_{shape}_{level}": hybrid.output_tok_s / other.output_tok_s}
            if alone:
                ratios[f"ttft_over_vllm_{shape}_c1"] = hybrid.ttft_ms / other.ttft_ms
                ratios[f"tpot_over_vllm_{shape}_c1"] = hybrid.tpot_ms / other.tpot_ms
            return ratios
        case "llamacpp" if alone:
            return {f"ratio_llamacpp_{shape}_b1": other.tpot_ms / hybrid.tpot_ms}
        case "int8" if alone:
            return {f"int8_over_bf16_{shape}_b1": hybrid.tpot_ms / other.tpot_ms}
        case "pd" if level == "prompts":
            return {f"tpot_p99_pd_over_hybrid_{shape}": other.tpot_p99_ms / hybrid.tpot_p99_ms}
    return {}


def _median(outcomes: list[Outcome]) -> Outcome:
    names = [field.name for field in fields(Outcome)]
    return Outcome(
        **{name: statistics.median(getattr(one, name) for one in outcomes) for name in names}
    )
