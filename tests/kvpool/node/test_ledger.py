"""What a node promises of its blocks, one promise at a time. Bytes,
readers and writers are checked by the world around it.
"""

import pytest

from baton.errors import InvariantError
from baton.ids import BlockKey
from kvpool.eviction.lru import LeastRecentlyUsed
from kvpool.eviction.policy import MayGo
from kvpool.eviction.select import POLICIES
from kvpool.messages import (
    Allowance,
    DiskBlock,
    Promote,
    PutGrant,
    PutRefusalReason,
    PutRefused,
)
from kvpool.node.ledger import NodeLedger
from tests.kvpool.node.ledger_world import (
    SLOT_BYTES,
    World,
    bytes_of,
    chain,
    key,
    limits,
    owner,
    two_tiers,
    world,
)


def test_a_block_is_held_once_it_is_committed():
    node = world()
    put = node.reserve("abc")
    assert node.ledger.held(chain("abc")) == 0
    assert node.commit(put.put_id) == 3
    assert node.ledger.held(chain("abcd")) == 3
    assert [block.key for block in node.lease("abcd").blocks] == chain("abc")
    node.empty()


def test_places_are_given_only_for_what_nobody_holds_or_writes():
    node = world()
    node.put("ab")
    node.reserve("abc")
    assert [item.key for item in node.reserve("abcd").items] == [key("abcd", 3)]
    assert node.reserve("abcd") == PutGrant(put_id="", items=())


def test_a_block_that_was_not_written_is_not_held():
    node = world()
    put = node.reserve("abc")
    assert node.commit(put.put_id, skip=1) == 2
    assert node.ledger.held(chain("abc")) == 1
    node.empty()


def test_an_abandoned_put_leaves_nothing():
    node = world()
    node.abandon(node.reserve("abc").put_id)
    assert node.ledger.usage().slots_free == 8
    assert node.put("abc") == 3


def test_a_put_that_is_too_late_commits_nothing_and_its_places_wait():
    node = world(3)
    late = node.reserve("abc")
    node.sweep(10.0)
    assert node.ledger.usage().zombie_puts == 1
    assert node.reserve("xyz") == PutRefused(
        reason=PutRefusalReason.FULL, detail="all blocks are in use"
    )
    assert node.commit(late.put_id) == 0  # it says so at last: nobody writes there any more
    assert node.put("xyz") == 3


def test_places_of_a_zombie_are_free_after_as_much_time_again():
    node = world(3)
    node.reserve("abc")
    node.sweep(10.0)
    node.sweep(9.0)
    assert node.ledger.usage().slots_free == 0
    node.sweep(1.0)
    assert node.ledger.usage().slots_free == 3


def test_places_of_a_writer_that_is_gone_are_free_at_once():
    node = world(3)
    node.reserve("abc", by="dead")
    node.sweep(10.0)
    node.gone("dead")
    assert node.ledger.usage().slots_free == 3


def test_another_may_put_what_a_zombie_was_to_write():
    node = world()
    zombie = node.reserve("ab")
    node.sweep(10.0)
    assert node.put("ab") == 2
    node.write(zombie.put_id)  # late, into quarantine
    node.check()
    assert len(node.lease("ab").blocks) == 2


def test_a_place_has_another_epoch_each_time():
    node = world(1)
    epochs = []
    for text in "abc":
        node.put(text)
        epochs += [block.epoch for block in node.lease(text, lease_s=1.0).blocks]
        node.sweep(1.0)
    assert len(set(epochs)) == 3
    assert epochs == sorted(epochs)


def test_leased_blocks_stay():
    node = world(2)
    node.put("ab")
    lease = node.lease("ab")
    assert isinstance(node.reserve("xy"), PutRefused)
    node.release(lease.lease_id)
    assert node.put("xy") == 2


