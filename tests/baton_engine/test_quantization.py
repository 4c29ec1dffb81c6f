import pytest
import torch

from baton import native
from baton.errors import ConfigError
from baton_engine.kernels.cpu.library import load_library
from baton_engine.kernels.select import check_quantization
from baton_engine.models.config import load_spec, quantised
from tests.baton_engine.tiny_models import make_model

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("device", "dtype", "said"),
    [
        (torch.device("cuda"), torch.float32, "runs on CPUs, not on cuda"),
        (CPU, torch.float16, "not in float16"),
    ],
)
def test_int8_says_where_it_does_not_run(device, dtype, said):
    with pytest.raises(ConfigError, match=said) as raised:
        check_quantization("int8", device, dtype)
    assert raised.value.param == "model.quantization"


def test_int8_without_the_compiled_kernels_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(native, "ROOT", tmp_path)
    load_library.cache_clear()
    try:
        with pytest.raises(ConfigError, match="CPU kernels"):
            check_quantization("int8", CPU, torch.float32)
    finally:
        load_library.cache_clear()


def test_weights_as_they_are_stored_are_served_everywhere():
    check_quantization("none", torch.device("cuda"), torch.float16)


def test_kv_of_quantised_weights_is_another_models(tmp_path):
    spec = load_spec(make_model(tmp_path, "llama"))
    assert quantised(spec, "none") == spec
    assert quantised(spec, "int8").fingerprint != spec.fingerprint
