"""Copies full pages of an engine into slots of the slab that were reserved for them, and says what came of each.

The engine goes on meanwhile and holds nothing back: a page may be handed out again while it is copied. Its generation, read
after the copy, tells; what was copied then is not what its key says and is never committed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from baton.ids import BlockId
from baton.pages import PublishedPage
from kv_transfer.memory.pages import Pages
from kv_transfer.plan import check_pages
from kvpool.hashed_copy import Hashes
from kvpool.host_pages import check_layers, turns
from kvpool.ports import ArenaPages

Generation = Callable[[BlockId], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """One page with the place that was reserved for it.

    Attributes:
        page: What is copied.
        slot: Where to.
    """

    page: PublishedPage
    slot: int


class PoolWriter:
    """Blocks; for a thread that nobody waits for. Not thread-safe: one writer at a time.

    Args:
        arena: Where pages lie.
        generation: How often a page has been handed out; see `BlockManager.generation`.
    """

    def __init__(self, arena: ArenaPages, generation: Generation) -> None:
        self._arena = arena
        self._generation = generation

    def write(self, places: Sequence[Placed], slab: Sequence[Pages]) -> list[bytes]:
        """Copies each page to its slot.

        Args:
            places: Pages and slots.
            slab: One array `[num_slots, page_layer_bytes]` per layer.

        Returns:
            Per place the block's checksums as `HeldBlock` has them, or nothing where the page was handed out again: such a
            slot holds no block and must not be committed.

        Raises:
            TransferError: A slot lies outside the slab, or its blocks have another number of layers; nothing was written.
        """
        check_layers(slab, self._arena)
        check_pages(tuple(BlockId(placed.slot) for placed in places), len(slab[0]))
        fresh = [place for place, placed in enumerate(places) if self._is_unchanged(placed)]
        sums = self._copy([places[place] for place in fresh], slab)
        raw, size = sums.astype("<u8").tobytes(), 8 * len(slab)
        written = [b""] * len(places)
        for row, place in enumerate(fresh):
            if self._is_unchanged(places[place]):
                written[place] = raw[row * size : (row + 1) * size]
        return written

    def _copy(self, places: Sequence[Placed], slab: Sequence[Pages]) -> Hashes:
        """Checksums `[num_places, num_layers]`."""
        pages = np.array([placed.page.block for placed in places], dtype=np.int64)
        slots = np.array([placed.slot for placed in places], dtype=np.int64)
        sums = np.zeros((len(places), len(slab)), dtype=np.uint64)
        for layer_index, rows in enumerate(slab):
            for turn in turns(len(places), rows.shape[1]):
                hashes = self._arena.copy_out(layer_index, pages[turn], rows, slots[turn])
                sums[turn, layer_index] = hashes
        return sums

    def _is_unchanged(self, placed: Placed) -> bool:
        return self._generation(placed.page.block) == placed.page.generation
