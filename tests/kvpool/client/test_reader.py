import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from baton.errors import CorruptKvError, LeaseExpiredError, TransferError, disposition
from kvpool.client.reader import PoolReader
from kvpool.messages import BlockLease, HeldBlock
from tests.kvpool.client.arena_world import (
    NUM_SLOTS,
    OTHER,
    SEQ,
    TIMEOUT_S,
    ArenaWorld,
    Gated,
    fetch,
    key,
    layout,
)
from tests.waits import join


@contextmanager
def reading(
    world: ArenaWorld, arena=None, *, stalled_after_s: float = TIMEOUT_S
) -> Iterator[PoolReader]:
    reader = PoolReader(
        arena or world.host, world.leases, world.desk, world.clock, stalled_after_s=stalled_after_s
    )
    reader.connect(world.rows)
    try:
        yield reader
    finally:
        reader.close()


def test_leased_blocks_come_into_the_pages_layer_by_layer():
    world = ArenaWorld()
    world.lease(SEQ, 3, 5)
    with reading(world) as reader:
        assert reader.get_num_matched_blocks(SEQ, [key(3), key(5), key(6)]) == 2
        reader.start_load_kv([fetch(SEQ, (3, 1), (5, 0))])
        for layer_index in range(3):
            assert reader.wait_for_layer_load(layer_index) == frozenset()
            assert world.is_there(1, 3, layer_index)
            assert world.is_there(0, 5, layer_index)
        outcome = reader.finish_load_kv()
    assert (outcome.num_blocks, dict(outcome.failed)) == (2, {})


def test_a_layer_is_awaited_while_the_next_is_still_on_its_way():
    world = ArenaWorld()
    world.lease(SEQ, 1)
    gated = Gated(world.host)
    with reading(world, gated) as reader:
        reader.start_load_kv([fetch(SEQ, (1, 2))])
        for layer_index in range(3):
            gated.gates[layer_index].set()
            assert reader.wait_for_layer_load(layer_index) == frozenset()
            assert world.is_there(2, 1, layer_index)
            for later in range(layer_index + 1, 3):
                assert not world.is_there(2, 1, later)
        assert reader.finish_load_kv().num_blocks == 1


def test_nothing_is_offered_without_a_lease():
    world = ArenaWorld()
    world.lease(SEQ, 1)
    with reading(world) as reader:
        assert reader.get_num_matched_blocks(OTHER, [key(1)]) == 0
        assert reader.get_num_matched_blocks(SEQ, [key(2), key(1)]) == 0


def test_nothing_is_offered_once_the_lease_is_nearly_over():
    world = ArenaWorld()
    world.lease(SEQ, 1, lease_s=5.0)
    with reading(world) as reader:
        world.clock.advance(4.99)
        assert reader.get_num_matched_blocks(SEQ, [key(1)]) == 0


def test_a_renewed_lease_is_good_for_longer():
    world = ArenaWorld()
    world.lease(SEQ, 1, lease_s=5.0)
    with reading(world) as reader:
        world.leases.renewed(["L"], asked_s=world.clock.now_s() + 4, lease_s=5.0)
        world.clock.advance(6)
        assert reader.get_num_matched_blocks(SEQ, [key(1)]) == 1


def test_a_lease_that_ended_between_offer_and_begin_fails_the_fetch_and_touches_no_page():
    world = ArenaWorld()
    world.lease(SEQ, 1)
    with reading(world) as reader:
        world.clock.advance(10)
        reader.start_load_kv([fetch(SEQ, (1, 2))])
        assert reader.wait_for_layer_load(0) == {SEQ}
        error = reader.finish_load_kv().failed[SEQ]
    assert isinstance(error, LeaseExpiredError)
    assert disposition(error).retryable
    assert not any(world.arena)


def test_a_lease_that_ends_while_a_layer_is_copied_fails_the_fetch():
    world = ArenaWorld()
    world.lease(SEQ, 1)
    gated = Gated(world.host, is_open=True)
    gated.after = lambda layer_index: world.clock.advance(10 if layer_index == 1 else 0)
    with reading(world, gated) as reader:
        reader.start_load_kv([fetch(SEQ, (1, 2))])
        assert reader.wait_for_layer_load(1) == {SEQ}
        assert reader.wait_for_layer_load(2) == {SEQ}
        assert isinstance(reader.finish_load_kv().failed[SEQ], LeaseExpiredError)
    assert not world.is_there(2, 1, 2)


def test_wrong_bytes_fail_their_own_sequence_and_are_reported():
    world = ArenaWorld()
    world.lease(SEQ, 1, 2)
    world.lease(OTHER, 3, lease_id="M")
    world.rows[1][2, 17] ^= 1
    with reading(world) as reader:
        reader.start_load_kv([fetch(SEQ, (1, 0), (2, 1)), fetch(OTHER, (3, 4))])
        assert reader.wait_for_layer_load(1) >= {SEQ}
        assert reader.wait_for_layer_load(2) == {SEQ}
        outcome = reader.finish_load_kv()
    assert isinstance(outcome.failed[SEQ], CorruptKvError)
    assert outcome.failed.keys() == {SEQ}
    assert outcome.num_blocks == 1
    assert world.desk.bad == [key(2)]
    assert all(world.is_there(4, 3, layer_index) for layer_index in range(3))


@pytest.mark.parametrize("slot", [NUM_SLOTS, -1])
def test_a_slot_outside_the_slab_is_refused_before_anything_is_copied(slot):
    world = ArenaWorld()
    held = HeldBlock(key=key(1), slot=slot, epoch=1, checksums=world.checksums(1))
    lease = BlockLease(lease_id="L", blocks=(held,), lease_s=5.0)
    world.leases.add(SEQ, lease, asked_s=world.clock.now_s())
    with reading(world) as reader:
        reader.start_load_kv([fetch(SEQ, (1, 0))])
        reader.wait_for_layer_load(0)
        assert isinstance(reader.finish_load_kv().failed[SEQ], TransferError)
    assert not any(world.arena)


