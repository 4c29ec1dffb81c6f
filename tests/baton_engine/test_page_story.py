"""The bounded log of what happened to the pages of an arena."""

import pytest

from baton.errors import InvariantError
from baton.ids import BlockId, BlockKey, SeqId
from baton_engine.cache.blocks import BlockManager
from baton_engine.cache.page_story import PageStory

A, B = SeqId("a"), SeqId("b")


def pages(*numbers: int) -> list[BlockId]:
    return [BlockId(number) for number in numbers]


def test_an_operation_is_told_by_its_sequence_its_pages_and_its_blocks():
    story = PageStory()
    story.now_s = 2.0
    key = BlockKey(bytes(16))
    story.record("published", pages(3, 4), keys=[key], seq_id=A)
    story.record("allocated", pages(5), seq_id=B)
    assert story.story(A) == story.story(BlockId(4)) == story.story(key)
    (entry,) = story.story(key)
    assert str(entry) == f"2.000000 published: 2 pages (3 4), last block {'00' * 16}, a"
    assert story.story(SeqId("c")) == story.story(BlockId(6)) == ()


def test_of_many_pages_the_first_are_shown():
    story = PageStory()
    story.record("allocated", pages(*range(100)), seq_id=A)
    assert story.story(A)[0].event == "allocated: 100 pages (0 1 2 3 4 5 6 7 and 92 more), a"


def test_what_is_kept_is_bounded_by_operations_and_by_pages():
    story = PageStory()
    for turn in range(20_000):
        story.record("allocated", pages(turn), seq_id=A)
    kept = story.story(A)
    assert len(kept) == 16_384
    assert "19999" in kept[-1].event
    story.record("allocated", pages(*range(200_000)), seq_id=B)
    assert story.story(A) == ()
    assert len(story.story(B)) == 1


def test_an_error_about_a_page_carries_what_happened_to_it():
    manager = BlockManager(2)
    blocks = manager.take((), 1)
    assert blocks is not None
    manager.publish(BlockKey(b"k"), blocks[0], None)
    manager.release(blocks)
    manager.take((), 2)
    manager.release(blocks)
    with pytest.raises(InvariantError, match="more often than taken") as raised:
        manager.release(blocks)
    assert "evicted: 1 pages" in raised.value.story_text
