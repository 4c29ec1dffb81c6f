"""Every documented field of each API is obeyed, refused by its name, or documented as ignored.

What is obeyed changes what is generated or answered, what is ignored changes neither, and nothing is on two lists or on none.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params

from tests.router.served import MODEL, Served, serve

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
RESPONSE, MESSAGE = "/v1/responses", "/v1/messages"
SAID = [{"role": "user", "content": "hi"}]
BASE: dict[str, dict[str, Any]] = {
    CHAT: {"model": MODEL, "messages": SAID, "seed": 1},
    COMPLETION: {"model": MODEL, "prompt": "hi there", "seed": 1},
    RESPONSE: {"model": MODEL, "input": "hi there", "seed": 1},
    MESSAGE: {"model": MODEL, "messages": SAID, "max_tokens": 50, "seed": 1},
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
    """With this value the same is generated and answered; docs/openai-conformance.md says so."""

    value: Any
    besides: dict[str, Any] = field(default_factory=dict)


Disposition = Obeyed | Refused | Ignored

_FUNCTION = {"name": "f", "parameters": {"type": "object"}}
_TOOL = {"type": "function", "function": _FUNCTION}

SAMPLING: dict[str, Disposition] = {
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
    "stream": Obeyed(True),
    "temperature": Obeyed(0.5),
    "top_k": Obeyed(7),
    "top_p": Obeyed(0.5),
    "truncate_prompt_tokens": Obeyed(1),
    "cache_salt": Obeyed("salt"),
    "model": Obeyed("tiny-alias"),
    "service_tier": Obeyed("flex"),
    "user": Obeyed("someone"),
}
"""OpenAI's and vLLM's fields of drawing, the same for all APIs."""

OF_VLLM: dict[str, Disposition] = {
    "add_special_tokens": Refused(True),
    "allowed_token_ids": Refused([1]),
    "bad_words": Refused(["x"]),
    "ec_transfer_params": Ignored({"a": 1}),
    "include_reasoning": Refused(False),
    "kv_transfer_params": Ignored({"a": 1}),
    "length_penalty": Refused(2.0),
    "logprob_token_ids": Refused([1]),
    "media_io_kwargs": Ignored({"video": {}}),
    "mm_processor_kwargs": Ignored({"a": 1}),
    "prompt_embeds": Refused("AAAA"),
    "repetition_detection": Refused({"max_pattern_size": 3}),
    "request_id": Ignored("mine"),
    "return_mm_kwargs": Ignored(False),
    "return_prompt_text": Refused(True),
    "return_token_offsets": Ignored(True),
    "return_tokens_as_token_ids": Refused(True),
    "routed_experts_prompt_start": Ignored(3),
    "session_id": Ignored("mine"),
    "spaces_between_special_tokens": Refused(False),
    "stream_interval": Ignored(4),
    "structured_outputs": Refused({"regex": "a"}),
    "thinking_token_budget": Refused(5),
    "truncation_side": Refused("right", {"truncate_prompt_tokens": 3}),
    "use_beam_search": Refused(True),
    "vllm_xargs": Refused({"a": 1}),
    "watermarking": Refused(True),
}
"""What vLLM's protocol adds, where ours has no field of that name (`chat_completion/protocol.py`, November 2026)."""

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
        "audio": Ignored({"voice": "v", "format": "wav"}),
        "chat_template": Refused("{{ 1 }}"),
        "chat_template_kwargs": Obeyed({"style": "terse"}),
        "continue_final_message": Obeyed(True, {"add_generation_prompt": False}),
        "documents": Refused([{"text": "x"}]),
        "echo": Refused(True),
        "function_call": Refused({"name": "g"}),
        "functions": Refused([_FUNCTION]),
        "logprobs": Obeyed(True),
        "max_completion_tokens": Obeyed(3),
        "max_tokens": Obeyed(3),
        "messages": Obeyed([{"role": "user", "content": "another"}]),
        "modalities": Refused(["text", "audio"]),
        "n": Obeyed(2),
        "prediction": Ignored({"type": "content", "content": "x"}),
        "prompt_logprobs": Obeyed(1),
        "reasoning_effort": Obeyed("high"),
        "response_format": Refused({"type": "json_object"}),
        "return_token_ids": Obeyed(True),
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
        "add_special_tokens": Ignored(False),  # by a tokenizer that adds none
        "best_of": Obeyed(3),
        "echo": Obeyed(True),
        "logprobs": Obeyed(1),
        "max_tokens": Obeyed(3),
        "metadata": Ignored({"a": "b"}),
        "n": Obeyed(2),
        "prompt": Obeyed([1, 2, 3]),
        "prompt_logprobs": Obeyed(1),
        "response_format": Refused({"type": "json_object"}),
        "return_token_ids": Obeyed(True),
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
        "image": Ignored({}),
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
        "text": Refused({"format": {"type": "json_object"}}),
        "tool_choice": Obeyed("none"),
        "tools": Refused([{"type": "web_search"}]),
        "top_logprobs": Obeyed(2, {"include": ["message.output_text.logprobs"]}),
        "truncation": Ignored("auto"),
    },
    MESSAGE: SAMPLING
    | OF_VLLM
    | {
        "cache_control": Ignored({"type": "ephemeral"}),
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
        "output_config": Refused({"format": {"type": "json_schema", "schema": {}}}),
        "output_format": Refused({"type": "json_schema", "schema": {}}),
        "speed": Refused("fast"),
        "stop_sequences": Obeyed(["world"]),
        "system": Obeyed("be kind"),
        "thinking": Refused({"type": "enabled", "budget_tokens": 2000}),
        "tool_choice": Refused({"type": "any"}),
        "tools": Refused([{"name": "f", "input_schema": {"type": "object"}}]),
        "user_profile_id": Ignored("u"),
        "workspace_id": Ignored("w"),
    },
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