def test_a_lease_ends_with_its_time():
    node = world(2)
    node.put("ab")
    lease = node.lease("ab", lease_s=5.0)
    assert node.ledger.renew(lease.lease_id, 5.0, node.now_s + 4.0)
    node.readers[lease.lease_id].until_s = node.now_s + 9.0
    node.sweep(8.0)
    assert node.ledger.usage().leases == 1
    node.sweep(1.0)
    assert not node.ledger.renew(lease.lease_id, 5.0, node.now_s)
    assert node.put("xy") == 2


def test_a_renewal_looks_at_its_own_lease_and_at_no_other():
    """A worker renews hundreds at once, and others hold as many."""
    node = world()
    node.put("abc")
    over, kept = (node.ledger.lease(chain("a"), lease_s, 0.0) for lease_s in (5.0, 50.0))
    assert node.ledger.renew(kept.lease_id, 50.0, 10.0)
    assert node.ledger.usage().leases == 2, "the other one is left to the next sweep"
    assert not node.ledger.renew(over.lease_id, 50.0, 10.0)
    assert node.ledger.usage().leases == 1
    node.ledger.release(kept.lease_id)
    node.empty()


def test_a_lease_ends_with_its_reader():
    node = world(2)
    node.put("ab")
    node.lease("ab", by="dead")
    node.gone("dead")
    assert node.put("xy") == 2


def test_pinned_blocks_stay_until_they_are_unpinned():
    node = world(2)
    node.put("ab")
    node.pin("ab")
    assert isinstance(node.reserve("xy"), PutRefused)
    node.unpin("ab")
    assert node.put("xy") == 2


@pytest.mark.parametrize("eviction", ["lru", "s3fifo", "cost"])
def test_a_probe_changes_nothing(eviction):
    quiet, probed = world(4, eviction=eviction), world(4, eviction=eviction)
    for node in (quiet, probed):
        node.put("ab")
        node.put("xy")
        for _ in range(5 if node is probed else 0):
            assert node.ledger.held(chain("ab")) == 2
        node.put("p")
    assert {s.key for s in quiet.ledger.take_stored()} == {
        s.key for s in probed.ledger.take_stored()
    }
    assert probed.ledger.usage() == quiet.ledger.usage()


def test_a_put_never_pushes_out_the_beginning_of_its_own_text():
    node = world(3)
    node.put("ab")
    node.put("x")
    assert node.put("abcd") == 1  # only x could go
    assert node.ledger.held(chain("abcd")) == 3


def test_the_last_blocks_of_a_text_go_first():
    node = world(4)
    node.put("abcd")
    node.put("xy")
    assert node.ledger.held(chain("abcd")) == 2


def test_a_block_that_is_too_large_is_refused_by_name():
    refused = world().ledger.reserve(chain("a"), owner(), 0.0, size_bytes=SLOT_BYTES + 1)
    assert isinstance(refused, PutRefused)
    assert refused.reason is PutRefusalReason.TOO_LARGE
    assert "block_bytes" in refused.detail


@pytest.mark.parametrize("reason", [PutRefusalReason.SICK, PutRefusalReason.DRAINING])
def test_a_sick_node_takes_nothing_and_serves_what_it_has(reason):
    node = world()
    node.put("ab")
    node.ledger.refuses = reason
    assert node.reserve("xy") == PutRefused(reason=reason)
    assert len(node.lease("ab").blocks) == 2
    node.ledger.refuses = None
    assert node.put("xy") == 2


def test_a_tenant_over_its_quota_loses_its_own_blocks():
    node = world(8)
    node.ledger.allow("small", Allowance(max_bytes=2 * SLOT_BYTES))
    node.put("abc", "other")
    assert node.put("xy", "small") == 2
    assert node.put("pq", "small") == 2
    assert node.ledger.held(chain("xy")) == 0
    assert node.ledger.held(chain("abc")) == 3


