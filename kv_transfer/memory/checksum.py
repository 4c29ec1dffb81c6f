"""Checksums of pages: what a prefill worker computes of what it pushes, and a decode worker of what arrived.

Of every page there is one 64-bit number per group of layers: the hash of each layer's bytes (`page_hash.py`), folded
with an odd factor per layer, so that no layer can change alone, nor two change places, without changing the sum. A
group spans 16 layers: that says in which part of the model a fault lies, and keeps the commit record of 1,000 pages of
80 layers at 40 KB, where one number per layer would be 640 KB.
Per-layer hashes can be computed as layers are pushed, in any order.
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from kv_transfer.heads import LinkPlan
from kv_transfer.memory.page_hash import Hashes, PageHashes
from kv_transfer.plan import Grant

LAYERS_PER_GROUP = 16


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


@lru_cache(maxsize=16)
def _factors(num_layers: int) -> Hashes:
    """Odd numbers without a pattern, the same on every machine (splitmix64 of the layer's index)."""
    with np.errstate(over="ignore"):
        z = np.arange(1, num_layers + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return (z ^ (z >> np.uint64(31))) | np.uint64(1)
