import pytest

from bench.harness.load import Outcome
from bench.peers.figures import over_all_shapes, peer_figures


def outcome(tok_s: float = 1.0, tpot_ms: float = 1.0, ttft_ms: float = 1.0) -> Outcome:
    return Outcome(
        output_tok_s=tok_s,
        ttft_ms=ttft_ms,
        ttft_p99_ms=ttft_ms,
        tpot_ms=tpot_ms,
        tpot_p99_ms=2 * tpot_ms,
        itl_p99_ms=3 * tpot_ms,
    )


def test_ours_are_set_over_the_peers_at_each_level_of_load() -> None:
    figures = peer_figures(
        "tiny",
        {
            ("hybrid", "c1"): [outcome(30, tpot_ms=20, ttft_ms=80)],
            ("hybrid", "c8"): [outcome(150)],
            ("vllm", "c1"): [outcome(20, tpot_ms=40, ttft_ms=100)],
            ("vllm", "c8"): [outcome(100)],
            ("transformers_float32", "c8"): [outcome(75)],
            ("llamacpp", "c1"): [outcome(tpot_ms=25)],
            ("llamacpp_q8_0", "c1"): [outcome(tpot_ms=8)],
            ("int8", "c1"): [outcome(tpot_ms=10)],
        },
    )
    ratios = {name: value for name, value in figures.items() if "ratio" in name or "over" in name}
    assert ratios == {
        "ratio_vllm_tiny_c1": 1.5,
        "ratio_vllm_tiny_c8": 1.5,
        "ttft_over_vllm_tiny_c1": 0.8,
        "tpot_over_vllm_tiny_c1": 0.5,
        "ratio_transformers_float32_tiny_c8": 2.0,
        "ratio_llamacpp_tiny_b1": 1.25,
        "ratio_llamacpp_int8_tiny_b1": 0.8,
        "int8_over_bf16_tiny_b1": 2.0,
    }


def test_prefill_and_decode_apart_are_compared_while_prompts_arrive() -> None:
    figures = peer_figures(
        "tiny",
        {
            ("hybrid", "prompts"): [outcome(tpot_ms=50)],
            ("hybrid_paced", "prompts"): [outcome(tpot_ms=25)],
            ("pd", "prompts"): [outcome(tpot_ms=20)],
            ("pd", "c1"): [outcome()],
        },
    )
    assert figures["tpot_p99_pd_over_hybrid_tiny"] == pytest.approx(0.4)
    assert figures["tpot_p99_pd_over_hybrid_paced_tiny"] == pytest.approx(0.8)


def test_of_prompts_that_arrive_only_the_first_token_is_told() -> None:
    figures = peer_figures("tiny", {("pd", "arriving"): [outcome(ttft_ms=70)]})
    assert figures == {"pd_tiny_ttft_ms_arriving": 70}


def test_turns_count_by_their_median() -> None:
    turns = [outcome(tok_s) for tok_s in (1, 100, 3)]
    assert peer_figures("tiny", {("vllm", "c1"): turns})["vllm_tiny_output_tok_s_c1"] == 3


def test_without_peers_there_are_no_ratios() -> None:
    figures = peer_figures("tiny", {("hybrid", "c1"): [outcome()]})
    assert not [name for name in figures if "ratio" in name or "over" in name]


@pytest.mark.parametrize("whose", ["hybrid", "vllm"])
def test_a_server_whose_tokens_came_at_once_has_no_time_per_token_to_compare(whose: str) -> None:
    measured = {(name, "c1"): [outcome()] for name in ("hybrid", "vllm")}
    measured[whose, "c1"] = [outcome(tpot_ms=0.0)]
    ratios = [name for name in peer_figures("tiny", measured) if "ratio" in name or "over" in name]
    assert ratios == ["ratio_vllm_tiny_c1", "ttft_over_vllm_tiny_c1"]


def test_of_several_shapes_the_worst_is_told() -> None:
    figures = {
        "tpot_p99_pd_over_hybrid_a": 0.4,
        "tpot_p99_pd_over_hybrid_b": 0.9,
        "tpot_p99_pd_over_hybrid_paced_a": 1.5,
    }
    told = {"tpot_p99_pd_over_hybrid": 0.9, "tpot_p99_pd_over_hybrid_paced": 1.5}
    assert over_all_shapes(figures, ["a", "b"]) == told
    assert over_all_shapes(figures | told, ["a", "b"]) == told
    assert over_all_shapes({"ratio_a": 2.0}, ["a", "b"]) == {}
