"""A whole model on the GPU's kernels, against the same model on their torch twins."""

from functools import cache
from pathlib import Path

import pytest
import torch

from baton.generation import SamplingParams
from baton.ids import BlockId
from baton_engine.kernels import reference
from baton_engine.kernels.ports import KernelSet
from baton_engine.kernels.reference import ReferenceKernels
from baton_engine.models.config import load_spec
from baton_engine.models.decoder import Decoder
from baton_engine.models.loader import load_decoder
from tests.baton_engine.stepping import make_runner, make_texts, run_all
from tests.baton_engine.tiny_models import make_model
from tests.baton_engine.triton_cases import DEVICE, kernels, needs_triton

pytestmark = [
    needs_triton,
    pytest.mark.skipif(DEVICE != "cpu", reason="the models of these tests lie on the CPU"),
]
GREEDY = SamplingParams(temperature=0, max_tokens=2, logprobs=3)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Makes each family's model once."""
    root = tmp_path_factory.mktemp("models")
    return cache(lambda family: make_model(root / family, family))


def load(path: Path, kernel_set: KernelSet, kv_dtype: torch.dtype | None = None) -> Decoder:
    return load_decoder(
        path, load_spec(path), torch.float32, CPU, kernels=kernel_set, kv_dtype=kv_dtype
    )


def triton_kernels(kv_dtype: torch.dtype | None = None) -> KernelSet:
    """Of a GPU so small that contexts of this test are cut into pieces. Pages of 8 bits are written by the twin: the
    interpreter rounds to them wrongly (7.9 becomes 4).
    """
    made = kernels("kernel_set").TritonKernels(multiprocessors=2)
    if kv_dtype is not None:
        made.rotate_and_store = reference.rotate_and_store
    kernel_set: KernelSet = made
    return kernel_set


def assert_alike(actual, expected):
    for ours, theirs in zip(actual, expected, strict=True):
        assert [drawn.token for drawn in ours.drawn] == [drawn.token for drawn in theirs.drawn]
        for mine, other in zip(ours.drawn, theirs.drawn, strict=True):
            assert mine.logprobs.logprob == pytest.approx(other.logprobs.logprob, abs=1e-3)


@pytest.mark.parametrize(
    ("family", "kv_dtype"),
    [
        pytest.param("mistral", None, marks=pytest.mark.slow),
        ("qwen3", None),
        ("qwen2", torch.float8_e4m3fn),
    ],
)
def test_chunked_prefill_mixed_with_decodes_draws_what_the_twins_draw(models, family, kv_dtype):
    """Mistral has a sliding window, Qwen3 norms on its heads, and Qwen2 is read from pages of 8 bits."""
    made = []
    for kernel_set in (triton_kernels(kv_dtype), ReferenceKernels()):
        texts, num_blocks = make_texts(
            [[*range(3, 73)], [*range(100, 109)]], GREEDY, block_tokens=16, chunks=(40, 64)
        )
        runner, _ = make_runner(
            load(models(family), kernel_set, kv_dtype),
            block_tokens=16,
            num_blocks=num_blocks,
            kv_dtype=kv_dtype,
        )
        run_all(runner, texts)
        made.append(texts)
    assert_alike(*made)


def test_a_prompt_on_pages_of_another_draws_what_the_twins_draw(models):
    """The second text begins with the first one's prompt: its first pages are not computed again."""
    prompt = [*range(3, 43)]
    made = []
    for kernel_set in (triton_kernels(), ReferenceKernels()):
        texts, num_blocks = make_texts(
            [prompt, [*prompt[:32], 7, 6, 5]], GREEDY, block_tokens=16, chunks=(200,)
        )
        runner, _ = make_runner(
            load(models("mistral"), kernel_set), block_tokens=16, num_blocks=num_blocks
        )
        run_all(runner, texts[:1])
        texts[1].seq.blocks[:2] = [BlockId(block) for block in texts[0].seq.blocks[:2]]
        texts[1].seq.num_computed = 32
        run_all(runner, texts[1:])
        made.append(texts)
    assert_alike(*made)
