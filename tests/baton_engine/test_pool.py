"""What an engine reads from a pool and writes to it: the same tokens, fewer computed, wrong bytes nowhere."""

import pytest

from baton.errors import CorruptKvError, TransferError, disposition
from baton.ids import SeqId
from baton_engine.fakes.pool import FakeKvSource
from baton_engine.messages import (
    Abort,
    Failed,
    FlushCache,
    Generate,
    Prefill,
    PrefillStarted,
    Receive,
    Release,
    Reserved,
)
from tests.baton_engine.scheduling_world import World, hand_off, limits, prompt

A, B, C = SeqId("a"), SeqId("b"), SeqId("c")


def filled(*prompts) -> FakeKvSource:
    """A pool with all full blocks of the prompts, computed elsewhere."""
    pool = FakeKvSource()
    elsewhere = World(limits(), pool=pool)
    for place, asked in enumerate(prompts):
        elsewhere.tell(Generate(seq_id=SeqId(f"f{place}"), prompt=asked))
    elsewhere.run()
    return pool


def computed(world: World) -> int:
    return sum(row.num_tokens for plan in world.plans for row in plan.rows)


def test_full_pages_are_published_once_with_what_names_them():
    pool = FakeKvSource()
    world = World(limits(), pool=pool)
    world.block_sink.eager = False
    world.tell(Generate(seq_id=A, prompt=prompt(10, max_tokens=4, scope="blue")))
    world.run()
    assert [page.index for page in world.block_sink.offered] == [0, 1, 2]
    assert {page.scope for page in world.block_sink.offered} == {"blue"}
    world.block_sink.copy_all()
    assert len(pool.blocks) == 3


def test_nothing_is_published_without_a_prefix_cache():
    world = World(limits(), pool=FakeKvSource(), enable_prefix_caching=False)
    world.tell(Generate(seq_id=A, prompt=prompt(10)))
    world.run()
    assert world.pool is not None
    assert world.pool.blocks == {}


def test_nothing_is_remembered_where_nobody_listens():
    world = World(limits())
    world.tell(Generate(seq_id=A, prompt=prompt(10)))
    world.run()
    assert world.scheduler.take_published() == []


def test_what_a_pool_holds_is_fetched_and_not_computed():
    asked = prompt(30)
    world = World(limits(), pool=filled(asked))
    world.tell(Generate(seq_id=A, prompt=asked))
    world.run()
    assert world.tokens(A) == world.undisturbed(asked)
    assert (world.cached_tokens(A), world.pooled_tokens(A)) == (0, 28)
    assert computed(world) == 2 + 4
    assert world.scheduler.load().pool_hit_tokens == 28
    world.assert_empty()


def test_at_least_one_token_is_computed():
    asked = prompt(32)
    world = World(limits(), pool=filled(prompt(33)))
    world.tell(Generate(seq_id=A, prompt=asked))
    world.run()
    assert world.pooled_tokens(A) == 28
    assert world.tokens(A) == world.undisturbed(asked)


def test_the_engines_own_pages_come_first_and_the_pool_adds_to_them():
    asked = prompt(30)
    world = World(limits(), pool=filled(asked))
    assert world.pool is not None
    world.source.unleased.add(A)
    world.tell(Generate(seq_id=A, prompt=prompt(13, max_tokens=1)))
    world.run()
    world.tell(Generate(seq_id=B, prompt=asked))
    world.run()
    assert (world.cached_tokens(B), world.pooled_tokens(B)) == (12, 16)
    assert [fetch.first_block for fetch in world.source.fetched] == [3]
    assert world.tokens(B) == world.undisturbed(asked)


def test_what_was_fetched_is_shared_here_and_not_offered_back():
    asked = prompt(30, max_tokens=1)
    world = World(limits(), pool=filled(asked))
    world.block_sink.eager = False
    for seq_id in (A, B):
        world.tell(Generate(seq_id=seq_id, prompt=asked))
        world.run()
    assert (world.cached_tokens(B), world.pooled_tokens(B)) == (28, 0)
    assert world.block_sink.offered == []


def test_a_longer_text_publishes_only_what_follows_the_fetched_part():
    world = World(limits(), pool=filled(prompt(20, max_tokens=1)))
    world.block_sink.eager = False
    world.tell(Generate(seq_id=A, prompt=prompt(30, max_tokens=1)))
    world.run()
    assert [page.index for page in world.block_sink.offered] == [5, 6]


