import pytest

from baton.errors import InvariantError
from baton.ids import BlockId, BlockKey
from baton_engine.cache.page_story import PageStory
from baton_engine.cache.prefix_tree import PrefixTree


def key(name: str) -> BlockKey:
    return BlockKey(name.encode())


def block(number: int) -> BlockId:
    return BlockId(number)


def tree_of(*chain: str) -> PrefixTree:
    """A chain of pages 0, 1, 2… in use."""
    tree = PrefixTree(PageStory())
    for index, name in enumerate(chain):
        tree.insert(key(name), block(index), block(index - 1) if index else None)
    return tree


def test_the_longest_held_prefix_is_matched():
    tree = tree_of("a", "ab")
    assert tree.match([key("a"), key("ab"), key("abc")]) == [0, 1]


def test_a_chain_that_differs_in_its_first_block_matches_nothing():
    assert tree_of("a", "ab").match([key("x"), key("ab")]) == []


def test_the_page_that_was_first_under_a_key_stays():
    tree = tree_of("a")
    assert tree.insert(key("a"), block(7), None) == 0
    assert block(7) not in tree


def test_the_page_idle_longest_is_evicted_first_and_a_parent_after_its_children():
    tree = tree_of("a", "ab")
    tree.insert(key("ac"), block(2), block(0))
    for number in (2, 1, 0):
        tree.retire(block(number))
    assert [node.block for node in (*tree.evict(1), *tree.evict(4))] == [2, 1, 0]
    assert len(tree) == 0


def test_a_page_that_is_used_again_is_not_evicted():
    tree = tree_of("a")
    tree.retire(block(0))
    tree.revive(block(0))
    assert tree.evict(1) == []
    assert tree.match([key("a")]) == [0]


def test_a_used_page_below_an_idle_one_is_a_broken_invariant():
    tree = tree_of("a", "ab")
    tree.retire(block(0))
    with pytest.raises(InvariantError, match="its parent is idle"):
        tree.check_integrity()


def test_evicting_a_page_that_others_hang_on_is_a_broken_invariant():
    tree = tree_of("a", "ab")
    tree.retire(block(0))
    with pytest.raises(InvariantError, match="children"):
        tree.evict(1)


def test_changes_tell_what_came_and_went_each_page_after_the_one_before_it():
    tree = tree_of("a", "ab")
    assert tree.changes.take().stored == (key("a"), key("ab"))
    for number in (1, 0):
        tree.retire(block(number))
    tree.evict(2)
    assert tree.changes.take().removed == (key("ab"), key("a"))


def test_a_page_that_came_and_went_between_two_looks_is_no_change():
    tree = tree_of("a")
    tree.changes.take()
    tree.insert(key("ab"), block(1), block(0))
    tree.retire(block(1))
    tree.evict(1)
    assert len(tree.changes) == 0
