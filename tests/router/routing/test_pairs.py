"""Which pairs get requests, and when their links are tried without one."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import IncompatibleError, UnreachableError
from baton.ids import Incarnation, Role, WorkerId, WorkerIdentity
from router.routing.pairs import BrokenPairs, PairKey, ProbeOutcome


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
    broken = [(worker(f"p{number}"), worker(f"d{number}")) for number in range(100)]
    for number, pair in enumerate(broken):
        pairs.failed(*pair, NO_WAY, float(10 * number))
    first = pairs.due(2000.0)
    assert first == broken[:32]
    assert pairs.due(2000.1) == []
    pairs.probed(*broken[0], None, 2000.2)
    assert pairs.due(2000.3) == [broken[32]]


PEERS = [worker(f"p{number}") for number in range(6)]


@pytest.fixture(params=[Role.DECODE, Role.PREFILL])
def side(request: pytest.FixtureRequest) -> Role:
    asked: Role = request.param
    return asked


def pair_of(lone: WorkerIdentity, peer: WorkerIdentity, side: Role) -> PairKey:
    return (peer, lone) if side is Role.DECODE else (lone, peer)


def cut_off(side: Role) -> BrokenPairs:
    """With D, whose hand-offs failed with the first three of its peers."""
    pairs = BrokenPairs(rng=Random(0), peers=lambda _end, _now_s: PEERS)
    for peer in PEERS[:3]:
        assert not pairs.cuts_off(D, side)
        pairs.failed(*pair_of(D, peer, side), NO_WAY, 0.0)
    return pairs


def test_a_worker_that_fails_with_several_peers_in_a_row_is_nobodys_pair(side: Role):
    pairs = cut_off(side)
    assert pairs.cuts_off(D, side)
    assert not any(pairs.allows(*pair_of(D, peer, side)) for peer in PEERS)
    assert all(pairs.allows(*pair_of(Q, peer, side)) for peer in PEERS)


def test_one_link_of_a_worker_that_is_cut_off_is_tried_at_a_time_and_any_that_carries_ends_it(
    side: Role,
):
    pairs, now_s = cut_off(side), 0.0
    tried: set[PairKey] = set()
    while not tried & {pair_of(D, peer, side) for peer in PEERS[3:]}:
        (pair,) = pairs.due(now_s := now_s + 20.0)
        assert pairs.due(now_s) == []
        assert not pairs.probed(*pair, NO_WAY, now_s)
        tried.add(pair)
    (pair,) = pairs.due(now_s + 20.0)
    assert pairs.probed(*pair, None, now_s + 21.0)
    assert not pairs.cuts_off(D, side)
    assert pairs.allows(*pair)
    assert pairs.allows(*pair_of(D, PEERS[5], side))
    assert not pairs.allows(*pair_of(D, PEERS[0], side)) or pair == pair_of(D, PEERS[0], side)


def test_a_success_in_between_and_what_does_not_fit_cut_nobody_off(side: Role):
    pairs = BrokenPairs(rng=Random(0))
    for peer in PEERS[:2]:
        pairs.failed(*pair_of(D, peer, side), NO_WAY, 0.0)
    pairs.succeeded(*pair_of(D, PEERS[5], side))
    for peer in PEERS[2:4]:
        pairs.failed(*pair_of(D, peer, side), NO_WAY, 0.0)
    pairs.failed(*pair_of(D, PEERS[4], side), IncompatibleError("dtype", param="dtype"), 0.0)
    assert not pairs.cuts_off(D, side)


def test_those_that_failed_with_a_worker_that_is_cut_off_have_no_mark_of_it(side: Role):
    lone = [worker(f"d{number}") for number in range(4)]
    pairs = BrokenPairs(rng=Random(0))
    for one in lone:
        for peer in PEERS[:3]:
            pairs.failed(*pair_of(one, peer, side), NO_WAY, 0.0)
    assert all(pairs.cuts_off(one, side) for one in lone)
    other = Role.PREFILL if side is Role.DECODE else Role.DECODE
    assert not any(pairs.cuts_off(peer, other) for peer in PEERS)
    pairs.forget(lone[0])
    assert not pairs.cuts_off(lone[0], side)


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