def test_pages_that_came_by_a_hand_off_are_not_offered():
    asked = prompt(12, max_tokens=6)
    source, target = World(limits()), World(limits(), pool=FakeKvSource())
    target.block_sink.eager = False
    source.tell(Prefill(seq_id=A, prompt=asked))
    target.tell(Receive(seq_id=A, prompt=asked))
    source.run()
    target.run()
    hand_off(source, target, A)
    target.run()
    assert [page.index for page in target.block_sink.offered] == [3]


def test_a_reservation_never_fetches():
    asked = prompt(30)
    world = World(limits(), pool=filled(asked))
    world.tell(Receive(seq_id=A, prompt=asked))
    world.run()
    (reserved,) = world.told(Reserved, A)
    assert reserved.held_blocks == 0
    assert world.source.fetched == []


def test_a_prompt_whose_logprobs_are_wanted_is_computed():
    asked = prompt(30, prompt_logprobs=1)
    world = World(limits(), pool=filled(prompt(30)))
    world.tell(Generate(seq_id=A, prompt=asked))
    world.run()
    assert world.source.fetched == []


def test_prompts_of_another_scope_find_nothing():
    world = World(limits(), pool=filled(prompt(30, scope="blue")))
    world.tell(Generate(seq_id=A, prompt=prompt(30, scope="red")))
    world.run()
    assert world.pooled_tokens(A) == 0


def test_several_samples_share_what_was_fetched():
    asked = prompt(30, samples=3)
    world = World(limits(), pool=filled(prompt(30)))
    world.tell(Generate(seq_id=A, prompt=asked))
    world.run()
    for sample in range(3):
        assert world.tokens(A, sample) == world.undisturbed(asked, sample)
    world.assert_empty()


def test_a_fetched_prompt_is_exported_whole():
    asked = prompt(30)
    world = World(limits(), pool=filled(asked))
    world.tell(Prefill(seq_id=A, prompt=asked))
    world.run()
    assert [(e.first_block, len(e.blocks)) for e in world.exports(A)] == [(0, 8)]
    world.tell(Release(seq_id=A))
    world.assert_empty()


@pytest.fixture
def corrupt():
    """A world whose pool holds a wrong block of a prompt, and a neighbour that computes beside."""
    asked = prompt(30)
    pool = filled(asked)
    pool.corrupt.add(list(pool.blocks)[3])
    return World(limits(), pool=pool), asked


def test_a_failed_fetch_fails_its_own_sequence_retryably(corrupt):
    world, asked = corrupt
    beside = prompt(tuple(range(500, 520)))
    world.tell(Generate(seq_id=A, prompt=asked), Generate(seq_id=B, prompt=beside))
    world.run()
    assert isinstance(world.error_of(A), CorruptKvError)
    assert disposition(world.error_of(A)).retryable
    assert world.tokens(A) == []
    assert world.tokens(B) == world.undisturbed(beside)
    world.assert_empty()


def test_pages_of_a_failed_fetch_are_never_shared_nor_published(corrupt):
    world, asked = corrupt
    world.block_sink.eager = False
    world.tell(Generate(seq_id=A, prompt=asked))
    world.run()
    assert world.block_sink.offered == []
    assert world.scheduler.load().blocks_cached == 0
    world.source.unleased.add(B)
    world.tell(Generate(seq_id=B, prompt=asked))
    world.run()
    assert (world.cached_tokens(B), world.tokens(B)) == (0, world.undisturbed(asked))


def test_a_failed_fetch_leaves_what_was_cached_before_it(corrupt):
    world, asked = corrupt
    world.source.unleased.add(A)
    world.tell(Generate(seq_id=A, prompt=prompt(9, max_tokens=1)))
    world.run()
    world.tell(Generate(seq_id=B, prompt=asked))
    world.run()
    assert isinstance(world.error_of(B), CorruptKvError)
    assert world.scheduler.load().blocks_cached == 2


def test_a_lease_that_ends_too_soon_fails_the_sequence_and_the_retry_computes():
    asked = prompt(30)
    world = World(limits(), pool=filled(asked))
    world.source.expiring.add(A)
    world.tell(Generate(seq_id=A, prompt=asked))
    world.run()
    assert isinstance(world.error_of(A), TransferError)
    world.source.unleased.add(B)
    world.tell(Generate(seq_id=B, prompt=asked))
    world.run()
    assert world.tokens(B) == world.undisturbed(asked)
    world.assert_empty()


