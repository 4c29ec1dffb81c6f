"""Fairness of the waiting queue: between tenants, between priorities, and for those who leave."""

from collections import Counter, deque
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.errors import InvariantError
from router.admission.queue import (
    QUANTUM_TOKENS,
    RESERVED_SHARE,
    SAVED_TOKENS,
    AdmissionQueue,
    FairQueue,
)
from router.slo import STANDARD, Slo
from router.tenants.tenant import TenantId
from tests.router.admission.admitting import queued

URGENT, PLAIN, BATCH = Slo(name="u", priority=2), Slo(name="p"), Slo(name="b", priority=0)


def names(queue: FairQueue | AdmissionQueue) -> list[str]:
    order: list[str] = []
    while queue.head() is not None:
        order.append(queue.pop().request_id)
        queue.check_integrity()
    return order


def test_one_tenant_is_served_in_the_order_in_which_it_came():
    queue = FairQueue()
    for n in range(30):
        queue.push(queued(f"r{n}", prompt_tokens=1 + 997 * n % 5000))
    assert names(queue) == [f"r{n}" for n in range(30)]


def test_a_tenant_that_comes_later_does_not_wait_for_the_backlog_of_another():
    queue = FairQueue()
    for n in range(1000):
        queue.push(queued(f"b{n}", tenant="b", prompt_tokens=2000))
    queue.pop()
    queue.push(queued("a0", tenant="a", prompt_tokens=2000))
    assert queue.pop().request_id == "a0"


def test_large_requests_one_at_a_time_take_no_more_than_their_share():
    queue = FairQueue()
    given_out: Counter[str] = Counter()
    for n in range(3000):
        queue.push(queued(f"b{n}", tenant="b", prompt_tokens=500))
    turn = 0
    queue.push(queued("a0", tenant="a", prompt_tokens=100_000))
    for _ in range(1000):
        taken = queue.pop()
        given_out[taken.tenant.tenant_id] += taken.cost
        if taken.tenant.tenant_id == "a":
            turn += 1
            queue.push(queued(f"a{turn}", tenant="a", prompt_tokens=100_000))
    assert given_out["a"] <= given_out["b"] + 100_010 + SAVED_TOKENS + 3 * QUANTUM_TOKENS


def test_weights_divide_what_there_is():
    queue = FairQueue()
    for n in range(2000):
        queue.push(queued(f"a{n}", tenant="a", weight=3.0))
        queue.push(queued(f"b{n}", tenant="b", weight=1.0))
    given_out: Counter[str] = Counter()
    for _ in range(1600):
        taken = queue.pop()
        given_out[taken.tenant.tenant_id] += taken.cost
    assert given_out["a"] / given_out["b"] == pytest.approx(3.0, rel=0.1)


def test_the_head_of_an_empty_line_is_nobody_and_cannot_be_taken():
    queue = FairQueue()
    assert queue.head() is None
    with pytest.raises(InvariantError):
        queue.pop()


TENANTS = {"a": 1.0, "b": 3.0, "c": 0.5}
COSTS = st.integers(1, 20_000)


@settings(max_examples=50, deadline=None)
@given(
    costs=st.fixed_dictionaries(
        {tenant: st.lists(COSTS, min_size=1, max_size=8) for tenant in TENANTS}
    ),
    visits=st.lists(st.tuples(st.integers(0, 300), COSTS), max_size=20),
    rounds=st.integers(1, 120),
)
def test_backlogged_tenants_get_their_shares_within_the_bound_whoever_else_comes(
    costs, visits, rounds
):
    queue = FairQueue()
    given_out = dict.fromkeys(TENANTS, 0)
    supply = {tenant: deque(sizes) for tenant, sizes in costs.items()}

    def refill(tenant: str, n: int) -> None:
        sizes = supply[tenant]
        sizes.rotate(1)
        queue.push(
            queued(
                f"{tenant}{n}",
                tenant=tenant,
                weight=TENANTS[tenant],
                prompt_tokens=sizes[0],
                output_tokens=0,
            )
        )

    for tenant in TENANTS:
        refill(tenant, -1)
        refill(tenant, -2)
    for n in range(rounds):
        for number, (at, cost) in enumerate(visits):
            if at == n:
                queue.push(queued(f"v{number}", tenant=f"v{cost % 3}", prompt_tokens=cost))
        taken = queue.pop()
        queue.check_integrity()
        tenant = taken.tenant.tenant_id
        if tenant in TENANTS:
            given_out[tenant] += taken.cost
            refill(tenant, n)
    for one, one_weight in TENANTS.items():
        for other, other_weight in TENANTS.items():
            apart = given_out[one] / one_weight - given_out[other] / other_weight
            bound = SAVED_TOKENS + (
                3 * QUANTUM_TOKENS + max(costs[one]) / one_weight + max(costs[other]) / other_weight
            )
            assert apart <= bound


