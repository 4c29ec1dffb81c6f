"""What cannot become an engine is refused by name before any weights are read, with the real vLLM."""

import json
import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from baton.config.schema import EngineConfig, ModelConfig
from baton.errors import BatonError, ConfigError, ModelLoadError
from baton.ids import Role
from baton.layout import KvLayout
from baton_vllm import build
from baton_vllm.adapters import Adapter, read_adapters
from baton_vllm.settings import missing, num_ranks
from kv_transfer.memory.arena import WorkerMemory
from prefill_worker.sink import TransferSink
from tests.baton_engine.tiny_models import make_model as make_tiny
from tests.baton_vllm.families import make_model
from tests.baton_vllm.lora import make_adapter

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.filterwarnings("ignore"),  # of torch and vLLM, while they are imported
    pytest.mark.timeout(300),
    pytest.mark.skipif(missing() is not None, reason=missing() or ""),
]


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What the engine sets for its process ends with the test, as does the connector of one that was refused late."""
    ranks = {"VLLM_WORKER_MULTIPROC_METHOD": "fork", "OMP_NUM_THREADS": "2"}
    for name, value in (build._ENVIRONMENT | ranks).items():
        monkeypatch.setenv(name, os.environ.get(name, value))
    yield
    from vllm.distributed.kv_transfer.kv_transfer_state import ensure_kv_transfer_shutdown

    ensure_kv_transfer_shutdown()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_model("llama", folder)
    return folder


def layout_of(model: Path) -> KvLayout:
    """Of a hybrid worker, which ends at once."""
    from vllm.distributed.kv_transfer.kv_transfer_state import ensure_kv_transfer_shutdown

    built = build.build_vllm_engine(
        ModelConfig(model=str(model), dtype="float32"),
        EngineConfig(kind="vllm", kv_cache_memory_bytes=32 << 20, vllm={"enforce_eager": True}),
        role=Role.HYBRID,
        secret=bytes(32),
        memory=WorkerMemory(),
        sink=TransferSink(),
        progress=lambda *_: None,
    )
    built.host.close()
    ensure_kv_transfer_shutdown()
    return built.layout


def refused(
    model: Path,
    dtype: str = "float32",
    adapters: tuple[str, ...] = (),
    role: Role = Role.HYBRID,
    **engine: object,
) -> BatonError:
    config = EngineConfig(kind="vllm", kv_cache_memory_bytes=32 << 20, **engine)  # type: ignore[arg-type]
    memories = [WorkerMemory() for _ in range(num_ranks(config))]
    with pytest.raises(BatonError) as caught:
        build.build_vllm_engine(
            ModelConfig(model=str(model), dtype=dtype, lora_modules=adapters),
            config,
            role=role,
            secret=bytes(32),
            memory=memories[0],
            rank_memories=memories[1:] and memories,
            sink=TransferSink(),
            progress=lambda *_: None,
        )
    assert "\n" not in str(caught.value)
    return caught.value


def test_a_setting_that_vllm_does_not_have_is_refused_with_the_nearest_one(model: Path) -> None:
    error = refused(model, vllm={"enforce_eagre": True})
    assert isinstance(error, ConfigError)
    assert error.param == "engine.vllm.enforce_eagre"
    assert "did you mean enforce_eager?" in str(error)


def test_a_device_that_this_vllm_has_not_is_refused(model: Path) -> None:
    error = refused(model, device="cuda")
    assert isinstance(error, ConfigError)
    assert error.param == "engine.device"
    assert "this vLLM is built for cpu" in str(error)


def test_settings_that_contradict_each_other_are_refused_in_vllms_words(model: Path) -> None:
    error = refused(model, vllm={"quantization": "awq"})
    assert isinstance(error, ModelLoadError)
    assert "Cannot find the config file for awq" in str(error)


def test_a_model_that_vllm_does_not_know_is_refused_in_its_words(
    model: Path, tmp_path: Path
) -> None:
    config = json.loads((model / "config.json").read_text())
    config["architectures"] = ["NobodysForCausalLM"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    error = refused(tmp_path)
    assert isinstance(error, ModelLoadError)
    assert "NobodysForCausalLM" in str(error)


def test_a_precision_that_a_quantisation_cannot_be_computed_in_is_refused(
    model: Path, tmp_path: Path
) -> None:
    config = json.loads((model / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    error = refused(tmp_path)
    assert "torch.float32 is not supported for quantization method fp8" in str(error)


def test_latent_attention_is_refused_on_a_cpu(tmp_path: Path) -> None:
    make_model("deepseek-v2-latent", tmp_path)
    assert "latent attention is not served on CPUs" in str(refused(tmp_path))


def test_adapters_that_vllm_cannot_serve_are_refused_by_their_names(
    model: Path, tmp_path: Path
) -> None:
    (tmp_path / "other").mkdir()
    wider = make_tiny(tmp_path / "other" / "model", "llama", hidden_size=96)
    fits = f"fits={make_adapter(tmp_path / 'fits', model, seed=1)}"
    high = f"high={make_adapter(tmp_path / 'high', model, seed=1, rank=32)}"
    anothers = f"anothers={make_adapter(tmp_path / 'anothers', wider, seed=1)}"
    settings = {"enforce_eager": True, "enable_lora": True}

    missing_one = refused(model, adapters=(fits, f"gone={tmp_path}/gone"), vllm=settings)
    too_high = refused(model, adapters=(fits, high), vllm=settings)
    of_another = refused(model, adapters=(fits, anothers), vllm=settings)

    assert isinstance(missing_one, ConfigError)
    assert str(missing_one).startswith("model.lora_modules.gone: there is no directory")
    assert "high: its rank is 32, engine.vllm.max_lora_rank is 16" in str(too_high)
    assert str(of_another).startswith("model.lora_modules.anothers: vLLM cannot load it: ")


def test_an_adapter_that_is_replaced_while_vllm_loads_it_is_refused(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What vLLM has of it then has another digest than the pages' layout."""
    adapter = make_adapter(tmp_path / "sql", model, seed=1)

    def replaced(entries: Iterable[str]) -> tuple[Adapter, ...]:
        adapters = read_adapters(entries)
        shutil.rmtree(adapter)
        make_adapter(adapter, model, seed=2)
        return adapters

    monkeypatch.setattr(build, "read_adapters", replaced)
    settings = {"enforce_eager": True, "enable_lora": True}
    error = refused(model, adapters=(f"sql={adapter}",), vllm=settings)
    assert "model.lora_modules.sql: " in str(error)
    assert "changed since this worker read it" in str(error)


