"""A circuit opens when too much fails, is tried once after a pause, and closes when that went well."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import InvariantError
from baton.story import StoryLog
from router.breaker import Breaker, BreakerPolicy, Circuit

POLICY = BreakerPolicy(
    min_failures=3,
    failure_share=0.5,
    half_life_s=30.0,
    pause_s=5.0,
    max_pause_s=40.0,
    trial_timeout_s=60.0,
)


def opened(now_s: float = 0.0) -> Breaker:
    breaker = Breaker(POLICY, name="x", story=StoryLog("circuit"))
    for _ in range(3):
        breaker.failed(now_s)
    return breaker


def test_it_stays_closed_while_few_fail():
    breaker = Breaker(POLICY, name="x", story=StoryLog("circuit"))
    for step in range(50):
        breaker.succeeded(step)
        breaker.succeeded(step)
        breaker.failed(step)
    assert breaker.circuit(50) is Circuit.CLOSED


def test_failures_long_ago_do_not_count():
    breaker = Breaker(POLICY, name="x", story=StoryLog("circuit"))
    for step in range(50):
        breaker.failed(step * 100.0)
    assert breaker.circuit(5000) is Circuit.CLOSED


def test_repeated_failures_open_it_for_a_pause():
    breaker = opened()
    assert breaker.circuit(4.9) is Circuit.OPEN
    assert not breaker.allows(4.9)
    assert breaker.wait_s(1.0) == 4.0
    assert breaker.circuit(5.0) is Circuit.HALF_OPEN


def test_it_is_outdated_when_it_could_be_tried_for_long_and_was_not():
    breaker = opened()
    assert not breaker.is_outdated(3604.9)
    assert breaker.is_outdated(3605.0)
    breaker.started(3605.0)
    assert not breaker.is_outdated(3664.9)
    breaker.succeeded(3665.0)
    assert not breaker.is_outdated(1e6), "it is closed"


def test_one_trial_at_a_time_decides():
    breaker = opened()
    assert breaker.allows(5.0)
    breaker.started(5.0)
    assert not breaker.allows(5.0)
    breaker.succeeded(6.0)
    assert breaker.circuit(6.0) is Circuit.CLOSED
    assert breaker.allows(6.0)


def test_the_pause_doubles_while_trials_fail_up_to_the_longest():
    breaker, now_s, pauses = opened(), 0.0, []
    for _ in range(5):
        pauses.append(breaker.wait_s(now_s))
        now_s += pauses[-1]
        breaker.started(now_s)
        breaker.failed(now_s)
    assert pauses == [5.0, 10.0, 20.0, 40.0, 40.0]


def test_after_a_long_time_closed_the_pause_is_short_again():
    breaker = opened()
    breaker.started(5.0)
    breaker.failed(5.0)
    breaker.started(15.0)
    breaker.succeeded(15.0)
    for now_s in (55.0, 55.0, 55.0):
        breaker.failed(now_s)
    assert breaker.wait_s(55.0) == 5.0


def test_what_fails_again_soon_pauses_longer():
    breaker = opened()
    breaker.started(5.0)
    breaker.succeeded(5.0)
    for _ in range(3):
        breaker.failed(6.0)
    assert breaker.wait_s(6.0) == 10.0


def test_a_trial_that_says_nothing_makes_room_for_another():
    breaker = opened()
    breaker.started(5.0)
    breaker.abandoned(6.0)
    assert breaker.allows(6.0)
    breaker.started(6.0)
    assert not breaker.allows(65.9)
    assert breaker.allows(66.0), "no outcome within the timeout of a trial"


def test_what_began_before_it_opened_changes_nothing():
    breaker = opened()
    breaker.succeeded(1.0)
    breaker.failed(1.0)
    assert breaker.wait_s(1.0) == 4.0


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["started", "succeeded", "failed", "abandoned"]),
            st.floats(0, 20),
        ),
        max_size=60,
    )
)
def test_whatever_happens_it_lets_something_through_again(events: list[tuple[str, float]]):
    breaker, now_s = Breaker(POLICY, name="x", story=StoryLog("circuit")), 0.0
    for name, pause_s in events:
        now_s += pause_s
        getattr(breaker, name)(now_s)
        breaker.check_integrity()
        assert breaker.allows(now_s) == (breaker.wait_s(now_s) == 0)
        longest_s = max(POLICY.max_pause_s, POLICY.trial_timeout_s)
        assert breaker.wait_s(now_s) <= longest_s + 1e-6
    assert breaker.allows(now_s + breaker.wait_s(now_s) + 1e-6)


def test_its_story_tells_failures_and_every_change_and_an_invariant_error_carries_it():
    story = StoryLog("circuit")
    breaker = Breaker(POLICY, name="acme", story=story)
    for now_s in (1.0, 1.0, 1.0):
        breaker.failed(now_s)
    breaker.started(7.0)
    breaker.abandoned(8.0)
    breaker.succeeded(9.0)
    breaker.succeeded(10.0)
    assert [str(entry) for entry in story.story("acme")] == [
        "1.000000 failed",
        "1.000000 failed",
        "1.000000 failed -> opened for 5 s",
        "7.000000 trial began",
        "8.000000 trial ended without an outcome",
        "9.000000 succeeded -> closed",
    ]
    breaker._trial_s = 11.0
    with pytest.raises(InvariantError, match="acme: is closed and on trial") as broken:
        breaker.check_integrity()
    assert "opened for 5 s" in broken.value.story_text
