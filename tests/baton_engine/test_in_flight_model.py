"""A whole model on the CPU draws the same tokens, to the last bit of their log-probabilities,
however early steps are launched.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from llguidance import LLMatcher
from numpy.typing import NDArray

from baton.config.schema import GrammarConfig
from baton.generation import Prompt, SamplingParams
from baton.ids import SeqId
from baton_engine.grammar import MatcherCompiler, load_compiler
from baton_engine.messages import Generate
from baton_engine.models.config import load_spec
from tests.baton_engine.looped import draw_all
from tests.baton_engine.tiny_models import make_model, random_prompts
from tests.baton_engine.whole_engine import WholeEngine

EOS_IDS = (2,)
GREEDY = SamplingParams(temperature=0, max_tokens=24)
DRAWN = SamplingParams(
    temperature=0.9, max_tokens=17, seed=4, stop_token_ids=tuple(range(0, 320, 9))
)
ASKED = (
    GREEDY,
    DRAWN,
    replace(DRAWN, seed=5, top_k=20, top_p=0.9, min_p=0.01),
    replace(DRAWN, seed=6, logprobs=3, min_tokens=6),
    replace(GREEDY, max_tokens=40, logit_bias={7: 2.0}),
    replace(DRAWN, seed=7, frequency_penalty=0.5, presence_penalty=0.5, repetition_penalty=1.2),
)
OF_TEXT = LLMatcher.grammar_from_regex("[a-z ]{1,9}(, [a-z]{2,5}){0,6}")
CONSTRAINED = (
    replace(DRAWN, seed=8, stop_token_ids=(), grammar=OF_TEXT),
    replace(GREEDY, grammar=OF_TEXT),
    replace(DRAWN, seed=9, repetition_penalty=1.3, min_tokens=5, logprobs=2, grammar=OF_TEXT),
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("ahead"), "qwen3")


def commands(params: Sequence[SamplingParams] = ASKED) -> list[Generate]:
    prompts = random_prompts(len(params), 40, seed=3)
    return [
        Generate(
            seq_id=SeqId(f"s{place}"),
            prompt=Prompt(
                prompt_tokens=tuple(tokens),
                samples=(0, 1) if place == 1 else (0,),
                sampling=asked,
            ),
        )
        for place, (tokens, asked) in enumerate(zip(prompts, params, strict=True))
    ]


@pytest.mark.parametrize("num_blocks", [64, 9], ids=["room for all", "preemptions"])
def test_a_model_draws_the_same_however_early_its_steps_are_launched(
    checkpoint: Path, num_blocks: int
):
    plain, ahead = (WholeEngine(checkpoint, num_blocks=num_blocks) for _ in range(2))
    expected, none = draw_all(plain.scheduler, plain.runner, commands(), ahead=False)
    drawn, launched_ahead = draw_all(ahead.scheduler, ahead.runner, commands(), ahead=True)
    assert drawn == expected
    assert (none, launched_ahead > 10) == (0, True)
    assert (plain.scheduler.load().preemptions > 0) == (num_blocks == 9)


@pytest.fixture(scope="module")
def grammars(checkpoint: Path) -> Iterator[MatcherCompiler]:
    spec = load_spec(checkpoint)
    compiler = load_compiler(
        checkpoint, GrammarConfig(), vocab_size=spec.vocab_size, eos_ids=EOS_IDS
    )
    assert compiler is not None
    yield compiler
    compiler.close()


def test_rows_under_a_grammar_draw_the_same_and_keep_nobody_from_looking_ahead(
    checkpoint: Path, grammars: MatcherCompiler
):
    """As many steps are launched ahead as without them."""
    free = replace(DRAWN, stop_token_ids=(), ignore_eos=True, max_tokens=60)
    drawn, num_ahead = {}, {}
    for beside in ((), CONSTRAINED):
        for ahead in (False, True):
            engine = WholeEngine(checkpoint, eos_ids=EOS_IDS)
            asked = commands((free, replace(free, seed=5), *beside))
            drawn[ahead], num_ahead[bool(beside), ahead] = draw_all(
                engine.scheduler, engine.runner, asked, ahead=ahead, grammars=grammars
            )
        assert drawn[True] == drawn[False]
    assert num_ahead[False, True] >= 55
    assert num_ahead[True, True] == num_ahead[False, True]


class Noting:
    """A constraint that allows everything, and notes what it is asked."""

    fault = None

    def __init__(self, noted: list[str]) -> None:
        self._noted = noted

    def accept(self, token: int) -> None:
        self._noted.append("accept")

    def fork(self) -> "Noting":
        return self

    def fork_for_draft(self, token: int) -> "Noting":
        return self

    def fill(self, bits: NDArray[np.uint32]) -> None:
        self._noted.append("fill")
        bits[:] = 0xFFFF_FFFF

    def num_allowed(self, tokens: Sequence[int]) -> int:
        return len(tokens)


def test_a_mask_is_found_while_the_scores_of_its_step_are_computed(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
):
    """The step is computed from the token before the host has seen that; then the grammar reads it,
    and says what may come.
    """
    engine, noted = WholeEngine(checkpoint), list[str]()
    computed = engine.runner._compute

    def compute(*arguments):
        noted.append("compute")
        return computed(*arguments)

    monkeypatch.setattr(engine.runner, "_compute", compute)
    prompt = Prompt(prompt_tokens=(5, 6, 7), samples=(0,), sampling=replace(GREEDY, max_tokens=5))
    engine.scheduler.handle(Generate(seq_id=SeqId("s"), prompt=prompt), 0.0, Noting(noted))
    draw_all(engine.scheduler, engine.runner, (), ahead=True)
    assert noted == [
        *("compute", "fill", "accept"),  # the prompt
        *("compute", "fill", "compute", "accept", "fill"),
        *("compute", "accept", "fill", "compute", "accept", "fill", "accept"),
    ]
