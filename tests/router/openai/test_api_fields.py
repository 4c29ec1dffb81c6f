"""Every documented field of each API is obeyed, refused by its name, or ignored and named to the client.

What is obeyed changes what is generated or answered, what is ignored changes neither,
and nothing is on two lists or on none.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import httpx
import pytest
from openai.types import completion_create_params
from openai.types.chat import ChatCompletionMessageParam
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params

from router.http.auth import IGNORED_HEADER
from router.http.known_fields import FIELDS, Api
from router.openapi import READ
from tests.router.openai.field_page import PAGE, table
from tests.router.served import MODEL, Served, serve

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
RESPONSE, MESSAGE = "/v1/responses", "/v1/messages"
COUNT, TOKENIZE, DETOKENIZE = "/v1/messages/count_tokens", "/tokenize", "/detokenize"
SAID = [{"role": "user", "content": "hi"}]
BASE: dict[str, dict[str, Any]] = {
    CHAT: {"model": MODEL, "messages": SAID, "seed": 1},
    COMPLETION: {"model": MODEL, "prompt": "hi there", "seed": 1},
    RESPONSE: {"model": MODEL, "input": "hi there", "seed": 1},
    MESSAGE: {"model": MODEL, "messages": SAID, "max_tokens": 50, "seed": 1},
    COUNT: {"model": MODEL, "messages": SAID},
    TOKENIZE: {"model": MODEL, "messages": SAID},
    DETOKENIZE: {"model": MODEL, "tokens": [5]},
}
TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}"
    "{% if not (continue_final_message and loop.last) %}<|end|>{% endif %}{% endfor %}"
    "{{ reasoning_effort }}{{ style }}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@dataclass(frozen=True)
class Obeyed:
    """With this value something else is generated or answered than without, both with the fields of `besides`."""

    value: Any
    besides: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Refused:
    """With this value the request gets 400 and the field's name."""

    value: Any
    besides: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Ignored:
    """With this value the same is generated and answered, and the reply names the field."""

    value: Any
    besides: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Unseen:
    """It is obeyed, and makes no difference to this tokenizer and template."""

    value: Any
    besides: dict[str, Any] = field(default_factory=dict)


Disposition = Obeyed | Refused | Ignored | Unseen

_FUNCTION = {"name": "f", "parameters": {"type": "object"}}
_TOOL = {"type": "function", "function": _FUNCTION}

SAMPLING: dict[str, Disposition] = {
    "allowed_token_ids": Obeyed([5, 7]),
    "bad_words": Obeyed(["hello"]),
    "frequency_penalty": Obeyed(1.0),
    "ignore_eos": Obeyed(True),
    "include_stop_str_in_output": Obeyed(True, {"skip_special_tokens": False}),
    "logit_bias": Obeyed({"5": 1}),
    "min_p": Obeyed(0.1),
    "min_tokens": Obeyed(1),
    "presence_penalty": Obeyed(1.0),
    "priority": Obeyed(1),
    "repetition_penalty": Obeyed(1.1),
    "seed": Obeyed(2),
    "skip_special_tokens": Obeyed(False, {"include_stop_str_in_output": True}),
    "stop_token_ids": Obeyed([5]),
    "session_id": Obeyed("mine"),
    "stream": Obeyed(True),
    "stream_interval": Obeyed(2, {"stream": True}),
    "temperature": Obeyed(0.5),
    "top_k": Obeyed(7),
    "top_p": Obeyed(0.5),
    "truncate_prompt_tokens": Obeyed(1),
    "truncation_side": Obeyed("right", {"truncate_prompt_tokens": 3}),
    "cache_salt": Obeyed("salt"),
    "model": Obeyed("tiny-alias"),
    "service_tier": Obeyed("flex"),
    "user": Obeyed("someone"),
}
"""OpenAI's and vLLM's fields of drawing, the same for all APIs."""

