"""Where a worker's KV arena lies: memory shared with the processes of this host, or a GPU's.

A worker takes it once, for its engine. Where it lies decides by which backends pages come and go
(`backends/registry.py`): an engine on a CPU computes in host memory; the address of device memory means something to
the GPU and to an adapter that reaches it, and nothing here may read it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, Self

import numpy as np

from baton.errors import InvariantError, OutOfMemoryError, TransferError
from baton.layout import KvLayout
from kv_transfer.memory.cuda import Cuda
from kv_transfer.memory.shared_region import SharedRegion


@dataclass(frozen=True, slots=True, kw_only=True)
class ArenaSpan:
    """The bytes of one arena.

    Attributes:
        address: Of the first byte, in this process.
        size_bytes: How many.
        device: Index of the GPU that holds them; None for host memory.
        view: The bytes themselves where the CPU may touch them; keeps them alive.
    """

    address: int
    size_bytes: int
    device: int | None = None
    view: memoryview | None = None

    @classmethod
    def of_host(cls, view: memoryview) -> Self:
        """Host memory that `view` shows."""
        address = np.frombuffer(view, dtype=np.uint8).ctypes.data
        return cls(address=int(address), size_bytes=len(view), view=view)

    @property
    def host_view(self) -> memoryview:
        """The bytes of an arena in host memory."""
        if self.view is None:
            raise InvariantError("the arena is not in host memory")
        return self.view

    def check_holds(self, layout: KvLayout, num_blocks: int) -> None:
        """Refuses a span that is too small.

        Raises:
            TransferError: Names both sizes.
        """
        if self.size_bytes < layout.region_bytes(num_blocks):
            raise TransferError(
                f"an arena of {self.size_bytes} bytes cannot hold {num_blocks} pages"
            )


class GpuMemory(Protocol):
    """Gives memory of one GPU. Faults raise TransferError."""

    def allocate(self, size_bytes: int) -> int:
        """Memory that other processes can be let into; its address."""

    def clear(self, address: int, size_bytes: int) -> None:
        """Fills it with zeros. Blocks."""


class WorkerMemory:
    """Gives an engine the memory of its arena (implements `baton_engine.ports.ArenaAllocator`).

    Args:
        gpu: Opens the GPU of an index.
    """

    def __init__(self, gpu: Callable[[int], GpuMemory] = Cuda) -> None:
        self._gpu = gpu
        self._region: SharedRegion | None = None
        self._span: ArenaSpan | None = None

    def allocate(self, size_bytes: int, gpu: int | None = None) -> ArenaSpan:
        """Zeroed bytes that stay valid until the process ends: shared memory, or memory of a GPU. One call per arena.

        Raises:
            OutOfMemoryError: This machine has not got them.
        """
        if self._span is not None:
            raise InvariantError("an arena is allocated once: its layers lie in one region")
        if gpu is None:
            self._region = SharedRegion.create(size_bytes)
            self._span = ArenaSpan.of_host(self._region.memoryview)
        else:
            self._span = self._on_gpu(gpu, size_bytes)
        return self._span

    def allocate_shared(self, size_bytes: int) -> int:
        """As `allocate`, for an engine's rank in another process (implements `baton_vllm.ports.RankMemory`): the
        descriptor of the shared memory, which stays this object's.

        Raises:
            OutOfMemoryError: This machine has not got them.
        """
        self.allocate(size_bytes)
        return self.region.fd

    @property
    def span(self) -> ArenaSpan:
        """What was allocated.

        Raises:
            InvariantError: The engine has not allocated it yet.
        """
        if self._span is None:
            raise InvariantError("the engine has not allocated its arena yet")
        return self._span

    @property
    def place(self) -> SharedRegion | ArenaSpan:
        """The same as backends want it: peers of this host map shared memory by its descriptor.

        Raises:
            InvariantError: The engine has not allocated it yet.
        """
        return self._region or self.span

    @property
    def region(self) -> SharedRegion:
        """The shared memory.

        Raises:
            InvariantError: The arena is not in any.
        """
        if self._region is None:
            raise InvariantError("the arena is not in shared memory")
        return self._region

    def _on_gpu(self, gpu: int, size_bytes: int) -> ArenaSpan:
        try:
            memory = self._gpu(gpu)
            address = memory.allocate(size_bytes)
            memory.clear(address, size_bytes)
        except TransferError as error:
            raise OutOfMemoryError(
                f"KV pages of {size_bytes} bytes ({size_bytes / 2**30:.2f} GiB) cannot be had on GPU {gpu}: {error.message}",
                param="kv_cache_memory_bytes",
            ) from error
        return ArenaSpan(address=address, size_bytes=size_bytes, device=gpu)