DOCUMENTED = {
    CHAT: set(chat_create_params.CompletionCreateParamsBase.__annotations__),
    COMPLETION: set(completion_create_params.CompletionCreateParamsBase.__annotations__),
    RESPONSE: set(response_create_params.ResponseCreateParamsBase.__annotations__),
    MESSAGE: OF_ANTHROPIC,
}

PAGE = Path(__file__).parents[2] / "docs/openai-conformance.md"


@pytest.mark.parametrize("path", TABLE)
def test_every_documented_field_has_its_place(path: str):
    assert DOCUMENTED[path] - set(TABLE[path]) == set()


@pytest.mark.parametrize("path", TABLE)
async def test_a_field_is_obeyed_or_refused_or_changes_nothing(path: str):
    wrong = {}
    async with serve(chat_template=TEMPLATE) as served:
        served.says("hello world", "and again", "quick fox")
        for name, listed in TABLE[path].items():
            found = await disposition_of(served, path, name, listed)
            if found is not type(listed):
                wrong[name] = found
    assert wrong == {}


async def disposition_of(
    served: Served, path: str, name: str, listed: Disposition
) -> type[Disposition] | str:
    """What the server does with a field; what it answers if that is none of the three."""
    without = BASE[path] | listed.besides
    plain = seen(served, await served.http.post(path, json=without))
    generated = len(served.generator.requests)
    reply = await served.http.post(path, json=without | {name: listed.value})
    if reply.status_code == 200:
        return Ignored if seen(served, reply) == plain else Obeyed
    named = reply.json()["error"]["message"].startswith(name)
    if reply.status_code == 400 and named and len(served.generator.requests) == generated:
        return Refused
    return reply.text


def seen(served: Served, reply: httpx.Response) -> tuple[Any, ...]:
    """What was generated last, and what was answered, without what differs from reply to reply."""
    assert reply.status_code == 200
    asked = served.generator.requests[-1]
    text = reply.text.replace(asked.request_id, "ID")
    text = text.replace(asked.request_id.replace("resp", "msg", 1), "ID")
    return asked.prompt, asked.session, asked.slo, _without_time(text)


def _without_time(text: str) -> str:
    head, *rest = text.split('"created')
    return "".join([head, *(part.partition(",")[2] for part in rest)])


@pytest.mark.parametrize("path", TABLE)
def test_what_is_ignored_is_documented(path: str):
    lines = PAGE.read_text().splitlines()
    listed = {row: line for row in TABLE for line in lines if line.startswith(f"| `{row}` |")}
    text = listed[path] + (listed[CHAT] if "the same of vLLM" in listed[path] else "")
    ignored = {name for name, kind in TABLE[path].items() if isinstance(kind, Ignored)}
    assert {name for name in ignored if f"`{name}`" not in text} == set()