def test_checksums_of_another_number_of_layers_are_refused():
    world = ArenaWorld()
    held = HeldBlock(key=key(1), slot=1, epoch=1, checksums=bytes(8))
    world.leases.add(
        SEQ, BlockLease(lease_id="L", blocks=(held,), lease_s=5.0), asked_s=world.clock.now_s()
    )
    with reading(world) as reader:
        reader.start_load_kv([fetch(SEQ, (1, 0))])
        assert "3 layers" in str(reader.finish_load_kv().failed[SEQ])


def test_what_makes_no_progress_is_given_up_and_writes_nothing_after_the_end():
    world = ArenaWorld()
    world.lease(SEQ, 1)
    gated = Gated(world.host)
    gated.gates[0].set()
    with reading(world, gated, stalled_after_s=0.0) as reader:
        reader.start_load_kv([fetch(SEQ, (1, 2))])
        assert gated.entered[1].wait(TIMEOUT_S)
        assert reader.wait_for_layer_load(1) == {SEQ}
        gated.gates[1].set()
        outcome = reader.finish_load_kv()
        gated.gates[2].set()
    assert "did not arrive" in str(outcome.failed[SEQ])
    assert not world.is_there(2, 1, 2)


def test_nothing_is_written_once_a_step_has_ended():
    world = ArenaWorld()
    world.lease(SEQ, 1)
    gated = Gated(world.host)
    with reading(world, gated) as reader:
        reader.start_load_kv([fetch(SEQ, (1, 2))])
        assert gated.entered[0].wait(TIMEOUT_S)
        opener = threading.Thread(target=gated.open)
        opener.start()
        outcome = reader.finish_load_kv()
        left = bytes(world.arena)
        join(opener)
    assert bytes(world.arena) == left
    assert (outcome.num_blocks == 1) != (outcome.failed.keys() == {SEQ})


def test_the_same_fetch_can_be_begun_again():
    world = ArenaWorld()
    world.lease(SEQ, 1)
    with reading(world) as reader:
        for _ in range(2):
            reader.start_load_kv([fetch(SEQ, (1, 2))])
            reader.wait_for_layer_load(2)
            assert reader.finish_load_kv().num_blocks == 1


def test_an_arena_that_breaks_fails_the_fetch_and_not_the_thread():
    world = ArenaWorld()
    world.lease(SEQ, 1)
    gated = Gated(world.host, is_open=True)

    def break_after(layer_index):
        raise KeyError(layer_index)

    gated.after = break_after
    with reading(world, gated) as reader:
        for _ in range(2):
            reader.start_load_kv([fetch(SEQ, (1, 2))])
            assert reader.wait_for_layer_load(2) == {SEQ}
            assert "KeyError" in str(reader.finish_load_kv().failed[SEQ])


def test_forgotten_leases_are_given_back():
    world = ArenaWorld()
    world.lease(SEQ, 1)
    world.lease(SEQ, 1, 2, lease_id="M")
    with reading(world) as reader:
        reader.request_finished(SEQ)
        reader.request_finished(SEQ)
        assert reader.get_num_matched_blocks(SEQ, [key(1)]) == 0
    assert world.desk.let_go == ["L", "M"]
    assert world.leases.open() == []


def test_what_is_wanted_again_is_asked_for_and_given_back_if_it_comes_too_late():
    world = ArenaWorld()
    with reading(world) as reader:
        reader.prefetch(SEQ, [key(1), key(2)])
        assert world.desk.want == [(SEQ, (key(1), key(2)))]
        lease = BlockLease(lease_id="L", blocks=(world.held(1),), lease_s=5.0)
        world.leases.add(SEQ, lease, asked_s=world.clock.now_s(), wanted=True)
        assert reader.get_num_matched_blocks(SEQ, [key(1), key(2)]) == 1
        reader.prefetch(OTHER, [key(2)])
        reader.request_finished(OTHER)
        late = BlockLease(lease_id="late", blocks=(world.held(2),), lease_s=5.0)
        world.leases.add(OTHER, late, asked_s=world.clock.now_s(), wanted=True)
        assert reader.get_num_matched_blocks(OTHER, [key(2)]) == 0
    assert world.desk.let_go == ["late"]


def test_a_node_that_is_gone_offers_nothing():
    world = ArenaWorld()
    world.lease(SEQ, 1)
    with reading(world) as reader:
        reader.disconnect()
        assert reader.get_num_matched_blocks(SEQ, [key(1)]) == 0
        reader.prefetch(SEQ, [key(1)])
        assert world.desk.want == []
        reader.start_load_kv([fetch(SEQ, (1, 2))])
        assert reader.wait_for_layer_load(0) == {SEQ}
        assert isinstance(reader.finish_load_kv().failed[SEQ], LeaseExpiredError)


def test_a_node_that_goes_before_anything_is_copied_fails_the_fetch():
    world = ArenaWorld()
    world.lease(SEQ, 3, 5)
    with reading(world) as reader, reader._changed:  # the copying thread cannot begin meanwhile
        reader.start_load_kv([fetch(SEQ, (3, 1), (5, 0))])
        reader.disconnect()
    outcome = reader.finish_load_kv()
    assert outcome.num_blocks == 0
    assert isinstance(outcome.failed[SEQ], LeaseExpiredError)


def test_a_slab_of_other_layers_is_refused():
    world = ArenaWorld()
    with reading(world) as reader, pytest.raises(TransferError, match="layers: 3 here, 2"):
        reader.connect(world.rows[:2])
    assert len(layout().layers) == 3
