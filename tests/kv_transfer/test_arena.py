"""Where a worker's arena comes from."""

import pytest

from baton.errors import InvariantError, OutOfMemoryError, TransferError
from kv_transfer.memory.arena import WorkerMemory


class Gpu:
    """Has 4 KiB, all of it dirty."""

    def __init__(self) -> None:
        self.cleared: list[tuple[int, int]] = []

    def allocate(self, size_bytes: int) -> int:
        if size_bytes > 4096:
            raise TransferError("cuMemAlloc_v2: out of memory")
        return 0x7000

    def clear(self, address: int, size_bytes: int) -> None:
        self.cleared.append((address, size_bytes))


def test_host_memory_is_shared_memory_and_is_given_once() -> None:
    memory = WorkerMemory()
    with pytest.raises(InvariantError):
        assert memory.span
    memory.allocate(4096).host_view[0] = 9
    assert memory.region.memoryview[0] == 9
    with pytest.raises(InvariantError):
        memory.allocate(4096)
    memory.region.close()


def test_memory_of_a_gpu_is_cleared_and_says_where_it_lies() -> None:
    gpu, asked = Gpu(), list[int]()

    def opened(device: int) -> Gpu:
        asked.append(device)
        return gpu

    memory = WorkerMemory(opened)
    span = memory.allocate(4096, gpu=1)
    assert (span.address, span.size_bytes, span.device, span.view) == (0x7000, 4096, 1, None)
    assert memory.place == memory.span == span
    assert asked == [1]
    assert gpu.cleared == [(0x7000, 4096)]
    with pytest.raises(InvariantError, match="shared memory"):
        assert memory.region


def test_a_gpu_that_has_not_got_the_memory_says_so_in_its_own_words() -> None:
    with pytest.raises(OutOfMemoryError, match="out of memory") as caught:
        WorkerMemory(lambda device: Gpu()).allocate(8192, gpu=0)
    assert caught.value.param == "kv_cache_memory_bytes"
