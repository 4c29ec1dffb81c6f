"""vLLM's events under Baton's keys. The events are vLLM's in name and fields."""

from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest

from baton.hashing import chain_keys, root_key
from baton.ids import LayerName
from baton.layout import KvLayout
from baton_vllm.block_events import BlockNames

SECRET = bytes(32)
LAYOUT = KvLayout(
    model_fingerprint="m",
    dtype="float32",
    block_tokens=2,
    num_kv_heads=1,
    head_dim=8,
    layers=(LayerName("0"),),
)


@dataclass
class BlockStored:
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int = 2
    extra_keys: list[tuple[str, ...] | None] | None = None
    group_idx: int = 0
    lora_name: str | None = None


@dataclass
class BlockRemoved:
    block_hashes: list[int]
    group_idx: int = 0


@dataclass
class AllBlocksCleared:
    pass


def keys(tokens: list[int], scope: str = "", adapter: str = ""):
    root = root_key(SECRET, scope=scope, layout=LAYOUT, adapter=adapter)
    return tuple(chain_keys(SECRET, root, tokens, 2))


def test_a_text_has_the_names_that_the_router_gives_it():
    names = BlockNames(SECRET, LAYOUT)
    stored = BlockStored([10, 11], None, [1, 2, 3, 4], extra_keys=[("tenant",), None])
    names.publish(SimpleNamespace(events=[stored, BlockStored([12], 11, [5, 6])]))
    changes = names.take()
    assert changes is not None
    assert changes.stored == keys([1, 2, 3, 4, 5, 6], "tenant")
    assert names.take() is None


def test_tenants_have_names_of_their_own():
    assert keys([1, 2], "a") != keys([1, 2], "b")


@pytest.mark.parametrize(("extra", "scope"), [(("sql",), ""), (("sql", "tenant"), "tenant")])
def test_an_adapters_blocks_have_names_of_their_own_in_each_scope(extra, scope):
    names = BlockNames(SECRET, LAYOUT)
    names.add(
        [BlockStored([10, 11], None, [1, 2, 3, 4], extra_keys=[extra, ("sql",)], lora_name="sql")]
    )
    changes = names.take()
    assert changes is not None
    assert changes.stored == keys([1, 2, 3, 4], scope, "sql")
    assert {*changes.stored}.isdisjoint(keys([1, 2, 3, 4], scope))


def test_a_block_that_two_pages_hold_goes_with_the_second():
    names = BlockNames(SECRET, LAYOUT)
    names.add([BlockStored([10], None, [1, 2]), BlockStored([10], None, [1, 2])])
    names.take()
    names.add([BlockRemoved([10])])
    assert names.take() is None
    names.add([BlockRemoved([10])])
    changes = names.take()
    assert changes is not None
    assert changes.removed == keys([1, 2])


def test_what_stands_behind_an_unknown_block_is_not_told():
    names = BlockNames(SECRET, LAYOUT)
    names.add([BlockStored([11], 10, [3, 4]), BlockRemoved([11])])
    assert names.take() is None


def test_blocks_behind_some_that_have_left_a_window_are_not_told():
    """Hashes are then of the last blocks, and the salt of the first one is not there."""
    names = BlockNames(SECRET, replace(LAYOUT, windows=(2,)))
    stored = BlockStored([11], None, [1, 2, 3, 4], extra_keys=[None])
    names.add([stored, BlockStored([12], 11, [5, 6]), BlockRemoved([11])])
    assert names.take() is None


def test_of_several_groups_the_first_that_attends_to_everything_is_followed():
    layout = replace(LAYOUT, windows=(4, 0, 0))
    names = BlockNames(SECRET, layout)
    names.add(
        [
            BlockStored([20], None, [1, 2], group_idx=0),
            BlockStored([20, 21], None, [1, 2, 3, 4], group_idx=1),
            BlockStored([20, 21], None, [1, 2, 3, 4], group_idx=2),
            BlockRemoved([20], group_idx=0),
            BlockRemoved([21], group_idx=2),
        ]
    )
    root = root_key(SECRET, scope="", layout=layout, adapter="")
    changes = names.take()
    assert changes is not None
    assert changes.stored == tuple(chain_keys(SECRET, root, [1, 2, 3, 4], 2))
    assert not changes.removed


def test_a_flush_removes_all_last_block_first():
    names = BlockNames(SECRET, LAYOUT)
    names.add([BlockStored([10, 11], None, [1, 2, 3, 4])])
    names.take()
    names.add([AllBlocksCleared()])
    changes = names.take()
    assert changes is not None
    assert changes.removed == tuple(reversed(keys([1, 2, 3, 4])))
