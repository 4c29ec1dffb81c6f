"""What is refused before vLLM is imported, and by which name."""

from dataclasses import fields
from importlib import metadata

import pytest

from baton.config.load import load
from baton.config.lora import read_lora_modules
from baton.config.schema import EngineConfig
from baton.config.setting import Setting
from baton.errors import ConfigError
from baton_vllm import settings


def config_of(**given: object):
    flags = [
        Setting(path=path.replace("__", "."), value=value, source=path)
        for path, value in given.items()
    ]
    return load(flags=flags)


def test_a_setting_of_vllms_is_taken_by_its_own_name():
    settings.check_settings({"max_logprobs": 5})


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("max_logprob", "did you mean max_logprobs"),
        ("_api_process_count", "no such setting"),
        ("model", "is given by model.model"),
        ("kv_transfer_config", "is decided by Baton"),
        ("kv_offloading_size", "is decided by Baton: the pool"),
        ("kv_offloading_backend", "is decided by Baton: the pool"),
        ("disable_hybrid_kv_cache_manager", "is decided by Baton: windows are kept"),
        ("pipeline_parallel_size", "not supported with Baton yet"),
    ],
)
def test_a_setting_that_is_not_the_operators_is_refused_by_its_name(name, says):
    with pytest.raises(ConfigError, match=says) as refused:
        settings.check_settings({name: 1})
    assert refused.value.param == f"engine.vllm.{name}"


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("generation_config", "generation_config.json of the model's directory"),
        ("override_generation_config", "change it there, or in each request"),
        ("tokenizer", "the one in the model's directory"),
        ("tokenizer_mode", "tokenizer.json in the model's directory"),
        ("tokenizer_revision", "model.revision"),
        ("reasoning_parser", "router.reasoning_parser"),
        ("structured_outputs_config", "grammar.max_bytes"),
        ("log_level", "log.level"),
    ],
)
def test_what_vllms_front_alone_would_read_is_refused_with_what_to_use(name, instead):
    """Nothing of that front runs, so that it would do nothing."""
    with pytest.raises(ConfigError) as refused:
        settings.check_settings({name: "x"})
    assert refused.value.param == f"engine.vllm.{name}"
    assert instead in refused.value.message


def test_each_setting_has_one_verdict():
    tables = [settings.GIVEN_BY, settings.DECIDED, settings.NOT_YET, settings.PASSED]
    names = [name for table in tables for name in table]
    assert sorted(names) == sorted(set(names))


@pytest.mark.vllm
@pytest.mark.filterwarnings("ignore")  # of torch and vLLM, while they are imported
@pytest.mark.skipif(settings.missing() is not None, reason=settings.missing() or "")
def test_every_setting_of_vllms_has_a_verdict():
    """A new one of the next minor is to be looked at: does it reach the engine core, or vLLM's front alone?"""
    from vllm.engine.arg_utils import EngineArgs

    judged = {*settings.GIVEN_BY, *settings.DECIDED, *settings.NOT_YET, *settings.PASSED}
    assert {field.name for field in fields(EngineArgs) if field.name[0] != "_"} == judged


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"engine__deterministic": True}, "engine.deterministic is of the engine baton"),
        ({"model__quantization": "int8"}, "engine.vllm.quantization"),
        ({"engine__cuda_graphs": False}, "engine.vllm.enforce_eager"),
    ],
)
def test_what_vllm_cannot_do_here_is_refused_when_the_configuration_is_read(given, says):
    with pytest.raises(ConfigError, match=says):
        config_of(**{"engine__kind": "vllm", "cluster__hybrid_workers": 1} | given)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({}, "model.lora_modules needs engine.vllm.enable_lora: true"),
        ({"engine__kind": "baton"}, "model.lora_modules needs engine.kind vllm"),
        (
            {"engine__vllm": {"enable_lora": True}, "model__served_model_name": ("sql",)},
            "model.lora_modules: sql is the model's own name",
        ),
    ],
)
def test_adapters_need_vllm_its_setting_and_names_of_their_own(given, says):
    asked = {"engine__kind": "vllm", "cluster__hybrid_workers": 1}
    asked |= {"model__lora_modules": ("code=/a", "sql=/b=c")}
    with pytest.raises(ConfigError, match=says):
        config_of(**asked | given)
    config = config_of(**asked | {"engine__vllm": {"enable_lora": True}})
    assert read_lora_modules(config.model.lora_modules) == {"code": "/a", "sql": "/b=c"}


@pytest.mark.parametrize("entries", [("sql",), ("=/a",), ("sql=",), ("sql=/a", "sql=/b")])
def test_an_adapter_without_a_name_or_a_place_or_with_anothers_name_is_refused(entries):
    with pytest.raises(ConfigError, match="lora_modules: must hold NAME=PATH, and no name twice"):
        config_of(model__lora_modules=entries, engine__kind="vllm")
    with pytest.raises(ConfigError, match=r"NAME=PATH|two adapters are named sql"):
        read_lora_modules(entries)


def test_ranks_are_counted_by_vllms_own_setting():
    given = {"engine__kind": "vllm", "cluster__hybrid_workers": 1}
    for size in (1, 4):
        config = config_of(**given | {"engine__vllm": {"tensor_parallel_size": size}})
        assert settings.num_ranks(config.engine) == size
    assert settings.num_ranks(config_of(**given).engine) == 1


@pytest.mark.parametrize("size", [0, -1, 65, 1.5, "2", True])
def test_what_is_no_number_of_ranks_is_refused_by_its_name(size):
    with pytest.raises(ConfigError) as refused:
        settings.num_ranks(EngineConfig(kind="vllm", vllm={"tensor_parallel_size": size}))
    assert refused.value.param == "engine.vllm.tensor_parallel_size"


def test_vllms_settings_need_vllm():
    with pytest.raises(ConfigError, match=r"needs engine\.kind vllm"):
        config_of(engine__vllm={"max_logprobs": 5})


def test_its_settings_reach_the_configuration_of_a_worker():
    config = config_of(
        engine__kind="vllm", cluster__hybrid_workers=1, engine__vllm={"max_logprobs": 5}
    )
    assert config.engine.vllm == {"max_logprobs": 5}


def test_without_vllm_it_is_said_what_to_install(monkeypatch):
    def absent(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", absent)
    assert "not installed" in (settings.missing() or "")


def test_another_version_is_refused(monkeypatch):
    monkeypatch.setattr(metadata, "version", lambda name: "0.33.1")
    assert "vLLM 0.33.1 is installed, Baton runs 0.32" in (settings.missing() or "")