OF_VLLM: dict[str, Disposition] = {
    "add_special_tokens": Refused(True),
    "ec_transfer_params": Refused({"a": 1}),
    "early_stopping": Refused(True),
    "guided_decoding_backend": Refused("xgrammar"),
    "include_reasoning": Refused(False),
    "kv_transfer_params": Refused({"do_remote_decode": True}),
    "length_penalty": Refused(2.0),
    "logprob_token_ids": Refused([1]),
    "media_io_kwargs": Refused({"video": {}}),
    "mm_payload": Ignored("none"),
    "mm_processor_kwargs": Refused({"a": 1}),
    "prompt_embeds": Refused("AAAA"),
    "repetition_detection": Refused({"max_pattern_size": 3}),
    "request_id": Refused("mine"),
    "return_mm_kwargs": Ignored(False),
    "return_prompt_text": Refused(True),
    "return_token_offsets": Ignored(True),
    "return_tokens_as_token_ids": Refused(True),
    "routed_experts_prompt_start": Refused(3),
    "spaces_between_special_tokens": Refused(False),
    "guided_choice": Obeyed(["a", "b"]),
    "guided_grammar": Obeyed('start: "a"'),
    "guided_json": Obeyed({"type": "object"}),
    "guided_regex": Obeyed("a"),
    "structured_outputs": Obeyed({"regex": "a"}),
    "thinking_token_budget": Refused(5),
    "use_beam_search": Refused(True),
    "vllm_xargs": Refused({"a": 1}),
    "watermarking": Refused(True),
}
"""What vLLM's protocol adds, the same for all APIs."""

BEAMS: dict[str, Disposition] = {
    "early_stopping": Obeyed("never", {"use_beam_search": True}),
    "length_penalty": Obeyed(2.0, {"use_beam_search": True}),
    "use_beam_search": Obeyed(True),
}

OF_OPENAI: dict[str, Disposition] = {
    "metadata": Ignored({"a": "b"}),
    "moderation": Refused({"model": "m", "policy": {"input": {"mode": "block"}}}),
    "parallel_tool_calls": Ignored(False),
    "prompt_cache_key": Ignored("k"),
    "prompt_cache_options": Ignored({"ttl": "24h"}),
    "prompt_cache_retention": Ignored("24h"),
    "safety_identifier": Ignored("s"),
    "store": Ignored(True),
}

