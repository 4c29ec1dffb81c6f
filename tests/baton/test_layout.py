"""Two workers agree on the bytes of a page, or know why not."""

from dataclasses import fields, replace
from typing import Any

import pytest

from baton.ids import LayerName
from baton.layout import KvLayout

LAYOUT = KvLayout(
    model_fingerprint="m",
    dtype="bfloat16",
    block_tokens=64,
    num_kv_heads=8,
    head_dim=128,
    layers=tuple(LayerName(f"model.layers.{i}") for i in range(32)),
)


def test_a_page_of_llama_8b_at_64_tokens_is_8_mib() -> None:
    assert LAYOUT.page_bytes == 8 << 20
    assert LAYOUT.region_bytes(10) == 80 << 20


def test_a_page_of_8_bits_is_half_as_large_and_no_page_of_16() -> None:
    narrow = replace(LAYOUT, dtype="float8_e4m3fn")
    assert narrow.page_bytes == LAYOUT.page_bytes // 2
    assert LAYOUT.difference(narrow) == "dtype: 'bfloat16' here, 'float8_e4m3fn' there"
    assert narrow.content_digest() != LAYOUT.content_digest()


def test_layers_lie_one_after_the_other() -> None:
    ends = [LAYOUT.layer_offset(i, 10) + 10 * LAYOUT.page_layer_bytes for i in range(32)]
    assert ends[-1] == LAYOUT.region_bytes(10)
    assert ends[:-1] == [LAYOUT.layer_offset(i, 10) for i in range(1, 32)]


def test_tokens_take_whole_pages() -> None:
    assert [LAYOUT.num_blocks_for(n) for n in (0, 1, 64, 65)] == [0, 1, 1, 2]
    windowed = replace(LAYOUT, windows=(0, 64))
    assert [windowed.num_blocks_for(n) for n in (0, 1, 64, 65, 129)] == [0, 2, 2, 4, 5]


OTHER: dict[str, Any] = {
    "model_fingerprint": "m2",
    "dtype": "float16",
    "block_tokens": 16,
    "num_kv_heads": 4,
    "head_dim": 64,
    "layers": (LayerName("model.layers.32"),),
    "tp_size": 2,
    "tp_rank": 1,
    "kv_head_replicas": 2,
    "drafter": "d",
    "windows": (0, 64),
}
NAMED = {"num_kv_heads": "total_kv_heads", "tp_size": "total_kv_heads"}


@pytest.mark.parametrize("field", [field.name for field in fields(KvLayout)])
def test_a_difference_is_told_by_the_fields_name(field: str) -> None:
    other = replace(LAYOUT, **{field: OTHER[field]})
    for difference in (LAYOUT.difference(other), other.difference(LAYOUT)):
        assert difference is not None
        assert difference.startswith(f"{NAMED.get(field, field)}: ")
    assert other.digest() != LAYOUT.digest()


def test_equal_layouts_have_no_difference() -> None:
    assert LAYOUT.difference(replace(LAYOUT)) is None
    assert replace(LAYOUT).digest() == LAYOUT.digest()


SPREAD = [
    replace(LAYOUT, num_kv_heads=4, tp_size=2),
    replace(LAYOUT, num_kv_heads=4, tp_size=2, tp_rank=1),
    replace(LAYOUT, num_kv_heads=1, tp_size=16, tp_rank=15, kv_head_replicas=2),
    replace(LAYOUT, layers=LAYOUT.layers[::-1]),
    replace(LAYOUT, layers=LAYOUT.layers[5:9]),
]


@pytest.mark.parametrize("other", SPREAD)
def test_heads_and_layers_that_are_spread_otherwise_are_no_difference(other: KvLayout) -> None:
    assert LAYOUT.difference(other) is None
    assert other.difference(LAYOUT) is None
    assert other.digest() != LAYOUT.digest()
    assert other.content_digest() == LAYOUT.content_digest()


@pytest.mark.parametrize(
    "field", ["model_fingerprint", "dtype", "block_tokens", "num_kv_heads", "head_dim", "tp_size"]
)
def test_another_content_has_another_digest(field: str) -> None:
    other = replace(LAYOUT, **{field: OTHER[field]})
    assert other.content_digest() != LAYOUT.content_digest()


def test_ranks_hold_their_heads_in_order() -> None:
    spread = [
        replace(LAYOUT, num_kv_heads=1, tp_size=16, tp_rank=rank, kv_head_replicas=2)
        for rank in range(16)
    ]
    assert [layout.first_kv_head for layout in spread] == [rank // 2 for rank in range(16)]
    assert {layout.total_kv_heads for layout in spread} == {8}


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("dtype", {"dtype": "int3"}),
        ("block_tokens", {"block_tokens": 0}),
        ("num_kv_heads", {"num_kv_heads": 0}),
        ("head_dim", {"head_dim": 0}),
        ("tp_size", {"tp_size": 0}),
        ("tp_rank", {"tp_rank": -1}),
        ("tp_rank", {"tp_size": 2, "tp_rank": 2}),
        ("kv_head_replicas", {"kv_head_replicas": 0}),
        ("kv_head_replicas", {"tp_size": 4, "kv_head_replicas": 3}),
        ("layers", {"layers": ()}),
        ("layers", {"layers": (LAYOUT.layers[0], LAYOUT.layers[0])}),
    ],
)
def test_an_impossible_layout_is_told_by_the_fields_name(
    field: str, values: dict[str, Any]
) -> None:
    impossible = replace(LAYOUT, **values)
    for told in (impossible.fault(), LAYOUT.difference(impossible), impossible.difference(LAYOUT)):
        assert told is not None
        assert told.startswith(f"{field}: ")
