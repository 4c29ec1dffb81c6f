"""How near what is computed and held in fewer bits comes to float32: on the demo model, whose log-probabilities mean something."""

from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import pytest
import torch
from tokenizers import Tokenizer

from baton.generation import SamplingParams
from engine.demo.questions import MODEL_DIRECTORY, load_questions
from engine.kernels.cpu_matmul import multiplies_int8
from engine.models.config import load_spec
from engine.models.inputs import InputBuilder
from engine.models.loader import load_decoder
from engine.scheduling.plan import Row
from tests.engine.stepping import make_runner, make_texts
from tests.engine.tiny_models import FAMILIES, make_model

CPU, FP8 = torch.device("cpu"), torch.float8_e4m3fn
TOP = 5
NUM_DECODES = 24
"""The last tokens go one by one, what is before them in chunks: both kinds of steps read what was rounded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """What is allowed: share of float32's five likeliest tokens that are still among the five, share of positions whose
    likeliest token is the same, and by how much the log-probability of that one differs in the mean.
    """

    overlap: float
    same_best: float
    delta: float


def logprobs(
    directory, tokens, dtype=torch.float32, kv_dtype=None, quantization="none", chunk=64
) -> torch.Tensor:
    """After each of `tokens`, `[num_tokens, vocab]`."""
    decoder = load_decoder(
        directory, load_spec(directory), dtype, CPU, quantization=quantization, kv_dtype=kv_dtype
    )
    texts, blocks = make_texts(
        [tokens], SamplingParams(max_tokens=1), block_tokens=16, chunks=(chunk,)
    )
    _, arena = make_runner(decoder, block_tokens=16, num_blocks=blocks, kv_dtype=kv_dtype)
    inputs = InputBuilder(16, blocks, CPU)
    decodes = range(max(1, len(tokens) - NUM_DECODES), len(tokens))
    starts = [*range(0, decodes.start, chunk), *decodes, len(tokens)]
    logits = []
    for start, end in pairwise(starts):
        count = end - start
        row = Row(seq=texts[0].seq, start=start, num_tokens=count, samples=(), num_scored=count)
        logits.append(decoder.forward(inputs.build([row]), arena))
    return torch.cat(logits).log_softmax(-1)


@cache
def answers() -> tuple[int, ...]:
    """A text that the demo model knows: some of its questions, with their answers."""
    tokenizer = Tokenizer.from_file(str(MODEL_DIRECTORY / "tokenizer.json"))
    asked = [f"{one.question} {one.answer}\n" for one in load_questions()[::96]]
    return tuple(tokenizer.encode("".join(asked)).ids)


@cache
def exact() -> torch.Tensor:
    return logprobs(MODEL_DIRECTORY, list(answers()))


def assert_close(actual: torch.Tensor, expected: torch.Tensor, bounds: Bounds) -> None:
    best = expected.topk(TOP).indices
    among = (best.unsqueeze(2) == actual.topk(TOP).indices.unsqueeze(1)).any(2)
    delta = (actual - expected).gather(1, best[:, :1]).abs()
    assert actual.isfinite().all()
    assert among.float().mean() >= bounds.overlap
    assert (actual.argmax(1) == best[:, 0]).float().mean() >= bounds.same_best
    assert 0 < delta.mean() <= bounds.delta


@pytest.mark.parametrize(
    ("settings", "bounds"),
    [
        ({"dtype": torch.bfloat16}, Bounds(overlap=0.97, same_best=0.97, delta=0.02)),
        ({"kv_dtype": FP8}, Bounds(overlap=0.92, same_best=0.95, delta=0.06)),
        pytest.param(
            {"quantization": "int8"},
            Bounds(overlap=0.95, same_best=0.95, delta=0.04),
            marks=pytest.mark.skipif(
                not multiplies_int8(), reason="no AVX-512 VNNI, or no compiler"
            ),
        ),
    ],
    ids=["bfloat16", "pages of 8 bits", "int8 weights"],
)
def test_fewer_bits_keep_close_to_float32(settings, bounds):
    assert_close(logprobs(MODEL_DIRECTORY, list(answers()), **settings), exact(), bounds)


def test_pages_of_8_bits_say_the_same_of_a_token_however_its_prompt_was_cut():
    tokens = list(answers())[:90]
    whole = logprobs(MODEL_DIRECTORY, tokens, kv_dtype=FP8, chunk=90)
    for chunk in (7, 16, 33):
        cut = logprobs(MODEL_DIRECTORY, tokens, kv_dtype=FP8, chunk=chunk)
        assert (cut - whole).abs().quantile(0.99) < 0.1, "a chunk reads another's pages wrongly"


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_served_from_pages_of_8_bits(tmp_path, family):
    directory = make_model(tmp_path, family)
    tokens = torch.randint(6, 300, (60,), generator=torch.Generator().manual_seed(0)).tolist()
    wide = logprobs(directory, tokens)
    assert_close(
        logprobs(directory, tokens, kv_dtype=FP8),
        wide,
        Bounds(overlap=0.7, same_best=0.6, delta=0.4),
    )


@pytest.mark.parametrize("length", [1, 15, 16, 17, 32])
def test_lengths_around_a_page_give_finite_scores_from_8_bits(length):
    assert logprobs(MODEL_DIRECTORY, list(answers())[:length], kv_dtype=FP8).isfinite().all()
