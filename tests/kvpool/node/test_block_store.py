"""What the slots of a node refuse, and what they tell of it. How blocks come and go is in `test_ledger`."""

import pytest

from baton.errors import InvariantError
from baton.ids import BlockKey
from kvpool.eviction.lru import LeastRecentlyUsed
from kvpool.messages import Allowance, Selection
from kvpool.node.accounts import Accounts
from kvpool.node.block_store import TRANSITIONS, BlockStore, SlotState
from tests.kvpool.node.ledger_world import owner

KEY = BlockKey(b"k" * 16)


def test_a_transition_that_the_table_has_not_is_refused_with_the_blocks_story():
    policies = (LeastRecentlyUsed, LeastRecentlyUsed)
    accounts = Accounts(block_bytes=8, usual=Allowance(), policies=policies)
    blocks = BlockStore(num_slots=1, num_extents=0, first_epoch=1)
    billing = accounts.billing(owner(), 8)
    slot = blocks.take(blocks.memory, KEY, billing, 0, SlotState.RESERVED)
    blocks.story.record("reserved by a-p1", (slot,))
    with pytest.raises(InvariantError, match="RESERVED to DEMOTING") as refused:
        blocks.memory.move(slot, SlotState.DEMOTING)
    assert "reserved by a-p1" in refused.value.story_text


def test_every_state_can_be_left_and_entered():
    assert TRANSITIONS.keys() == set(SlotState)
    assert frozenset().union(*TRANSITIONS.values()) == set(SlotState)


def test_owners_without_blocks_are_forgotten_though_their_tenant_has_some():
    """A tenant's clients name as many cache scopes as they like (`cache_salt`)."""
    policies = (LeastRecentlyUsed, LeastRecentlyUsed)
    accounts = Accounts(block_bytes=8, usual=Allowance(), policies=policies)
    blocks = BlockStore(num_slots=2, num_extents=0, first_epoch=1)
    stays = accounts.billing(owner(), 8)
    blocks.take(blocks.memory, KEY, stays, 0, SlotState.RESERVED)
    for number in range(10_000):
        billing = accounts.billing(owner(scope=f"salt {number}"), 8)
        key = BlockKey(number.to_bytes(16, "little"))
        slot = blocks.take(blocks.memory, key, billing, 0, SlotState.RESERVED)
        blocks.give_up(slot)
        blocks.free(slot)
        accounts.forget_empty()
    blocks.check_integrity(accounts)
    accounts.check_integrity()
    assert accounts.billing(owner(), 8) is stays
    assert len(accounts.covered(Selection())) < 2_000
