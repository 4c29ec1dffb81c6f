import shutil

import pytest
import torch

from baton.errors import ConfigError
from baton.generation import SamplingParams
from engine.kernels.cpu_library import load_library
from engine.kernels.cpu_matmul import multiplies_int8
from engine.kernels.select import check_quantization
from engine.models.config import load_spec, quantised
from engine.models.inputs import InputBuilder
from engine.models.loader import load_decoder
from engine.scheduling.plan import Row
from tests.engine.stepping import make_runner, make_texts
from tests.engine.tiny_models import make_model

CPU = torch.device("cpu")
needs_int8 = pytest.mark.skipif(
    not multiplies_int8(), reason="this processor has no AVX-512 VNNI, or there is no compiler"
)
PARAMS = SamplingParams(max_tokens=1, temperature=0.0)


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
    """Errors of the logits against their spread, and the greedy choice wherever it led by more than those errors."""
    directory = make_model(tmp_path, family, hidden_size=256, head_dim=64)
    exact, rounded = (_logits(directory, held) for held in ("none", "int8"))
    error = (rounded - exact).std() / exact.std()
    assert 0 < error < 0.03
    best = exact.topk(2).values
    clear = best[:, 0] - best[:, 1] > 0.2 * exact.std()
    assert clear.sum() >= 10
    assert torch.equal(exact.argmax(1)[clear], rounded.argmax(1)[clear])


def _logits(directory, quantization):
    """After each of 200 tokens."""
    decoder = load_decoder(
        directory, load_spec(directory), torch.float32, CPU, quantization=quantization
    )
    torch.manual_seed(0)
    prompt = torch.randint(3, 300, (200,)).tolist()
    texts, blocks = make_texts([prompt], PARAMS, block_tokens=16, chunks=(200,))
    _, arena = make_runner(decoder, block_tokens=16, num_blocks=blocks)
    row = Row(seq=texts[0].seq, start=0, num_tokens=200, samples=(), num_scored=200)
    return decoder.forward(InputBuilder(16, blocks, CPU).build([row]), arena)
