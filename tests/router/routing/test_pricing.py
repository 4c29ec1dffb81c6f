"""Pricing in C is compared with pricing in Python: the same workers at the same cost, to the last bit."""

from random import Random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.generation import WorkerLoad
from baton.ids import Incarnation, LegId, Role, WorkerId, WorkerIdentity
from router.routing.index import PrefixIndex
from router.routing.policy import Demand, Pair, Unavailable
from router.routing.predictive import (
    UNBOUNDED,
    Candidates,
    LocalPrefill,
    Option,
    Predictive,
    PythonPricing,
)
from router.routing.pricing import NativePricing, fastest_pricing, pricing_library
from router.routing.table import HeldBySlot
from router.routing.view import ClusterView
from tests.interpreter_steps import steps_of
from tests.router.known_workers import hello

counts = st.integers(0, 300)
tokens = st.integers(0, 200_000)
seconds = st.floats(0.0, 5.0)

LOCAL = LocalPrefill(max_tokens=2000, max_stall_s=0.5)


@pytest.fixture(scope="module")
def native() -> NativePricing:
    library = pricing_library()
    if library is None:
        pytest.skip("the C functions are not built")
    return NativePricing(library)


def node(number: int) -> WorkerIdentity:
    return WorkerIdentity(worker_id=WorkerId("pool-0"), incarnation=Incarnation(number))


def attach(view: ClusterView, draw: st.DataObject) -> None:
    """Has some workers map a node that is watched, and some another one."""
    for number in (1, 2):
        view.pools.join(node(number), f"host{number}")
    for worker in view.workers:
        number = draw.draw(st.integers(0, 3))
        worker.load = WorkerLoad(pool_node="pool-0" if number else "", pool_incarnation=number)
        view.pools.attach(worker)
        if draw.draw(st.booleans()):
            worker.forecast.fetched(1, draw.draw(tokens), 0.01 + draw.draw(seconds))


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
            worker.forecast.parted(draw.draw(st.integers(0, number)))
    if draw.draw(st.booleans()):
        attach(view, draw)
    return view


def demand_of(draw: st.DataObject, view: ClusterView) -> Demand:
    holders = draw.draw(st.lists(st.sampled_from(list(view.workers)), max_size=8))
    held = {worker.slot: draw.draw(tokens) for worker in holders}
    held |= {w.pool_slot: draw.draw(tokens) for w in view.workers if w.pool_slot >= 0}
    return Demand(
        tokens=draw.draw(st.integers(1, 200_000)),
        samples=draw.draw(st.integers(1, 4)),
        held=held,
        output_tokens=draw.draw(st.integers(1, 1000)),
        now_s=draw.draw(seconds),
    )


def what(chosen: Pair | Unavailable) -> tuple[object, ...]:
    if isinstance(chosen, Unavailable):
        return (chosen.reason,)
    return chosen.prefill, chosen.decode, chosen.kind, chosen.predicted


def rank_of(option: Option | None) -> tuple[float, int] | None:
    return None if option is None else option.rank[:2]


@settings(max_examples=200, deadline=None)
@given(st.data(), st.sampled_from([LOCAL, UNBOUNDED]))
def test_both_ways_find_the_same_costs(native, data, local):
    view = cluster_of(data)
    for number, worker in enumerate(view.workers):
        worker.legs = 1 << number  # so that no sum of two is another's, and chance decides nothing
    candidates, demand = Candidates(tuple(view.workers)), demand_of(data, view)
    ours = native.cheapest(candidates, demand, Random(1), local)
    theirs = PythonPricing().cheapest(candidates, demand, Random(2), local)
    assert ours.rationale.considered() == theirs.rationale.considered()
    assert ours.rationale.why() == theirs.rationale.why()
    for alone, mine, other in ((False, ours.pair, theirs.pair), (True, ours.single, theirs.single)):
        assert rank_of(mine) == rank_of(other)
        if mine is not None:
            assert ours.rationale.predicted(alone=alone) == theirs.rationale.predicted(alone=alone)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_both_ways_choose_the_same_workers_where_no_two_are_equal(native, data):
    view = cluster_of(data)
    for number, worker in enumerate(view.workers):
        worker.legs = 1 << number  # so that no sum of two is another's, and chance decides nothing
    demand = demand_of(data, view)
    chosen = [
        Predictive(LOCAL, way).pair(tuple(view.workers), demand, Random(seed))
        for seed, way in enumerate((native, PythonPricing()))
    ]
    assert what(chosen[0]) == what(chosen[1])


