"""The pages of an engine's arena, in host memory or on a GPU, and the slab,
as the rows that are copied from one to the other.

A block lies in the slab in one piece, its layers one after the other; in the arena every layer has a region of its own:

    slab    slot 0: layer 0 | layer 1 | …    slot 1: layer 0 | layer 1 | …
    arena   layer 0: page 0 | page 1 | …     layer 1: page 0 | page 1 | …

To and from a GPU rows go through a pinned buffer on the host, hashed on their way:

    slab rows ── copied and hashed by the processor ── pinned buffer ── the GPU's copy engine ── pages of the arena
"""

import threading
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from baton.block_ids import Numbers
from baton.errors import TransferError
from baton.layout import KvLayout
from kv_transfer.memory.arena import ArenaSpan
from kv_transfer.memory.cuda import HostBuffer, Stream
from kv_transfer.memory.pages import Pages, layer_pages
from kv_transfer.plan import runs
from kvpool.hashed_copy import Hashes, copy_hashed
from kvpool.ports import ArenaPages

_ROWS_PER_CALL_BYTES = 4 << 20
"""Rows are copied without the interpreter's lock; a call never holds on to a core for long,
and a cancelled copy ends soon.
"""


class HostPages:
    """`ArenaPages` over memory that this process maps.

    Args:
        memory: The arena's region.
        layout: Of its pages.
        num_blocks: Pages per layer, those that are never handed out included.

    Raises:
        TransferError: The region is smaller than that.
    """

    def __init__(self, memory: memoryview, layout: KvLayout, *, num_blocks: int) -> None:
        self._layers = layer_pages(memory, layout, num_blocks)

    @property
    def num_layers(self) -> int:
        """Layers of a block."""
        return len(self._layers)

    def copy_in(self, layer_index: int, source: Pages, slots: Numbers, pages: Numbers) -> Hashes:
        """See `ArenaPages`."""
        return copy_hashed(source, self._layers[layer_index], slots, pages)

    def copy_out(self, layer_index: int, pages: Numbers, target: Pages, slots: Numbers) -> Hashes:
        """See `ArenaPages`."""
        return copy_hashed(self._layers[layer_index], target, pages, slots)


def slab_layers(
    memory: memoryview, layout: KvLayout, *, num_slots: int, slot_bytes: int
) -> list[Pages]:
    """A slab's bytes as one `[num_slots, page_layer_bytes]` array per layer of `layout`, without copying;
    its rows lie apart.

    Raises:
        TransferError: A block does not fit a slot, or the slab is smaller than said.
    """
    if layout.page_bytes > slot_bytes:
        raise TransferError(f"block_bytes: {layout.page_bytes} here, slots of {slot_bytes} there")
    if len(memory) < num_slots * slot_bytes:
        raise TransferError(f"a slab of {len(memory)} bytes cannot hold {num_slots} slots")
    slots = np.frombuffer(memory, dtype=np.uint8)[: num_slots * slot_bytes]
    rows, size = slots.reshape(num_slots, slot_bytes), layout.page_layer_bytes
    return [rows[:, index * size : (index + 1) * size] for index in range(len(layout.layers))]


def check_layers(slab: Sequence[Pages], arena: ArenaPages) -> None:
    """Refuses a slab whose blocks have another number of layers than the arena's pages.

    Raises:
        TransferError: They have.
    """
    if len(slab) != arena.num_layers:
        raise TransferError(f"layers: {arena.num_layers} here, {len(slab)} in the pool's blocks")


