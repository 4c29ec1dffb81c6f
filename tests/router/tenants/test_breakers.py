"""A tenant whose requests break workers is slowed; one that only errs is not, and nobody is when everybody fails."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import BatonError, EngineError, InvalidRequestError, WorkerLostError
from router.tenants.breakers import TenantBreakers
from router.tenants.tenant import TenantId

BAD, GOOD = TenantId("bad"), TenantId("good")


def _send(
    breakers: TenantBreakers, who: TenantId, error: BatonError | None, times: int = 1
) -> None:
    for _ in range(times):
        if breakers.wait_s(who, 0.0) == 0:
            breakers.started(who, 0.0)
            breakers.finished(who, error, 0.0)


@pytest.mark.parametrize("error", [WorkerLostError("x"), EngineError("x")])
def test_whose_requests_keep_breaking_workers_has_to_wait(error: BatonError):
    breakers = TenantBreakers()
    _send(breakers, GOOD, None, 20)
    _send(breakers, BAD, error, 10)
    assert breakers.wait_s(BAD, 0.0) > 0
    assert breakers.wait_s(GOOD, 0.0) == 0


def test_whose_requests_are_only_wrong_does_not():
    breakers = TenantBreakers()
    _send(breakers, BAD, InvalidRequestError("x"), 100)
    assert breakers.wait_s(BAD, 0.0) == 0


def test_when_everybody_fails_nobody_is_to_blame():
    breakers = TenantBreakers()
    for _ in range(50):
        _send(breakers, GOOD, WorkerLostError("x"))
        _send(breakers, BAD, WorkerLostError("x"))
    assert breakers.wait_s(GOOD, 0.0) == 0
    assert breakers.wait_s(BAD, 0.0) == 0


def test_who_is_alone_on_a_cluster_that_loses_workers_is_not_shut_out():
    breakers = TenantBreakers()
    _send(breakers, BAD, None, 200)
    _send(breakers, BAD, WorkerLostError("x"), 50)
    assert breakers.wait_s(BAD, 0.0) == 0
    _send(breakers, GOOD, None, 20)
    _send(breakers, BAD, WorkerLostError("x"), 300)
    assert breakers.wait_s(BAD, 0.0) > 0


def test_thousands_of_tenants_are_told_from_those_who_break_workers():
    breakers = TenantBreakers()
    _send(breakers, GOOD, None, 20)
    _send(breakers, BAD, WorkerLostError("x"), 3)
    for number in range(10_000):
        _send(breakers, TenantId(f"t{number}"), None)
    _send(breakers, BAD, WorkerLostError("x"), 2)
    assert breakers.wait_s(BAD, 0.0) > 0


def test_what_went_well_still_counts_when_thousands_of_tenants_came_since():
    breakers = TenantBreakers()
    _send(breakers, GOOD, None, 200)
    for number in range(10_000):
        _send(breakers, TenantId(f"t{number}"), WorkerLostError("x"))
    _send(breakers, GOOD, WorkerLostError("x"), 5)
    assert breakers.wait_s(GOOD, 0.0) == 0


def test_after_the_pause_one_request_is_tried_and_its_success_forgives():
    breakers = TenantBreakers()
    _send(breakers, GOOD, None, 20)
    _send(breakers, BAD, WorkerLostError("x"), 10)
    now_s = breakers.wait_s(BAD, 0.0)
    assert breakers.wait_s(BAD, now_s) == 0
    breakers.started(BAD, now_s)
    assert breakers.wait_s(BAD, now_s) > 0
    breakers.finished(BAD, None, now_s)
    assert breakers.wait_s(BAD, now_s) == 0


def test_what_no_worker_served_to_its_end_is_no_success():
    breakers = TenantBreakers()
    _send(breakers, GOOD, None, 20)
    _send(breakers, BAD, WorkerLostError("x"), 10)
    now_s = breakers.wait_s(BAD, 0.0)
    breakers.started(BAD, now_s)
    breakers.finished(BAD, None, now_s, served=False)
    assert breakers.wait_s(BAD, now_s) == 0, "another may be tried"
    breakers.started(BAD, now_s)
    assert breakers.wait_s(BAD, now_s) > 0, "but one at a time"
    breakers.finished(BAD, WorkerLostError("x"), now_s)
    assert breakers.wait_s(BAD, now_s) > 0


@given(
    st.lists(
        st.tuples(
            st.sampled_from([BAD, GOOD]),
            st.sampled_from([None, WorkerLostError("x"), InvalidRequestError("x")]),
            st.floats(0, 30),
        ),
        max_size=80,
    )
)
def test_nobody_is_shut_out_for_ever(requests: list[tuple[TenantId, BatonError | None, float]]):
    breakers, now_s = TenantBreakers(), 0.0
    for who, error, pause_s in requests:
        now_s += pause_s
        if breakers.wait_s(who, now_s) == 0:
            breakers.started(who, now_s)
            breakers.finished(who, error, now_s)
        breakers.check_integrity()
    for who in (BAD, GOOD):
        assert breakers.wait_s(who, now_s + breakers.wait_s(who, now_s) + 1e-6) == 0
