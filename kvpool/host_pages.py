"""An arena in host memory, and the slab beside it, as the rows that are copied from one to the other.

A block lies in the slab in one piece, its layers one after the other; in the arena every layer has a region of its own:

    slab    slot 0: layer 0 | layer 1 | …    slot 1: layer 0 | layer 1 | …
    arena   layer 0: page 0 | page 1 | …     layer 1: page 0 | page 1 | …
"""

from collections.abc import Sequence

import numpy as np

from baton.block_ids import Numbers
from baton.errors import TransferError
from baton.layout import KvLayout
from kv_transfer.memory.pages import Pages, layer_pages
from kvpool.hashed_copy import Hashes, copy_hashed
from kvpool.ports import ArenaPages

_ROWS_PER_CALL_BYTES = 4 << 20
"""Rows are copied without the interpreter's lock; a call never holds on to a core for long, and whoever gave up is obeyed soon."""


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
    """A slab's bytes as one `[num_slots, page_layer_bytes]` array per layer of `layout`, without copying; its rows lie apart.

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