TABLE: dict[str, dict[str, Disposition]] = {
    CHAT: SAMPLING
    | OF_VLLM
    | OF_OPENAI
    | {
        "add_generation_prompt": Obeyed(False),
        "add_special_tokens": Unseen(True),
        "best_of": Refused(2),
        **BEAMS,
        "audio": Ignored({"voice": "v", "format": "wav"}),
        "chat_template": Refused("{{ 1 }}"),
        "chat_template_kwargs": Obeyed({"style": "terse"}),
        "continue_final_message": Obeyed(True, {"add_generation_prompt": False}),
        "documents": Refused([{"text": "x"}]),
        "echo": Obeyed(True, {"messages": [*SAID, {"role": "assistant", "content": "Well, "}]}),
        "function_call": Refused({"name": "g"}),
        "functions": Refused([_FUNCTION]),
        "include_reasoning": Unseen(False),
        "logprobs": Obeyed(True),
        "max_completion_tokens": Obeyed(3),
        "max_tokens": Obeyed(3),
        "messages": Obeyed([{"role": "user", "content": "another"}]),
        "modalities": Refused(["text", "audio"]),
        "n": Obeyed(2),
        "parallel_tool_calls": Unseen(False),
        "prediction": Ignored({"type": "content", "content": "x"}),
        "prompt_logprobs": Obeyed(1),
        "reasoning_effort": Obeyed("high"),
        "response_format": Obeyed({"type": "json_object"}),
        "return_token_ids": Obeyed(True),
        "return_tokens_as_token_ids": Obeyed(True, {"logprobs": True}),
        "stop": Obeyed("world"),
        "stream_options": Obeyed({"include_usage": True}, {"stream": True}),
        "tool_choice": Refused("required"),
        "tools": Refused([_TOOL]),
        "top_logprobs": Obeyed(2, {"logprobs": True}),
        "verbosity": Ignored("low"),
        "web_search_options": Ignored({}),
    },
    COMPLETION: SAMPLING
    | OF_VLLM
    | {
        "add_special_tokens": Unseen(False),
        "best_of": Obeyed(3),
        **BEAMS,
        "echo": Obeyed(True),
        "logprobs": Obeyed(1),
        "max_tokens": Obeyed(3),
        "metadata": Ignored({"a": "b"}),
        "n": Obeyed(2),
        "prompt": Obeyed([1, 2, 3]),
        "prompt_logprobs": Obeyed(1),
        "response_format": Obeyed({"type": "json_object"}),
        "return_token_ids": Obeyed(True),
        "return_tokens_as_token_ids": Obeyed(True, {"logprobs": 1}),
        "stop": Obeyed("world"),
        "stream_options": Obeyed({"include_usage": True}, {"stream": True}),
        "suffix": Refused("x"),
    },
    RESPONSE: SAMPLING
    | OF_VLLM
    | OF_OPENAI
    | {
        "access_programs": Ignored({}),
        "background": Refused(True),
        "chat_template_kwargs": Obeyed({"style": "terse"}),
        "context_management": Refused([{"type": "compaction"}]),
        "conversation": Refused("conv_1"),
        "enable_response_messages": Refused(True),
        "previous_input_messages": Refused([{}]),
        "image": Ignored({}),
        "include_reasoning": Unseen(False),
        "include": Obeyed(["message.output_text.logprobs"]),
        "input": Obeyed("another"),
        "instructions": Obeyed("be kind"),
        "max_output_tokens": Obeyed(3),
        "max_tool_calls": Ignored(3),
        "metadata": Obeyed({"a": "b"}),
        "parallel_tool_calls": Obeyed(False),
        "previous_response_id": Refused("resp_1"),
        "prompt": Refused({"id": "p"}),
        "reasoning": Obeyed({"effort": "high"}),
        "stop": Obeyed("world"),
        "stream_options": Ignored({"include_obfuscation": False}, {"stream": True}),
        "text": Obeyed({"format": {"type": "json_object"}}),
        "tool_choice": Obeyed("none"),
        "tools": Refused([{"type": "web_search"}]),
        "top_logprobs": Obeyed(2, {"include": ["message.output_text.logprobs"]}),
        "truncation": Ignored("auto"),
    },
    MESSAGE: SAMPLING
    | OF_VLLM
    | {
        "cache_control": Ignored({"type": "ephemeral"}),
        "chat_template_kwargs": Obeyed({"style": "terse"}),
        "compaction": Refused({"type": "auto"}),
        "container": Refused("c"),
        "context_management": Refused({"edits": [{"type": "x"}]}),
        "diagnostics": Ignored({}),
        "fallback_credit_token": Ignored("t"),
        "fallbacks": Refused([{"model": "m"}]),
        "inference_geo": Refused("eu"),
        "max_tokens": Obeyed(3),
        "mcp_servers": Refused([{}]),
        "messages": Obeyed([{"role": "user", "content": "another"}]),
        "metadata": Ignored({"user_id": "u"}),
        "output_config": Obeyed({"format": {"type": "json_schema", "schema": {}}}),
        "output_format": Obeyed({"type": "json_schema", "schema": {}}),
        "speed": Refused("fast"),
        "stop_sequences": Obeyed(["world"]),
        "system": Obeyed("be kind"),
        "thinking": Refused({"type": "enabled", "budget_tokens": 2000}),
        "tool_choice": Refused({"type": "any"}),
        "tools": Refused([{"name": "f", "input_schema": {"type": "object"}}]),
        "user_profile_id": Ignored("u"),
        "workspace_id": Ignored("w"),
    },
    COUNT: {
        "cache_control": Ignored({"type": "ephemeral"}),
        "chat_template_kwargs": Obeyed({"style": "terse"}),
        "context_management": Refused({"edits": [{"type": "x"}]}),
        "max_tokens": Ignored(3),
        "mcp_servers": Refused([{}]),
        "messages": Obeyed([{"role": "user", "content": "another"}]),
        "model": Unseen("tiny-alias"),
        "output_config": Obeyed({"effort": "low"}),
        "speed": Refused("fast"),
        "system": Obeyed("be kind"),
        "temperature": Ignored(0.5),
        "thinking": Unseen({"type": "enabled", "budget_tokens": 2000}),
        "tool_choice": Refused({"type": "any"}),
        "tools": Unseen([{"name": "f", "input_schema": {"type": "object"}}]),
    },
    TOKENIZE: {
        "add_generation_prompt": Obeyed(False),
        "add_special_tokens": Unseen(True),
        "chat_template": Refused("{{ 1 }}"),
        "chat_template_kwargs": Obeyed({"style": "terse"}),
        "continue_final_message": Obeyed(True, {"add_generation_prompt": False}),
        "max_tokens": Ignored(3),
        "media_io_kwargs": Refused({"video": {}}),
        "messages": Obeyed([{"role": "user", "content": "another"}]),
        "mm_processor_kwargs": Refused({"a": 1}),
        "model": Unseen("tiny-alias"),
        "prompt": Obeyed("another", {"messages": None}),
        "return_token_strs": Obeyed(True),
        "temperature": Ignored(0.5),
        "tools": Refused([_TOOL]),
        "truncate_prompt_tokens": Refused(2),
    },
    DETOKENIZE: {"model": Unseen("tiny-alias"), "tokens": Obeyed([7, 8])},
}

