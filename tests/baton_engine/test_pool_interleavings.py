"""The same with a pool that both engines share, whose leases end at any moment and whose pages are copied at any
moment.
"""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule

from baton_engine.fakes.pool import FakeKvSource
from baton_engine.messages import Abort, Failed
from tests.baton_engine.scheduling_world import World, limits
from tests.baton_engine.test_scheduler_interleavings import EOS, Interleavings


class PoolInterleavings(Interleavings):
    """Whatever was fetched, tokens are those of an undisturbed run; only a sequence whose fetch failed fails."""

    @initialize(
        block_tokens=st.sampled_from([1, 2, 4]),
        pages_tokens=st.integers(26, 44),
        max_num_batched_tokens=st.integers(3, 16),
        eager=st.booleans(),
    )
    def begin(self, block_tokens, pages_tokens, max_num_batched_tokens, eager):
        some = limits(
            block_tokens=block_tokens,
            num_blocks=-(-pages_tokens // block_tokens),
            max_num_seqs=4,
            max_num_batched_tokens=max_num_batched_tokens,
            vocab_size=128,
        )
        self.pool = FakeKvSource()
        self.source = World(some, eos_ids=EOS, pool=self.pool, num_layers=2, patience=4)
        self.target = World(some, eos_ids=EOS, pool=self.pool, num_layers=2, patience=4)
        for world in (self.source, self.target):
            world.block_sink.eager = eager
        self.local, self.moving = {}, {}
        self.unasked, self.started, self.cut = set(), set(), set()
        self.compiling = {}

    @rule()
    def copy_what_was_offered(self):
        self.source.block_sink.copy_all()
        self.target.block_sink.copy_all()

    @rule(data=st.data())
    def lose_the_lease(self, data):
        """The sequence fails if it fetches."""
        known = [*self.local, *self.moving]
        if known:
            self.target.source.expiring.add(data.draw(st.sampled_from(known)))

    @rule(data=st.data())
    def give_no_lease(self, data):
        known = [*self.local, *self.moving]
        if known:
            self.target.source.unleased.add(data.draw(st.sampled_from(known)))

    @rule()
    def evict_from_the_pool(self):
        for key in list(self.pool.blocks)[::2]:
            del self.pool.blocks[key]

    @rule(count=st.integers(1, 6))
    def step_target(self, count: int):
        for _ in range(count):
            self.target.step()
        self._cut_failed()

    @rule(row=st.integers(0, 5))
    def fail_a_row(self, row: int):
        self.target.step(failing_row=row)
        self._cut_failed()

    def _cut_failed(self):
        for seq_id in {*self.local, *self.moving} - self.cut:
            if self.target.told(Failed, seq_id):
                self._tell_both(Abort(seq_id=seq_id))

    @invariant()
    def what_the_pool_holds_is_what_its_keys_say(self):
        """Two engines that compute the same block write the same; no page that was overwritten got through."""
        for world in (self.source, self.target) if hasattr(self, "pool") else ():
            for page in world.block_sink.offered:
                if world.scheduler.generation(page.block) == page.generation:
                    held = self.pool.blocks.get(page.key)
                    assert held is None or held == world.runner.pages[page.block]

    def teardown(self):
        if hasattr(self, "pool"):
            self.target.source.expiring.clear()
        super().teardown()


TestPoolInterleavings = PoolInterleavings.TestCase
TestPoolInterleavings.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
