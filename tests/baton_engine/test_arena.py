import pytest
import torch

from baton.ids import BlockId, LayerName
from baton.layout import KvLayout
from baton_engine.cache.arena import KvArena

LAYOUT = KvLayout(
    model_fingerprint="m",
    dtype="float32",
    block_tokens=4,
    num_kv_heads=2,
    head_dim=8,
    layers=(LayerName("model.layers.0"), LayerName("model.layers.1")),
)


def test_a_layer_is_a_view_over_the_bytes_at_the_layouts_offset():
    memory = bytearray(LAYOUT.region_bytes(3))
    arena = KvArena(LAYOUT, 3, memoryview(memory))
    arena.layer(1)[2, 1, 0, 3, 7] = 1.5
    page = LAYOUT.layer_offset(1, 3) + 2 * LAYOUT.page_layer_bytes
    element = (((1 * 2 + 0) * 4 + 3) * 8 + 7) * 4
    cell = memory[page + element : page + element + 4]
    assert torch.frombuffer(cell, dtype=torch.float32).item() == 1.5


def test_what_a_peer_writes_into_the_bytes_is_seen():
    memory = bytearray(LAYOUT.region_bytes(1))
    arena = KvArena(LAYOUT, 1, memoryview(memory))
    memory[:4] = bytes.fromhex("0000803f")
    assert arena.layer(0)[0, 0, 0, 0, 0].item() == 1.0


def test_copying_pages_copies_them_in_every_layer():
    arena = KvArena(LAYOUT, 4, memoryview(bytearray(LAYOUT.region_bytes(4))))
    for index in range(2):
        arena.layer(index)[1] = index + 1.0
    arena.copy_pages([(BlockId(1), BlockId(3))])
    assert [arena.layer(i)[3].unique().tolist() for i in range(2)] == [[1.0], [2.0]]
    assert not arena.layer(0)[[0, 2]].any()


def test_too_small_a_buffer_is_refused():
    with pytest.raises(ValueError, match="needs"):
        KvArena(LAYOUT, 4, memoryview(bytearray(LAYOUT.region_bytes(4) - 1)))


def test_a_read_only_buffer_is_refused():
    with pytest.raises(ValueError, match="read-only"):
        KvArena(LAYOUT, 1, memoryview(bytes(LAYOUT.region_bytes(1))))
