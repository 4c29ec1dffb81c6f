"""Checksums of pages: what a prefill worker computes of what it pushes, and a decode worker of what arrived.

Of every page there is one 64-bit number per group of layers: the xxh3 of each layer's bytes, folded with an odd factor per
layer, so that no layer can change alone, nor two change places, without changing the sum. A group spans 16 layers: that
says in which part of the model a fault lies, and keeps the commit record of 1,000 pages of 80 layers at 40 KB, where
one number per layer would be 640 KB. Per-layer hashes can be computed as layers are pushed, in any order.
"""

import time
from collections.abc import Sequence
from functools import lru_cache
from typing import Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from baton.ids import BlockId
from baton.layout import KvLayout
from kv_transfer.heads import LinkPlan
from kv_transfer.plan import Grant
from kv_transfer.shm import layer_pages

LAYERS_PER_GROUP = 16
_YIELD_BYTES = 256 * 1024
"""xxh3 of a small page keeps the interpreter's lock; between so many bytes other threads get it."""

Hashes = npt.NDArray[np.uint64]


class PageHashes(Protocol):
    """Reads a local arena."""

    def of_layer(
        self, layer_index: int, blocks: Sequence[BlockId], parts: Sequence[slice] = ()
    ) -> Hashes:
        """The xxh3 of each page in one layer, `[len(blocks)]`; of `parts` of each page where only those are written."""


class ArenaHashes:
    """Of an arena in host memory. Blocks; for threads that nobody waits for."""

    def __init__(self, memory: memoryview, layout: KvLayout, *, num_blocks: int) -> None:
        self._layers = layer_pages(memory, layout, num_blocks)
        self._pages_per_turn = max(1, _YIELD_BYTES // layout.page_layer_bytes)

    def of_layer(
        self, layer_index: int, blocks: Sequence[BlockId], parts: Sequence[slice] = ()
    ) -> Hashes:
        """See `PageHashes`."""
        pages = self._layers[layer_index]
        hashes = np.empty(len(blocks), dtype=np.uint64)
        for begin in range(0, len(blocks), self._pages_per_turn):
            turn = blocks[begin : begin + self._pages_per_turn]
            if parts:
                hashes[begin : begin + len(turn)] = [_of_parts(pages[b], parts) for b in turn]
            else:
                hashes[begin : begin + len(turn)] = [
                    xxhash.xxh3_64_intdigest(pages[b]) for b in turn
                ]
            time.sleep(0)
        return hashes


def fold(hashes: Sequence[Hashes] | Hashes) -> Hashes:
    """Checksums from hashes: `num_layers` rows of `[num_blocks]` to `[num_groups, num_blocks]`."""
    groups = -(-len(hashes) // LAYERS_PER_GROUP)
    sums = np.zeros((groups, len(hashes[0])), dtype=np.uint64)
    product = np.empty(len(hashes[0]), dtype=np.uint64)
    # Layer by layer, in one small buffer: a product of the whole would be fresh memory every time.
    for layer, factor in enumerate(_factors(len(hashes))):
        sums[layer // LAYERS_PER_GROUP] += np.multiply(hashes[layer], factor, out=product)
    return sums


def checksum_bytes(link: LinkPlan, num_blocks: int) -> int:
    """Length of the checksums of a commit over `link`."""
    groups = -(-len(link.target_layers) // LAYERS_PER_GROUP)
    return groups * num_blocks * 8


def find_corruption(
    arena: PageHashes, link: LinkPlan, grant: Grant, checksums: bytes
) -> str | None:
    """Compares pages that arrived over `link` with their sender's checksums; what differs, or None."""
    parts = () if link.whole_pages else tuple(part.target for part in link.slices)
    found = np.zeros((len(link.target_layers), len(grant.blocks)), dtype=np.uint64)
    for row, target in zip(found, link.target_layers, strict=True):
        if target is not None:
            row[:] = arena.of_layer(target, grant.blocks, parts)
    sums = fold(found)
    wanted = np.frombuffer(checksums, dtype="<u8").reshape(sums.shape)
    wrong = np.argwhere(sums != wanted)
    if not len(wrong):
        return None
    group, page = wrong[0]
    first = group * LAYERS_PER_GROUP
    last = min(first + LAYERS_PER_GROUP, len(found)) - 1
    return (
        f"{len(wrong)} checksums differ, the first of block {grant.held_blocks + page}, "
        f"layers {first} to {last}"
    )


def _of_parts(page: npt.NDArray[np.uint8], parts: Sequence[slice]) -> int:
    whole = xxhash.xxh3_64()
    for part in parts:
        whole.update(page[part].data)
    return whole.intdigest()


@lru_cache(maxsize=16)
def _factors(num_layers: int) -> Hashes:
    """Odd numbers without a pattern, the same on every machine (splitmix64 of the layer's index)."""
    with np.errstate(over="ignore"):
        z = np.arange(1, num_layers + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return (z ^ (z >> np.uint64(31))) | np.uint64(1)
