"""Any order of puts, reads, copies, deaths and flushes: nobody's bytes change under him, every place returns."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from kvpool.messages import Allowance, PutGrant, PutRefusalReason
from kvpool.node.ledger import NodeLimits
from tests.kvpool.node.ledger_world import SLOT_BYTES, World, chain

TEXTS = st.sampled_from(["abcd", "abce", "abxyz", "q", "qrstuv", "a", "mnop"])
TENANTS = st.sampled_from(["t", "u", "v"])
WORKERS = st.sampled_from(["w", "x"])
QUOTA = 4


class Interleavings(RuleBasedStateMachine):
    """One node, two workers, three tenants of which one has a quota."""

    @initialize(
        num_slots=st.integers(1, 12),
        num_extents=st.sampled_from([0, 0, 1, 3, 9]),
        eviction=st.sampled_from(["lru", "s3fifo", "cost"]),
        high=st.sampled_from([0.3, 0.7, 1.0]),
    )
    def begin(self, num_slots, num_extents, eviction, high):
        self.world = World(
            NodeLimits(
                num_slots=num_slots,
                slot_bytes=SLOT_BYTES,
                num_extents=num_extents,
                eviction=eviction,
                ssd_eviction=eviction,
                high_watermark=high,
                low_watermark=high / 2,
                put_timeout_s=10.0,
                idle_s=40.0,
            )
        )
        self.world.ledger.allow("v", Allowance(max_bytes=QUOTA * SLOT_BYTES, weight=2.0))

    @rule(text=TEXTS, tenant=TENANTS, first=st.integers(0, 3), by=WORKERS)
    def reserve(self, text, tenant, first, by):
        self.world.reserve(text, tenant, first=min(first, len(text) - 1), by=by)

    @rule(text=TEXTS, tenant=TENANTS)
    def fetch(self, text, tenant):
        self.world.reserve(text, tenant, fetched=True)

    @rule(data=st.data())
    def extend(self, data):
        if self.world.readers:
            self.world.extend(data.draw(st.sampled_from(sorted(self.world.readers))))

    @rule(text=TEXTS, tenant=TENANTS)
    def put(self, text, tenant):
        self.world.put(text, tenant)

    @rule(data=st.data(), skip=st.sampled_from([None, 0, 1]))
    def commit(self, data, skip):
        if self.world.writers:
            put_id = data.draw(st.sampled_from(sorted(self.world.writers)))
            self.world.commit(put_id, skip=skip)

    @rule(data=st.data())
    def write_only(self, data):
        if self.world.writers:
            self.world.write(data.draw(st.sampled_from(sorted(self.world.writers))))
            self.world.check()

    @rule(data=st.data())
    def abandon(self, data):
        if self.world.writers:
            self.world.abandon(data.draw(st.sampled_from(sorted(self.world.writers))))

    @rule(data=st.data())
    def forget(self, data):
        if self.world.writers:
            self.world.forget(data.draw(st.sampled_from(sorted(self.world.writers))))

    @rule(text=TEXTS, lease_s=st.sampled_from([5.0, 60.0]), by=WORKERS)
    def lease(self, text, lease_s, by):
        self.world.lease(text, lease_s, by=by)

    @rule(text=TEXTS, tenant=TENANTS, by=WORKERS)
    def put_and_lease(self, text, tenant, by):
        self.world.put(text, tenant)
        self.world.lease(text, 60.0, by=by)

    @rule(data=st.data())
    def release(self, data):
        if self.world.readers:
            self.world.release(data.draw(st.sampled_from(sorted(self.world.readers))))

    @rule(index=st.integers(0, 5), fails=st.sampled_from([False, False, True]))
    def answer(self, index, fails):
        if self.world.moves:
            self.world.answer(index, fails=fails)

    @rule(after_s=st.sampled_from([0.0, 1.0, 6.0, 50.0]))
    def sweep(self, after_s):
        self.world.sweep(after_s)

    @rule(by=WORKERS)
    def worker_gone(self, by):
        self.world.gone(by)

    @rule(tenant=st.sampled_from(["", "t", "u", "v"]))
    def flush(self, tenant):
        self.world.flush(tenant=tenant)

    @rule(text=TEXTS)
    def drop(self, text):
        self.world.drop(chain(text)[-1:])

    @rule(text=TEXTS)
    def pin(self, text):
        self.world.pin(text)

    @rule(text=TEXTS)
    def unpin(self, text):
        self.world.unpin(text)

    @rule(sick=st.booleans())
    def fall_sick(self, sick):
        self.world.ledger.refuses = PutRefusalReason.SICK if sick else None
        outcome = self.world.reserve("zzz")
        assert isinstance(outcome, PutGrant) or outcome.reason is not PutRefusalReason.OVER_QUOTA
        assert not (sick and isinstance(outcome, PutGrant))

    @invariant()
    def nobody_is_over_quota(self):
        if hasattr(self, "world"):
            for usage in self.world.ledger.owners():
                assert usage.tenant != "v" or usage.blocks <= QUOTA

    def teardown(self):
        if hasattr(self, "world"):
            self.world.empty()


TestInterleavings = Interleavings.TestCase
TestInterleavings.settings = settings(max_examples=150, stateful_step_count=50)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_thousands_of_interleavings():
    run_state_machine_as_test(
        Interleavings, settings=settings(max_examples=3000, stateful_step_count=60)
    )
