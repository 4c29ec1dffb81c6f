"""How many pages a worker takes."""

import pytest

from baton.config.schema import EngineConfig
from baton.errors import ConfigError
from baton.ids import LayerName
from baton.layout import KvLayout
from engine.cache.budget import DEFAULT_CPU_BYTES, Demand, num_blocks

LAYOUT = KvLayout(
    model_fingerprint="m",
    dtype="float32",
    block_tokens=16,
    num_kv_heads=2,
    head_dim=64,
    layers=(LayerName("a"), LayerName("b")),
)


def _demand(*, max_model_len: int = 1600, available_bytes: int = 1 << 40) -> Demand:
    return Demand(layout=LAYOUT, max_model_len=max_model_len, available_bytes=available_bytes)


def test_asked_bytes_are_filled_with_whole_pages() -> None:
    config = EngineConfig(kv_cache_memory_bytes=10 * LAYOUT.page_bytes + 1)
    assert num_blocks(config, _demand()) == 10


def test_bytes_for_less_than_a_page_are_refused_by_name() -> None:
    with pytest.raises(ConfigError) as caught:
        num_blocks(EngineConfig(kv_cache_memory_bytes=LAYOUT.page_bytes - 1), _demand())
    assert caught.value.param == "engine.kv_cache_memory_bytes"


def test_no_more_is_taken_than_all_sequences_could_use() -> None:
    assert num_blocks(EngineConfig(max_num_seqs=3), _demand()) == 3 * 100


def test_unasked_memory_stays_within_the_default_and_the_share() -> None:
    plenty = num_blocks(EngineConfig(max_num_seqs=100_000), _demand())
    assert plenty == DEFAULT_CPU_BYTES // LAYOUT.page_bytes
    scarce = _demand(available_bytes=400 * LAYOUT.page_bytes)
    assert num_blocks(EngineConfig(gpu_memory_utilization=0.5), scarce) == 200


def test_one_longest_sequence_always_fits() -> None:
    assert num_blocks(EngineConfig(), _demand(available_bytes=0)) == 100
