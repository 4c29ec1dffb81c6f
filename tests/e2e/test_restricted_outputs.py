"""Outputs that are restricted over real clusters (to listed tokens, without unwanted words, to a form, to calls of
tools): a pair that hands KV over draws what a hybrid worker draws.
"""

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import jsonschema_rs
import pytest
from pydantic_core import from_json

from tests.baton_engine.tiny_models import make_model, random_prompts
from tests.e2e.served import serve

PAIR = ("--prefill-workers", "1", "--decode-workers", "1")
HYBRID = ("--hybrid-workers", "1")
COMMON = ("--dtype", "float32", "--kv-cache-memory", "32MiB")
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if thinks %}<think>\n{% endif %}{# <tool_call> </think> #}"
)
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

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 6},
        "days": {"type": "array", "items": {"type": "integer", "maximum": 9}, "maxItems": 2},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
NONE: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
TOOL_SCHEMAS = {"weather": WEATHER, "now": NONE}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": schema}}
    for name, schema in TOOL_SCHEMAS.items()
]
THINKS = {"chat_template_kwargs": {"thinks": True}, "max_thinking_tokens": 9}
CALLS: tuple[dict[str, Any], ...] = (
    {"tool_choice": "required", "temperature": 0},
    {"tool_choice": "required", "seed": 3, "n": 2, "parallel_tool_calls": False},
    {"tool_choice": {"type": "function", "function": {"name": "weather"}}, "seed": 4},
    {"tool_choice": "required", "seed": 5, **THINKS},
    {"tool_choice": "required", "seed": 6, "presence_penalty": 1.0, **THINKS},
)
_LIKELY = (7, 66, 98)
"""Quote, bracket and brace of the tiny tokenizer: what ends a text."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "llama", "llama")


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("templates") / "template.jinja"
    path.write_text(TEMPLATE)
    return path


@pytest.fixture(scope="module")
def hybrid(checkpoint: Path, template: Path) -> Iterator[httpx.Client]:
    flags = (*HYBRID, *COMMON, "--chat-template", str(template))
    with serve(str(checkpoint), *flags) as cluster, cluster.client() as http:
        yield http


@pytest.fixture(scope="module")
def pair(checkpoint: Path, template: Path) -> Iterator[httpx.Client]:
    flags = (*PAIR, *COMMON, "--chat-template", str(template))
    with serve(str(checkpoint), *flags) as cluster, cluster.client() as http:
        yield http


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


def test_both_call_the_same_tools(hybrid: httpx.Client, pair: httpx.Client) -> None:
    alone = [_messages(hybrid, fields) for fields in CALLS]
    streamed, elsewhere = _streamed(hybrid, CALLS[0]), _in_other_words(hybrid)
    assert [_messages(pair, fields) for fields in CALLS] == alone
    assert _in_other_words(pair) == elsewhere
    for answers in alone:
        for message, reason in answers:
            assert message["calls"]
            if reason == "tool_calls":
                for name, arguments in message["calls"]:
                    jsonschema_rs.validate(TOOL_SCHEMAS[name], json.loads(arguments))
    reasons = [reason for answers in alone for _, reason in answers]
    assert reasons.count("tool_calls") > 2
    assert any(message["reasoning"] for answers in alone for message, _ in answers)
    ((whole, _),) = alone[0]
    assert streamed == whole["calls"]
    objects = [(name, from_json(text, allow_partial=True)) for name, text in whole["calls"]]
    assert elsewhere == [whole["calls"], objects]


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


def _in_other_words(http: httpx.Client) -> list[list[tuple[str, Any]]]:
    """The calls that `CALLS[0]` gives, asked for as a response and as a message."""
    body = _called({"temperature": 0})
    said = body.pop("messages")
    functions = [
        {"type": "function", "name": name, "parameters": schema}
        for name, schema in TOOL_SCHEMAS.items()
    ]
    response = {**body, "input": said, "tools": functions, "tool_choice": "required"}
    response["max_output_tokens"] = response.pop("max_tokens")
    described = [{"name": name, "input_schema": schema} for name, schema in TOOL_SCHEMAS.items()]
    message = {**body, "messages": said, "tools": described, "tool_choice": {"type": "any"}}
    items = http.post("/v1/responses", json=response).raise_for_status().json()["output"]
    blocks = http.post("/v1/messages", json=message).raise_for_status().json()["content"]
    return [
        [(item["name"], item["arguments"]) for item in items],
        [(block["name"], block["input"]) for block in blocks],
    ]


def _called(fields: dict[str, Any]) -> dict[str, Any]:
    ends = {str(token): 4 for token in _LIKELY}
    return {"messages": SAID, "tools": TOOLS, "max_tokens": 300, "logit_bias": ends} | fields


def _messages(http: httpx.Client, fields: dict[str, Any]) -> list[tuple[dict[str, Any], str]]:
    """Content, reasoning and calls of each choice, without the calls' ids, and why it ended."""
    reply = http.post("/v1/chat/completions", json=_called(fields))
    assert reply.status_code == 200, reply.text
    found = []
    for choice in reply.json()["choices"]:
        message = choice["message"]
        calls = [c["function"] for c in message.get("tool_calls") or ()]
        said = {
            "content": message["content"],
            "reasoning": message.get("reasoning"),
            "calls": [(call["name"], call["arguments"]) for call in calls],
        }
        found.append((said, choice["finish_reason"]))
    return found


def _streamed(http: httpx.Client, fields: dict[str, Any]) -> list[tuple[str, str]]:
    calls: list[list[str]] = []
    with http.stream(
        "POST", "/v1/chat/completions", json=_called(fields) | {"stream": True}
    ) as reply:
        for line in reply.iter_lines():
            if not line.startswith("data: {"):
                continue
            for choice in json.loads(line.removeprefix("data: "))["choices"]:
                for part in choice["delta"].get("tool_calls") or ():
                    if "id" in part:
                        calls.append([part["function"]["name"], ""])
                    calls[part["index"]][1] += part["function"]["arguments"]
    return [(name, arguments) for name, arguments in calls]
