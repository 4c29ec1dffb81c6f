"""What moves between a node's memory and its disk, one promise at a time. Bytes, readers and writers are checked by the
world around it.
"""

from kvpool.messages import Demote, Promote, PutRefused, Tier
from tests.kvpool.node.ledger_world import (
    chain,
    key,
    two_tiers,
    world,
)


def test_blocks_go_to_the_disk_above_the_high_watermark():
    node = two_tiers()
    node.put("abc")
    (move,) = node.moves
    assert isinstance(move, Demote)
    assert move.block.key == key("abc", 2)
    node.answer()
    assert node.directory[key("abc", 2)].tier is Tier.SSD
    assert node.ledger.held(chain("abc")) == 3
    assert node.ledger.usage().slots_free == 2
    node.empty()


def test_a_slot_is_not_used_again_before_its_copy_is_answered():
    node = world(3, 8, high_watermark=0.1, low_watermark=0.0)
    node.put("abc")
    assert len(node.moves) == 3
    assert isinstance(node.reserve("x"), PutRefused)
    node.answer()
    assert node.put("x") == 1


def test_a_lease_brings_blocks_back_from_the_disk():
    node = two_tiers()
    node.put("abc")
    node.answer_all()
    lease = node.lease("abc")
    assert len(lease.blocks) == 2
    assert node.ledger.loading(lease.lease_id) == 1
    assert isinstance(node.moves[0], Promote)
    node.answer()
    assert len(node.ledger.leased(lease.lease_id).blocks) == 3
    assert node.ledger.usage().promoted_blocks == 1
    node.empty()


def test_a_block_that_is_on_the_disk_too_leaves_memory_without_a_copy():
    node = two_tiers()
    node.put("abc")
    node.answer_all()
    node.release(node.lease("abc").lease_id)
    node.answer_all()
    node.put("x")
    node.put("y")
    node.sweep()
    keys = [move.block.key for move in node.moves]
    assert key("abc", 2) not in keys
    assert node.directory[key("abc", 2)].tier is Tier.SSD


def test_a_block_that_is_read_while_it_is_copied_stays_in_memory():
    node = two_tiers()
    node.put("abc")
    lease = node.lease("abc")
    assert len(lease.blocks) == 3
    node.answer()
    assert node.directory[key("abc", 2)].tier is Tier.DRAM


def test_a_copy_that_fails_leaves_the_block_in_memory():
    node = two_tiers()
    node.put("abc")
    node.answer(fails=True)
    assert node.ledger.held(chain("abc")) == 3
    assert node.ledger.usage().ssd_blocks == 0


def test_a_disk_that_keeps_failing_is_left_alone_for_a_while():
    node = two_tiers()
    node.put("abc")
    for _ in range(3):
        node.answer(fails=True)
        node.sweep()
    assert not node.moves
    node.sweep(31.0)
    assert node.moves


def test_a_block_that_cannot_be_read_back_is_a_miss():
    node = two_tiers()
    node.put("abc")
    node.answer_all()
    lease = node.lease("abc")
    node.answer(fails=True)
    assert node.ledger.held(chain("abc")) == 2
    assert node.ledger.loading(lease.lease_id) == 0
    assert len(node.ledger.leased(lease.lease_id).blocks) == 2
    node.empty()


def test_an_answer_that_comes_twice_changes_nothing():
    node = two_tiers()
    node.put("abc")
    (move,) = node.moves
    assert isinstance(move, Demote)
    node.answer()
    before = node.ledger.usage()
    node.ledger.tier_moves.written(move, node.now_s)
    node.ledger.tier_moves.io_failed(move, node.now_s)
    node.check()
    assert node.ledger.usage() == before


def test_a_full_disk_gives_up_its_own_oldest():
    node = world(4, 2, high_watermark=0.5, low_watermark=0.5)
    for text in "abcdefgh":
        node.put(text)
        node.answer_all()
    assert node.ledger.usage().ssd_blocks == 2
    assert node.ledger.usage().evicted_blocks > 0
    node.empty()


def test_what_is_flushed_while_it_is_copied_stays_nowhere():
    node = two_tiers()
    node.put("abc")
    node.flush()
    node.answer_all()
    assert node.ledger.usage().ssd_blocks == 0
    assert not node.extents
    node.empty()


def test_cold_copies_are_not_written_to_the_disk():
    node = two_tiers()
    node.commit(node.reserve("xyz", fetched=True).put_id)
    node.sweep(300.0)
    assert node.moves == []
    assert node.ledger.usage().copies == 2
    node.empty()
