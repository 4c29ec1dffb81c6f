from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from baton_engine.staging import DeviceStaging, PinnedBuffers, StagedBatch, pack, unpack
from tests.baton_engine.absent_device import ABSENT, watched

ARRAYS: list[NDArray[Any]] = [
    np.arange(5, dtype=np.int32),
    np.arange(6, dtype=np.float64).reshape(2, 3),
    np.zeros(0, np.int64),
    np.array([2.5], np.float32),
]


def staged_from(arrays):
    staged = StagedBatch()
    return staged, [staged.add(array) for array in arrays]


def test_what_is_packed_is_unpacked_as_it_was():
    for array, tensor in zip(
        ARRAYS, unpack(pack(ARRAYS, PinnedBuffers(pinned=False)), ARRAYS), strict=True
    ):
        np.testing.assert_array_equal(tensor.numpy(), array)
        assert tensor.numpy().dtype == array.dtype


def test_every_array_begins_where_a_kernel_may_read_16_bytes_at_once():
    packed = pack(ARRAYS, PinnedBuffers(pinned=False))
    assert [t.storage_offset() * t.itemsize % 16 for t in unpack(packed, ARRAYS)] == [0] * 4


def test_what_the_last_step_sends_is_not_overwritten_by_the_next():
    memory = PinnedBuffers(pinned=False)
    first = pack(ARRAYS, memory)
    pack([np.full_like(array, 7) for array in ARRAYS], memory)
    for array, tensor in zip(ARRAYS, unpack(first, ARRAYS), strict=True):
        np.testing.assert_array_equal(tensor.numpy(), array)


def test_memory_is_used_again_by_the_second_step_after_it_and_grows():
    memory = PinnedBuffers(pinned=False)
    first, second, third = (pack(ARRAYS[:1], memory) for _ in range(3))
    assert third.data_ptr() == first.data_ptr() != second.data_ptr()
    assert len(pack(ARRAYS, memory)) > len(first)


def test_staged_arrays_are_sent_in_one_copy_without_waiting():
    staged, items = staged_from(ARRAYS)
    assert watched(lambda: DeviceStaging(ABSENT).send(staged)) == 0
    assert [(item.tensor.shape, item.tensor.device) for item in items] == [
        (array.shape, ABSENT) for array in ARRAYS
    ]


def test_on_a_cpu_nothing_is_copied():
    staged, items = staged_from(ARRAYS)
    DeviceStaging(torch.device("cpu")).send(staged)
    assert items[0].tensor.data_ptr() == ARRAYS[0].ctypes.data


def test_what_comes_back_is_waited_for_once():
    staging, there = DeviceStaging(ABSENT), torch.zeros(4, device=ABSENT)
    assert watched(lambda: staging.read(there)) == 1
    assert watched(lambda: staging.copy_back(there)) == 0
    assert watched(staging.copy_back(there)) == 1
    here = torch.arange(3)
    assert torch.equal(DeviceStaging(torch.device("cpu")).read(here), here)


def test_an_item_that_was_not_sent_is_nowhere():
    _, items = staged_from(ARRAYS)
    with pytest.raises(ValueError, match="have not been sent"):
        _ = items[0].tensor
