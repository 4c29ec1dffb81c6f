"""Marks that are tokens on their way from the draw to the parser: past stop strings,
guardrails and intervals of a stream.
"""

import json
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.generation import FinishReason, TokenLogprobs, TokenSample
from baton.pretrained import PretrainedTokenizer
from router.generation.answer_form import CallableTools
from router.generation.generation_run import Choice, Delta, MarkedTokens, keep
from router.generation.parsed_choice import ParsedChoice
from router.generation.responder import _parts
from router.openai.requests import ChatCompletionRequest
from router.parsing.output_format import OutputFormat, ToolSchema, detect_format
from router.text.stop_strings import StopStrings
from router.text.tokenizer import Tokenizer
from tests.router.parsing.test_output_format import END, byte_tokenizer
from tests.router.parsing.test_parser import Said, said
from tests.router.text.tiny_tokenizers import token_id

MARKS = ("<tool_call>", "</tool_call>", "<think>", "</think>")
CALLABLE = CallableTools(
    tools=(ToolSchema(name="now", parameters={"type": "object"}),), required=False, parallel=True
)
TEXT = (
    'hmé</think>\n\nWell:\n<tool_call>\n{"name": "now", "arguments": {"x": "<y>é"}}\n</tool_call>'
)

LOGPROBS = TokenLogprobs(logprob=-0.5, rank=1)


@pytest.fixture(scope="module", params=[True, False], ids=["special", "added"])
def tokenizer(request: pytest.FixtureRequest):
    backend = byte_tokenizer(MARKS, special=request.param)
    pretrained = PretrainedTokenizer(backend=backend, special_tokens={}, chat_template=None)
    made = Tokenizer(pretrained, threads=1)
    yield made
    made.close()


def made_format(tokenizer: Tokenizer) -> OutputFormat:
    return detect_format("<tool_call></think>", tokenizer.backend.token_to_id)


def deltas(
    tokenizer: Tokenizer,
    text: str,
    taken_after: Sequence[int],
    stop: Sequence[str] = (),
    logprobs: TokenLogprobs | None = None,
) -> tuple[list[Delta], Choice]:
    """What a choice gains that draws the text, looked at after some of its tokens, each with these `logprobs`."""
    found = made_format(tokenizer)
    body = ChatCompletionRequest.model_validate(
        {"model": "m", "messages": [{"role": "user", "content": "x"}]}
    )
    reads = MarkedTokens(
        texts={token: mark for mark, token in found.marker_ids.items()},
        reasoning_begin=found.reasoning_begin,
        reasoning_ends=found.reasoning_ends,
        in_reasoning=True,
    )
    stops = StopStrings(stop) if stop else None
    choice = Choice(0, tokenizer.decoder(), body, stops, reads)
    ids = tokenizer.backend.encode(text, add_special_tokens=False).ids
    gained: list[Delta] = []
    for place, token in enumerate([*ids, token_id(tokenizer.backend, END)]):
        finish = FinishReason.STOP if place == len(ids) else None
        choice.push(TokenSample(sample=0, token=token, finish=finish, logprobs=logprobs))
        if (place in taken_after or choice.finished) and (delta := choice.take()) is not None:
            gained.append(delta)
        if choice.finished:
            break
    return gained, choice


def parsed(tokenizer: Tokenizer, gained: Sequence[Delta]) -> Said:
    choice = ParsedChoice(made_format(tokenizer), CALLABLE, in_reasoning=True)
    return said([event for delta in gained for event in choice.push(delta)])


@given(
    taken=st.lists(st.integers(0, 120), max_size=40),
    kept=st.booleans(),
    logprobs=st.sampled_from([None, LOGPROBS]),
)
def test_what_is_said_does_not_depend_on_when_it_is_taken(
    tokenizer: Tokenizer, taken: list[int], kept: bool, logprobs: TokenLogprobs | None
) -> None:
    gained, choice = deltas(tokenizer, TEXT, taken, logprobs=logprobs)
    if kept:
        whole: list[Delta] = []
        for delta in gained:
            keep(whole, delta)
        gained = whole
    gained = [delta for batch in gained for part in _parts([batch]) for delta in part]
    found = parsed(tokenizer, gained)
    assert (found.reasoning, found.content) == ("hmé", "\n\nWell:")
    assert found.calls == [("now", '{"x": "<y>é"}')]
    drawn = len(tokenizer.backend.encode(TEXT[: TEXT.index("</think>")]).ids)
    assert choice.num_reasoning_tokens == drawn + 1


@given(taken=st.lists(st.integers(0, 120), max_size=40))
def test_a_stop_string_that_begins_like_a_mark_holds_it_back_and_loses_nothing(
    tokenizer: Tokenizer, taken: list[int]
) -> None:
    gained, _ = deltas(tokenizer, TEXT, taken, stop=["<tool_call>?", "</"])
    assert parsed(tokenizer, gained).reasoning == "hmé"
    gained, _ = deltas(tokenizer, TEXT, taken, stop=["<tool_call>?"])
    assert parsed(tokenizer, gained).calls == [("now", '{"x": "<y>é"}')]


@given(taken=st.lists(st.integers(0, 120), max_size=40))
def test_marks_of_calls_are_content_where_a_model_that_thinks_may_call_nothing(
    tokenizer: Tokenizer, taken: list[int]
) -> None:
    gained, _ = deltas(tokenizer, TEXT, taken)
    choice = ParsedChoice(made_format(tokenizer), None, in_reasoning=True)
    found = said([event for delta in gained for event in choice.push(delta)])
    assert [found.reasoning, found.content] == TEXT.split("</think>")
    assert not found.calls


def test_text_that_spells_a_mark_is_text(tokenizer: Tokenizer) -> None:
    spelt = "a</think>b<tool_call>c"
    ids = [token_id(tokenizer.backend, char) for char in spelt]
    choice = ParsedChoice(made_format(tokenizer), CALLABLE, in_reasoning=False)
    found = said(choice.push(Delta(0, spelt, ids, finish=FinishReason.STOP)))
    assert (found.content, found.calls) == (spelt, [])
    assert json.dumps(found.content)


def test_tokens_of_reasoning_are_counted_where_several_begin_it() -> None:
    reads = MarkedTokens(reasoning_begin=(1, 7, 2), reasoning_ends=frozenset({3, 4}))
    body = ChatCompletionRequest.model_validate(
        {"model": "m", "messages": [{"role": "user", "content": "x"}]}
    )
    backend = byte_tokenizer(MARKS, special=True)
    pretrained = PretrainedTokenizer(backend=backend, special_tokens={}, chat_template=None)
    made = Tokenizer(pretrained, threads=1)
    choice = Choice(0, made.decoder(), body, None, reads)
    for token in (1, 8, 1, 1, 7, 2, 9, 1, 3, 9, 1, 7, 2, 4, 7, 2):
        choice.push(TokenSample(sample=0, token=token))
    assert choice.num_reasoning_tokens == 6 + 4
    made.close()
