from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.routing.forecast import Link


def hand_off(link: Link, bytes_per_s: float, latency_s: float, size_bytes: float, window_s: float):
    """A hand-off over a link that sends as soon as there is something to send."""
    link.handed_off(size_bytes, window_s, latency_s + max(0.0, size_bytes / bytes_per_s - window_s))


@settings(max_examples=50, deadline=None)
@given(st.floats(1e6, 1e12), st.floats(1e-4, 0.05), st.integers(0, 1000))
def test_the_bandwidth_of_a_busy_link_is_found(bytes_per_s, latency_s, seed):
    rng, link = Random(seed), Link()
    for _ in range(60):
        sending_s = rng.uniform(1.0, 4.0)
        hand_off(link, bytes_per_s, latency_s, bytes_per_s * sending_s, 0.2 * sending_s)
        link.check_integrity()
    assert link.bytes_per_s == pytest.approx(bytes_per_s, rel=0.25)


def test_a_link_that_keeps_up_is_never_taken_for_a_slow_one():
    link = Link()
    for _ in range(50):
        hand_off(link, 100e9, 0.001, 1e6, 0.5)
    assert link.bytes_per_s >= 10e9
    assert link.latency_s == pytest.approx(0.001, rel=0.1)


def test_a_stall_moves_the_estimate_by_a_bounded_step():
    link = Link()
    for _ in range(20):
        hand_off(link, 1e9, 0.001, 1e9, 0.1)
    before = link.bytes_per_s
    link.handed_off(1e9, 0.1, 600.0)
    assert link.bytes_per_s > before / 2


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.floats(), st.floats(), st.floats()), max_size=30))
def test_whatever_is_measured_the_estimates_stay_within_bounds(measurements):
    link = Link()
    for size_bytes, window_s, unhidden_s in measurements:
        link.handed_off(size_bytes, window_s, unhidden_s)
        link.check_integrity()
        assert link.unhidden_s(1e9, 0.0) >= 0.0


def test_what_is_sent_while_the_prompt_is_computed_costs_nothing():
    link = Link()
    assert link.unhidden_s(1e9, window_s=10.0) == link.latency_s
    assert link.unhidden_s(1e9, window_s=0.0) == pytest.approx(
        link.latency_s + 1e9 / link.bytes_per_s
    )
