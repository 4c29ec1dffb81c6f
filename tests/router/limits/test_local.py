"""Whatever tenants do, no window of time gives out more than burst and rate allow."""

from functools import partial
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from router.limits.local import LimitLedger
from router.limits.ports import GrantId, LimitGranted
from router.tenants.tenant import Tenant, TenantId, TenantLimits

LIMITED = Tenant(
    tenant_id=TenantId("acme"),
    limits=TenantLimits(
        requests_per_minute=60,
        request_burst=4,
        tokens_per_minute=600,
        token_burst=100,
        max_concurrency=3,
    ),
)
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["enter", "leave", "wait"]),
        st.integers(0, 250),
        st.integers(0, 400),
        st.floats(0, 3),
    ),
    max_size=60,
)


@given(STEPS, st.sampled_from([1.0, 0.5]))
def test_no_more_than_allowed_is_ever_given_out(steps: list[Any], share: float):
    ledger, now_s = LimitLedger(share), 0.0
    in_flight: list[GrantId] = []
    entered = 0
    for number, (what, asked, taken, pause_s) in enumerate(steps):
        if what == "wait":
            now_s += pause_s
        elif what == "leave" and in_flight:
            ledger.leave(LIMITED, in_flight.pop(0), taken, now_s)
        elif what == "enter":
            grant = GrantId(str(number))
            if isinstance(ledger.enter(LIMITED, grant, now_s), LimitGranted):
                entered += 1
                in_flight.append(grant)
                ledger.charge(LIMITED, grant, asked, now_s)
        ledger.check_integrity()
        assert len(in_flight) <= 3 * share
        assert ledger.usage(LIMITED, now_s).in_flight == len(in_flight)
        assert entered <= (4 + now_s) * share + 1e-6
        levels = ledger.usage(LIMITED, now_s).levels
        assert levels.tokens is not None
        assert levels.tokens.remaining <= 100 * share
    for grant in in_flight:
        ledger.leave(LIMITED, grant, 0, now_s)
    assert ledger.usage(LIMITED, now_s).in_flight == 0


@given(st.lists(st.tuples(st.integers(1, 300), st.integers(0, 300)), min_size=1, max_size=30))
def test_whoever_waits_as_long_as_told_gets_what_was_asked_for(asks: list[tuple[int, int]]):
    ledger, now_s = LimitLedger(), 0.0
    for number, (asked, used) in enumerate(asks):
        grant = GrantId(str(number))
        for attempt in (
            partial(ledger.enter, LIMITED, grant),
            partial(ledger.charge, LIMITED, grant, asked),
        ):
            decision = attempt(now_s)
            if not isinstance(decision, LimitGranted):
                now_s += decision.retry_after_s + 1e-6
                assert isinstance(attempt(now_s), LimitGranted)
        ledger.leave(LIMITED, grant, used, now_s)