def turns(num_rows: int, row_bytes: int) -> list[slice]:
    """Splits a copy of many rows into calls of a bounded size."""
    step = max(1, _ROWS_PER_CALL_BYTES // row_bytes)
    return [slice(begin, begin + step) for begin in range(0, num_rows, step)]


_STAGED_BYTES = 8 << 20


class GpuCopies(Protocol):
    """Copies between one GPU and pinned memory. Faults raise TransferError."""

    def stream(self) -> Stream:
        """A stream that waits for no other."""

    def host_buffer(self, size_bytes: int) -> HostBuffer:
        """Pinned host memory, kept until the process ends."""

    def fetch(self, target: int, source: int, size_bytes: int, stream: Stream) -> None:
        """Queues a copy from device memory to pinned memory."""

    def put(self, target: int, source: int, size_bytes: int, stream: Stream) -> None:
        """Queues a copy from pinned memory to device memory."""

    def wait(self, stream: Stream) -> None:
        """Blocks until everything queued is done."""


class _Stage:
    """One pinned buffer and the stream that its rows come or go by."""

    def __init__(self, gpu: GpuCopies, row_bytes: int) -> None:
        count = max(1, _STAGED_BYTES // row_bytes)
        buffer = gpu.host_buffer(count * row_bytes)
        self.lock = threading.Lock()
        self.stream = gpu.stream()
        self.address = buffer.address
        self.rows: Pages = np.frombuffer(buffer.view, dtype=np.uint8).reshape(count, row_bytes)


class GpuPages:
    """`ArenaPages` over an arena on a GPU. What the engine wrote has to be done, as it is once a step has ended.

    Args:
        arena: Where it lies.
        gpu: That holds it.
        layout: Of its pages.
        num_blocks: Pages per layer, those that are never handed out included.

    Raises:
        TransferError: The arena is smaller than that, or the GPU gives no pinned memory.
    """

    def __init__(
        self, arena: ArenaSpan, gpu: GpuCopies, layout: KvLayout, *, num_blocks: int
    ) -> None:
        arena.check_holds(layout, num_blocks)
        self._gpu = gpu
        self._layout = layout
        self._num_blocks = num_blocks
        self._address = arena.address
        # One for each way: the reader and the publisher are threads of their own.
        self._inward = _Stage(gpu, layout.page_layer_bytes)
        self._outward = _Stage(gpu, layout.page_layer_bytes)

    @property
    def num_layers(self) -> int:
        """Layers of a block."""
        return len(self._layout.layers)

    def copy_in(self, layer_index: int, source: Pages, slots: Numbers, pages: Numbers) -> Hashes:
        """See `ArenaPages`. The hashes are of the pinned buffer.

        Raises:
            TransferError: A page lies outside the arena, or the GPU fails.
        """
        self._check(pages)
        hashes, stage = np.empty(len(pages), dtype=np.uint64), self._inward
        with stage.lock:
            for turn in self._turns(len(pages), stage):
                staged = np.arange(len(pages[turn]), dtype=np.int64)
                hashes[turn] = copy_hashed(source, stage.rows, slots[turn], staged)
                for begin, page, count in runs(staged.tolist(), pages[turn].tolist()):
                    self._gpu.put(
                        self._page(layer_index, page),
                        self._staged(stage, begin),
                        count * self._layout.page_layer_bytes,
                        stage.stream,
                    )
                self._gpu.wait(stage.stream)
        return hashes

    def copy_out(self, layer_index: int, pages: Numbers, target: Pages, slots: Numbers) -> Hashes:
        """See `ArenaPages`.

        Raises:
            TransferError: As `copy_in`.
        """
        self._check(pages)
        hashes, stage = np.empty(len(pages), dtype=np.uint64), self._outward
        with stage.lock:
            for turn in self._turns(len(pages), stage):
                staged = np.arange(len(pages[turn]), dtype=np.int64)
                for page, begin, count in runs(pages[turn].tolist(), staged.tolist()):
                    self._gpu.fetch(
                        self._staged(stage, begin),
                        self._page(layer_index, page),
                        count * self._layout.page_layer_bytes,
                        stage.stream,
                    )
                self._gpu.wait(stage.stream)
                hashes[turn] = copy_hashed(stage.rows, target, staged, slots[turn])
        return hashes

    def _turns(self, count: int, stage: _Stage) -> Sequence[slice]:
        size = len(stage.rows)
        return [slice(begin, begin + size) for begin in range(0, count, size)]

    def _page(self, layer_index: int, page: int) -> int:
        layer = self._layout.layer_offset(layer_index, self._num_blocks)
        return self._address + layer + page * self._layout.page_layer_bytes

    def _staged(self, stage: _Stage, row: int) -> int:
        return stage.address + row * self._layout.page_layer_bytes

    def _check(self, pages: Numbers) -> None:
        if len(pages) and not 0 <= int(pages.min()) <= int(pages.max()) < self._num_blocks:
            raise TransferError(f"a page outside an arena of {self._num_blocks}")
