"""The driver's calls, on a GPU: memory, copies, streams, and what goes wrong.
`test_host_cuda.py` runs them without one.
"""

import ctypes
import os
import threading

import pytest

from baton.errors import TransferError
from kv_transfer.memory.cuda import IPC_HANDLE_BYTES, Cuda, Rows, Stream, devices

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not devices(), reason="no GPU"),
]
SIZE = 64 * 1024


@pytest.fixture
def cuda() -> Cuda:
    return Cuda(0)


def filled(cuda: Cuda, size_bytes: int = SIZE) -> tuple[int, bytes]:
    address, content = cuda.allocate(size_bytes), os.urandom(size_bytes)
    cuda.write(address, content)
    return address, content


def rows(source: int, target: int, length: int, count: int = 1, **pitches: int) -> Rows:
    told = {"source_pitch": length, "target_pitch": length} | pitches
    return Rows(source=source, target=target, length=length, count=count, **told)


def recorded(stream: Stream) -> int:
    """A CUDA event behind what a stream was given so far, as torch makes them."""
    api, event = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
    assert api.cuEventCreate(ctypes.byref(event), 0) == 0
    assert api.cuEventRecord(event, ctypes.c_void_p(stream)) == 0
    return event.value or 0


def test_what_is_written_is_read(cuda: Cuda):
    address, content = filled(cuda)
    assert cuda.read(address, SIZE) == content
    assert cuda.read(address + 100, 50) == content[100:150]


def test_cleared_memory_is_zero_and_its_neighbours_are_not_touched(cuda: Cuda):
    address, content = filled(cuda)
    cuda.clear(address + 16, 32)
    assert cuda.read(address, 64) == content[:16] + bytes(32) + content[48:64]


def test_memory_is_freed(cuda: Cuda):
    address = cuda.allocate(SIZE)
    cuda.free(address)
    with pytest.raises(TransferError, match="cuMemFree_v2: invalid argument"):
        cuda.free(address)


def test_more_than_there_is_cannot_be_had(cuda: Cuda):
    with pytest.raises(TransferError, match="cuMemAlloc_v2: out of memory"):
        cuda.allocate(1 << 50)


def test_a_run_is_copied(cuda: Cuda):
    (source, content), (target, before) = filled(cuda), filled(cuda)
    stream = cuda.stream()
    cuda.copy_rows(rows(source + 256, target + 512, 1024), stream)
    cuda.wait(stream)
    assert cuda.read(target, SIZE) == before[:512] + content[256:1280] + before[1536:]


def test_neighbours_are_copied_as_one_run(cuda: Cuda):
    (source, content), (target, _) = filled(cuda), filled(cuda)
    stream = cuda.stream()
    cuda.copy_rows(rows(source, target, 1024, count=64), stream)
    cuda.wait(stream)
    assert cuda.read(target, SIZE) == content


def test_rows_that_lie_apart_are_copied_and_nothing_between_them(cuda: Cuda):
    (source, content), (target, before) = filled(cuda), filled(cuda)
    stream = cuda.stream()
    cuda.copy_rows(rows(source, target, 64, count=3, source_pitch=1024, target_pitch=256), stream)
    cuda.wait(stream)
    wanted = bytearray(before)
    for row in range(3):
        wanted[row * 256 : row * 256 + 64] = content[row * 1024 : row * 1024 + 64]
    assert cuda.read(target, SIZE) == bytes(wanted)


def test_pinned_memory_goes_there_and_back(cuda: Cuda):
    address, content = filled(cuda)
    buffer, stream = cuda.host_buffer(SIZE), cuda.stream()
    cuda.fetch(buffer.address, address, SIZE, stream)
    cuda.wait(stream)
    assert bytes(buffer.view) == content
    buffer.view[:4] = b"here"
    cuda.put(address + 8, buffer.address, 4, stream)
    cuda.wait(stream)
    assert cuda.read(address, 16) == content[:8] + b"here" + content[12:16]


def test_any_thread_may_call(cuda: Cuda):
    address, content = filled(cuda)
    found: list[bytes] = []
    thread = threading.Thread(target=lambda: found.append(cuda.read(address, SIZE)))
    thread.start()
    thread.join(30)
    assert found == [content]


def test_a_handle_says_how_far_into_its_allocation_an_address_lies(cuda: Cuda):
    address = cuda.allocate(4 << 20)
    (handle, start), (_, further) = cuda.export(address), cuda.export(address + 4096)
    assert len(handle) == IPC_HANDLE_BYTES
    assert further - start == 4096


def test_host_memory_has_no_handle(cuda: Cuda):
    here = ctypes.create_string_buffer(64)
    with pytest.raises(TransferError, match="cuMemGetAddressRange_v2: "):
        cuda.export(ctypes.addressof(here))


def test_a_handle_that_nobody_gave_opens_nothing(cuda: Cuda):
    with pytest.raises(TransferError, match="cuIpcOpenMemHandle_v2: "):
        cuda.open(bytes(IPC_HANDLE_BYTES))


def test_a_stream_that_ends_takes_what_was_queued_along(cuda: Cuda):
    (source, content), (target, _) = filled(cuda), filled(cuda)
    stream = cuda.stream()
    cuda.copy_rows(rows(source, target, SIZE), stream)
    cuda.end(stream)
    cuda.clear(cuda.allocate(8), 8)  # waits for the whole GPU
    assert cuda.read(target, SIZE) == content


def test_a_gpu_that_is_not_there_is_told(cuda: Cuda):
    with pytest.raises(TransferError, match="cuDeviceGet: invalid device ordinal"):
        Cuda(4096)


def test_a_stream_follows_an_event_of_another(cuda: Cuda):
    (first, content), (second, _), (third, _) = (filled(cuda, 1 << 24) for _ in range(3))
    ahead, behind = cuda.stream(), cuda.stream()
    cuda.copy_rows(rows(first, second, 1 << 24), ahead)
    cuda.follow(behind, recorded(ahead))
    cuda.copy_rows(rows(second, third, 1 << 24), behind)
    cuda.wait(behind)
    assert cuda.read(third, 1 << 24) == content


def test_an_event_that_is_none_is_refused(cuda: Cuda):
    with pytest.raises(TransferError, match="cuStreamWaitEvent: "):
        cuda.follow(cuda.stream(), 0)