def test_a_tenant_is_refused_only_when_nothing_of_its_own_can_go():
    node = world(8)
    node.ledger.allow("small", Allowance(max_bytes=2 * SLOT_BYTES))
    node.put("xy", "small")
    lease = node.lease("xy")
    assert node.reserve("pq", "small").reason is PutRefusalReason.OVER_QUOTA
    node.release(lease.lease_id)
    assert node.put("pqr", "small") == 2  # the beginning of it


def test_a_flood_takes_nothing_from_what_others_have_within_their_share():
    node = world(8)
    node.put("abcd", "calm")
    for number in range(20):
        node.put(f"{number:04}", "flood")
    assert node.ledger.held(chain("abcd")) == 4


def test_what_others_do_not_claim_is_anybodys():
    node = world(8)
    node.put("ab", "calm")
    node.put("mnopqr", "flood")
    assert node.ledger.held(chain("mnopqr")) == 6
    node.put("abcdefgh", "calm")  # comes back for its share
    assert node.ledger.held(chain("abcdefgh")) == 4
    assert node.ledger.held(chain("mnopqr")) == 4


def test_shares_go_by_weight():
    node = world(8)
    node.ledger.allow("heavy", Allowance(weight=3.0))
    for number in range(20):
        node.put(f"h{number:03}", "heavy")
        node.put(f"l{number:03}", "light")
    blocks = {usage.tenant: usage.blocks for usage in node.ledger.owners()}
    assert blocks == {"heavy": 6, "light": 2}


def test_a_tenant_that_went_away_has_no_share():
    node = world(8, idle_s=60.0)
    node.put("abcd", "gone")
    node.sweep(61.0)
    assert node.put("mnopqrst", "busy") == 8


def test_a_flush_means_puts_under_way_and_pinned_blocks_too():
    node = world()
    node.put("ab", "t")
    node.put("mn", "u")
    node.pin("ab")
    put = node.reserve("xyz", "t")
    assert node.flush(tenant="t") == 2
    assert node.commit(put.put_id) == 0
    assert node.ledger.held(chain("ab")) == 0
    assert node.ledger.held(chain("mn")) == 2
    node.empty()


def test_a_flush_means_blocks_too_that_another_node_is_sending():
    """Whose they are is known once they have come."""
    node = world()
    put = node.reserve("abc", "node", fetched=True)
    assert node.flush(tenant="t") == 0
    assert node.commit(put.put_id, owners=[owner("t"), owner("u"), owner("t")]) == 1
    assert node.ledger.find(key("abc", 1)) is not None
    assert [node.ledger.find(key("abc", at)) for at in (0, 2)] == [None, None]
    put = node.reserve("abc", "node", fetched=True)
    assert node.commit(put.put_id, owners=[owner("t"), owner("t")]) == 2, "fetched since then"
    node.empty()


def test_who_reads_while_his_blocks_are_flushed_may_finish():
    node = world(2)
    node.put("ab")
    lease = node.lease("ab")
    node.flush()
    assert isinstance(node.reserve("xy"), PutRefused)
    node.release(lease.lease_id)
    assert node.put("xy") == 2


def test_a_corrupt_block_is_a_miss_from_then_on():
    node = world()
    node.put("abc")
    node.drop([key("abc", 1)])
    assert node.ledger.held(chain("abc")) == 1
    assert node.ledger.usage().corrupt_blocks == 1
    assert node.put("abc") == 1


def test_a_block_whose_owner_is_learned_late_is_billed_to_him():
    node = world()
    put = node.reserve("ab", "node")
    assert node.commit(put.put_id, owners=[owner("t"), owner("u")]) == 2
    assert {u.tenant: u.blocks for u in node.ledger.owners() if u.blocks} == {"t": 1, "u": 1}
    assert node.flush(tenant="t") == 1
    node.empty()