def test_the_more_urgent_go_first():
    queue = AdmissionQueue()
    queue.push(queued("batch", slo=BATCH))
    queue.push(queued("plain", slo=PLAIN))
    queue.push(queued("urgent", slo=URGENT))
    assert names(queue) == ["urgent", "plain", "batch"]


@settings(max_examples=30, deadline=None)
@given(
    urgent=st.lists(COSTS, min_size=1, max_size=6),
    batch=st.lists(COSTS, min_size=1, max_size=6),
    turns=st.integers(1, 150),
)
def test_a_class_that_waits_gets_its_reserved_share_of_what_those_above_it_get(
    urgent, batch, turns
):
    queue = AdmissionQueue()

    def refill(slo: Slo, sizes: list[int], n: int) -> None:
        cost = sizes[n % len(sizes)]
        queue.push(
            queued(f"{slo.name}{n}", tenant=slo.name, slo=slo, prompt_tokens=cost, output_tokens=0)
        )

    given_out = {"u": 0, "b": 0}
    for n in (0, 1):
        refill(URGENT, urgent, n)
        refill(BATCH, batch, n)
    for n in range(2, turns):
        taken = queue.pop()
        queue.check_integrity()
        given_out[taken.slo.name] += taken.cost
        refill(taken.slo, urgent if taken.slo is URGENT else batch, n)
    assert given_out["b"] >= RESERVED_SHARE * (given_out["u"] - max(urgent)) - max(batch)
    assert given_out["b"] <= RESERVED_SHARE * given_out["u"]


ACTS = st.lists(
    st.tuples(st.sampled_from(["push", "pop", "leave"]), st.integers(0, 30), st.integers(0, 8)),
    max_size=60,
)


@settings(max_examples=50, deadline=None)
@given(acts=ACTS)
def test_everybody_who_comes_is_taken_or_leaves_exactly_once(acts):
    queue = AdmissionQueue()
    inside: set[str] = set()
    for act, number, kind in acts:
        name = f"r{number}"
        if act == "push" and name not in inside:
            slo = (URGENT, PLAIN, BATCH)[kind % 3]
            queue.push(queued(name, tenant=f"t{kind}", slo=slo, prompt_tokens=1 + 700 * number))
            inside.add(name)
        elif act == "pop" and inside:
            inside.remove(queue.pop().request_id)
        elif act == "leave":
            gone = queue.remove(queued(name).request_id)
            assert (gone is not None) == (name in inside)
            inside.discard(name)
        queue.check_integrity()
        assert len(queue) == len(inside)
    assert set(names(queue)) == inside
    assert sum(queue.per_class().values()) == 0


def test_what_is_ahead_counts_others_only_as_far_as_they_take_turns():
    queue = AdmissionQueue()
    for n in range(100):
        queue.push(queued(f"b{n}", tenant="b"))
    assert queue.ahead(queued("x", tenant="a").tenant, STANDARD) == 0
    for n in range(5):
        queue.push(queued(f"a{n}", tenant="a"))
    assert queue.ahead(queued("x", tenant="a").tenant, STANDARD) == 1000
    assert queue.ahead(queued("x", tenant="b").tenant, STANDARD) == 10_500
    assert queue.ahead(queued("x", tenant="a").tenant, URGENT) == 0
    assert queue.ahead(queued("x", tenant="a").tenant, BATCH) == 10_500


def test_what_a_tenant_was_not_there_to_take_goes_before_a_flood():
    queue = FairQueue()
    for n in range(600):
        queue.push(queued(f"b{n}", tenant="b", prompt_tokens=2000))
    for _ in range(100):
        queue.pop()
    for n in range(5):
        queue.push(queued(f"a{n}", tenant="a", prompt_tokens=2000))
    assert [queue.pop().request_id for _ in range(5)] == [f"a{n}" for n in range(5)]


def test_savings_are_bounded_and_then_shares_are_equal():
    queue = FairQueue()
    for tenant in ("a", "b"):
        for n in range(600):
            queue.push(queued(f"{tenant}{n}", tenant=tenant, prompt_tokens=2000))
    order = [queue.pop().tenant.tenant_id for _ in range(400)]
    assert order.count(order[0]) == 200


def test_what_a_tenant_is_given_elsewhere_counts_here():
    queue = FairQueue()
    for tenant in ("a", "b"):
        for n in range(600):
            queue.push(queued(f"{tenant}{n}", tenant=tenant, prompt_tokens=90))
    queue.charge(TenantId("b"), 20_000)
    queue.check_integrity()
    order = [queue.pop().tenant.tenant_id for _ in range(800)]
    assert order.count(order[0]) == pytest.approx(500, abs=5)
    assert order[0] == "a"


