import json

import pytest
import torch

from baton.config.schema import EngineConfig, ModelConfig
from baton.errors import ConfigError
from baton_engine import build
from baton_engine.kernels.cpu import product_choice
from baton_engine.kernels.cpu.product_choice import (
    AUTO,
    ROWS,
    Bfloat16Product,
    Comparison,
    choose_product,
    compare,
    measured,
    possible_products,
    selectable_products,
)
from baton_engine.models.config import load_spec
from baton_engine.models.loader import load_decoder
from tests.baton_engine.tiny_models import make_model

CPU = torch.device("cpu")
PANELS, ONEDNN = Bfloat16Product.PANELS, Bfloat16Product.ONEDNN
COMPRESSED, MIXED = Bfloat16Product.COMPRESSED_PAIRS, Bfloat16Product.MIXED
BOTH = (PANELS, ONEDNN)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The cache directory."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "baton"


@pytest.fixture
def comparisons(monkeypatch):
    """What was measured, with times that this test gives."""
    made = []

    def count(possible):
        made.append(tuple(possible))
        return Comparison(milliseconds={PANELS: [1.0] * len(ROWS), ONEDNN: [2.0] * len(ROWS)})

    monkeypatch.setattr(product_choice, "compare", count)
    monkeypatch.setattr(product_choice, "_key", lambda possible: "key")
    monkeypatch.setattr(product_choice, "possible_products", lambda: BOTH)
    return made


def test_the_fastest_is_that_of_the_smallest_geometric_mean():
    times = {PANELS: [1.0, 1.0, 1.0, 9.0], ONEDNN: [2.0, 2.0, 2.0, 2.0]}
    comparison = Comparison(milliseconds=times)
    assert comparison.fastest() is PANELS
    assert comparison.advantage() == pytest.approx(2 / 9**0.25)


def test_weights_are_held_twice_where_decodes_and_prompts_want_different_products():
    times = {COMPRESSED: [1.0, 1.0, 1.0, 8.0], ONEDNN: [2.0, 2.0, 2.0, 2.0]}
    comparison = Comparison(milliseconds=times)
    assert comparison.fastest() is MIXED
    assert comparison.advantage() == pytest.approx(8**0.25 / 2**0.25)
    assert comparison.fastest(one_for_all=True) is COMPRESSED


def test_a_little_is_not_worth_twice_the_memory():
    times = {COMPRESSED: [1.0, 1.0, 1.0, 1.2], ONEDNN: [2.0, 2.0, 2.0, 1.0]}
    assert Comparison(milliseconds=times).fastest() is COMPRESSED


@pytest.mark.parametrize(
    ("plain_ms", "expected"), [(0.98, COMPRESSED), (0.96, Bfloat16Product.PAIRS)]
)
def test_compressed_weights_are_taken_unless_plain_ones_are_clearly_faster(plain_ms, expected):
    times = {Bfloat16Product.PAIRS: [plain_ms] * len(ROWS), COMPRESSED: [1.0] * len(ROWS)}
    assert Comparison(milliseconds=times).fastest() is expected


def test_products_over_panels_may_be_compressed(monkeypatch):
    monkeypatch.setattr(product_choice, "reads_bfloat16", lambda: True)
    monkeypatch.setattr(product_choice, "multiplies_bfloat16", lambda: True)
    for plain in (PANELS, Bfloat16Product.PAIRS):
        assert {plain, Bfloat16Product(f"compressed_{plain}")} <= set(selectable_products())


def test_a_processor_is_measured_once(folder, comparisons):
    assert choose_product(AUTO, CPU) is choose_product(AUTO, CPU) is PANELS
    assert comparisons == [BOTH]


@pytest.mark.parametrize(
    "kept", ["", "[]", "{}", '{"panels": [1, 2, 3, 4]}', '{"panels": [], "onednn": []}',
             '{"panels": [1, 1, 1, "nan"], "onednn": [1, 1, 1, 1]}']
)  # fmt: skip
def test_what_cannot_be_right_is_measured_again(folder, comparisons, kept):
    folder.mkdir()
    (folder / "products-key.json").write_text(kept)
    assert measured(BOTH).fastest() is PANELS
    assert comparisons == [BOTH]
    assert set(json.loads((folder / "products-key.json").read_text())) == {"panels", "onednn"}


