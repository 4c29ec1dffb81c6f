"""What is read of an adapter before vLLM loads it, and what is refused."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from baton.errors import ConfigError
from baton_vllm.adapters import (
    check_ranks,
    check_unchanged,
    fingerprint,
    num_held,
    read_adapters,
)
from tests.baton_engine.tiny_models import make_model
from tests.baton_vllm.lora import make_adapter

SETTINGS = SimpleNamespace(lora_dtype="auto", target_modules=None)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), "llama")


@pytest.fixture
def adapter(model: Path, tmp_path: Path) -> Path:
    return make_adapter(tmp_path / "first", model, seed=1)


def change(adapter: Path, **settings: object) -> None:
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(config | settings))


def refused(adapter: Path, max_rank: int = 16) -> str:
    with pytest.raises(ConfigError) as caught:
        check_ranks(read_adapters([f"sql={adapter}"]), max_rank)
    assert caught.value.param == "model.lora_modules"
    assert str(caught.value).startswith("model.lora_modules.sql: ")
    return str(caught.value)


def test_adapters_are_numbered_in_order_and_know_their_rank(adapter: Path) -> None:
    change(adapter, rank_pattern={"q_proj": 12})
    first, second = read_adapters([f"sql={adapter}", f"code={adapter}"])
    assert (first.name, first.number, first.path, first.rank) == ("sql", 1, adapter, 12)
    assert (second.name, second.number) == ("code", 2)


def test_the_fingerprint_tells_names_weights_and_settings_apart(model: Path, adapter: Path) -> None:
    other = make_adapter(adapter.parent / "other", model, seed=2)
    copied = Path(shutil.copytree(adapter, adapter.parent / "copied"))

    def of(*entries: str, **settings: object) -> str:
        return fingerprint(read_adapters(entries), SimpleNamespace(**(vars(SETTINGS) | settings)))

    plain = of(f"a={adapter}", f"b={other}")
    assert of(f"b={other}", f"a={copied}") == plain, "where they lie, and their order, is all one"
    assert of(f"a={other}", f"b={adapter}") != plain
    assert of(f"a={adapter}") != plain
    assert of(f"a={adapter}", f"b={other}", lora_dtype="bfloat16") != plain
    change(copied, lora_alpha=32)
    assert of(f"a={copied}", f"b={other}") != plain


def test_an_adapter_that_is_not_there_is_refused_by_its_name(adapter: Path) -> None:
    assert "there is no directory /nowhere/at/all" in refused(Path("/nowhere/at/all"))
    assert "there is no directory ~nobody-of" in refused(Path("~nobody-of-this-name/sql"))
    (adapter / "adapter_model.safetensors").unlink()
    assert "has no adapter_model.safetensors" in refused(adapter)
    (adapter / "adapter_config.json").unlink()
    assert "has no adapter_config.json" in refused(adapter)


@pytest.mark.parametrize("rank", [None, 0, -1, "8", 8.5, True])
def test_an_adapter_that_tells_no_rank_is_refused_by_its_name(adapter: Path, rank: object) -> None:
    change(adapter, r=rank)
    assert "rank (r)" in refused(adapter)


def test_a_rank_that_is_too_high_is_refused_with_both_numbers(adapter: Path) -> None:
    assert "its rank is 8, engine.vllm.max_lora_rank is 4" in refused(adapter, max_rank=4)
    change(adapter, rank_pattern={"v_proj": 32})
    assert "its rank is 32, engine.vllm.max_lora_rank is 16" in refused(adapter)


@pytest.mark.parametrize(
    ("settings", "held"),
    [({}, 2), ({"max_loras": 1}, 2), ({"max_loras": 4}, 4), ({"max_cpu_loras": 3}, 3)],
)
def test_all_adapters_are_held(adapter: Path, settings: dict[str, object], held: int) -> None:
    assert num_held(read_adapters([f"sql={adapter}", f"code={adapter}"]), settings) == held


@pytest.mark.parametrize("given", [0, 1, "2"])
def test_fewer_than_all_are_refused_by_the_settings_name(adapter: Path, given: object) -> None:
    adapters = read_adapters([f"sql={adapter}", f"code={adapter}"])
    with pytest.raises(ConfigError, match=r"max_cpu_loras: is .*, and all 2 adapters") as caught:
        num_held(adapters, {"max_cpu_loras": given})
    assert caught.value.param == "engine.vllm.max_cpu_loras"


def test_files_that_change_while_vllm_loads_them_are_refused(model: Path, adapter: Path) -> None:
    (read,) = read_adapters([f"sql={adapter}"])
    check_unchanged(read)
    shutil.rmtree(adapter)
    make_adapter(adapter, model, seed=2)
    with pytest.raises(
        ConfigError, match=r"^model\.lora_modules\.sql: .* changed since this worker"
    ):
        check_unchanged(read)
    shutil.rmtree(adapter)
    with pytest.raises(ConfigError, match=r"^model\.lora_modules\.sql: there is no directory"):
        check_unchanged(read)


def test_files_that_cannot_be_read_are_refused_by_the_adapters_name(
    adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those that somebody takes away between one look at them and the next."""
    opened = Path.open

    def gone(self: Path, mode: str = "r", *more: Any, **options: Any) -> object:
        if mode == "rb":
            raise FileNotFoundError(2, "No such file or directory", str(self))
        return opened(self, mode, *more, **options)

    monkeypatch.setattr(Path, "open", gone)
    with pytest.raises(ConfigError, match=r"^model\.lora_modules\.sql: .* cannot be read: No such"):
        read_adapters([f"sql={adapter}"])
