"""Random requests, bit by bit the same from one worker, from one that guesses tokens, and from a pair that does, one half of which is
lost in the middle of its output: grammars, several samples, seeds, penalties. (`tests/chaos` does it with processes.)
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import pytest
from llguidance import LLMatcher

from baton.config.schema import GrammarConfig
from baton.config.speculative import NgramSpeculation
from baton.generation import Prompt, SamplingParams, TokenSample
from baton.ids import SeqId
from baton.tokens import PackedTokens
from baton_engine.grammar import MatcherCompiler, load_compiler
from baton_engine.messages import Abort, Generate, Prefill, Receive, Release
from baton_engine.models.config import load_spec
from tests.baton_engine.tiny_models import make_model
from tests.baton_engine.whole_engine import WholeEngine, hand_off

CASES = 16
GUESSES = NgramSpeculation(num_speculative_tokens=4, prompt_lookup_min=1, prompt_lookup_max=4)
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "ages": {"type": "array", "items": {"type": "integer", "maximum": 99}, "maxItems": 3},
    },
    "required": ["name", "ages"],
    "additionalProperties": False,
}
FORMS: tuple[dict[str, Any], ...] = (
    {},
    {"allowed_token_ids": PackedTokens.of((66, 67, 68))},
    {"grammar": LLMatcher.grammar_from_json_schema(SCHEMA)},
    {"grammar": LLMatcher.grammar_from_regex("(ab|abc){4,20}")},
    {"grammar": LLMatcher.grammar_from_regex("([a-c]{2,4}-[0-9]{1,3} ){2,9}")},
    {"grammar": LLMatcher.grammar_from_lark('start: "x" (WORD " ")* "."\nWORD: /[a-z]{3,9}/')},
)
STEERS: tuple[dict[str, Any], ...] = (
    {"presence_penalty": 1.0, "frequency_penalty": 0.5},
    {"repetition_penalty": 1.3},
    {"min_tokens": 12},
    {"top_k": 20, "top_p": 0.9},
    {"min_p": 0.02},
    {"logprobs": 2},
    {"logit_bias": {7: 4.0, 66: 4.0, 98: 4.0}},
    {"bad_words": ((66, 67), (70,))},
    {"ignore_eos": True},
)

Texts = dict[int, list[TokenSample]]
"""By sample, with the exact log-probabilities."""


def prompts() -> list[Prompt]:
    rng = Random(17)
    return [_prompt(rng, seed) for seed in range(CASES)]


def _prompt(rng: Random, seed: int) -> Prompt:
    sampling: dict[str, Any] = {
        "seed": seed,
        "max_tokens": rng.randint(3, 24),
        "temperature": rng.choice([0.0, 0.7, 1.0, 1.3]),
    }
    for steer in (rng.choice(FORMS), *rng.sample(STEERS, rng.randint(0, 3))):
        sampling |= steer
    text = [rng.randrange(20, 300) for _ in range(rng.randint(2, 20))]
    return Prompt(
        prompt_tokens=tuple(text * rng.randint(1, 2)),
        samples=tuple(range(rng.choice([1, 1, 2, 3]))),
        sampling=SamplingParams(**sampling),
    )


def _name(number: int) -> SeqId:
    return SeqId(f"case {number}")


def _texts(*told: TokenSample) -> Texts:
    texts: Texts = {}
    for token in told:
        texts.setdefault(token.sample, []).append(token)
    return texts


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), "llama", num_layers=1)


@pytest.fixture(scope="module")
def compiler(model: Path) -> Iterator[MatcherCompiler]:
    spec = load_spec(model)
    made = load_compiler(
        model, GrammarConfig(), vocab_size=spec.vocab_size, eos_ids=spec.eos_token_ids
    )
    assert made is not None
    yield made
    made.close()


@dataclass(frozen=True, slots=True)
class Engines:
    """Makes engines of one model."""

    model: Path
    compiler: MatcherCompiler

    def new(self, *, guesses: bool) -> WholeEngine:
        return WholeEngine(
            self.model,
            eos_ids=load_spec(self.model).eos_token_ids,
            grammars=self.compiler,
            speculation=GUESSES if guesses else None,
        )


@pytest.fixture(scope="module")
def engines(model: Path, compiler: MatcherCompiler) -> Engines:
    return Engines(model, compiler)


@pytest.fixture(scope="module")
def expected(engines: Engines) -> list[Texts]:
    """From one worker that guesses nothing."""
    return _from_one(engines.new(guesses=False))


def _from_one(engine: WholeEngine) -> list[Texts]:
    asked = prompts()
    engine.tell(*(Generate(seq_id=_name(i), prompt=prompt) for i, prompt in enumerate(asked)))
    engine.run()
    assert engine.scheduler.load().blocks_used == 0
    return [_texts(*engine.tokens(_name(i))) for i in range(len(asked))]


def test_one_that_guesses(engines: Engines, expected: list[Texts]):
    engine = engines.new(guesses=True)
    assert _from_one(engine) == expected
    counts = engine.scheduler.speculation_counts
    assert counts is not None
    assert 0 < counts.accepted_tokens < counts.draft_tokens


def test_a_pair_that_guesses_and_loses_its_decode_worker(engines: Engines, expected: list[Texts]):
    rng, moved = Random(18), 0
    prefill, decode, other = (engines.new(guesses=True) for _ in range(3))
    for number, prompt in enumerate(prompts()):
        name = _name(number)
        _hand_over(prefill, decode, name, prompt)
        for _ in range(rng.randint(0, 20)):
            decode.step()
        texts = _texts(*prefill.tokens(name), *decode.tokens(name))
        decode.tell(Abort(seq_id=name))
        moved += _go_on(other, name, prompt, texts)
        assert texts == expected[number], prompt
    assert moved > CASES / 3
    for engine in (prefill, decode, other):
        assert engine.scheduler.load().blocks_used == 0


def _hand_over(prefill: WholeEngine, decode: WholeEngine, name: SeqId, prompt: Prompt) -> None:
    prefill.tell(Prefill(seq_id=name, prompt=prompt))
    decode.tell(Receive(seq_id=name, prompt=prompt))
    decode.step()
    prefill.run()
    (blocks,) = [s.blocks for r in prefill.scheduler._requests.values() for s in r.sequences]
    hand_off(prefill, decode, name, [*blocks])
    prefill.tell(Release(seq_id=name))


def _go_on(engine: WholeEngine, name: SeqId, prompt: Prompt, texts: Texts) -> int:
    """Each sample that has not ended goes on behind the tokens that it has; returns how many did."""
    open_samples = [sample for sample, text in texts.items() if text[-1].finish is None]
    for sample in open_samples:
        rest, output = SeqId(f"{name} {sample}"), tuple(t.token for t in texts[sample])
        again = Prompt(
            prompt_tokens=prompt.prompt_tokens,
            output_tokens=output,
            samples=(sample,),
            sampling=prompt.sampling,
        )
        engine.tell(Generate(seq_id=rest, prompt=again))
        engine.run()
        texts[sample] += engine.tokens(rest)
    return len(open_samples)