def test_without_an_offer_everything_is_computed():
    asked = prompt(30)
    world = World(limits(), pool=filled(asked))
    world.source.unleased.add(A)
    world.tell(Generate(seq_id=A, prompt=asked))
    world.run()
    assert world.pooled_tokens(A) == 0
    assert world.tokens(A) == world.undisturbed(asked)


def test_a_preempted_sequence_comes_back_from_the_pool():
    world = World(limits(num_blocks=12, max_num_batched_tokens=32), pool=FakeKvSource())
    first, second = prompt(16, max_tokens=20), prompt(tuple(range(100, 118)), max_tokens=20)
    world.tell(Generate(seq_id=A, prompt=first), Generate(seq_id=B, prompt=second))
    world.run()
    assert world.scheduler.load().preemptions > 0
    again = world.told(PrefillStarted, B)[1:]
    assert any(event.pooled_tokens for event in again)
    (seq_id, keys), *_ = world.source.wanted
    assert seq_id == B
    assert len(keys) >= 4
    for seq_id, asked in ((A, first), (B, second)):
        assert world.tokens(seq_id) == world.undisturbed(asked)
    world.assert_empty()


def test_the_source_forgets_a_sequence_once_it_was_admitted_or_is_gone():
    asked = prompt(30)
    world = World(limits(), pool=filled(asked))
    world.tell(Generate(seq_id=A, prompt=asked), Generate(seq_id=B, prompt=prompt(500)))
    assert world.source.forgotten == [B], "refused at once: it is too long"
    world.step()
    assert A in world.source.forgotten
    world.tell(Generate(seq_id=C, prompt=asked), Abort(seq_id=C))
    assert C in world.source.forgotten


def test_a_sample_that_fetches_nothing_gives_no_lease_of_one_beside_it_back():
    world = World(limits(num_blocks=8, max_num_batched_tokens=64), pool=FakeKvSource())
    other, both = prompt((100, 101, 102, 103), max_tokens=20), prompt(3, samples=2, max_tokens=20)
    world.tell(Generate(seq_id=A, prompt=other), Generate(seq_id=B, prompt=both))
    while len(world.source.wanted) < 2:
        world.step()
    (_, of_last), (_, of_first) = world.source.wanted
    assert world.pool is not None
    for key in set(of_last) - set(of_first):
        world.pool.blocks.pop(key, None)
    for _ in range(100):
        num_forgotten = world.source.forgotten.count(B)
        plan, _ = world.scheduler.schedule(0.0)
        assert plan is not None
        assert world.source.forgotten.count(B) == num_forgotten
        world.scheduler.update_from_output(plan, world.runner.execute(plan), 0.0)
        if plan.fetches:
            assert len([row for row in plan.rows if row.seq.seq_id == B]) == 2
            assert len(plan.fetches) == 1
            assert world.source.forgotten[-1] == B
            return
    raise AssertionError("nothing was fetched")


def test_a_page_that_is_handed_out_again_gets_another_generation():
    world = World(limits(num_blocks=8), pool=FakeKvSource())
    world.block_sink.eager = False
    world.tell(Generate(seq_id=A, prompt=prompt(20, max_tokens=1)))
    world.run()
    held = list(world.block_sink.offered)
    assert all(world.scheduler.generation(page.block) == page.generation for page in held)
    world.tell(
        FlushCache(), Generate(seq_id=B, prompt=prompt(tuple(range(100, 130)), max_tokens=1))
    )
    world.step()
    assert any(world.scheduler.generation(page.block) != page.generation for page in held)


def test_what_was_handed_out_before_it_was_copied_never_reaches_the_pool():
    pool = FakeKvSource()
    world = World(limits(num_blocks=8), pool=pool)
    world.block_sink.eager = False
    for number in range(6):
        tokens = tuple(range(100 * number, 100 * number + 25))
        world.tell(Generate(seq_id=SeqId(f"s{number}"), prompt=prompt(tokens, max_tokens=1)))
        world.run()
    world.block_sink.copy_all()
    reader = World(limits(), pool=pool)
    for number in range(6):
        tokens = tuple(range(100 * number, 100 * number + 25))
        asked = prompt(tokens)
        reader.tell(Generate(seq_id=SeqId(f"s{number}"), prompt=asked))
        reader.run()
        assert reader.tokens(f"s{number}") == reader.undisturbed(asked)
    assert not any(isinstance(event, Failed) for event in reader.events)
