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


def test_layers_lie_one_after_the_other() -> None:
    ends = [LAYOUT.layer_offset(i, 10) + 10 * LAYOUT.page_layer_bytes for i in range(32)]
    assert ends[-1] == LAYOUT.region_bytes(10)
    assert ends[:-1] == [LAYOUT.layer_offset(i, 10) for i in range(1, 32)]


def test_tokens_take_whole_pages() -> None:
    assert [LAYOUT.num_blocks_for(n) for n in (0, 1, 64, 65)] == [0, 1, 1, 2]


OTHER: dict[str, Any] = {
    "model_fingerprint": "m2",
    "dtype": "float16",
    "block_tokens": 16,
    "num_kv_heads": 4,
    "head_dim": 64,
    "layers": LAYOUT.layers[:-1],
    "tp_size": 2,
}


@pytest.mark.parametrize("field", [field.name for field in fields(KvLayout)])
def test_a_difference_is_told_by_the_fields_name(field: str) -> None:
    other = replace(LAYOUT, **{field: OTHER[field]})
    difference = LAYOUT.difference(other)
    assert difference is not None
    assert difference.startswith(f"{field}: ")
    assert other.digest() != LAYOUT.digest()


def test_equal_layouts_have_no_difference() -> None:
    assert LAYOUT.difference(replace(LAYOUT)) is None
    assert replace(LAYOUT).digest() == LAYOUT.digest()
