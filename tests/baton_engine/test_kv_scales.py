import pytest
import torch

from baton.errors import ConfigError
from baton_engine.kernels import select
from baton_engine.models.config import load_spec
from baton_engine.models.loader import load_decoder
from tests.baton_engine.tiny_models import make_model

CPU, FP8 = torch.device("cpu"), torch.float8_e4m3fn


def scales(directory, dtype=torch.float32, kv_dtype=FP8):
    decoder = load_decoder(directory, load_spec(directory), dtype, CPU, kv_dtype=kv_dtype)
    return [layer.attention.scales for layer in decoder.layers]


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_scales_are_powers_of_two_of_every_head_in_every_dtype(tmp_path, family):
    """They follow from what is stored: workers that compute in other dtypes write and read the same pages."""
    directory = make_model(tmp_path, family)
    found = scales(directory)
    for layer, narrow in zip(found, scales(directory, torch.bfloat16), strict=True):
        assert layer.shape == (2, 2)
        assert torch.equal(layer.log2(), layer.log2().round())
        assert torch.equal(layer, narrow)


def test_pages_as_wide_as_what_is_computed_need_no_scales(tmp_path):
    assert scales(make_model(tmp_path, "llama"), kv_dtype=None) == [None, None]


def test_larger_weights_have_larger_scales(tmp_path):
    small = scales(make_model(tmp_path / "small", "llama", initializer_range=0.05))
    large = scales(make_model(tmp_path / "large", "llama", initializer_range=0.8))
    for one, other in zip(small, large, strict=True):
        assert torch.equal(other, 16 * one)


def test_what_norms_make_of_keys_does_not_depend_on_their_projection(tmp_path):
    small = scales(make_model(tmp_path / "small", "qwen3", initializer_range=0.05))
    large = scales(make_model(tmp_path / "large", "qwen3", initializer_range=0.8))
    for one, other in zip(small, large, strict=True):
        assert torch.equal(other[:, 0], one[:, 0])
        assert torch.equal(other[:, 1], 16 * one[:, 1])


def test_auto_holds_what_is_computed():
    assert select.choose_kv_dtype("auto", torch.float16, CPU) == torch.float16
    assert select.choose_kv_dtype("fp8_e4m3", torch.float16, CPU) == FP8


def test_a_model_of_bfloat16_that_is_widened_to_be_computed_keeps_its_pages_narrow():
    assert select.choose_kv_dtype("auto", torch.float32, CPU, widened=True) == torch.bfloat16
    assert select.choose_kv_dtype("fp8_e4m3", torch.float32, CPU, widened=True) == FP8


def test_a_gpu_without_numbers_of_8_bits_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A100")
    with pytest.raises(ConfigError, match=r"8\.9 or later, which A100 is not") as raised:
        select.choose_kv_dtype("fp8_e4m3", torch.bfloat16, torch.device("cuda", 0))
    assert raised.value.param == "engine.kv_cache_dtype"