OF_ANTHROPIC = frozenset(
    [
        "cache_control",
        "compaction",
        "container",
        "context_management",
        "diagnostics",
        "fallback_credit_token",
        "fallbacks",
        "inference_geo",
        "max_tokens",
        "mcp_servers",
        "messages",
        "metadata",
        "model",
        "output_config",
        "output_format",
        "service_tier",
        "speed",
        "stop_sequences",
        "stream",
        "system",
        "temperature",
        "thinking",
        "tool_choice",
        "tools",
        "top_k",
        "top_p",
        "user_profile_id",
        "workspace_id",
    ]
)
"""Of the package `anthropic` 1.13.0 (`MessageCreateParams`, also its beta's), and those that it took until then."""

OF_VLLM_BY_PATH: dict[str, list[str]] = json.loads(
    (Path(__file__).parent / "vllm_fields.json").read_text()
)["fields"]
"""Of vLLM 0.32.0's request models, by endpoint."""

OF_PACKAGES: dict[str, set[str]] = {
    CHAT: set(chat_create_params.CompletionCreateParamsBase.__annotations__),
    COMPLETION: set(completion_create_params.CompletionCreateParamsBase.__annotations__),
    RESPONSE: set(response_create_params.ResponseCreateParamsBase.__annotations__),
    MESSAGE: set(OF_ANTHROPIC),
}


@pytest.mark.parametrize("path", TABLE)
def test_every_documented_field_has_its_place(path: str):
    documented = OF_PACKAGES.get(path, set()) | set(OF_VLLM_BY_PATH[path])
    assert documented - set(TABLE[path]) == set()
    assert documented - set(FIELDS) == set()


@pytest.mark.parametrize("path", TABLE)
def test_what_is_said_of_a_field_is_what_is_done(path: str):
    api = Api(path)
    said = {}
    for name, listed in TABLE[path].items():
        known = FIELDS[name]
        is_obeyed, is_idle = api in known.obeyed, api in known.idle
        said[name] = {
            Obeyed: is_obeyed,
            Unseen: is_obeyed,
            Ignored: is_idle or bool(known.limits),
            # Of what is obeyed in part, the table has a value that is not served.
            Refused: not (is_obeyed or is_idle) or bool(known.limits) or name == "moderation",
        }[type(listed)]
    assert [name for name, right in said.items() if not right] == []


@pytest.mark.parametrize("schema", READ, ids=lambda schema: schema.__name__)
def test_a_request_model_declares_what_it_obeys_and_nothing_else_but_idle_fields(schema):
    declared = {n for n, f in schema.model_fields.items() if f.annotation is not type(None)}
    obeyed = {name for name, known in FIELDS.items() if schema.api in known.obeyed}
    idle = {name for name, known in FIELDS.items() if schema.api in known.idle}
    assert obeyed - declared == declared - obeyed - idle == set()


@pytest.mark.parametrize("path", TABLE)
async def test_a_field_is_obeyed_or_refused_or_changes_nothing(path: str):
    wrong = {}
    async with serve(chat_template=TEMPLATE) as served:
        served.says("hello world, and again", "and again", "quick fox")
        for name, listed in TABLE[path].items():
            found = await disposition_of(served, path, name, listed)
            if found is not type(listed):
                wrong[name] = found
    assert wrong == {}


async def disposition_of(
    served: Served, path: str, name: str, listed: Disposition
) -> type[Disposition] | str:
    """What the server does with a field; what it answers if that is none of the four."""
    without = BASE[path] | {k: v for k, v in listed.besides.items() if v is not None}
    without = {k: v for k, v in without.items() if listed.besides.get(k, v) is not None}
    plain = None
    if path != TOKENIZE or "messages" in without:
        plain = seen(served, await served.http.post(path, json=without))
    generated = len(served.generator.requests)
    reply = await served.http.post(path, json=without | {name: listed.value})
    if reply.status_code == 200:
        is_named = name in reply.headers.get(IGNORED_HEADER, "").split(", ")
        if seen(served, reply) != plain:
            return Obeyed if not is_named else "obeyed and named as ignored"
        return Ignored if is_named else Unseen
    named = reply.json()["error"]["message"].startswith(name)
    if reply.status_code == 400 and named and len(served.generator.requests) == generated:
        return Refused
    return reply.text


