import os

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from baton.ids import BlockId, LayerName
from baton.layout import KvLayout
from kv_transfer.heads import plan_link
from kv_transfer.memory.checksum import LAYERS_PER_GROUP, checksum_bytes, find_corruption, fold
from kv_transfer.memory.page_hash import ArenaHashes
from kv_transfer.memory.pages import layer_pages
from kv_transfer.plan import Grant

NUM_LAYERS = LAYERS_PER_GROUP + 4
NUM_BLOCKS = 6
LAYOUT = KvLayout(
    model_fingerprint="f",
    dtype="float16",
    block_tokens=4,
    num_kv_heads=2,
    head_dim=8,
    layers=tuple(LayerName(f"layer.{i}") for i in range(NUM_LAYERS)),
)
LINK = plan_link(LAYOUT, LAYOUT)
GRANT = Grant(held_blocks=1, blocks=(BlockId(5), BlockId(0), BlockId(3)))


@pytest.fixture
def memory() -> memoryview:
    return memoryview(bytearray(os.urandom(LAYOUT.region_bytes(NUM_BLOCKS))))


def checksums(memory: memoryview) -> bytes:
    arena = ArenaHashes(memory, LAYOUT, num_blocks=NUM_BLOCKS)
    return fold(np.stack([arena.of_layer(i, GRANT.blocks) for i in range(NUM_LAYERS)])).tobytes()


def corruption(memory: memoryview, sums: bytes) -> str | None:
    arena = ArenaHashes(memory, LAYOUT, num_blocks=NUM_BLOCKS)
    return find_corruption(arena, LINK, GRANT, sums)


def test_a_hash_is_xxh3_of_the_page_in_one_layer(memory: memoryview):
    arena = ArenaHashes(memory, LAYOUT, num_blocks=NUM_BLOCKS)
    page = layer_pages(memory, LAYOUT, NUM_BLOCKS)[2][3]
    assert arena.of_layer(2, (BlockId(3),))[0] == xxhash.xxh3_64_intdigest(page.tobytes())


def test_pages_that_arrived_whole_are_right(memory: memoryview):
    sums = checksums(memory)
    assert len(sums) == checksum_bytes(LINK, len(GRANT.blocks)) == 2 * 3 * 8
    assert corruption(memory, sums) is None


@given(layer=st.integers(0, NUM_LAYERS - 1), page=st.integers(0, 2), at=st.integers(0))
def test_any_flipped_bit_is_found_and_its_block_and_layers_named(layer: int, page: int, at: int):
    memory = memoryview(bytearray(LAYOUT.region_bytes(NUM_BLOCKS)))
    sums = checksums(memory)
    row = layer_pages(memory, LAYOUT, NUM_BLOCKS)[layer][GRANT.blocks[page]]
    row[at % len(row)] ^= 1
    group = range(LAYERS_PER_GROUP) if layer < LAYERS_PER_GROUP else range(16, NUM_LAYERS)
    fault = corruption(memory, sums)
    assert fault is not None
    assert f"block {1 + page}, layers {group[0]} to {group[-1]}" in fault


def test_layers_that_changed_places_are_found(memory: memoryview):
    sums = checksums(memory)
    pages = layer_pages(memory, LAYOUT, NUM_BLOCKS)
    pages[0][5], pages[1][5] = pages[1][5].copy(), pages[0][5].copy()
    assert corruption(memory, sums) is not None


def test_pages_that_were_not_sent_are_no_part_of_it(memory: memoryview):
    sums = checksums(memory)
    for layer in layer_pages(memory, LAYOUT, NUM_BLOCKS):
        layer[1] ^= 255
    assert corruption(memory, sums) is None


def test_only_the_parts_that_a_link_writes_are_hashed(memory: memoryview):
    parts = (slice(0, 8), slice(16, 24))
    arena = ArenaHashes(memory, LAYOUT, num_blocks=NUM_BLOCKS)
    before = arena.of_layer(0, (BlockId(0),), parts)[0]
    page = layer_pages(memory, LAYOUT, NUM_BLOCKS)[0][0]
    page[8:16] ^= 255
    assert arena.of_layer(0, (BlockId(0),), parts)[0] == before
    page[16] ^= 1
    assert arena.of_layer(0, (BlockId(0),), parts)[0] != before


def test_checksums_of_a_thousand_pages_of_a_large_model_stay_small():
    layout = KvLayout(
        model_fingerprint="f",
        dtype="bfloat16",
        block_tokens=64,
        num_kv_heads=8,
        head_dim=128,
        layers=tuple(LayerName(f"layer.{i}") for i in range(80)),
    )
    assert checksum_bytes(plan_link(layout, layout), 1000) == 40_000


def test_a_prompt_that_the_peer_holds_whole_has_no_checksums():
    assert fold(np.zeros((NUM_LAYERS, 0), dtype=np.uint64)).tobytes() == b""
