"""The same request, the same bits, on the GPU's kernels:
a whole small model whose tokens and log-probabilities are compared exactly.
"""

import numpy as np
import pytest
import torch

from baton.generation import Prompt, SamplingParams
from baton.ids import SeqId
from baton_engine.messages import Generate
from tests.baton_engine.tiny_models import make_model, random_prompts
from tests.baton_engine.triton_cases import DEVICE, kernels, needs_triton
from tests.baton_engine.whole_engine import WholeEngine

pytestmark = [
    needs_triton,
    pytest.mark.slow,
    pytest.mark.skipif(DEVICE != "cpu", reason="the models of these tests lie on the CPU"),
]
ASKED = SeqId("asked")
PROMPTS = random_prompts(3, 45, seed=3)


def asking(text: list[int]) -> Prompt:
    """Drawn at random, so that every probability counts."""
    sampling = SamplingParams(
        max_tokens=3, seed=7, temperature=0.9, top_p=0.95, logprobs=3, ignore_eos=True
    )
    return Prompt(prompt_tokens=tuple(text), sampling=sampling)


WANTED = asking([*range(40, 140)])
OTHERS = [
    Generate(seq_id=SeqId(f"o{n}"), prompt=asking(text)) for n, text in enumerate(PROMPTS[:2])
]


@pytest.fixture(scope="module", autouse=True)
def _rows_round_alike():
    """The interpreter multiplies by numpy, which on some processors gives a row other last bits where it stands
    elsewhere among the others. Matrix instructions do not; nor does float64, seen in float32.
    """
    multiply = np.matmul

    def multiply_wide(one, other, dtype):
        return multiply(one.astype(np.float64), other.astype(np.float64)).astype(dtype)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(np, "matmul", multiply_wide)
        yield


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    """Makes engines of one model, whose contexts are several tiles of keys long."""
    path = make_model(tmp_path_factory.mktemp("model"), "qwen3", vocab_size=301)

    def make(**changes) -> WholeEngine:
        invariant = kernels("kernel_set").InvariantTritonKernels()
        return WholeEngine(path, dtype=torch.float32, kernels=invariant, **changes)

    return make


@pytest.fixture(scope="module")
def alone(engines):
    """What the request gets when nothing else is there."""
    engine = engines()
    engine.tell(Generate(seq_id=ASKED, prompt=WANTED))
    engine.run()
    return engine.tokens(ASKED)


def test_beside_others_and_in_other_chunks(engines, alone):
    engine = engines(budget=57)
    engine.tell(*OTHERS)
    engine.step()
    engine.tell(Generate(seq_id=ASKED, prompt=WANTED))
    engine.run()
    assert engine.tokens(ASKED) == alone


def test_after_a_hit_on_what_was_decoded_before(engines, alone):
    """Its cached page was filled token by token in part."""
    engine = engines()
    text = WANTED.prompt_tokens
    engine.tell(Generate(seq_id=SeqId("before"), prompt=asking([*text[:79]])))
    engine.run()
    drawn = [token.token for token in engine.tokens(SeqId("before"))]
    again = asking([*text[:79], *drawn, 5, 6])
    fresh = engines()
    for each in (engine, fresh):
        each.tell(Generate(seq_id=ASKED, prompt=again))
        each.run()
    assert (engine.cached_tokens(ASKED), fresh.cached_tokens(ASKED)) == ([80], [0])
    assert engine.tokens(ASKED) == fresh.tokens(ASKED)
