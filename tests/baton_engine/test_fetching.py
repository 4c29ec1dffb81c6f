from hypothesis import given
from hypothesis import strategies as st

from baton_engine.scheduling.fetching import FetchRule
from baton_engine.scheduling.step_cost import attended_pairs

BLOCK = 16


def taught(*, block_s: float, token_s: float) -> FetchRule:
    """A rule that has seen what a block takes to fetch, and a token to compute."""
    rule = FetchRule(BLOCK)
    for count in (1, 4, 16, 64) * 8:
        rule.fetched(count, 1e-4 + block_s * count)
        tokens = BLOCK * count
        rule.computed(tokens, attended_pairs(tokens, 0), 1e-3 + token_s * tokens)
    rule.check_integrity()
    return rule


def test_nothing_is_never_worth_fetching():
    assert not FetchRule(BLOCK).pays(0, first_block=3)
    assert not FetchRule(BLOCK).pays(-1, first_block=3)


def test_what_is_unknown_is_tried():
    rule = FetchRule(BLOCK)
    assert rule.pays(1, first_block=0)
    rule.fetched(4, 10.0)
    assert rule.pays(1, first_block=0), "nobody knows what computing takes"


def test_quick_memory_and_a_slow_model_fetch():
    assert taught(block_s=1e-5, token_s=1e-3).pays(10, first_block=0)


def test_slow_memory_and_a_quick_model_compute():
    assert not taught(block_s=1e-2, token_s=1e-6).pays(10, first_block=0)


@given(
    block_s=st.floats(1e-6, 1e-1),
    token_s=st.floats(1e-7, 1e-2),
    count=st.integers(1, 500),
    first_block=st.integers(0, 500),
)
def test_what_is_predicted_to_be_slower_is_never_fetched(block_s, token_s, count, first_block):
    rule = taught(block_s=block_s, token_s=token_s)
    slower = rule.fetch_s(count) >= rule.compute_s(count, first_block)
    assert rule.pays(count, first_block=first_block) != slower


def test_predictions_come_near_what_was_measured():
    rule = taught(block_s=2e-4, token_s=5e-4)
    assert 0.8 < rule.fetch_s(32) / (1e-4 + 2e-4 * 32) < 1.25
    assert 0.5 < rule.compute_s(32, 0) / (5e-4 * 32 * BLOCK) < 1.5


def test_a_fetch_that_was_slow_once_is_tried_again_after_many_refusals():
    rule = taught(block_s=BLOCK * 2e-4, token_s=1e-4)
    answers = [rule.pays(10, first_block=0) for _ in range(400)]
    assert not any(answers[:10])
    assert any(answers)


def test_what_the_trial_shows_is_believed_again():
    rule = taught(block_s=BLOCK * 2e-4, token_s=1e-4)
    for _ in range(400):
        if rule.pays(10, first_block=0):
            rule.fetched(10, 1e-4 + 10 * BLOCK * 2e-4)
            break
    assert not rule.pays(10, first_block=0)