def seen(served: Served, reply: httpx.Response) -> tuple[Any, ...]:
    """What was generated last, and what was answered, without what differs from reply to reply."""
    assert reply.status_code == 200, reply.text
    if not served.generator.requests:
        return (reply.text,)
    asked = served.generator.requests[-1]
    text = reply.text.replace(asked.request_id, "ID")
    text = text.replace(asked.request_id.replace("resp", "msg", 1), "ID")
    return asked.prompt, asked.session, asked.slo, _without_time(text)


def _without_time(text: str) -> str:
    head, *rest = text.split('"created')
    return "".join([head, *(part.partition(",")[2] for part in rest)])


def test_the_page_has_the_table():
    assert table() in PAGE.read_text(), "python -m tests.router.openai.field_page writes it"


@pytest.mark.parametrize("path", BASE)
async def test_a_field_that_nobody_knows_is_answered_and_named(path: str):
    strange: dict[str, Any] = {"zebra": 1, "a, b\r\nc: \u00e9": None, "x" * 100: {}}
    async with serve() as served:
        served.says("hello")
        reply = await served.http.post(path, json=BASE[path] | strange)
        assert reply.status_code == 200
        named = reply.headers[IGNORED_HEADER]
        assert named == f"a%2C%20b%0D%0Ac%3A%20%C3%A9, {'x' * 64}, zebra"
        plain = await served.http.post(path, json=BASE[path])
        assert IGNORED_HEADER not in plain.headers


async def test_what_messages_have_that_templates_are_not_given_is_named():
    async with serve() as served:
        served.says("hello")
        said: dict[str, Any] = {"role": "assistant", "content": "x", "refusal": None}
        said["annotations"] = []
        messages = [*SAID, said | {"reasons": "hm"}, said | {"zebra": 1, "reasons": "hm"}]
        reply = await served.chat(messages=messages, store=True)
        assert reply.status_code == 200
        assert reply.headers[IGNORED_HEADER] == "store, messages.reasons, messages.zebra"
        assert IGNORED_HEADER not in (await served.chat(messages=[*SAID, said])).headers


@pytest.mark.parametrize("kind", get_args(ChatCompletionMessageParam), ids=lambda k: k.__name__)
async def test_every_documented_field_of_a_message_is_obeyed_or_refused(kind: type):
    values: dict[str, Any] = {"function_call": {"name": "f"}}
    known = {"role", "content", "name", "tool_call_id", "tool_calls"}
    async with serve(chat_template=TEMPLATE) as served:
        served.says("hello")
        for name in set(kind.__annotations__) - known:
            said = {"role": "assistant", "content": "x", name: values.get(name, "x")}
            error = (await served.chat(messages=[*SAID, said])).json()["error"]
            assert error["code"] == "unsupported_parameter", name
            assert name in error["message"]


async def test_of_many_unknown_fields_the_first_are_named_and_the_others_counted():
    async with serve() as served:
        served.says("hello")
        strange: dict[str, Any] = {f"field_{i:02}": i for i in range(40)}
        reply = await served.http.post(CHAT, json=BASE[CHAT] | strange)
        named = reply.headers[IGNORED_HEADER].split(", ")
        assert named == [*(f"field_{i:02}" for i in range(32)), "+8"]


async def test_what_is_ignored_is_named_in_a_large_body_and_in_an_error_too():
    async with serve() as served:
        served.says("hello")
        long = [{"role": "user", "content": "x"}] * 2000
        reply = await served.chat(messages=long, store=True, zebra=1)
        assert (reply.status_code, reply.json()["error"]["code"]) == (
            400,
            "context_length_exceeded",
        )
        assert reply.headers[IGNORED_HEADER] == "store, zebra"


async def test_a_field_that_is_named_like_what_a_body_says_of_itself_is_only_unknown():
    async with serve() as served:
        reply = await served.chat(ignored=1, model_extra={})
        assert reply.status_code == 200
        assert reply.headers["x-baton-ignored"] == "ignored, model_extra"
