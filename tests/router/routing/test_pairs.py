"""Which pairs get requests, and when their links are tried without one."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import IncompatibleError, UnreachableError
from baton.ids import Incarnation, WorkerId, WorkerIdentity
from router.routing.pairs import BrokenPairs, ProbeOutcome


def worker(name: str, incarnation: int = 1) -> WorkerIdentity:
    return WorkerIdentity(worker_id=WorkerId(name), incarnation=Incarnation(incarnation))


P, Q, D = worker("p"), worker("q"), worker("d")
NO_WAY = UnreachableError("nothing passes")


@pytest.fixture
def pairs() -> BrokenPairs:
    return BrokenPairs(rng=Random(0))


def test_a_pair_that_failed_gets_no_request_however_long_it_is(pairs: BrokenPairs):
    pairs.failed(P, D, NO_WAY, 0.0)
    assert not pairs.allows(P, D)
    assert pairs.allows(Q, D)
    assert pairs.due(1000.0) == [(P, D)]
    assert not pairs.allows(P, D)


def test_hand_offs_that_fail_together_are_told_once(pairs: BrokenPairs):
    assert pairs.failed(P, D, NO_WAY, 0.0) is not None
    assert pairs.failed(P, D, NO_WAY, 0.1) is None


def test_a_link_that_carries_makes_the_pair_whole(pairs: BrokenPairs):
    pairs.failed(P, D, NO_WAY, 0.0)
    assert pairs.due(2.0) == [(P, D)]
    assert pairs.probed(P, D, None, 2.5)
    assert pairs.allows(P, D)
    assert pairs.due(1000.0) == []
    assert pairs.outcomes == {ProbeOutcome.CARRIES: 1}


def pause_from(pairs: BrokenPairs, now_s: float) -> float:
    """Seconds until the pair is probed, to a hundredth."""
    return next(step / 100 for step in range(10_000) if pairs.due(now_s + step / 100))


def test_pauses_grow_with_each_failure_up_to_a_bound_and_are_spread(pairs: BrokenPairs):
    pairs.failed(P, D, NO_WAY, 0.0)
    now_s, pauses_s = 0.0, [pause_from(pairs, 0.0)]
    for _ in range(7):
        now_s += pauses_s[-1]
        pairs.probed(P, D, NO_WAY, now_s)
        pauses_s.append(pause_from(pairs, now_s))
    for pause_s, around_s in zip(pauses_s, (1, 2, 4, 8, 15, 15, 15, 15), strict=True):
        assert 0.75 * around_s <= pause_s <= 1.25 * around_s + 0.01
    assert len(set(pauses_s[4:])) > 1


def test_a_probe_without_an_answer_counts_as_failed_and_its_late_answer_as_nothing(
    pairs: BrokenPairs,
):
    pairs.failed(P, D, NO_WAY, 0.0)
    pairs.due(2.0)
    assert pairs.due(31.0) == []
    assert pairs.due(32.0) == []  # given up; the next pause begins
    assert pairs.outcomes == {ProbeOutcome.UNANSWERED: 1}
    assert not pairs.probed(P, D, None, 32.1)
    assert pairs.due(35.0) == [(P, D)]


def test_a_pair_that_does_not_fit_is_never_probed(pairs: BrokenPairs):
    pause_s = pairs.failed(P, D, IncompatibleError("dtype", param="dtype"), 0.0)
    assert pause_s == float("inf")
    assert pairs.due(1e9) == []
    pairs.forget(D)
    assert pairs.allows(P, D)


def test_probes_at_once_are_bounded_and_the_longest_due_come_first(pairs: BrokenPairs):
    others = [worker(f"q{number}") for number in range(100)]
    for number, other in enumerate(others):
        pairs.failed(other, D, NO_WAY, float(10 * number))
    first = pairs.due(2000.0)
    assert first == [(other, D) for other in others[:32]]
    assert pairs.due(2000.1) == []
    pairs.probed(others[0], D, None, 2000.2)
    assert pairs.due(2000.3) == [(others[32], D)]


@given(
    st.lists(
        st.tuples(st.sampled_from("fspadb"), st.sampled_from((P, Q)), st.floats(0.01, 40.0)),
        max_size=60,
    )
)
def test_a_broken_pair_is_whole_only_after_pages_passed_or_a_worker_began_anew(moves):
    pairs, now_s, broken, probed = BrokenPairs(rng=Random(1)), 0.0, set(), set()
    for move, prefill, seconds in moves:
        now_s += seconds
        match move:
            case "f":
                pairs.failed(prefill, D, NO_WAY, now_s)
                broken.add(prefill)
            case "s":
                pairs.succeeded(prefill, D)
                broken.discard(prefill)
            case "p":
                probed |= {p for p, _ in pairs.due(now_s)}
            case "a" if prefill in probed:
                if pairs.probed(prefill, D, None, now_s):
                    broken.discard(prefill)
            case "b" if prefill in probed:
                assert not pairs.probed(prefill, D, NO_WAY, now_s)
            case "d":
                pairs.forget(prefill)
                broken.discard(prefill)
        assert {p for p in (P, Q) if not pairs.allows(p, D)} == broken
        assert len(pairs) == len(broken)
