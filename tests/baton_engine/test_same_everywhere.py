"""Random requests, bit by bit the same from one worker, from one that guesses tokens, and from a pair that does, one
half of which is lost in the middle of its output: grammars, calls of tools, reasoning, several samples, seeds,
penalties. (`tests/chaos` does it with processes.)
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from llguidance import LLMatcher
from tokenizers import Tokenizer

from baton.config.schema import GrammarConfig
from baton.config.speculative import NgramSpeculation, Speculation, SuffixSpeculation
from baton.generation import Prompt, SamplingParams, TokenSample
from baton.ids import SeqId
from baton.tokens import PackedTokens
from baton_engine.grammar import MatcherCompiler, load_compiler
from baton_engine.messages import Abort, Generate, Prefill, Receive, Release
from baton_engine.models.config import load_spec
from router.generation.answer_form import CALL_SCHEMA, AnswerForm, grammar_of
from router.http.fields import JsonObject
from router.parsing.output_format import ToolSchema, detect_format
from tests.baton_engine.tiny_models import make_model
from tests.baton_engine.whole_engine import WholeEngine, hand_off

CASES = 22
NGRAMS = NgramSpeculation(num_speculative_tokens=4, prompt_lookup_min=1, prompt_lookup_max=4)
SUFFIXES = SuffixSpeculation(num_speculative_tokens=24)
SCHEMA: JsonObject = {
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
TOOLS = (
    ToolSchema(name="weather", parameters=SCHEMA, strict=True),
    ToolSchema(name="now", parameters={"type": "object", "additionalProperties": False}),
)
MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
"""Each a token of the model."""
STEERS: tuple[dict[str, Any], ...] = (
    {"presence_penalty": 1.0, "frequency_penalty": 0.5},
    {"repetition_penalty": 1.3},
    {"min_tokens": 12},
    {"top_k": 20, "top_p": 0.9},
    {"min_p": 0.02},
    {"logprobs": 2},
    {"logit_bias": {11: 4.0, 70: 4.0, 102: 4.0}},  # quote, bracket and brace: they end a text
    {"bad_words": ((66, 67), (70,))},
    {"ignore_eos": True},
)

Texts = dict[int, list[TokenSample]]
"""By sample, with the exact log-probabilities."""


@pytest.fixture(scope="module")
def mark_ids(model: Path) -> dict[str, int]:
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    ids = tokenizer.get_vocab()
    return {mark: ids[mark] for mark in MARKS}


@pytest.fixture(scope="module")
def prompts(mark_ids: dict[str, int]) -> list[Prompt]:
    rng = Random(17)
    forms = (*FORMS, *chat_forms(mark_ids))
    return [_prompt(rng, seed, forms[seed % len(forms)]) for seed in range(CASES)]


def chat_forms(mark_ids: dict[str, int]) -> Iterator[dict[str, Any]]:
    """What chats alone ask for, as the router asks workers for it: required calls, calls of the model's own accord, and
    reasoning before a named call, text and JSON.
    """
    written = detect_format(None, mark_ids.get, tool_call_parser="hermes", reasoning_parser="qwen3")

    def held(form: AnswerForm, *, thinks: bool = True, **fields: object) -> dict[str, Any]:
        if thinks:
            reasoning = written.reasoning_lark(7, in_reasoning=False)
            form = replace(form, reasoning=reasoning, must_reason=True)
        return {"grammar": grammar_of(form, ()).text, "max_tokens": 60} | fields

    def calls(rules: str, tools: Sequence[ToolSchema] = TOOLS) -> AnswerForm:
        return AnswerForm(
            kind="calls",
            value={tool.name: tool.parameters for tool in tools},
            param="tools",
            calls=rules,
            call_schemas=tuple(written.call_schemas(tools)),
        )

    several = written.calls_lark(TOOLS, parallel=True, schema=CALL_SCHEMA)
    yield held(calls(several), thinks=False)
    named = TOOLS[1:]
    yield held(calls(written.calls_lark(named, parallel=False, schema=CALL_SCHEMA), named))
    begun = written.strict_lark(TOOLS, parallel=True, schema=CALL_SCHEMA, thinks=True)
    yield held(calls(begun), thinks=False, logit_bias={mark_ids["<tool_call>"]: 6.0})
    yield held(AnswerForm(kind="text", value=written.any_lark(), param="max_thinking_tokens"))
    yield held(AnswerForm(kind="json", value=SCHEMA, param="response_format"))


def _prompt(rng: Random, seed: int, form: dict[str, Any]) -> Prompt:
    sampling: dict[str, Any] = {
        "seed": seed,
        "max_tokens": rng.randint(3, 24),
        "temperature": rng.choice([0.0, 0.7, 1.0, 1.3]),
    }
    for steer in (*rng.sample(STEERS, rng.randint(0, 3)), form):
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
    folder = tmp_path_factory.mktemp("model")
    return make_model(folder, "llama", num_layers=1, more_special=MARKS)


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

    def new(self, by: Speculation | None) -> WholeEngine:
        return WholeEngine(
            self.model,
            eos_ids=load_spec(self.model).eos_token_ids,
            grammars=self.compiler,
            speculation=by,
        )


@pytest.fixture(scope="module")
def engines(model: Path, compiler: MatcherCompiler) -> Engines:
    return Engines(model, compiler)


@pytest.fixture(scope="module")
def expected(engines: Engines, prompts: list[Prompt]) -> list[Texts]:
    """From one worker that guesses nothing."""
    return _from_one(engines.new(None), prompts)


def _from_one(engine: WholeEngine, asked: Sequence[Prompt]) -> list[Texts]:
    engine.tell(*(Generate(seq_id=_name(i), prompt=prompt) for i, prompt in enumerate(asked)))
    engine.run()
    assert engine.scheduler.load().blocks_used == 0
    return [_texts(*engine.tokens(_name(i))) for i in range(len(asked))]


def test_calls_and_reasoning_are_among_them(expected: list[Texts], mark_ids: dict[str, int]):
    told = [{t.token for t in text} for texts in expected for text in texts.values()]
    found = Counter(mark for mark, i in mark_ids.items() for tokens in told if i in tokens)
    assert found["<tool_call>"] > CASES / 6
    assert found["</tool_call>"] > 0
    assert found["</think>"] > CASES / 6


@pytest.mark.parametrize("by", [NGRAMS, SUFFIXES])
def test_one_that_guesses(
    engines: Engines, prompts: list[Prompt], expected: list[Texts], by: Speculation
):
    engine = engines.new(by)
    assert _from_one(engine, prompts) == expected
    counts = engine.scheduler.speculation_counts
    assert counts is not None
    assert 0 < counts.accepted_tokens < counts.draft_tokens


@pytest.mark.parametrize("by", [NGRAMS, SUFFIXES])
def test_a_pair_that_guesses_and_loses_its_decode_worker(
    engines: Engines, prompts: list[Prompt], expected: list[Texts], by: Speculation
):
    rng, moved = Random(18), 0
    prefill, decode, other = (engines.new(by) for _ in range(3))
    for number, prompt in enumerate(prompts):
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
