"""Outputs that are restricted over real clusters (to listed tokens, without unwanted words, to a form): a pair that
hands KV over draws what a hybrid worker draws.
"""

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import jsonschema_rs
import pytest

from tests.baton_engine.tiny_models import make_model, random_prompts
from tests.e2e.served import Served, assert_at_rest, serve

PAIR = ("--prefill-workers", "1", "--decode-workers", "1")
HYBRID = ("--hybrid-workers", "1")
COMMON = ("--dtype", "float32", "--kv-cache-memory", "32MiB")
SAID = [{"role": "user", "content": "hello"}]

ALLOWED = [*range(20, 120, 3)]
DRAWN: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 1.0, "seed": 7},
    {"temperature": 1.2, "seed": 8, "top_p": 0.9, "n": 2},
    {"temperature": 0.8, "seed": 9, "presence_penalty": 1.0, "repetition_penalty": 1.3},
)

SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["one", "two"]},
        "name": {"type": "string", "maxLength": 8},
        "ages": {"type": "array", "items": {"type": "integer", "maximum": 99}, "maxItems": 2},
    },
    "required": ["kind", "name", "ages"],
    "additionalProperties": False,
}
OF_SCHEMA = {
    "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
}
COMPLEX = "start: A\nA: /.*a.{12}/ & /.*b.{13}/ & ~/.*c.{11}/"
"""Over the limits of the work that it takes, which workers alone can tell: it depends on their tokens."""
TOO_COMPLEX: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": SAID},
    "/v1/completions": {"prompt": "hello"},
    "/v1/responses": {"input": "hello"},
    "/v1/messages": {"messages": SAID, "max_tokens": 50},
}
FORMS: tuple[dict[str, Any], ...] = (
    OF_SCHEMA | {"temperature": 0},
    OF_SCHEMA | {"seed": 7},
    OF_SCHEMA | {"seed": 8, "n": 3, "top_p": 0.9},
    OF_SCHEMA | {"seed": 9, "presence_penalty": 1.0, "repetition_penalty": 1.3, "min_tokens": 30},
    {"structured_outputs": {"regex": "[a-c]{2,9}-[0-9]{1,9}"}, "seed": 10, "n": 2},
    {"guided_choice": ["yes", "no, thank you"], "seed": 11},
    {
        "structured_outputs": {"grammar": 'start: "x" /[a-z]{3,20}/ "."'},
        "seed": 12,
        "logprobs": True,
    },
)