def test_equals_are_drawn_by_chance(native):
    view = ClusterView(PrefixIndex(max_blocks=100), silence_timeout_s=1e9)
    for number in range(4):
        view.join(hello(f"h{number}", Role.HYBRID), f"unix:{number}", 0.0)
    candidates, demand = (
        Candidates(tuple(view.workers)),
        Demand(tokens=9, samples=1, held={}),
    )
    rng = Random(0)
    options = [native.cheapest(candidates, demand, rng, LOCAL).single for _ in range(100)]
    assert {option.decode.slot for option in options if option} == {0, 1, 2, 3}


def test_what_is_held_at_a_slot_that_nobody_here_has_is_ignored(native):
    view = ClusterView(PrefixIndex(max_blocks=100), silence_timeout_s=1e9)
    worker = view.join(hello("h0", Role.HYBRID), "unix:h0", 0.0)
    candidates = Candidates((worker,))
    ranks = {
        rank_of(native.cheapest(candidates, demand, Random(0), LOCAL).single)
        for demand in (Demand(tokens=9, samples=1, held=held) for held in ({}, {1000: 5}))
    }
    assert len(ranks) == 1


def test_the_native_way_is_taken_where_it_can_be_built(native):
    assert isinstance(fastest_pricing(), type(native))


def test_workers_that_come_and_go_are_seen_by_the_next_decision():
    view = ClusterView(PrefixIndex(max_blocks=100), silence_timeout_s=1e9)
    policy, demand = Predictive(LOCAL, fastest_pricing()), Demand(tokens=5000, samples=1, held={})
    for name, role in (("p0", Role.PREFILL), ("d0", Role.DECODE)):
        view.join(hello(name, role, num_blocks=10_000), f"unix:{name}", 0.0)
    policy.pair(view.usable(0.0), demand, Random(0))
    view.lose(hello("p0", Role.PREFILL).identity)
    new = view.join(hello("p1", Role.PREFILL, num_blocks=10_000), "unix:p1", 0.0)
    chosen = policy.pair(view.usable(0.0), demand, Random(0))
    assert isinstance(chosen, Pair)
    assert chosen.prefill is new


def deciding(way: NativePricing, workers: int, *, draining: bool, full: bool) -> int:
    """Steps of two decisions, among all decoders and where half of them may be full, once others have been made."""
    view = ClusterView(PrefixIndex(max_blocks=100))
    for number in range(workers):
        role = (Role.PREFILL, Role.DECODE)[number % 2]
        view.join(hello(f"w{number}", role, num_blocks=10_000), f"unix:{number}", 0.0)
    first, *_ = view.workers
    first.draining = draining
    policy, rng = Predictive(LOCAL, way), Random(0)
    held = HeldBySlot(workers)
    identities = [worker.identity for worker in view.workers]
    some = frozenset(identities[1 : workers // 2 : 2] if full else ())

    def decide() -> None:
        for those in (frozenset[WorkerIdentity](), some):
            demand = Demand(tokens=5000, samples=1, held=held, full=those)
            policy.pair(view.usable(1.0), demand, rng)

    decide()
    return steps_of(decide)


@pytest.mark.parametrize(("draining", "full"), [(False, False), (True, False), (False, True)])
def test_a_decision_costs_python_the_same_among_any_number_of_workers(native, draining, full):
    """Also while one of them drains, and while many are full: what was prepared for C is used again."""
    few, many = (deciding(native, n, draining=draining, full=full) for n in (10, 200))
    assert many == few


def test_who_is_full_decodes_nothing_and_is_asked_again_when_it_has_room():
    view = ClusterView(PrefixIndex(max_blocks=100))
    for name, role in (("p0", Role.PREFILL), ("d0", Role.DECODE), ("d1", Role.DECODE)):
        view.join(hello(name, role, num_blocks=10_000), f"unix:{name}", 0.0)
    _, best, other = view.workers
    other.legs = other.decode_sequences = 3
    policy, demand = Predictive(LOCAL, fastest_pricing()), Demand(tokens=5000, samples=1, held={})
    chosen = []
    for worker in (best, other, best):
        full = frozenset({best.identity} if worker is other else ())
        pair = policy.pair(view.usable(0.0), msgspec.structs.replace(demand, full=full), Random(0))
        assert isinstance(pair, Pair)
        chosen.append(pair.decode)
    assert chosen == [best, other, best]