def test_where_nobody_waits_nothing_is_charged():
    queue = FairQueue()
    queue.push(queued("b0", tenant="b"))
    queue.pop()
    queue.charge(TenantId("b"), 1_000_000)
    queue.push(queued("b0", tenant="b"))
    queue.push(queued("a0", tenant="a"))
    assert queue.pop().request_id == "b0"
    queue.check_integrity()


def test_what_was_taken_while_nobody_waited_is_no_debt():
    queue = FairQueue()
    for n in range(40):
        queue.push(queued(f"a{n}", tenant="a", prompt_tokens=2000))
        queue.pop()
    for n in range(40):
        queue.push(queued(f"b{n}", tenant="b", prompt_tokens=2000))
    queue.push(queued("a40", tenant="a", prompt_tokens=2000))
    assert "a40" in [queue.pop().request_id for _ in range(2)]


def test_of_two_who_have_saved_something_whoever_took_less_goes_first():
    queue = FairQueue()
    for n in range(40):
        queue.push(queued(f"b{n}", tenant="b", prompt_tokens=2000))
    for _ in range(4):
        queue.pop()
    for n in range(3):
        queue.push(queued(f"a{n}", tenant="a", prompt_tokens=2000))
    assert [queue.pop().request_id for _ in range(3)] == ["a0", "a1", "a2"]


@settings(max_examples=60, deadline=None)
@given(
    taken=st.integers(0, 60),
    backlogs=st.fixed_dictionaries({tenant: st.integers(0, 12) for tenant in TENANTS}),
    own=st.integers(0, 6),
)
def test_what_is_said_to_be_ahead_is_what_goes_before(taken, backlogs, own):
    """Whatever anybody owes or has saved; to within two requests of each tenant."""
    queue = FairQueue()
    for n in range(taken + 1):
        queue.push(queued(f"p{n}", tenant="b", weight=TENANTS["b"], prompt_tokens=2000))
    for _ in range(taken):
        queue.pop()
    for tenant, length in (*backlogs.items(), ("x", own)):
        for n in range(length):
            one = queued(
                f"{tenant}{n}", tenant=tenant, weight=TENANTS.get(tenant, 1.0), prompt_tokens=2000
            )
            queue.push(one)
    last = queued("last", tenant="x", prompt_tokens=2000)
    said = queue.ahead(last.tenant)
    queue.push(last)
    before = 0
    while (one := queue.pop()) is not last:
        before += one.cost
    assert abs(said - before) <= 2 * last.cost * len(TENANTS)


def test_what_a_tenant_is_given_elsewhere_takes_no_more_of_its_savings_than_that():
    queue = FairQueue()
    for n in range(100):
        queue.push(queued(f"b{n}", tenant="b", prompt_tokens=1990))
    for n in range(16):
        queue.push(queued(f"a{n}", tenant="a", prompt_tokens=1990))
    while queue.pop().request_id != "a15":
        pass
    for _ in range(10):  # and nobody else: all this is saved for the other
        assert queue.pop().tenant.tenant_id == "b"
    queue.charge(TenantId("a"), 4000)
    queue.pop()
    for n in range(16, 24):
        queue.push(queued(f"a{n}", tenant="a", prompt_tokens=1990))
    queue.check_integrity()
    assert [queue.pop().tenant.tenant_id for _ in range(8)] == ["a"] * 8


@settings(max_examples=60, deadline=None)
@given(
    past=st.integers(0, 60),
    visits=st.lists(
        st.tuples(st.sampled_from(sorted(TENANTS)), st.sampled_from([4000, 20_000]), st.booleans()),
        min_size=1,
        max_size=20,
    ),
)
def test_nobody_waits_for_ever_however_the_others_come_and_go(past, visits):
    """Behind what each of the others has saved, and its share of what the one who waits owes."""
    queue = FairQueue()
    numbers = count()

    def come(tenant: str, cost: int) -> None:
        weight = TENANTS.get(tenant, 1.0)
        name = f"{tenant}{next(numbers)}"
        queue.push(queued(name, tenant=tenant, weight=weight, prompt_tokens=cost, output_tokens=0))

    come("b", 1000)
    for _ in range(past):
        come("x", 1000)
    for _ in range(past):
        queue.pop()
    queue.push(queued("waiting", tenant="x", prompt_tokens=1000, output_tokens=0))
    others = sum(TENANTS.values())
    most = (SAVED_TOKENS + 1000 + 3 * QUANTUM_TOKENS) * others + 2 * 20_000 * len(TENANTS)
    before, order = -1000 * past, deque(visits)  # some of its own may stand before it
    while before <= most:
        tenant, cost, both = order[0]
        order.rotate(-1)
        come(tenant, cost)
        if both:
            come(tenant, cost)
        taken = queue.pop()
        if taken.request_id == "waiting":
            break
        before += taken.cost
    queue.check_integrity()
    assert before <= most
