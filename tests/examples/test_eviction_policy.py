"""`examples/eviction_policy.py`, plugged in as its first lines say, under a pool node's ledger."""

import pytest

from baton.ids import BlockKey
from examples.eviction_policy import DeepestFirst
from kvpool.eviction.policy import EvictionPolicy
from kvpool.eviction.select import POLICIES
from kvpool.messages import Owner, PutGrant
from kvpool.node.ledger import NodeLedger, NodeLimits

OWNER = Owner(tenant="anna", scope="s", model="m")


def text(name: bytes, num_blocks: int) -> list[BlockKey]:
    return [BlockKey(name + bytes([at])) for at in range(num_blocks)]


@pytest.fixture
def ledger(monkeypatch: pytest.MonkeyPatch) -> NodeLedger:
    monkeypatch.setitem(POLICIES, "deepest", DeepestFirst)
    return NodeLedger(NodeLimits(num_slots=6, slot_bytes=8, eviction="deepest"), "a")


def put(ledger: NodeLedger, keys: list[BlockKey]) -> None:
    grant = ledger.reserve(keys, OWNER, 0.0)
    assert isinstance(grant, PutGrant)
    assert ledger.commit(grant.put_id, [bytes(8)] * len(grant.items), 0.0) == len(keys)
    ledger.check_integrity()


def test_the_deepest_blocks_of_a_full_node_go_first(ledger: NodeLedger):
    long, short = text(b"long", 4), text(b"short", 2)
    put(ledger, long)
    put(ledger, short)
    put(ledger, text(b"other", 2))
    assert ledger.held(long) == 2
    assert ledger.held(short) == 2


def test_a_block_that_is_being_read_stays(ledger: NodeLedger):
    long = text(b"long", 4)
    put(ledger, long)
    lease = ledger.lease(long, 10.0, 0.0)
    put(ledger, text(b"other", 2))
    put(ledger, text(b"third", 2))
    assert ledger.held(long) == 4
    ledger.release(lease.lease_id)
    ledger.check_integrity()


def test_what_it_holds_it_counts_and_gives_up_once():
    policy: EvictionPolicy = DeepestFirst()
    keys = text(b"t", 3)
    policy.admitted(keys, 0)
    policy.used(keys)
    policy.removed(keys[0])
    assert len(policy) == 2
    assert policy.victims(5, lambda key: key != keys[2]) == [keys[1]]
    assert keys[2] in policy