def on_disk(text, order=None):
    """The blocks of `text` as they were found, from the first extent on unless another order is given."""
    return tuple(
        DiskBlock(
            extent=extent,
            epoch=10 + extent,
            key=key(text, extent),
            owner=owner(),
            size_bytes=SLOT_BYTES,
            position=extent,
            checksums=bytes_of(key(text, extent)),
        )
        for extent in order or range(len(text))
    )


def test_what_was_on_the_disk_is_there_after_a_restart_under_older_epochs():
    node = World(limits(8, 4), on_disk=on_disk("abc", [2, 0, 1]))
    lease = node.lease("abc")
    node.answer_all()
    held = node.ledger.leased(lease.lease_id).blocks
    assert [block.key for block in held] == chain("abc")
    assert all(block.epoch > 12 for block in held)
    node.empty()


def test_what_a_quota_takes_away_leaves_the_rest_where_it_is():
    """Read back from the disk, the blocks lie in both tiers; a text that was read to its end goes from there."""
    node = World(limits(8, 4), on_disk=on_disk("abc"))
    for text in ("abc", "abc"):
        lease = node.lease(text)
        node.answer_all()
        node.release(lease.lease_id)
    node.ledger.allow("t", Allowance(max_bytes=2 * SLOT_BYTES))
    node.run()
    usage = node.ledger.usage()
    assert node.ledger.held(chain("abc")) == 2
    assert (usage.ssd_blocks, usage.slots_total - usage.slots_free) == (2, 2)
    node.empty()


def test_a_quota_takes_what_was_read_longest_ago_though_it_was_loaded_last():
    node = World(limits(8, 4), on_disk=on_disk("abc"))
    for text in ("a", "ab", "a"):  # the disk hears of loads alone
        lease = node.lease(text)
        node.answer_all()
        node.release(lease.lease_id)
    node.ledger.allow("t", Allowance(max_bytes=SLOT_BYTES))
    node.run()
    assert node.ledger.held(chain("abc")) == 1
    node.empty()


class Watched(LeastRecentlyUsed):
    """Counts how often victims were asked for, and how many blocks were looked at for that."""

    asked, looks = 0, 0

    def victims(self, count: int, may_go: MayGo) -> list[BlockKey]:
        def looked_at(block: BlockKey) -> bool:
            Watched.looks += 1
            return may_go(block)

        Watched.asked += 1
        return super().victims(count, looked_at)


def at_quota(num_blocks: int, *, in_memory: int) -> NodeLedger:
    """A tenant has as many blocks on the disk as it may, and the first of them in memory too."""
    blocks = [BlockKey(number.to_bytes(16, "little")) for number in range(num_blocks)]
    found = [
        DiskBlock(
            extent=at,
            epoch=1 + at,
            key=block,
            owner=owner(),
            size_bytes=SLOT_BYTES,
            position=at,
            checksums=b"x",
        )
        for at, block in enumerate(blocks)
    ]
    sizes = limits(2 * num_blocks, 2 * num_blocks, ssd_eviction="watched")
    node = NodeLedger(sizes, "n", found)
    lease = node.lease(blocks[:in_memory], 30.0, 0.0)
    for action in node.take_actions():
        assert isinstance(action, Promote)
        node.tier_moves.loaded(action)
    node.release(lease.lease_id)
    node.allow("t", Allowance(max_bytes=num_blocks * SLOT_BYTES))
    return node


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> type[Watched]:
    monkeypatch.setitem(POLICIES, "watched", Watched)
    monkeypatch.setattr(Watched, "looks", 0)
    monkeypatch.setattr(Watched, "asked", 0)
    return Watched


def test_room_in_a_quota_is_not_looked_for_on_a_disk_that_has_nothing_alone(watched: type[Watched]):
    node = at_quota(500, in_memory=500)
    put = node.reserve(chain("abcdefgh"), owner(), 0.0)
    assert isinstance(put, PutGrant)
    assert node.commit(put.put_id, [b"x"] * 8, 0.0) == 8
    assert sum(one.blocks for one in node.owners()) == 500
    assert watched.looks == 0
    node.check_integrity()


