"""KV pages of 8 bits: log-probabilities from them against those of float32."""

from functools import cache

import pytest
import torch
from tokenizers import Tokenizer

from baton_engine.demo.training.questions import MODEL_DIRECTORY, load_questions
from baton_engine.models.config import load_spec
from baton_engine.models.loader import load_decoder
from tests.baton_engine.closeness import assert_near, closeness, logits_after_each
from tests.baton_engine.stepping import make_runner
from tests.baton_engine.tiny_models import FAMILIES, make_model

CPU, FP8 = torch.device("cpu"), torch.float8_e4m3fn


def logits(directory, tokens, kv_dtype=None, chunk=None) -> torch.Tensor:
    decoder = load_decoder(directory, load_spec(directory), torch.float32, CPU, kv_dtype=kv_dtype)
    _, arena = make_runner(decoder, block_tokens=16, num_blocks=30, kv_dtype=kv_dtype)
    return logits_after_each(decoder, tokens, chunk=chunk, arena=arena)


@cache
def answers() -> list[int]:
    """A text that the demo model knows: some of its questions, with their answers."""
    tokenizer = Tokenizer.from_file(str(MODEL_DIRECTORY / "tokenizer.json"))
    asked = [f"{one.question} {one.answer}\n" for one in load_questions()[::96]]
    ids: list[int] = tokenizer.encode("".join(asked)).ids
    return ids


@pytest.mark.parametrize("chunk", [None, 1], ids=["prefill", "decode"])
def test_a_trained_model_keeps_near_float32(chunk):
    exact = logits(MODEL_DIRECTORY, answers())
    rounded = logits(MODEL_DIRECTORY, answers(), FP8, chunk)
    assert_near(exact, rounded, overlap=0.92, delta=0.15, largest_delta=2.0)
    best = exact.argmax(1)
    assert (rounded.argmax(1) == best).float().mean() >= 0.95


@pytest.mark.parametrize("family", FAMILIES)
def test_random_models_of_every_family_keep_near_float32(tmp_path, family):
    """Their scores lie close together, so that small errors show:
    a scale that were wrong would leave nothing in common.
    """
    directory = make_model(tmp_path, family, hidden_size=256, head_dim=64)
    tokens = torch.randint(6, 300, (60,), generator=torch.Generator().manual_seed(0)).tolist()
    exact, rounded = logits(directory, tokens), logits(directory, tokens, FP8)
    assert_near(exact, rounded, overlap=0.75, delta=0.5, largest_delta=4.0)


@pytest.mark.parametrize("chunk", [1, 7, 16, 33])
def test_how_a_prompt_is_cut_matters_no_more_than_elsewhere(chunk):
    """What is read back from pages is what the chunk that wrote it read itself."""
    tokens = answers()[:90]
    whole, cut = logits(MODEL_DIRECTORY, tokens, FP8), logits(MODEL_DIRECTORY, tokens, FP8, chunk)
    found = closeness(whole, cut)
    assert found.overlap > 0.98
    assert found.delta < 0.02


@pytest.mark.parametrize("length", [1, 15, 16, 17, 32])
def test_lengths_around_a_page_give_finite_scores(length):
    assert logits(MODEL_DIRECTORY, answers()[:length], FP8).isfinite().all()