def test_a_checkpoint_of_the_same_size_with_other_weights_has_another_fingerprint(
    model: Path, tmp_path: Path
) -> None:
    other = shutil.copytree(model, tmp_path / "other")
    file = other / "model.safetensors"
    weights = load_file(file)
    name = "model.layers.1.self_attn.k_proj.weight"
    save_file(weights | {name: weights[name] + 1.0}, file, {"format": "pt"})
    assert file.stat().st_size == (model / file.name).stat().st_size

    first, of_other, again = layout_of(model), layout_of(other), layout_of(model)

    assert first == again
    assert first == replace(of_other, model_fingerprint=first.model_fingerprint)
    assert first.model_fingerprint != of_other.model_fingerprint


def test_ranks_serve_no_adapters(model: Path) -> None:
    error = refused(model, vllm={"tensor_parallel_size": 2, "enable_lora": True})
    assert isinstance(error, ConfigError)
    assert error.param == "engine.vllm.tensor_parallel_size"
    assert "several ranks serve no adapters yet" in str(error)


def test_heads_that_cannot_be_shared_out_are_refused_in_vllms_words(model: Path) -> None:
    error = refused(model, vllm={"tensor_parallel_size": 3})
    assert isinstance(error, ModelLoadError)
    assert "divisible by tensor parallel size (3)" in str(error)


def test_heads_that_several_ranks_hold_are_not_handed_off(tmp_path: Path) -> None:
    one_head = make_tiny(tmp_path / "model", "llama", head_dim=32, num_kv_heads=1)
    settings = {"tensor_parallel_size": 2, "enforce_eager": True}
    error = refused(one_head, role=Role.DECODE, vllm=settings)
    assert isinstance(error, ConfigError)
    assert "2 ranks hold 1 KV heads more than once" in str(error)