def test_nor_is_it_where_all_that_is_in_memory_is_read(watched: type[Watched]):
    node = at_quota(500, in_memory=500)
    blocks = [BlockKey(number.to_bytes(16, "little")) for number in range(500)]
    lease = node.lease(blocks, 30.0, 0.0)
    refused = node.reserve(chain("abcdefgh"), owner(), 0.0)
    assert isinstance(refused, PutRefused)
    assert refused.reason is PutRefusalReason.OVER_QUOTA
    assert watched.looks == 0
    node.release(lease.lease_id)
    node.check_integrity()


def test_room_for_blocks_whose_owner_is_learned_late_is_looked_for_once(watched: type[Watched]):
    node = at_quota(500, in_memory=400)
    put = node.reserve(chain("abcdefgh"), owner(""), 0.0, fetched=True)
    assert isinstance(put, PutGrant)
    assert node.commit(put.put_id, [b"x"] * 8, 0.0, [owner()] * 8) == 8
    assert sum(one.blocks for one in node.owners()) == 500
    assert node.usage().ssd_blocks == 492, "what the disk alone has goes first"
    assert watched.asked == 1
    node.check_integrity()


def test_of_blocks_whose_owner_is_learned_late_those_beyond_its_quota_are_not_held():
    node = world()
    node.ledger.allow("t", Allowance(max_bytes=3 * SLOT_BYTES))
    assert node.put("xy", "t") == 2
    lease = node.lease("x")
    put = node.reserve("abc", "node")
    assert node.commit(put.put_id, owners=[owner("t")] * 3) == 2
    assert [node.ledger.held(chain(text)) for text in ("abc", "xy")] == [2, 1]
    node.release(lease.lease_id)
    node.empty()


def test_a_disk_that_names_an_extent_twice_is_refused():
    block = DiskBlock(
        extent=0,
        epoch=1,
        key=key("a", 0),
        owner=owner(),
        size_bytes=1,
        position=0,
        checksums=b"x",
    )
    with pytest.raises(InvariantError):
        NodeLedger(limits(8, 4), "n", (block, block))


def test_changes_nobody_took_do_not_pile_up():
    node = NodeLedger(limits(4), "n")
    for number in range(100):
        put = node.reserve(chain(f"{number:04}"), owner(), 0.0)
        assert isinstance(put, PutGrant)
        node.commit(put.put_id, [b"x"] * 4, 0.0)
    changes = node.take_replica_changes(limit=1000)
    assert changes is not None
    assert (len(changes.stored), len(changes.removed)) == (4, 0)


def test_what_comes_and_goes_while_the_directory_is_told_of_all_leaves_nothing_there():
    node = NodeLedger(limits(4), "n")
    first, put = (node.reserve(chain(text), owner(), 0.0) for text in ("a", "b"))
    assert isinstance(first, PutGrant)
    assert isinstance(put, PutGrant)
    node.commit(first.put_id, [b"x"], 0.0)
    told = node.take_stored()
    node.commit(put.put_id, [b"x"], 0.0)
    assert [stored.key for stored in told] == chain("a")
    node.drop(chain("b"))
    assert node.take_replica_changes() is None


def test_what_another_node_writes_has_no_time_of_its_own():
    node = world()
    put = node.reserve("abc", fetched=True)
    node.sweep(1000.0)
    node.sweep(1000.0)
    assert node.ledger.usage().slots_free == 5
    assert node.commit(put.put_id) == 3
    assert node.ledger.usage().fetched_blocks == 3
    node.empty()


def test_what_another_node_writes_too_late_may_be_put_by_others_while_it_writes():
    node = world()
    late = node.reserve("abc", fetched=True)
    node.forget(late.put_id)
    assert node.put("abc") == 3
    node.sweep(1000.0)
    assert node.ledger.usage().slots_free == 2
    assert node.commit(late.put_id) == 0
    assert node.ledger.usage().slots_free == 5
    assert node.ledger.held(chain("abc")) == 3
    node.empty()