_LIKELY = (7, 66, 98)
"""Quote, bracket and brace of the tiny tokenizer: what ends a text."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "llama", "llama")


@pytest.fixture(scope="module")
def hybrid_cluster(checkpoint: Path) -> Iterator[Served]:
    with serve(str(checkpoint), *HYBRID, *COMMON) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def pair_cluster(checkpoint: Path) -> Iterator[Served]:
    with serve(str(checkpoint), *PAIR, *COMMON) as cluster:
        yield cluster


@pytest.fixture
def hybrid(hybrid_cluster: Served) -> Iterator[httpx.Client]:
    with hybrid_cluster.client() as http:
        yield http
    assert_at_rest(hybrid_cluster)


@pytest.fixture
def pair(pair_cluster: Served) -> Iterator[httpx.Client]:
    with pair_cluster.client() as http:
        yield http
    assert_at_rest(pair_cluster)


def test_both_draw_listed_tokens_and_no_unwanted_words(
    hybrid: httpx.Client, pair: httpx.Client
) -> None:
    prompts = random_prompts(len(DRAWN), 60)
    free = [_outputs(hybrid, p, kind) for p, kind in zip(prompts, DRAWN, strict=True)]
    words = [_word_within(hybrid, lanes[0]) for lanes in free]
    asked = [
        (prompt, kind | fields)
        for prompt, kind, word in zip(prompts, DRAWN, words, strict=True)
        for fields in _restricted(word)
    ]
    alone = [_outputs(hybrid, prompt, fields) for prompt, fields in asked]
    assert [_outputs(pair, prompt, fields) for prompt, fields in asked] == alone
    for (_, fields), lanes in zip(asked, alone, strict=True):
        if "allowed_token_ids" in fields:
            assert all(set(lane) <= set(ALLOWED) for lane in lanes)
    for word, before, after in zip(words, free, alone[1::3], strict=True):
        unwanted = _tokens(hybrid, word)
        assert _holds(before[0], unwanted)
        assert not any(_holds(lane, unwanted) for lane in after)


def test_both_keep_to_the_same_forms(hybrid: httpx.Client, pair: httpx.Client) -> None:
    alone = [_choices(hybrid, fields) for fields in FORMS]
    assert [_choices(pair, fields) for fields in FORMS] == alone
    ended = [text for answers in alone[:4] for text, reason in answers if reason == "stop"]
    assert ended
    for text in ended:
        jsonschema_rs.validate(SCHEMA, json.loads(text))


def test_forms_that_cannot_be_are_refused(hybrid: httpx.Client, pair: httpx.Client) -> None:
    refused = hybrid.post("/v1/chat/completions", json=_form({"guided_regex": "a <|x|> ("}))
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "guided_regex")
    unknown = {"guided_grammar": 'start: "a" <|no_such_token|>'}  # only workers know the tokens
    assert pair.post("/v1/chat/completions", json=_form(unknown)).status_code == 400
    for path, fields in TOO_COMPLEX.items():
        refused = pair.post(path, json=fields | {"structured_outputs": {"grammar": COMPLEX}})
        assert refused.status_code == 400, (path, refused.text)
        assert "grammar" in refused.json()["error"]["message"]


def test_a_form_changes_no_block_of_the_prompt(pair: httpx.Client) -> None:
    tools = "You may call these tools: " + json.dumps([SCHEMA] * 2)

    def reused(question: str, **fields: object) -> tuple[int, int]:
        said = [{"role": "system", "content": tools}, {"role": "user", "content": question}]
        body = {"messages": said, "max_tokens": 40, "temperature": 0} | fields
        reply = pair.post("/v1/chat/completions", json=_form(body))
        assert reply.status_code == 200, reply.text
        usage = reply.json()["usage"]
        return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]

    num_tokens, cached = reused("What is there?")
    assert cached == 0
    whole = (num_tokens - 1) // 16 * 16  # all of its blocks but the one of its last token
    assert reused("What is there?", **OF_SCHEMA) == (num_tokens, whole)
    assert reused("What is there?") == (num_tokens, whole)
    # What comes first hits whatever comes after it, and whatever the form is.
    _, cached = reused("And then? " * 9, structured_outputs={"regex": "[a-c]{2,9}"})
    assert whole - 48 < cached <= whole


def _restricted(word: str) -> list[dict[str, Any]]:
    allowed: dict[str, Any] = {"allowed_token_ids": ALLOWED}
    unwanted: dict[str, Any] = {"bad_words": [word]}
    return [allowed, unwanted, allowed | unwanted]


def _outputs(http: httpx.Client, prompt: list[int], fields: dict[str, Any]) -> list[list[int]]:
    body = {"prompt": prompt, "max_tokens": 40, "ignore_eos": True, "return_token_ids": True}
    reply = http.post("/v1/completions", json=body | fields)
    assert reply.status_code == 200, reply.text
    return [choice["token_ids"] for choice in reply.json()["choices"]]


def _word_within(http: httpx.Client, tokens: list[int]) -> str:
    """A text whose two tokens stand beside each other among `tokens`."""
    for pair in pairwise(tokens):
        text: str = http.post("/detokenize", json={"tokens": pair}).json()["prompt"]
        if text == text.lstrip() and _tokens(http, text) == list(pair):
            return text
    pytest.fail("no two tokens that are read back from their text")


def _tokens(http: httpx.Client, text: str) -> list[int]:
    reply = http.post("/tokenize", json={"prompt": text, "add_special_tokens": False})
    tokens: list[int] = reply.json()["tokens"]
    return tokens


def _holds(tokens: list[int], word: list[int]) -> bool:
    return any(tokens[i : i + len(word)] == word for i in range(len(tokens)))


def _form(fields: dict[str, Any]) -> dict[str, Any]:
    ends = {str(token): 4 for token in _LIKELY}
    asked = {"messages": SAID, "max_tokens": 120}
    return asked | {"logit_bias": ends} | fields


def _choices(http: httpx.Client, fields: dict[str, Any]) -> list[tuple[str, str]]:
    reply = http.post("/v1/chat/completions", json=_form(fields))
    assert reply.status_code == 200, reply.text
    return [(c["message"]["content"], c["finish_reason"]) for c in reply.json()["choices"]]
