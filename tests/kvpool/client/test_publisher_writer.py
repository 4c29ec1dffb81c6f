import pytest

from baton.errors import TransferError
from baton.ids import BlockId
from baton.pages import PublishedPage
from kvpool.client.publisher import Placed, PoolWriter
from tests.kvpool.client.arena_world import NUM_SLOTS, ArenaWorld, key


class Filled(ArenaWorld):
    """Its pages hold random bytes, and its generations can be raised by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.arena[:] = bytes(self.slab[: len(self.arena)])
        self.slab[:] = bytes(len(self.slab))
        self.generations = [1] * len(self.pages[0])

    def placed(self, page: int, slot: int) -> Placed:
        published = PublishedPage(
            key=key(page), block=BlockId(page), generation=1, index=0, scope=""
        )
        return Placed(page=published, slot=slot)

    def writer(self, arena=None) -> PoolWriter:
        return PoolWriter(arena or self.host, self.generations.__getitem__)


def test_pages_come_into_their_slots_with_the_checksums_a_reader_compares():
    world = Filled()
    written = world.writer().write([world.placed(4, 1), world.placed(0, 7)], world.rows)
    for checksums, page, slot in zip(written, (4, 0), (1, 7), strict=True):
        assert all(world.is_there(page, slot, layer_index) for layer_index in range(3))
        assert checksums == world.checksums(slot)


def test_a_page_that_was_handed_out_again_is_not_copied():
    world = Filled()
    world.generations[4] += 1
    written = world.writer().write([world.placed(4, 1), world.placed(0, 7)], world.rows)
    assert written[0] == b""
    assert written[1] == world.checksums(7)
    assert not world.rows[0][1].any()


class Rewritten:
    """An arena in which a page is handed out again and overwritten while its layers are copied."""

    def __init__(self, world: Filled) -> None:
        self._world = world
        self.num_layers = 3

    def copy_in(self, layer_index, source, slots, pages):
        return self._world.host.copy_in(layer_index, source, slots, pages)

    def copy_out(self, layer_index, pages, target, slots):
        hashes = self._world.host.copy_out(layer_index, pages, target, slots)
        self._world.generations[4] = 2
        self._world.pages[2][4] = 0
        return hashes


def test_a_page_that_is_handed_out_while_it_is_copied_is_no_block():
    world = Filled()
    arena = Rewritten(world)
    written = world.writer(arena).write([world.placed(4, 1), world.placed(0, 7)], world.rows)
    assert written[0] == b""
    assert written[1] == world.checksums(7)


def test_a_slot_outside_the_slab_is_refused_and_nothing_is_written():
    world = Filled()
    with pytest.raises(TransferError, match=f"page {NUM_SLOTS} of a region"):
        world.writer().write([world.placed(1, 0), world.placed(0, NUM_SLOTS)], world.rows)
    assert not any(world.slab)


def test_a_slab_of_other_layers_is_refused():
    world = Filled()
    with pytest.raises(TransferError, match="layers"):
        world.writer().write([world.placed(1, 0)], world.rows[:1])


def test_nothing_to_write_is_nothing_written():
    world = Filled()
    assert world.writer().write([], world.rows) == []
