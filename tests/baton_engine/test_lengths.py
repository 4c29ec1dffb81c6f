"""Texts of every awkward length: nothing, one token, just a page, and the tokens around its end."""

import pytest
import torch

from baton.errors import InvalidRequestError
from baton.generation import Prompt, SamplingParams
from baton.ids import SeqId
from baton_engine.kernels.reference import ReferenceKernels
from baton_engine.messages import Failed, Generate
from baton_engine.models.config import load_spec
from baton_engine.models.loader import load_decoder
from baton_engine.scheduling.plan import StepPlan, StepResult
from tests.baton_engine.closeness import closeness, logits_after_each
from tests.baton_engine.kernel_cases import cpu_kernels
from tests.baton_engine.tiny_models import make_model, random_prompts
from tests.baton_engine.whole_engine import BLOCK_TOKENS, WholeEngine

CPU = torch.device("cpu")
LENGTHS = [1, BLOCK_TOKENS - 1, BLOCK_TOKENS, BLOCK_TOKENS + 1, 2 * BLOCK_TOKENS, 65]
ASKED = SeqId("asked")


@pytest.fixture(scope="module", params=["llama", "mistral"])
def checkpoint(request, tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"), request.param)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("chunk", [None, 1, BLOCK_TOKENS], ids=["at once", "one by one", "pages"])
@pytest.mark.parametrize("length", LENGTHS)
def test_logits_are_numbers_and_those_of_the_twin(checkpoint, dtype, chunk, length):
    tokens = random_prompts(2, length, seed=length)[1]
    spec = load_spec(checkpoint)
    exact = load_decoder(checkpoint, spec, torch.float32, CPU, kernels=ReferenceKernels())
    fast = load_decoder(checkpoint, spec, dtype, CPU, kernels=cpu_kernels(dtype))
    expected = logits_after_each(exact, tokens)
    found = logits_after_each(fast, tokens, chunk=chunk)
    assert torch.isfinite(found).all()
    bound = 1e-3 if dtype == torch.float32 else 0.8
    assert closeness(expected, found).largest_delta < bound


@pytest.mark.parametrize("length", LENGTHS)
def test_a_text_of_any_length_is_continued_over_the_next_pages_end(checkpoint, length):
    engine = WholeEngine(checkpoint, deterministic=False)
    sampling = SamplingParams(max_tokens=2 * BLOCK_TOKENS + 1, temperature=0, ignore_eos=True)
    tokens = tuple(random_prompts(2, length, seed=length)[1])
    engine.tell(Generate(seq_id=ASKED, prompt=Prompt(prompt_tokens=tokens, sampling=sampling)))
    engine.run()
    assert len(engine.tokens(ASKED)) == 2 * BLOCK_TOKENS + 1
    assert engine.scheduler.load().blocks_used == 0


def test_an_empty_prompt_is_refused_and_computes_nothing(checkpoint):
    engine = WholeEngine(checkpoint, deterministic=False)
    nothing = Prompt(prompt_tokens=(), sampling=SamplingParams())
    engine.tell(Generate(seq_id=ASKED, prompt=nothing))
    (failed,) = engine.events
    assert isinstance(failed, Failed)
    assert isinstance(failed.error, InvalidRequestError)
    assert not engine.step()


def test_a_step_without_rows_draws_nothing(checkpoint):
    engine = WholeEngine(checkpoint, deterministic=False)
    assert engine.runner.execute(StepPlan(step=1, rows=())) == StepResult(tokens=[])
