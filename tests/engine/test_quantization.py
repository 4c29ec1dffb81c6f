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
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_int8_keeps_close_to_float32(tmp_path, family):
    """Errors of the logits against their spread, and the greedy choice wherever it led by more than those errors."""
    exact, rounded = _both(tmp_path, family)
    error = (rounded - exact).std() / exact.std()
    assert 0 < error < 0.05
    best = exact.topk(2).values
    clear = best[:, 0] - best[:, 1] > 0.2 * exact.std()
    assert clear.sum() >= 10
    assert torch.equal(exact.argmax(1)[clear], rounded.argmax(1)[clear])


@needs_int8
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_int8_keeps_the_likeliest_tokens_and_how_likely_they_are(tmp_path, family):
    exact, rounded = (logits.log_softmax(1) for logits in _both(tmp_path, family))
    likely, likely_rounded = exact.topk(5), rounded.topk(5)
    overlap = [
        len(set(one) & set(other)) / 5
        for one, other in zip(likely.indices.tolist(), likely_rounded.indices.tolist(), strict=True)
    ]
    assert sum(overlap) / len(overlap) > 0.93
    assert min(overlap) >= 0.6
    moved = (rounded.gather(1, likely.indices) - likely.values).abs()
    assert moved.mean() < 0.04
    assert moved.max() < 0.2


@needs_int8
@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 32])
def test_int8_is_finite_around_the_borders_of_pages(tmp_path, tokens):
    directory = make_model(tmp_path, "llama", dtype=torch.bfloat16)
    assert _logits(directory, "int8", tokens).isfinite().all()


def _both(path, family):
    # Weights as small as trained ones: with larger ones attention jumps from key to key, and no rounding is small.
    directory = make_model(path, family, hidden_size=256, head_dim=64, initializer_range=0.05)
    return _logits(directory, "none"), _logits(directory, "int8")


def _logits(directory, quantization, tokens=200):
    """After each of so many tokens."""
    decoder = load_decoder(
        directory, load_spec(directory), torch.float32, CPU, quantization=quantization
    )
    torch.manual_seed(0)
    prompt = torch.randint(3, 300, (tokens,)).tolist()
    texts, blocks = make_texts([prompt], PARAMS, block_tokens=16, chunks=(tokens,))
    _, arena = make_runner(decoder, block_tokens=16, num_blocks=blocks)
    row = Row(seq=texts[0].seq, start=0, num_tokens=tokens, samples=(), num_scored=tokens)
    return decoder.forward(InputBuilder(16, blocks, CPU).build([row]), arena)
