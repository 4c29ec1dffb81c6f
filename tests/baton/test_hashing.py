"""Block keys stand for a block and all before it, and for who may share it."""

from dataclasses import replace
from hashlib import blake2b

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.hashing import KEY_BYTES, chain_keys, narrow_scope, root_key
from baton.ids import LayerName
from baton.layout import KvLayout

SECRET = bytes(range(32))
LAYOUT = KvLayout(
    model_fingerprint="m",
    dtype="float32",
    block_tokens=4,
    num_kv_heads=1,
    head_dim=8,
    layers=(LayerName("a"),),
)
ROOT = root_key(SECRET, scope="tenant", layout=LAYOUT)
TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=40)


@given(TOKENS)
def test_there_is_one_key_per_full_block(tokens: list[int]) -> None:
    keys = chain_keys(SECRET, ROOT, tokens, 4)
    assert len(keys) == len(tokens) // 4
    assert all(len(key) == KEY_BYTES for key in keys)


@given(TOKENS, TOKENS)
def test_equal_keys_mean_equal_prefixes(left: list[int], right: list[int]) -> None:
    pairs = zip(chain_keys(SECRET, ROOT, left, 4), chain_keys(SECRET, ROOT, right, 4), strict=False)
    for index, (one, other) in enumerate(pairs, start=1):
        assert (one == other) == (left[: index * 4] == right[: index * 4])


@given(TOKENS, st.integers(0, 9))
def test_a_chain_can_be_continued_from_any_block(tokens: list[int], blocks: int) -> None:
    whole = chain_keys(SECRET, ROOT, tokens, 4)
    blocks = min(blocks, len(whole))
    parent = whole[blocks - 1] if blocks else ROOT
    assert whole[blocks:] == chain_keys(SECRET, parent, tokens[blocks * 4 :], 4)


def test_a_key_is_keyed_blake2b_over_parent_and_little_endian_tokens() -> None:
    packed = b"".join(token.to_bytes(4, "little") for token in (1, 2, 3, 4))
    expected = blake2b(ROOT + packed, key=SECRET, digest_size=KEY_BYTES).digest()
    assert chain_keys(SECRET, ROOT, [1, 2, 3, 4], 4) == [expected]


def test_secret_scope_adapter_and_layout_all_part_the_caches() -> None:
    other_layout = KvLayout(
        model_fingerprint="m2",
        dtype="float32",
        block_tokens=4,
        num_kv_heads=1,
        head_dim=8,
        layers=(LayerName("a"),),
    )
    roots = {
        ROOT,
        root_key(bytes(32), scope="tenant", layout=LAYOUT),
        root_key(SECRET, scope="tenant2", layout=LAYOUT),
        root_key(SECRET, scope="tenant", layout=LAYOUT, adapter="a"),
        root_key(SECRET, scope="tenant", layout=other_layout),
        root_key(SECRET, scope="tenan", layout=LAYOUT, adapter="t"),
    }
    assert len(roots) == 6


def test_every_rank_names_a_block_alike() -> None:
    whole = replace(LAYOUT, num_kv_heads=4)
    spread = {
        root_key(SECRET, scope="tenant", layout=replace(LAYOUT, tp_size=4, tp_rank=rank))
        for rank in range(4)
    }
    assert spread == {root_key(SECRET, scope="tenant", layout=whole)}


@given(st.text(max_size=8), st.text(max_size=8), st.text(max_size=8), st.text(max_size=8))
def test_a_salt_of_any_text_only_narrows(scope: str, salt: str, other: str, salt2: str) -> None:
    if (scope, salt) != (other, salt2):
        assert narrow_scope(scope, salt) != narrow_scope(other, salt2) or not (salt and salt2)
    assert narrow_scope(scope, None) == narrow_scope(scope, "") == scope


def test_a_secret_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="32"):
        root_key(b"short", scope="", layout=LAYOUT)
