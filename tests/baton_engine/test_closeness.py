"""Log-probabilities of what computes in fewer bits, against those of float32."""

import pytest
import torch

from baton_engine.kernels.cpu.matmul import multiplies_int8
from baton_engine.models.config import load_spec
from baton_engine.models.loader import load_decoder
from tests.baton_engine.closeness import assert_near, closeness, logits_after_each
from tests.baton_engine.stepping import make_runner
from tests.baton_engine.tiny_models import make_model

CPU = torch.device("cpu")
FAMILIES = ("llama", "mistral", "qwen3")


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    """A model of each family, wide enough that a group of int8 weights is a group."""
    root = tmp_path_factory.mktemp("models")
    return {
        family: make_model(root / family, family, hidden_size=256, head_dim=64)
        for family in FAMILIES
    }


def some_tokens(count=80):
    generator = torch.Generator().manual_seed(1)
    return torch.randint(3, 300, (count,), generator=generator).tolist()


def logits(directory, dtype=torch.float32, quantization="none", chunk=None, kv_dtype=None):
    decoder = load_decoder(directory, load_spec(directory), dtype, CPU, quantization=quantization)
    _, arena = make_runner(decoder, block_tokens=16, num_blocks=6, kv_dtype=kv_dtype)
    return logits_after_each(decoder, some_tokens(), chunk=chunk, arena=arena)


@pytest.mark.parametrize("chunk", [None, 1], ids=["prefill", "decode"])
@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_keeps_near_float32(directories, family, chunk):
    exact = logits(directories[family])
    rounded = logits(directories[family], torch.bfloat16, chunk=chunk)
    assert_near(exact, rounded, overlap=0.94, delta=0.08, largest_delta=0.6)


@pytest.mark.parametrize("chunk", [None, 1], ids=["prefill", "decode"])
@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_pages_alone_keep_nearer_than_bfloat16_throughout(directories, family, chunk):
    exact = logits(directories[family])
    rounded = logits(directories[family], chunk=chunk, kv_dtype=torch.bfloat16)
    assert_near(exact, rounded, overlap=0.97, delta=0.04, largest_delta=0.3)


@pytest.mark.skipif(
    not multiplies_int8(), reason="this processor has no AVX-512 VNNI, or the kernels are not built"
)
@pytest.mark.parametrize("chunk", [None, 1], ids=["prefill", "decode"])
@pytest.mark.parametrize("family", FAMILIES)
def test_int8_weights_keep_near_float32(directories, family, chunk):
    exact = logits(directories[family])
    rounded = logits(directories[family], quantization="int8", chunk=chunk)
    assert_near(exact, rounded, overlap=0.88, delta=0.2, largest_delta=1.6)


def test_another_models_logits_are_not_near(tmp_path, directories):
    other = make_model(tmp_path, "llama", hidden_size=256, head_dim=64, seed=7)
    exact, wrong = logits(directories["llama"]), logits(other)
    assert closeness(exact, wrong).overlap < 0.2
    with pytest.raises(AssertionError):
        assert_near(exact, wrong, overlap=0.88, delta=0.2, largest_delta=1.6)


def test_a_computation_is_not_compared_with_itself():
    exact = torch.randn(4, 50)
    with pytest.raises(AssertionError, match="one and the same"):
        assert_near(exact, exact, overlap=0.0, delta=1.0, largest_delta=1.0)


def test_no_number_is_near_nothing():
    exact = torch.randn(4, 50)
    with pytest.raises(AssertionError):
        assert_near(exact, exact * torch.nan, overlap=0.0, delta=1e9, largest_delta=1e9)


def test_what_is_added_to_every_logit_does_not_count():
    exact = torch.randn(4, 50)
    found = closeness(exact, exact + 3.0)
    assert (found.overlap, found.least_overlap) == (1.0, 1.0)
    assert found.largest_delta < 1e-6
