"""Pages of an arena on a GPU come and go as those of one in host memory do."""

import os

import numpy as np
import pytest

from baton.errors import TransferError
from kv_transfer.memory.arena import ArenaSpan
from kvpool.client import arena_pages
from kvpool.client.arena_pages import GpuPages, HostPages
from tests.kv_transfer.conformance import LAYOUT
from tests.kv_transfer.fake_cuda import FakeCuda, FakeGpu

NUM_BLOCKS, NUM_SLOTS = 8, 6
PAGES = np.array([5, 6, 0, 7, 2], dtype=np.int64)
SLOTS = np.array([0, 1, 5, 4, 2], dtype=np.int64)


class World:
    """The same bytes twice: as a GPU's arena, and as one in host memory."""

    def __init__(self) -> None:
        size = LAYOUT.region_bytes(NUM_BLOCKS)
        self.there = np.frombuffer(bytearray(os.urandom(size)), dtype=np.uint8)
        self.here = self.there.copy()
        address = int(self.there.ctypes.data)
        span = ArenaSpan(address=address, size_bytes=size, device=0)
        driver = FakeCuda(FakeGpu(allocations={address: size}))
        self.gpu = GpuPages(span, driver, LAYOUT, num_blocks=NUM_BLOCKS)
        self.host = HostPages(self.here.data, LAYOUT, num_blocks=NUM_BLOCKS)

    def slab(self) -> np.ndarray:
        rows = os.urandom(NUM_SLOTS * LAYOUT.page_layer_bytes)
        return np.frombuffer(bytearray(rows), dtype=np.uint8).reshape(NUM_SLOTS, -1)


@pytest.fixture(params=[1, 2, 100], ids=lambda rows: f"{rows} rows staged")
def world(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr(arena_pages, "_STAGED_BYTES", request.param * LAYOUT.page_layer_bytes)
    return World()


def test_blocks_come_in_as_they_do_to_host_memory(world: World) -> None:
    slab = world.slab()
    for layer in range(len(LAYOUT.layers)):
        found = world.gpu.copy_in(layer, slab, SLOTS, PAGES)
        assert np.array_equal(found, world.host.copy_in(layer, slab, SLOTS, PAGES))
    assert np.array_equal(world.there, world.here)


def test_pages_go_out_as_they_do_from_host_memory(world: World) -> None:
    one, other = world.slab(), np.zeros((NUM_SLOTS, LAYOUT.page_layer_bytes), dtype=np.uint8)
    other[:] = one
    for layer in range(len(LAYOUT.layers)):
        found = world.gpu.copy_out(layer, PAGES, one, SLOTS)
        assert np.array_equal(found, world.host.copy_out(layer, PAGES, other, SLOTS))
        assert np.array_equal(one, other)


@pytest.mark.parametrize("page", [-1, NUM_BLOCKS])
def test_a_page_outside_the_arena_is_refused_and_nothing_is_written(page: int) -> None:
    world, numbers = World(), np.array([page], dtype=np.int64)
    with pytest.raises(TransferError, match="outside"):
        world.gpu.copy_in(0, world.slab(), np.array([0], dtype=np.int64), numbers)
    assert np.array_equal(world.there, world.here)
