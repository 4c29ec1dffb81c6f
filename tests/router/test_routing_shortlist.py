"""The shortlists in C are held against those in Python: the same workers at the same cost, to the last bit."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.ids import LegId, Role
from router.routing.index import PrefixIndex
from router.routing.local import ANYWHERE, LocalPrefill
from router.routing.policy import Demand, Pair, Unavailable
from router.routing.predictive import Predictive
from router.routing.pricing_library import pricing_library
from router.routing.shortlist import SHORTLIST, NativeShortlister, PlainShortlister, shortlister
from router.routing.side import Side
from router.routing.view import ClusterView, WorkerView
from tests.router.workers import hello

counts = st.integers(0, 300)
tokens = st.integers(0, 200_000)
seconds = st.floats(0.0, 5.0)

LOCAL = LocalPrefill(max_tokens=2000, max_stall_s=0.5)


@pytest.fixture(scope="module")
def native() -> NativeShortlister:
    library = pricing_library()
    if library is None:
        pytest.skip("no C compiler")
    return NativeShortlister(library)


def cluster_of(draw: st.DataObject) -> ClusterView:
    view = ClusterView(PrefixIndex(max_blocks=100), silence_timeout_s=1e9)
    roles = draw.draw(st.lists(st.sampled_from(list(Role)), min_size=1, max_size=14))
    for number, role in enumerate(roles):
        room = {"num_blocks": draw.draw(tokens), "max_num_seqs": draw.draw(st.integers(1, 300))}
        worker = view.join(hello(f"w{number}", role, **room), f"unix:{number}", 0.0)
        worker.legs = draw.draw(st.integers(0, 3))
        worker.decode_sequences, worker.decode_tokens = draw.draw(counts), draw.draw(tokens)
        worker.foreign_sequences, worker.foreign_prefill_tokens = (
            draw.draw(counts), draw.draw(tokens)
        )  # fmt: skip
        worker.used_tokens, worker.reported_context_tokens = draw.draw(tokens), draw.draw(tokens)
        worker.forecast.queued(LegId(1), draw.draw(seconds), 0.0)
        if draw.draw(st.booleans()):
            worker.forecast.prefilled(draw.draw(tokens), 100, 0.01 + draw.draw(seconds))
            worker.forecast.stepped(8, draw.draw(tokens), 0.01 + draw.draw(seconds), 0.0)
        if draw.draw(st.booleans()):
            slot = draw.draw(st.integers(0, number))
            worker.forecast.handed_off(slot, 1 + draw.draw(tokens), 0.1, draw.draw(seconds))
    return view


def demand_of(draw: st.DataObject, view: ClusterView) -> Demand:
    holders = draw.draw(st.lists(st.sampled_from(list(view.workers)), max_size=8))
    return Demand(
        tokens=draw.draw(st.integers(1, 200_000)),
        samples=draw.draw(st.integers(1, 4)),
        held={worker.slot: draw.draw(tokens) for worker in holders},
        output_tokens=draw.draw(st.integers(1, 1000)),
        now_s=draw.draw(seconds),
    )


def ranks(entries) -> list[tuple[int, int]]:
    return [(milliseconds, legs) for milliseconds, legs, *_ in entries]


def what(chosen: Pair | Unavailable) -> tuple[object, ...]:
    if isinstance(chosen, Unavailable):
        return (chosen.reason,)
    return chosen.prefill, chosen.decode, chosen.kind, chosen.predicted


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_both_ways_list_the_same_costs(native, data):
    view = cluster_of(data)
    demand, plain = demand_of(data, view), PlainShortlister()
    side: Side[WorkerView] = Side(tuple(view.workers))
    for ours, theirs, local in (
        (native.prefill, plain.prefill, ()),
        (native.decode, plain.decode, ()),
        (native.both, plain.both, (LOCAL,)),
        (native.both, plain.both, (ANYWHERE,)),
    ):
        found, everybody = ours(side, demand, Random(1), *local), {}
        for worker in side.workers:
            for entry in theirs(Side((worker,)), demand, Random(0), *local):
                everybody[worker] = entry
        assert {who: cost_s for *_, cost_s, who in found}.items() <= {
            who: entry[3] for who, entry in everybody.items()
        }.items()
        assert ranks(found) == sorted(ranks(everybody.values()))[:SHORTLIST]


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_both_ways_choose_the_same_workers_where_no_two_are_equal(native, data):
    view = cluster_of(data)
    for number, worker in enumerate(view.workers):
        worker.legs = 1 << number  # so that no sum of two is another's, and chance decides nothing
    demand = demand_of(data, view)
    chosen = [
        Predictive(LOCAL, way).pair(tuple(view.workers), demand, Random(seed))
        for seed, way in enumerate((native, PlainShortlister()))
    ]
    assert what(chosen[0]) == what(chosen[1])


def test_equals_are_drawn_by_chance(native):
    view = ClusterView(PrefixIndex(max_blocks=100), silence_timeout_s=1e9)
    for number in range(4):
        view.join(hello(f"p{number}", Role.PREFILL), f"unix:{number}", 0.0)
    side, demand, rng = Side(tuple(view.workers)), Demand(tokens=100, samples=1, held={}), Random(0)
    first = {native.prefill(side, demand, rng)[0][-1].slot for _ in range(100)}
    assert first == {0, 1, 2, 3}


def test_what_is_held_at_a_slot_that_nobody_here_has_is_ignored(native):
    view = ClusterView(PrefixIndex(max_blocks=100), silence_timeout_s=1e9)
    worker = view.join(hello("p0", Role.PREFILL), "unix:p0", 0.0)
    entries = [
        native.prefill(Side((worker,)), Demand(tokens=100, samples=1, held=held), Random(0))
        for held in ({}, {1000: 50})
    ]
    assert ranks(entries[0]) == ranks(entries[1])


def test_the_native_way_is_taken_where_it_can_be_built(native):
    assert isinstance(shortlister(), type(native))


def test_workers_that_come_and_go_are_seen_by_the_next_decision():
    view = ClusterView(PrefixIndex(max_blocks=100), silence_timeout_s=1e9)
    policy, demand = Predictive(LOCAL), Demand(tokens=5000, samples=1, held={})
    for name, role in (("p0", Role.PREFILL), ("d0", Role.DECODE)):
        view.join(hello(name, role, num_blocks=10_000), f"unix:{name}", 0.0)
    policy.pair(view.usable(0.0), demand, Random(0))
    view.lose(hello("p0", Role.PREFILL).identity)
    new = view.join(hello("p1", Role.PREFILL, num_blocks=10_000), "unix:p1", 0.0)
    chosen = policy.pair(view.usable(0.0), demand, Random(0))
    assert isinstance(chosen, Pair)
    assert chosen.prefill is new
