"""Calls of tools over real clusters: required ones are made, by a pair as by a hybrid worker, whole and in a stream."""

import json
from pathlib import Path
from typing import Any

import httpx
import jsonschema_rs
import pytest
from pydantic_core import from_json

from tests.baton_engine.tiny_models import make_model
from tests.e2e.served import serve

TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if thinks %}<think>\n{% endif %}{# <tool_call> </think> #}"
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
SCHEMAS = {"weather": WEATHER, "now": NONE}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": schema}}
    for name, schema in SCHEMAS.items()
]
THINKS = {"chat_template_kwargs": {"thinks": True}, "max_thinking_tokens": 9}
ASKED: tuple[dict[str, Any], ...] = (
    {"tool_choice": "required", "temperature": 0},
    {"tool_choice": "required", "seed": 3, "n": 2, "parallel_tool_calls": False},
    {"tool_choice": {"type": "function", "function": {"name": "weather"}}, "seed": 4},
    {"tool_choice": "required", "seed": 5, **THINKS},
    {"tool_choice": "required", "seed": 6, "presence_penalty": 1.0, **THINKS},
)


@pytest.mark.slow
def test_a_pair_calls_what_a_hybrid_worker_calls(tmp_path: Path) -> None:
    model = make_model(tmp_path / "llama", "llama")
    template = tmp_path / "template.jinja"
    template.write_text(TEMPLATE)
    common = ("--dtype", "float32", "--kv-cache-memory", "32MiB", "--chat-template", str(template))
    with serve(str(model), "--hybrid-workers", "1", *common) as cluster, cluster.client() as http:
        alone = [_messages(http, fields) for fields in ASKED]
        streamed = _streamed(http, ASKED[0])
        elsewhere = _in_other_words(http)
    pair = ("--prefill-workers", "1", "--decode-workers", "1")
    with serve(str(model), *pair, *common) as cluster, cluster.client() as http:
        assert [_messages(http, fields) for fields in ASKED] == alone
        assert _in_other_words(http) == elsewhere
    for answers in alone:
        for message, reason in answers:
            assert message["calls"]
            if reason == "tool_calls":
                for name, arguments in message["calls"]:
                    jsonschema_rs.validate(SCHEMAS[name], json.loads(arguments))
    reasons = [reason for answers in alone for _, reason in answers]
    assert reasons.count("tool_calls") > 2
    assert any(message["reasoning"] for answers in alone for message, _ in answers)
    ((whole, _),) = alone[0]
    assert streamed == whole["calls"]
    objects = [(name, from_json(text, allow_partial=True)) for name, text in whole["calls"]]
    assert elsewhere == [whole["calls"], objects]


def _in_other_words(http: httpx.Client) -> list[list[tuple[str, Any]]]:
    """The calls that `ASKED[0]` gives, asked for as a response and as a message."""
    body = _body({"temperature": 0})
    said = body.pop("messages")
    functions = [
        {"type": "function", "name": name, "parameters": schema} for name, schema in SCHEMAS.items()
    ]
    response = {**body, "input": said, "tools": functions, "tool_choice": "required"}
    response["max_output_tokens"] = response.pop("max_tokens")
    described = [{"name": name, "input_schema": schema} for name, schema in SCHEMAS.items()]
    message = {**body, "messages": said, "tools": described, "tool_choice": {"type": "any"}}
    items = http.post("/v1/responses", json=response).raise_for_status().json()["output"]
    blocks = http.post("/v1/messages", json=message).raise_for_status().json()["content"]
    return [
        [(item["name"], item["arguments"]) for item in items],
        [(block["name"], block["input"]) for block in blocks],
    ]


def _body(fields: dict[str, Any]) -> dict[str, Any]:
    said = [{"role": "user", "content": "hello"}]
    ends = {str(token): 4 for token in _LIKELY}
    return {"messages": said, "tools": TOOLS, "max_tokens": 300, "logit_bias": ends} | fields


_LIKELY = (7, 66, 98)
"""Quote, bracket and brace of the tiny tokenizer: what ends a text."""


def _messages(http: httpx.Client, fields: dict[str, Any]) -> list[tuple[dict[str, Any], str]]:
    """Content, reasoning and calls of each choice, without the calls' ids, and why it ended."""
    reply = http.post("/v1/chat/completions", json=_body(fields))
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
        "POST", "/v1/chat/completions", json=_body(fields) | {"stream": True}
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
