"""Hashes of pages where they lie: the same, be the arena in host memory or on a GPU."""

import numpy as np
import pytest

from baton.errors import TransferError
from baton.ids import BlockId
from kv_transfer.memory.arena import ArenaSpan
from kv_transfer.memory.cuda import Cuda, devices
from kv_transfer.memory.page_hash import ArenaHashes, Checksum, ReadBackHashes, ways_to_hash
from tests.kv_transfer.conformance import LAYOUT, fill
from tests.kv_transfer.device_memory import DeviceMemory
from tests.kv_transfer.fake_cuda import FakeCuda, FakeGpu

NUM_BLOCKS = 5
BLOCKS = (BlockId(4), BlockId(1), BlockId(2))
PARTS = (slice(0, 8), slice(16, 32))


@pytest.fixture
def memory() -> memoryview:
    memory = memoryview(bytearray(LAYOUT.region_bytes(NUM_BLOCKS)))
    fill(memory)
    return memory


@pytest.mark.parametrize("parts", [(), PARTS], ids=["whole", "parts"])
@pytest.mark.parametrize("kind", Checksum)
def test_pages_that_are_read_back_hash_as_they_would_on_the_host(
    memory: memoryview, kind: Checksum, parts: tuple[slice, ...]
) -> None:
    address = int(np.frombuffer(memory, dtype=np.uint8).ctypes.data)
    gpu = FakeGpu(allocations={address: len(memory)})
    span = ArenaSpan(address=address, size_bytes=len(memory), device=0)
    there = ReadBackHashes(span, FakeCuda(gpu), LAYOUT, num_blocks=NUM_BLOCKS, kind=kind)
    here = ArenaHashes(memory, LAYOUT, num_blocks=NUM_BLOCKS, kind=kind)
    for layer in range(len(LAYOUT.layers)):
        found = there.of_layer(layer, BLOCKS, parts)
        assert np.array_equal(found, here.of_layer(layer, BLOCKS, parts))


@pytest.mark.gpu
@pytest.mark.skipif(not devices(), reason="no GPU")
@pytest.mark.parametrize("kind", Checksum)
def test_pages_of_a_gpu_hash_as_they_would_on_the_host(memory: memoryview, kind: Checksum) -> None:
    gpu = DeviceMemory(0, len(memory))
    gpu[:] = bytes(memory)
    there = ReadBackHashes(gpu.span, Cuda(0), LAYOUT, num_blocks=NUM_BLOCKS, kind=kind)
    here = ArenaHashes(memory, LAYOUT, num_blocks=NUM_BLOCKS, kind=kind)
    assert np.array_equal(there.of_layer(1, BLOCKS), here.of_layer(1, BLOCKS))


def test_host_memory_prefers_xxh3_and_knows_the_gpus_rule(memory: memoryview) -> None:
    ways = ways_to_hash(ArenaSpan.of_host(memory), LAYOUT, num_blocks=NUM_BLOCKS)
    assert list(ways) == [Checksum.XXH3, Checksum.WORD_SUM]


def test_an_arena_that_is_too_small_is_refused(memory: memoryview) -> None:
    with pytest.raises(TransferError, match="cannot hold"):
        ways_to_hash(ArenaSpan.of_host(memory), LAYOUT, num_blocks=NUM_BLOCKS + 1)