def test_where_nothing_can_be_kept_it_is_measured_each_time(folder, comparisons):
    folder.write_text("a file where a directory should be")
    assert choose_product(AUTO, CPU) is choose_product(AUTO, CPU) is PANELS
    assert comparisons == [BOTH, BOTH]


def test_what_cannot_be_written_is_read_where_it_is_there(folder, comparisons):
    folder.mkdir()
    (folder / "products-key.json").write_text(
        json.dumps({"panels": [2.0] * len(ROWS), "onednn": [1.0] * len(ROWS)})
    )
    (folder / "products-key.lock").mkdir()  # which nobody can lock
    assert choose_product(AUTO, CPU, must_agree=True) is ONEDNN
    assert comparisons == []


def test_workers_that_have_to_agree_need_a_product_by_name_where_nothing_can_be_kept(
    folder, comparisons
):
    assert choose_product(AUTO, CPU, must_agree=True) is PANELS
    (folder / "products-key.json").unlink()
    (folder / "products-key.tmp").mkdir()  # which nobody can write
    for _ in range(2):
        with pytest.raises(
            ConfigError, match=r"auto, .* give them one of panels, onednn"
        ) as refused:
            choose_product(AUTO, CPU, must_agree=True)
        assert refused.value.param == "engine.cpu_product"
    assert choose_product(AUTO, CPU) is PANELS
    assert choose_product("onednn", CPU, must_agree=True) is ONEDNN


def test_a_fault_of_the_products_is_not_taken_for_one_of_the_cache(
    folder, comparisons, monkeypatch
):
    asked = []

    def broken(possible):
        asked.append(possible)
        raise RuntimeError("an illegal instruction")

    monkeypatch.setattr(product_choice, "compare", broken)
    with pytest.raises(RuntimeError, match="illegal instruction"):
        choose_product(AUTO, CPU)
    assert asked == [BOTH]


def test_nothing_is_measured_for_a_model_that_holds_no_bfloat16(
    tmp_path, folder, comparisons, monkeypatch
):
    asked = []

    def choose(*_, **how):
        asked.append(how)
        return PANELS

    monkeypatch.setattr(build, "choose_product", choose)
    path = make_model(tmp_path / "model", "llama", num_layers=1)
    spec = load_spec(path)
    load_decoder(path, spec, torch.float32, CPU)
    assert choose_product(AUTO, CPU, is_used=False, must_agree=True) is Bfloat16Product.WIDENED
    assert comparisons == []
    for dtype, deterministic in (("auto", False), ("bfloat16", True)):
        config = EngineConfig(device="cpu", deterministic=deterministic)
        build._choose(ModelConfig(model=str(path), dtype=dtype), config, 0)
    assert asked == [
        {"is_used": False, "must_agree": False},
        {"is_used": True, "must_agree": True},
    ]


def test_what_is_asked_for_is_not_measured(folder, comparisons):
    assert choose_product("onednn", CPU) is ONEDNN
    assert choose_product(AUTO, torch.device("cuda")) is Bfloat16Product.WIDENED
    assert comparisons == []


def test_what_does_not_run_here_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(product_choice, "possible_products", lambda: (Bfloat16Product.WIDENED,))
    monkeypatch.setattr(product_choice, "why_no_tiles", lambda: "the processor has none")
    with pytest.raises(
        ConfigError, match=r"cpu_product is panels; .* run auto, widened$"
    ) as caught:
        choose_product("panels", CPU)
    assert caught.value.param == "engine.cpu_product"


def test_amx_is_refused_with_the_reason_where_it_does_not_run(monkeypatch):
    monkeypatch.setattr(product_choice, "why_no_tiles", lambda: "the processor has none")
    with pytest.raises(
        ConfigError, match=r"cpu_product is amx, and the processor has none; .* run auto, (?!.*amx)"
    ) as caught:
        choose_product("amx", CPU)
    assert caught.value.param == "engine.cpu_product"


def test_products_that_may_be_the_fastest_are_measured():
    possible = possible_products()
    if len(possible) == 1:
        pytest.skip(f"on this processor only {possible[0]} may be the fastest")
    times = compare(possible).milliseconds
    assert set(times) == set(possible)
    assert all(len(row) == len(ROWS) and min(row) > 0 for row in times.values())