def test_what_another_node_writes_counts_against_no_quota_before_it_is_known_whose_it_is():
    node = world(usual=Allowance(max_bytes=SLOT_BYTES))
    node.ledger.allow("rich", Allowance())
    put = node.reserve("abc", "", fetched=True)
    assert len(put.items) == 3
    assert node.commit(put.put_id, owners=[owner("rich")] * 3) == 3
    put = node.reserve("xyz", "", fetched=True)
    assert node.commit(put.put_id, owners=[owner("poor")] * 3) == 1
    node.empty()


def test_room_for_the_rest_of_a_text_is_not_made_of_its_beginning():
    node = world(4)
    node.put("abc")
    node.put("x")
    before = chain("abc")
    rest = node.ledger.reserve(chain("abcdef", 3), owner(), node.now_s, first=3, before=before)
    assert isinstance(rest, PutGrant)
    assert len(rest.items) == 1
    assert node.ledger.held(before) == 3
    rest = node.ledger.reserve(chain("abcdef", 4), owner(), node.now_s, first=4, before=before)
    assert isinstance(rest, PutRefused)


def test_room_in_a_quota_for_the_rest_of_a_text_is_not_made_of_its_beginning():
    node = world(8, usual=Allowance(max_bytes=3 * SLOT_BYTES))
    node.put("x")
    node.put("ab")
    rest = node.reserve("abcdef", "", first=2, fetched=True)
    assert len(rest.items) == 4
    assert node.commit(rest.put_id, owners=[owner()] * 4, before=chain("ab")) == 1
    assert node.ledger.held(chain("abcdef")) == 3
    node.empty()


def test_the_size_of_a_block_may_be_learned_late():
    node = world()
    put = node.reserve("a", fetched=True)
    node.write(put.put_id)
    node.writers.clear()
    sums = [bytes_of(key("a", 0))]
    node.ledger.commit(put.put_id, sums, node.now_s, [owner("u")], 100)
    node.run()
    stored = node.ledger.find(key("a", 0))
    assert stored is not None
    assert (stored.size_bytes, stored.owner) == (100, owner("u"))
    node.empty()


def test_a_lease_is_extended_by_what_has_come_since():
    node = world()
    node.put("ab")
    lease = node.lease("abcd", more=True)
    assert len(lease.blocks) == 2
    assert node.ledger.usage().missed_blocks == 0
    node.put("abc")
    assert [b.key for b in node.extend(lease.lease_id).blocks] == chain("abc")
    usage = node.ledger.usage()
    assert (usage.hit_blocks, usage.missed_blocks) == (3, 1)
    node.put("wxyz" + "v" * 4)
    assert node.ledger.held(chain("abc")) == 3
    node.empty()


def test_when_memory_is_short_cold_copies_of_other_nodes_go_before_anything_else():
    node = world(4)
    node.put("ab")
    node.commit(node.reserve("xy", fetched=True).put_id)
    node.sweep(300.0)
    node.put("cd")
    assert node.ledger.held(chain("ab")) == 2
    assert node.ledger.held(chain("xy")) == 0
    node.empty()


def test_a_copy_that_is_read_is_kept_like_any_other_block():
    node = world(4)
    node.put("ab")
    node.commit(node.reserve("xy", fetched=True).put_id)
    node.sweep(300.0)
    node.release(node.lease("xy").lease_id)
    node.put("cd")
    assert node.ledger.held(chain("xy")) == 2
    assert node.ledger.held(chain("ab")) == 0
    node.empty()


