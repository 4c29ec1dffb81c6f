import shutil

import pytest
import torch

from baton.errors import ConfigError
from baton.generation import SamplingParams
from engine.kernels.cpu_library import load_library
from engine.kernels.cpu_matmul import multiplies_int8
from engine.kernels.select import check_quantization
from engine.models.config import load_spec, quantised
from engine.models.loader import load_decoder
from tests.engine.stepping import make_runner, make_texts, run_all
from tests.engine.tiny_models import make_model

CPU = torch.device("cpu")
needs_int8 = pytest.mark.skipif(
    not multiplies_int8(), reason="this processor has no AVX-512 VNNI, or there is no compiler"
)
PARAMS = SamplingParams(max_tokens=1, temperature=0.0, logprobs=20, ignore_eos=True)


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


def test_int8_without_a_compiler_is_refused(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    load_library.cache_clear()
    try:
        with pytest.raises(ConfigError, match="C\\+\\+ compiler"):
            check_quantization("int8", CPU, torch.float32)
    finally:
        load_library.cache_clear()


def test_weights_as_they_are_stored_are_served_everywhere():
    check_quantization("none", torch.device("cuda"), torch.float16)


def test_kv_of_quantised_weights_is_another_models(tmp_path):
    spec = load_spec(make_model(tmp_path, "llama"))
    assert quantised(spec, "none") == spec
    assert quantised(spec, "int8").fingerprint != spec.fingerprint


@needs_int8
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_int8_keeps_close_to_float32(tmp_path, family):
    """First tokens of 40 prompts: log-probabilities within a tenth, and the greedy choice wherever it led by more."""
    directory = make_model(tmp_path, family, hidden_size=256, head_dim=64)
    spec = load_spec(directory)
    exact, rounded = (
        _first_logprobs(load_decoder(directory, spec, torch.float32, CPU, quantization=held))
        for held in ("none", "int8")
    )
    for want, have in zip(exact, rounded, strict=True):
        shared = want.keys() & have.keys()
        assert len(shared) >= 15
        assert max(abs(want[token] - have[token]) for token in shared) < 0.1
        first, second = sorted(want.values(), reverse=True)[:2]
        if first - second > 0.2:
            assert max(want, key=want.__getitem__) == max(have, key=have.__getitem__)


def _first_logprobs(decoder):
    torch.manual_seed(0)
    prompts = [torch.randint(3, 300, (length,)).tolist() for length in range(3, 43)]
    texts, blocks = make_texts(prompts, PARAMS, block_tokens=16, chunks=(64,))
    runner, _ = make_runner(decoder, block_tokens=16, num_blocks=blocks)
    run_all(runner, texts)
    return [dict(text.drawn[0].logprobs.top) for text in texts]
