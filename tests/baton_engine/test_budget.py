"""How many pages a worker takes."""

from pathlib import Path

import pytest

from baton.config.schema import EngineConfig
from baton.errors import ConfigError
from baton.ids import LayerName
from baton.layout import KvLayout
from baton_engine.build import BuiltEngine
from baton_engine.cache.budget import (
    DEFAULT_CPU_BYTES,
    ArenaDemand,
    affordable_on_cpu,
    affordable_on_gpu,
    num_blocks,
)
from tests.baton_engine.built import built_engine
from tests.baton_engine.tiny_models import make_model

LAYOUT = KvLayout(
    model_fingerprint="m",
    dtype="float32",
    block_tokens=16,
    num_kv_heads=2,
    head_dim=64,
    layers=(LayerName("a"), LayerName("b")),
)


def _demand(*, max_model_len: int = 1600, affordable_bytes: int = 1 << 40) -> ArenaDemand:
    return ArenaDemand(
        layout=LAYOUT, max_model_len=max_model_len, affordable_bytes=affordable_bytes
    )


def test_asked_bytes_are_filled_with_whole_pages() -> None:
    config = EngineConfig(kv_cache_memory_bytes=10 * LAYOUT.page_bytes + 1)
    assert num_blocks(config, _demand()) == 10


@pytest.mark.parametrize(("pages", "longest"), [(4, 65), (15, 241), (16, 256), (100, 256)])
def test_texts_that_are_generated_are_no_longer_than_the_pages_hold(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, pages: int, longest: int
) -> None:
    """Routers are told, and do not promise a client more, who would be refused where its request is placed."""
    model = make_model(tmp_path, "qwen3", num_layers=1)
    page_bytes = built(model, 1 << 20).layout.page_bytes
    caplog.clear()
    limits = built(model, pages * page_bytes).limits
    assert (limits.num_blocks, limits.longest_text, limits.max_model_len) == (pages, longest, 256)
    assert (f"hold texts of {longest} tokens" in caplog.text) == (longest < 256)


def built(model: Path, kv_bytes: int) -> BuiltEngine:
    engine = built_engine(model, EngineConfig(kv_cache_memory_bytes=kv_bytes), max_model_len=256)
    engine.host.close()
    return engine


def test_bytes_for_less_than_a_page_are_refused_by_name() -> None:
    with pytest.raises(ConfigError) as caught:
        num_blocks(EngineConfig(kv_cache_memory_bytes=LAYOUT.page_bytes - 1), _demand())
    assert caught.value.param == "engine.kv_cache_memory_bytes"


def test_no_more_is_taken_than_all_sequences_could_use() -> None:
    assert num_blocks(EngineConfig(max_num_seqs=3), _demand()) == 3 * 100


def test_unasked_memory_stays_within_what_is_affordable() -> None:
    scarce = _demand(affordable_bytes=200 * LAYOUT.page_bytes)
    assert num_blocks(EngineConfig(), scarce) == 200


def test_on_a_cpu_a_share_of_what_is_free_is_affordable_up_to_the_default() -> None:
    half = EngineConfig(gpu_memory_utilization=0.5)
    assert affordable_on_cpu(half, 1000) == 500
    assert affordable_on_cpu(half, 1 << 40) == DEFAULT_CPU_BYTES


def test_on_a_gpu_it_is_what_the_weights_leave_of_the_workers_share() -> None:
    half = EngineConfig(gpu_memory_utilization=0.5)
    assert affordable_on_gpu(half, total_bytes=1000, weights_bytes=100, sharers=1) == 400
    assert affordable_on_gpu(half, total_bytes=1000, weights_bytes=100, sharers=2) == 150
    assert affordable_on_gpu(half, total_bytes=1000, weights_bytes=700, sharers=1) == 0


def test_one_longest_sequence_always_fits() -> None:
    assert num_blocks(EngineConfig(), _demand(affordable_bytes=0)) == 100