def test_without_a_disk_a_copy_has_the_room_of_what_was_not_read_of_late_and_no_other():
    node = world(4)
    node.put("ab")
    node.put("xy")
    node.release(node.lease("ab").lease_id)
    assert node.ledger.usage().slots_free == 0
    assert node.ledger.spare_slots(node.now_s) == 2
    put = copy_of(node, "cdef")
    assert isinstance(put, PutGrant)
    assert [item.key for item in put.items] == chain("cd")
    assert node.ledger.held(chain("ab")) == 2
    node.ledger.commit(put.put_id, [bytes_of(item.key) for item in put.items], node.now_s)
    for text in ("ab", "cd"):
        node.ledger.release(node.ledger.lease(chain(text), 1.0, node.now_s).lease_id)
    node.sweep(5.0)
    assert node.ledger.spare_slots(node.now_s) == 0
    assert copy_of(node, "ef") == PutRefused(
        reason=PutRefusalReason.FULL, detail="all blocks are in use"
    )
    assert [node.ledger.held(chain(text)) for text in ("ab", "cd")] == [2, 2]
    node.sweep(300.0)
    assert node.ledger.spare_slots(node.now_s) == 4
    node.empty()


def copy_of(node: World, text: str) -> PutGrant | PutRefused:
    """Another node's hot blocks, whose owner is not known yet."""
    return node.ledger.reserve(chain(text), owner(""), node.now_s, fetched=True, only_cold=True)


def test_a_copy_takes_nothing_from_what_tenants_have_within_their_share():
    node = world(4)
    node.put("abc", "t")
    node.put("x", "u")
    node.release(node.lease("abc").lease_id)
    assert isinstance(copy_of(node, "p"), PutRefused)
    assert [node.ledger.held(chain(text)) for text in ("abc", "x")] == [3, 1]
    node.empty()


def test_a_copy_whose_tenant_is_learned_late_has_no_room_in_a_full_quota():
    """Nothing of the tenant goes for what readers of another node want."""
    node = world()
    node.ledger.allow("t", Allowance(max_bytes=3 * SLOT_BYTES))
    node.put("xyz", "t")
    put = copy_of(node, "abc")
    assert isinstance(put, PutGrant)
    assert node.ledger.commit(put.put_id, [b"x"] * 3, node.now_s, [owner("t")] * 3) == 0
    assert [node.ledger.held(chain(text)) for text in ("abc", "xyz")] == [0, 3]
    node.empty()


def told(node: World, text: str) -> list[str]:
    """What the ledger tells of the last block of a text."""
    return [entry.event for entry in node.ledger.story(chain(text)[-1].hex())]


def test_a_block_has_a_story_from_its_put_to_its_eviction():
    node = world(2)
    first, second = node.reserve("a"), node.reserve("b")
    node.commit(first.put_id)
    node.abandon(second.put_id)
    node.put("xy")
    assert told(node, "a") == [
        f"reserved by {first.put_id}",
        f"committed by {first.put_id}",
        "evicted",
    ]
    assert told(node, "b") == [f"reserved by {second.put_id}", f"abandoned by {second.put_id}"]
    assert node.ledger.story("not a key") == node.ledger.story(key("never", 0).hex()) == ()


def test_a_story_tells_of_the_disk_and_not_of_reads():
    node = two_tiers()
    node.put("abc")
    node.answer_all()
    lease = node.lease("abc")
    node.release(lease.lease_id)
    events = told(node, "abc")
    assert "being copied to the disk" in events
    assert "written to the disk" in events
    assert not [event for event in events if "lease" in event]


def test_stories_are_bounded_however_many_blocks_come_and_go():
    node = world(4)
    for number in range(5000):
        put = node.ledger.reserve([BlockKey(number.to_bytes(16))], owner(), 0.0)
        assert isinstance(put, PutGrant)
        node.ledger.abandon(put.put_id)
    assert node.ledger.story(bytes(16).hex()) == ()
    assert len(node.ledger.story((4999).to_bytes(16).hex())) == 2
