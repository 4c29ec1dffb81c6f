"""The figures of one engine behind two fronts."""

from bench.harness.load import Outcome
from bench.vllm_engine import engine_figures


def outcome(tok_s: float, ttft_ms: float, itl_p99_ms: float = 3.0) -> Outcome:
    return Outcome(
        output_tok_s=tok_s,
        ttft_ms=ttft_ms,
        ttft_p99_ms=9.0,
        tpot_ms=1.0,
        tpot_p99_ms=2.0,
        itl_p99_ms=itl_p99_ms,
    )


def test_ratios_are_of_medians_over_the_turns():
    figures = engine_figures(
        {
            ("hybrid", "c8"): [outcome(90.0, 8.0), outcome(110.0, 8.0)],
            ("vllm_serve", "c8"): [outcome(50.0, 16.0)],
            ("pd", "c8"): [outcome(25.0, 4.0)],
        }
    )
    assert figures["hybrid_over_vllm_serve_tok_s_c8"] == 2.0
    assert figures["ttft_over_vllm_serve_c8"] == 0.5
    assert figures["pd_over_hybrid_tok_s_c8"] == 0.25
    assert figures["hybrid_output_tok_s_c8"] == 100.0


def test_a_server_that_took_no_turn_has_no_ratio():
    figures = engine_figures({("hybrid", "c1"): [outcome(90.0, 8.0)]})
    assert "hybrid_over_vllm_serve_tok_s_c1" not in figures


def test_a_pair_is_set_over_vllms_own_pair_and_while_prompts_arrive_by_its_latest_tokens():
    figures = engine_figures(
        {
            ("pd", "c8"): [outcome(90.0, 8.0)],
            ("vllm_nixl_pd", "c8"): [outcome(60.0, 8.0)],
            ("pd", "prompts"): [outcome(40.0, 8.0, itl_p99_ms=100.0)],
            ("vllm_nixl_pd", "prompts"): [outcome(20.0, 8.0, itl_p99_ms=400.0)],
        }
    )
    assert figures["pd_over_vllm_nixl_pd_tok_s_c8"] == 1.5
    assert figures["itl_p99_over_vllm_nixl_pd_prompts"] == 0.25
    assert figures["pd_over_vllm_nixl_pd_tok_s_prompts"] == 2.0
