"""What a step is believed to take, against engines whose steps take what a simple formula says."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.generation import SamplingParams
from baton.ids import BlockId, BlockKey, SeqId
from baton.pages import PageFetch
from baton_engine.scheduling.plan import Row, StepPlan
from baton_engine.scheduling.step_cost import StepCost
from tests.baton_engine.sequences import sequence


def row(start: int, num_tokens: int, *, generated: int = 0) -> Row:
    seq = sequence([0] * (start + num_tokens), SamplingParams(), num_generated=generated)
    return Row(seq=seq, start=start, num_tokens=num_tokens, samples=())


def decode(context: int) -> Row:
    return row(context, 1, generated=1)


def true_s(plan: StepPlan) -> float:
    """An engine of 4 ms per step, 0.3 ms per decode, 2 µs per token of context, 0.5 ms per prompt token,
    0.2 µs per pair.
    """
    seconds = 0.004
    for r in plan.rows:
        if r.seq.num_generated:
            seconds += 3e-4 + 2e-6 * (r.start + 1)
        else:
            seconds += 5e-4 * r.num_tokens + 2e-7 * r.num_tokens * (r.start + r.num_tokens / 2)
    return seconds


def plan(*rows: Row) -> StepPlan:
    return StepPlan(step=1, rows=rows)


def taught(rounds: int = 40) -> StepCost:
    cost = StepCost()
    for i in range(rounds):
        decodes = [decode(100 + 37 * ((i * 7 + j) % 50)) for j in range(1 + i % 9)]
        chunk = row(128 * (i % 11), 16 + 48 * (i % 7))
        for step in (plan(*decodes), plan(chunk), plan(*decodes, chunk)):
            cost.measured(step, true_s(step))
    return cost


def test_steps_are_predicted_from_those_before_them():
    cost = taught()
    decodes = [decode(700)] * 6
    assert cost.decodes_s(6, 6 * 701) == pytest.approx(true_s(plan(*decodes)), rel=0.1)
    mixed = true_s(plan(*decodes, row(512, 200)))
    assert cost.decodes_s(6, 6 * 701) + cost.prompts_s(200, 512) == pytest.approx(mixed, rel=0.2)


def test_hours_of_decoding_do_not_make_it_forget_what_prompts_cost():
    cost = taught()
    before = cost.prompts_s(300, 300)
    for _ in range(2000):
        step = plan(decode(500))
        cost.measured(step, true_s(step))
    assert cost.prompts_s(300, 300) == before


def test_a_worker_that_never_only_decodes_learns_what_both_take_together():
    cost = StepCost()
    decodes = [decode(700)] * 6
    for i in range(60):
        step = plan(*decodes, row(128 * (i % 5), 40 + 20 * (i % 4)))
        cost.measured(step, true_s(step))
    found = cost.decodes_s(6, 6 * 701) + cost.prompts_s(60, 256)
    assert found == pytest.approx(true_s(plan(*decodes, row(256, 60))), rel=0.15)


def test_a_step_that_fetched_is_no_measure():
    cost = taught()
    before = cost.prompts_s(100, 0)
    fetch = PageFetch(
        seq_id=SeqId("s"), first_block=0, keys=(BlockKey(b"k" * 16),), blocks=(BlockId(0),)
    )
    cost.measured(StepPlan(step=1, rows=(row(0, 100),), fetches=(fetch,)), 100.0)
    assert cost.prompts_s(100, 0) == before


def test_nothing_takes_no_time():
    cost = StepCost()
    assert not cost.knows_prompts
    assert (cost.decodes_s(0, 0), cost.prompts_s(0, 100)) == (0.0, 0.0)


@settings(max_examples=200, deadline=None)
@given(
    seconds=st.floats(-1.0, 10.0),
    start=st.integers(0, 200_000),
    most=st.integers(1, 8192),
    teach=st.booleans(),
)
def test_the_largest_chunk_within_a_time_is_just_that(seconds, start, most, teach):
    cost = taught(5) if teach else StepCost()
    size = cost.tokens_within(seconds, start, most)
    assert 0 <= size <= most
    assert size == 0 or cost.further_s(size, start) <= seconds
    assert size == most or seconds <= 0 or cost.further_s(size + 1, start) > seconds * (1 - 1e-9)


@settings(max_examples=50, deadline=None)
@given(
    steps=st.lists(
        st.tuples(
            st.lists(st.integers(1, 5000), max_size=5),
            st.lists(st.tuples(st.integers(0, 5000), st.integers(2, 2000)), max_size=3),
            st.floats(0.0, 100.0),
        ),
        max_size=30,
    )
)
def test_no_measurement_makes_a_prediction_negative(steps):
    cost = StepCost()
    for decodes, chunks, seconds in steps:
        rows = [*map(decode, decodes), *(row(start, size) for start, size in chunks)]
        if rows:
            cost.measured(plan(*rows), seconds)
        cost.check_integrity()
        assert cost.decodes_s(3, 300) >= 0.0
        assert cost.further_s(100, 100) >= 0.0
