"""Every number and every list that a client may send has a bound, and whoever goes beyond it is told which."""

from typing import Any

import pytest

from router.http.errors import ErrorReply
from router.http.fields import MAX_CHOICES, MAX_METADATA, MAX_TEMPLATE_KWARGS
from tests.router.served import MODEL, serve

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
SAID = {"role": "user", "content": "hi"}
BOTH: list[tuple[dict[str, Any], str]] = [
    ({"n": MAX_CHOICES + 1}, "n"),
    ({"n": 0}, "n"),
    ({"max_tokens": 2**31}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 513}, "max_tokens"),
    ({"min_tokens": 2**31}, "min_tokens"),
    ({"stop": ["x"] * 17}, "stop"),
    ({"stop": "x" * 513}, "stop"),
    ({"stop": ""}, "stop"),
    ({"stop_token_ids": [1] * 1025}, "stop_token_ids"),
    ({"stop_token_ids": [2**31]}, "stop_token_ids"),
    ({"stop_token_ids": [512]}, "stop_token_ids"),
    ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
    ({"logit_bias": {"1": 101}}, "logit_bias"),
    ({"logit_bias": {"512": 1}}, "logit_bias"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"temperature": 2.1}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_k": 2**31}, "top_k"),
    ({"presence_penalty": -2.1}, "presence_penalty"),
    ({"repetition_penalty": 101}, "repetition_penalty"),
    ({"seed": 2**64}, "seed"),
    ({"user": "x" * 1025}, "user"),
    ({"metadata": {str(i): "" for i in range(MAX_METADATA + 1)}}, "metadata"),
    ({"metadata": {"x": "y" * 513}}, "metadata"),
    ({"service_tier": "x" * 65}, "service_tier"),
    ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
]
ONE: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"messages": []}, "messages"),
    (CHAT, {"messages": [SAID] * 4097}, "messages"),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * 1025}]},
        "messages",
    ),
    (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    (CHAT, {"max_completion_tokens": 2**31}, "max_completion_tokens"),
    (
        CHAT,
        {"chat_template_kwargs": {f"k{i}": 1 for i in range(MAX_TEMPLATE_KWARGS + 1)}},
        "chat_template_kwargs",
    ),
    (CHAT, {"tools": [{"type": "function", "function": {"name": "f"}}] * 129}, "tools"),
    (COMPLETION, {"logprobs": 21}, "logprobs"),
    (COMPLETION, {"best_of": MAX_CHOICES + 1}, "best_of"),
    (COMPLETION, {"prompt": ["x"] * (MAX_CHOICES + 1)}, "prompt"),
    (COMPLETION, {"prompt": ["x"] * 65, "n": 2}, "n"),
    (COMPLETION, {"prompt": [1] * 513}, "prompt"),
    (COMPLETION, {"prompt": [2**31]}, "prompt"),
    (COMPLETION, {"prompt": [512]}, "prompt"),
    (COMPLETION, {"prompt": []}, "prompt"),
]


@pytest.mark.parametrize(
    ("route", "fields", "param"),
    [(route, *case) for case in BOTH for route in (CHAT, COMPLETION)] + ONE,
)
async def test_beyond_a_bound_the_field_is_named(route: str, fields: dict[str, Any], param: str):
    asked: dict[str, Any] = {"model": MODEL}
    asked |= {"messages": [SAID]} if route == CHAT else {"prompt": "hi"}
    async with serve() as served:
        reply = await served.http.post(route, json=asked | fields)
        error = ErrorReply.model_validate_json(reply.content).error
        assert reply.status_code == 400
        assert error.param is not None
        assert error.param.partition("[")[0] == param
        assert served.generator.requests == []


async def test_a_body_beyond_the_bound_is_413_whatever_it_holds():
    async with serve(max_body_bytes=1000) as served:
        reply = await served.chat(messages=[{"role": "user", "content": "x" * 1000}])
        assert reply.status_code == 413
        assert ErrorReply.model_validate_json(reply.content).error.code == "payload_too_large"
