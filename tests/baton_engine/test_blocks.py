import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from baton.errors import InvariantError
from baton.ids import BlockId, BlockKey
from baton_engine.cache.blocks import BlockManager

NUM_BLOCKS = 8


def chain(text: str) -> list[BlockKey]:
    """One block per character."""
    return [BlockKey(text[: end + 1].encode()) for end in range(len(text))]


def publish(manager: BlockManager, text: str, blocks: list[BlockId]) -> None:
    for index, key in enumerate(chain(text)):
        held = manager.publish(key, blocks[index], blocks[index - 1] if index else None)
        if held != blocks[index]:
            own, blocks[index] = blocks[index], held
            manager.release([own])


def taken(manager: BlockManager, count: int) -> list[BlockId]:
    blocks = manager.take((), count)
    assert blocks is not None
    return blocks


def test_pages_are_taken_all_or_nothing():
    manager = BlockManager(4)
    taken(manager, 3)
    assert manager.take((), 2) is None
    assert (manager.num_free, manager.num_used) == (1, 3)


def test_headroom_stays_available():
    manager = BlockManager(4)
    assert manager.take((), 3, headroom=2) is None
    assert manager.take((), 2, headroom=2) is not None


def test_a_matched_page_that_was_cached_counts_against_the_room():
    manager = BlockManager(2)
    blocks = taken(manager, 1)
    publish(manager, "a", blocks)
    manager.release(blocks)
    matched = manager.match(chain("a"))
    assert manager.take(matched, 2) is None
    assert manager.take(matched, 1) is not None


def test_published_pages_become_cached_and_others_free():
    manager = BlockManager(4)
    blocks = taken(manager, 3)
    publish(manager, "ab", blocks)
    manager.release(blocks)
    assert (manager.num_free, manager.num_cached, manager.num_used) == (2, 2, 0)
    assert manager.match(chain("abc")) == blocks[:2]


def test_cached_pages_are_evicted_from_the_end_of_the_text_least_recently_used():
    manager = BlockManager(4)
    old, new = taken(manager, 2), taken(manager, 2)
    publish(manager, "ab", old)
    publish(manager, "xy", new)
    manager.release(old)
    manager.release(new)
    taken(manager, 1)
    assert manager.match(chain("ab")) == old[:1]
    assert manager.match(chain("xy")) == new


def test_equal_text_is_held_once():
    manager = BlockManager(4)
    first, second = taken(manager, 2), taken(manager, 2)
    publish(manager, "ab", first)
    publish(manager, "ab", second)
    assert second == first
    assert (manager.num_free, manager.num_used) == (2, 2)


def test_a_shared_page_is_written_through_a_fresh_one():
    manager = BlockManager(3)
    (page,) = taken(manager, 1)
    manager.share([page])
    assert manager.writable(page) not in (page, None)
    assert manager.writable(page) == page


def test_a_shared_page_cannot_be_written_without_room_for_its_copy():
    manager = BlockManager(1)
    (page,) = taken(manager, 1)
    manager.share([page])
    assert manager.writable(page) is None
    manager.check_integrity([page, page])


def test_flushing_frees_what_is_cached_and_spares_what_is_used():
    manager = BlockManager(4)
    used, unused = taken(manager, 1), taken(manager, 2)
    publish(manager, "a", used)
    publish(manager, "xy", unused)
    manager.release(unused)
    assert manager.flush() == 2
    assert manager.match(chain("a")) == used
    assert manager.match(chain("x")) == []


def test_releasing_a_page_twice_is_a_broken_invariant():
    manager = BlockManager(1)
    pages = taken(manager, 1)
    manager.release(pages)
    with pytest.raises(InvariantError, match="more often"):
        manager.release(pages)


def test_full_pages_are_published_before_they_are_shared():
    manager = BlockManager(2)
    pages = taken(manager, 1)
    manager.share(pages)
    with pytest.raises(InvariantError, match="after it was shared"):
        publish(manager, "a", pages)


def test_a_reference_that_nobody_holds_is_found():
    manager = BlockManager(1)
    taken(manager, 1)
    with pytest.raises(InvariantError, match="references"):
        manager.check_integrity([])


class Holder:
    """A text, one character per page, and the pages that hold it."""

    def __init__(self, text: str, blocks: list[BlockId]) -> None:
        self.text = text
        self.blocks = blocks


class BlocksAgainstModel(RuleBasedStateMachine):
    """The model: `content` says what text each page holds, as the writers of pages know it."""

    holders = Bundle("holders")

    def __init__(self) -> None:
        super().__init__()
        self.manager = BlockManager(NUM_BLOCKS)
        self.held: list[Holder] = []
        self.content: dict[BlockId, str] = {}

    @rule(target=holders, text=st.text("ab", min_size=1, max_size=5), headroom=st.integers(0, 3))
    def take_text(self, text: str, headroom: int):
        matched = self.manager.match(chain(text))
        for end, page in enumerate(matched, start=1):
            assert self.content[page] == text[:end]
        before = self.manager.num_available
        blocks = self.manager.take(matched, len(text) - len(matched), headroom=headroom)
        if blocks is None:
            assert before < len(text) + headroom
            return multiple()
        assert self.manager.num_available >= headroom
        for end, page in list(enumerate(blocks, start=1))[len(matched) :]:
            assert all(page not in holder.blocks for holder in self.held)
            self.content[page] = text[:end]
        holder = Holder(text, blocks)
        self.held.append(holder)
        return holder

    @rule(holder=holders)
    def publish_text(self, holder: Holder):
        publish(self.manager, holder.text, holder.blocks)
        for end, page in enumerate(holder.blocks, start=1):
            assert self.content[page] == holder.text[:end]

    @rule(target=holders, holder=holders)
    def fork(self, holder: Holder):
        publish(self.manager, holder.text, holder.blocks)
        self.manager.share(holder.blocks)
        forked = Holder(holder.text, list(holder.blocks))
        self.held.append(forked)
        return forked

    @rule(holder=consumes(holders))
    def release(self, holder: Holder):
        self.held.remove(holder)
        self.manager.release(holder.blocks)

    @rule()
    def flush(self):
        self.manager.flush()
        assert self.manager.num_cached == 0

    @invariant()
    def books_are_right(self):
        manager = self.manager
        held = [page for holder in self.held for page in holder.blocks]
        manager.check_integrity(held)
        assert manager.num_used == len(set(held))
        assert manager.num_free + manager.num_cached + manager.num_used == NUM_BLOCKS

    def teardown(self):
        for holder in self.held:
            self.manager.release(holder.blocks)
        assert self.manager.num_used == 0
        self.manager.check_integrity([])


TestBlocksAgainstModel = BlocksAgainstModel.TestCase
TestBlocksAgainstModel.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
