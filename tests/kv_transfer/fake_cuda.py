"""A CUDA driver without a GPU: "device memory" is host memory, IPC handles are known to all drivers of the process."""

import ctypes
import itertools
import threading
from dataclasses import dataclass, field

import numpy as np

from baton.errors import TransferError
from kv_transfer.memory.cuda import IPC_HANDLE_BYTES, HostBuffer, Rows, Stream

TIMEOUT_S = 30


@dataclass
class FakeGpu:
    """Allocations by where they begin, who has opened which, and what its streams can wait for, by its handle."""

    allocations: dict[int, int] = field(default_factory=dict)
    opened: list[int] = field(default_factory=list)
    events: dict[int, threading.Event] = field(default_factory=dict)

    def holds(self, address: int, size_bytes: int) -> int:
        """Where the allocation begins that all these bytes lie in."""
        for base, size in self.allocations.items():
            if base <= address and address + size_bytes <= base + size:
                return base
        raise TransferError("cuMemcpyDtoDAsync_v2: an illegal memory access was encountered")


class FakeCuda:
    """One process's driver. Copies happen when their stream is waited for, not before."""

    def __init__(self, gpu: FakeGpu) -> None:
        self._gpu = gpu
        self._streams = itertools.count(1)
        self._queued: dict[Stream, list[Rows | threading.Event]] = {}
        self._lock = threading.Lock()
        self.broken = False

    def export(self, address: int) -> tuple[bytes, int]:
        base = self._gpu.holds(address, 1)
        return base.to_bytes(IPC_HANDLE_BYTES), address - base

    def open(self, handle: bytes) -> int:
        base = int.from_bytes(handle)
        if base not in self._gpu.allocations:
            raise TransferError("cuIpcOpenMemHandle_v2: invalid argument")
        self._gpu.opened.append(base)
        return base

    def close(self, address: int) -> None:
        self._gpu.opened.remove(address)

    def host_buffer(self, size_bytes: int) -> HostBuffer:
        whole = np.zeros(size_bytes, dtype=np.uint8)
        return HostBuffer(address=int(whole.ctypes.data), view=whole.data)

    def fetch(self, target: int, source: int, size_bytes: int, stream: Stream) -> None:
        self._gpu.holds(source, size_bytes)
        ctypes.memmove(target, source, size_bytes)

    def put(self, target: int, source: int, size_bytes: int, stream: Stream) -> None:
        self._gpu.holds(target, size_bytes)
        ctypes.memmove(target, source, size_bytes)

    def stream(self) -> Stream:
        stream = Stream(next(self._streams))
        self._queued[stream] = []
        return stream

    def follow(self, stream: Stream, event: int) -> None:
        with self._lock:
            self._queued[stream].append(self._gpu.events[event])

    def copy_rows(self, rows: Rows, stream: Stream) -> None:
        with self._lock:
            self._queued[stream].append(rows)

    def wait(self, stream: Stream) -> None:
        with self._lock:
            queued, self._queued[stream] = self._queued[stream], []
        if self.broken:
            raise TransferError("cuStreamSynchronize: unspecified launch failure")
        for queued_one in queued:
            if isinstance(queued_one, Rows):
                self._copy(queued_one)
            else:
                assert queued_one.wait(TIMEOUT_S)

    def end(self, stream: Stream) -> None:
        del self._queued[stream]

    def _copy(self, rows: Rows) -> None:
        for row in range(rows.count):
            source = rows.source + row * rows.source_pitch
            target = rows.target + row * rows.target_pitch
            self._gpu.holds(source, rows.length)
            self._gpu.holds(target, rows.length)
            ctypes.memmove(target, source, rows.length)
