"""Shares over several routers: what one gives counts at the others."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.admission.controller import AdmissionController
from router.admission.shares import AdmittedTotals
from tests.router.admission.admitting import FakeCapacity, queued
from tests.router.admission.test_controller import limits


def gate_with(*backlogs: tuple[str, int]) -> AdmissionController:
    controller = AdmissionController(
        capacity=FakeCapacity(places=10**9),
        limits=limits(
            requests=10**6, tenant_requests=10**6, prompt_tokens=10**9, tenant_prompt_tokens=10**9
        ),
    )
    for tenant, count in backlogs:
        for n in range(count):
            assert (
                controller.offer(queued(f"{tenant}{n}", tenant=tenant, prompt_tokens=1990), 0.0)
                is None
            )
    return controller


def let_in(controller: AdmissionController, count: int, given_out: Counter[str]) -> None:
    for _ in range(count):
        taken = controller.next(0.0)
        assert taken is not None
        given_out[taken.tenant.tenant_id] += taken.cost


@pytest.mark.parametrize("every", [1, 20, 60])
def test_a_tenant_that_sends_to_one_router_gets_its_share_of_both(every):
    both, only_flood = gate_with(("quiet", 900), ("flood", 900)), gate_with(("flood", 900))
    routers = {"r1": both, "r2": only_flood}
    given_out: Counter[str] = Counter()
    for _ in range(600 // every):
        for controller in routers.values():
            let_in(controller, every, given_out)
        for name, controller in routers.items():
            controller.hear(
                {other: dict(g.admitted) for other, g in routers.items() if other != name}
            )
    assert given_out["quiet"] / given_out.total() == pytest.approx(0.5, abs=0.08)


def test_alone_each_router_is_fair_by_itself():
    controller = gate_with(("quiet", 900), ("flood", 900))
    given_out: Counter[str] = Counter()
    let_in(controller, 800, given_out)
    assert given_out["quiet"] == given_out["flood"]


def test_a_router_that_is_heard_for_the_first_time_is_charged_for_nothing_before():
    given_elsewhere = AdmittedTotals()
    assert given_elsewhere.hear({"r2": {"1/a": 5000.0}}) == []
    (charge,) = given_elsewhere.hear({"r2": {"1/a": 5100.0}})
    assert (charge.priority, charge.tenant_id, charge.tokens) == (1, "a", 100.0)


def test_a_router_that_left_and_came_back_is_a_new_one():
    given_elsewhere = AdmittedTotals()
    given_elsewhere.hear({"r2": {"1/a": 100.0}})
    given_elsewhere.hear({})
    assert given_elsewhere.hear({"r2": {"1/a": 900.0}}) == []


@settings(max_examples=30, deadline=None)
@given(
    heard=st.lists(
        st.dictionaries(
            st.sampled_from(["r1", "r2", "r3"]),
            st.dictionaries(
                st.one_of(st.sampled_from(["1/a", "1/b", "0/a"]), st.text(max_size=6)),
                st.floats(),
                max_size=4,
            ),
        ),
        max_size=8,
    )
)
def test_whatever_others_say_nothing_is_charged_below_zero_and_nothing_breaks(heard):
    given_elsewhere = AdmittedTotals()
    controller = gate_with(("a", 3), ("b", 3))
    for others in heard:
        assert all(charge.tokens > 0 for charge in given_elsewhere.hear(others))
        controller.hear(others)
        controller.check_integrity()
    let_in(controller, 6, Counter())
