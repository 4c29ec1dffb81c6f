from dataclasses import replace
from typing import Any

import pytest

from baton.errors import DISPOSITIONS, BatonError
from baton.generation import FinishReason
from router.http.errors import ErrorReply, error_response
from router.ports import ServedModel
from router.tenants.directory import TenantDirectory
from router.tenants.tenant import ANONYMOUS
from tests.router.served import MODEL, Served, serve

HELLO = [{"role": "user", "content": "hi"}]


def _assert_refused(reply: Any, status: int, code: str, param: str | None) -> None:
    error = ErrorReply.model_validate_json(reply.content, strict=True).error
    assert (reply.status_code, error.code, error.param) == (status, code, param)
    assert "\n" not in error.message


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user"}]}, "messages[0]"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages"),
        (
            {"messages": [{"role": "user", "content": [{"type": 5}]}]},
            "messages[0].content",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * 1025}]},
            "messages[0].content",
        ),
        ({"temperature": 2.5}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"temperature": "1"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": -0.1}, "min_p"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"repetition_penalty": 1e-39}, "repetition_penalty"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"n": True}, "n"),
        ({"seed": 2**64}, "seed"),
        ({"seed": 1.5}, "seed"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": "x" * 513}, "stop"),
        ({"stop": ""}, "stop"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"512": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_completion_tokens": -1}, "max_completion_tokens"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"stop_token_ids": [600]}, "stop_token_ids"),
        ({"allowed_token_ids": [600]}, "allowed_token_ids"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids"),
        ({"allowed_token_ids": [5] * 8193}, "allowed_token_ids"),
        ({"bad_words": "x"}, "bad_words"),
        ({"bad_words": [""]}, "bad_words"),
        ({"bad_words": ["x", "  "]}, "bad_words"),
        ({"bad_words": ["x"] * 65}, "bad_words"),
        ({"bad_words": [str(i) * 20 for i in range(60)]}, "bad_words"),
        ({"stream_interval": 0}, "stream_interval"),
        ({"stream_interval": 257}, "stream_interval"),
        ({"truncation_side": "middle"}, "truncation_side"),
        ({"stream_options": {"include_usage": 1}}, "stream_options"),
        ({"cache_salt": {"a": 1}}, "cache_salt"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "no spaces"}}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"tool_choice": "some"}, "tool_choice"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"metadata": {str(i): "" for i in range(17)}}, "metadata"),
        ({"service_tier": "gold"}, "service_tier"),
        ({"priority": "high"}, "priority"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"a b": 1}}, "chat_template_kwargs"),
        (
            {"continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
        ),
        ({"store": "yes"}, "store"),
        ({"prediction": "x"}, "prediction"),
        ({"modalities": ["smell"]}, "modalities"),
    ],
)
async def test_a_bad_field_is_refused_by_its_name(fields: dict[str, Any], param: str):
    async with serve() as served:
        _assert_refused(await served.chat(**fields), 400, "invalid_request", param)
        assert served.generator.requests == []


_IMAGE = {"type": "image", "source": {"type": "url", "url": "https://x"}}


@pytest.mark.parametrize(
    ("path", "field", "part", "where"),
    [
        ("chat/completions", "messages", {"type": "image_url"}, "messages[0].content"),
        ("responses", "input", {"type": "input_image"}, "input[0].content"),
        ("messages", "messages", _IMAGE, "messages[0].content"),
        (
            "messages",
            "messages",
            {"type": "tool_result", "tool_use_id": "a", "content": [_IMAGE]},
            "messages[0].content",
        ),
    ],
)
async def test_a_part_that_is_no_text_is_named_as_what_is_not_served(
    path: str, field: str, part: dict[str, Any], where: str
) -> None:
    said = [{"role": "user", "content": [part]}]
    async with serve() as served:
        body = {"model": MODEL, "max_tokens": 1, field: said}
        reply = await served.http.post(f"/v1/{path}", json=body)
        assert reply.status_code == 400
        error = reply.json()["error"]
        named = part["type"] if part["type"] != "tool_result" else _IMAGE["type"]
        assert error["message"] == f"{where}: Parts of type {named!r} are not served."
        if path != "messages":
            assert error["code"] == "unsupported_parameter"
            assert where.startswith(error["param"])


async def test_the_code_is_that_of_the_complaint_that_is_told() -> None:
    image = [{"type": "input_image"}]
    robot = {"role": "robot", "content": image}
    numbered = {"type": "function_call_output", "call_id": 5, "output": image}
    async with serve() as served:
        for item, code, where in (
            (robot, "invalid_request", "input[0].role: "),
            (numbered, "unsupported_parameter", "input[0].output: Parts of type"),
        ):
            reply = await served.http.post("/v1/responses", json={"model": MODEL, "input": [item]})
            _assert_refused(reply, 400, code, "input")
            assert reply.json()["error"]["message"].startswith(where)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [1, "x"]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [512]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": ["x"] * 129}, "prompt"),
        ({"prompt": ["x"] * 65, "n": 2}, "n"),
        ({"echo": 1}, "echo"),
        ({"best_of": 2, "n": 3}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"prompt": ["x"] * 65, "best_of": 2}, "n"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
    ],
)
async def test_a_bad_field_of_a_completion_is_refused_by_its_name(
    fields: dict[str, Any], param: str
):
    async with serve() as served:
        _assert_refused(await served.complete(**fields), 400, "invalid_request", param)
        assert served.generator.requests == []


_FUNCTION = {"name": "f", "parameters": {"type": "object"}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function", "function": _FUNCTION}]}, "tools"),
        (
            {"tools": [{"type": "function", "function": _FUNCTION}], "tool_choice": "required"},
            "tools",
        ),
        ({"functions": [_FUNCTION]}, "functions"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "schema": {"not": {}}},
                }
            },
            "response_format",
        ),
        ({"structured_outputs": {"json": {"uniqueItems": True}}}, "structured_outputs"),
        ({"chat_template": "{{ 1 }}"}, "chat_template"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"moderation": {"model": "m", "policy": {"input": {"mode": "block"}}}}, "moderation"),
        ({"messages": [{"role": "assistant", "refusal": "no"}]}, "messages[0]"),
    ],
)
async def test_what_is_right_but_not_served_is_refused_as_such(fields: dict[str, Any], param: str):
    async with serve() as served:
        _assert_refused(await served.chat(**fields), 400, "unsupported_parameter", param)
        assert served.generator.requests == []


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/completions", {"prompt": "x", "max_completion_tokens": 5}, "max_completion_tokens"),
        ("/v1/completions", {"prompt": "x", "tools": [{"type": "function"}]}, "tools"),
        ("/v1/chat/completions", {"messages": HELLO, "max_output_tokens": 5}, "max_output_tokens"),
        ("/v1/chat/completions", {"messages": HELLO, "stop_sequences": ["a"]}, "stop_sequences"),
        ("/v1/responses", {"input": "x", "max_tokens": 5}, "max_tokens"),
        ("/v1/responses", {"input": "x", "n": 2}, "n"),
        ("/v1/responses", {"input": "x", "use_beam_search": True}, "use_beam_search"),
        ("/v1/responses", {"input": "x", "reasoning": {"mode": "pro"}}, "reasoning"),
        ("/v1/chat/completions", {"messages": HELLO, "reasoning": {"effort": "low"}}, "reasoning"),
        ("/v1/completions", {"prompt": "x", "reasoning_effort": "low"}, "reasoning_effort"),
        ("/v1/responses", {"input": "x", "return_token_ids": True}, "return_token_ids"),
    ],
)
async def test_a_field_of_another_endpoint_is_refused_and_not_ignored(path, fields, param):
    async with serve() as served:
        reply = await served.http.post(path, json={"model": MODEL} | fields)
        _assert_refused(reply, 400, "unsupported_parameter", param)
        assert served.generator.requests == []


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": "x", "tools": [], "max_completion_tokens": None}),
        ("/v1/responses", {"input": "x", "n": 1, "logprobs": False, "return_token_ids": False}),
    ],
)
async def test_a_field_of_another_endpoint_that_asks_for_nothing_is_taken(path, fields):
    async with serve() as served:
        served.says("x")
        assert (await served.http.post(path, json={"model": MODEL} | fields)).status_code == 200


async def test_a_suffix_needs_a_model_that_fills_in_middles():
    async with serve() as served:
        reply = await served.complete(suffix="x")
        _assert_refused(reply, 400, "unsupported_parameter", "suffix")


async def test_more_figures_about_prompts_than_may_wait_are_refused():
    async with serve() as served:
        served.generator.served = ServedModel(max_model_len=2**20, max_samples=256, vocab_size=512)
        prompt = [5] * (2**17 // 3 + 1)
        reply = await served.complete(prompt=prompt, prompt_logprobs=2)
        _assert_refused(reply, 400, "invalid_request", "prompt_logprobs")
        assert (await served.complete(prompt=prompt, prompt_logprobs=1)).status_code == 200


async def test_fields_that_change_no_answer_are_taken():
    async with serve() as served:
        served.says("x")
        reply = await served.chat(
            tools=[{"type": "function", "function": _FUNCTION}],
            tool_choice="none",
            functions=[_FUNCTION],
            function_call="none",
            parallel_tool_calls=True,
            modalities=["text"],
            audio={"format": "wav", "voice": "alloy"},
            prediction={"type": "content", "content": "x"},
            web_search_options={"search_context_size": "low"},
            moderation={"model": "m", "policy": {"input": {"mode": "score"}}},
            logit_bias={"foo": 0},
            metadata={"foo": "bar"},
            service_tier="auto",
            store=True,
            user="me",
            priority=-3,
            reasoning_effort="none",
            verbosity="low",
            safety_identifier="s",
            prompt_cache_key="k",
            prompt_cache_retention="24h",
        )
        assert reply.status_code == 200, reply.text
        assert reply.json()["service_tier"] == "default"


async def test_fields_nobody_knows_and_neutral_values_are_ignored():
    async with serve() as served:
        served.says("x")
        reply = await served.chat(
            some_new_field={"a": 1}, tools=[], tool_choice="auto", response_format={"type": "text"}
        )
        assert reply.status_code == 200


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/chat/completions", {"messages": HELLO}),
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/responses", {"input": "x"}),
    ],
)
async def test_stream_options_without_a_stream_are_refused(path: str, fields: dict[str, Any]):
    async with serve() as served:
        asked = {"model": MODEL, "stream_options": {"include_obfuscation": False}, **fields}
        _assert_refused(
            await served.http.post(path, json=asked), 400, "invalid_request", "stream_options"
        )


@pytest.mark.parametrize("role", ["", "user\n", "<|system|>", "x" * 65, None, 5])
async def test_what_cannot_be_a_role_is_refused(role: object):
    async with serve() as served:
        messages = [*HELLO, {"role": role, "content": "x"}]
        reply = await served.chat(messages=messages)
        _assert_refused(reply, 400, "invalid_request", "messages[1].role")


async def test_an_unknown_model_is_not_found():
    async with serve() as served:
        _assert_refused(await served.chat(model="gpt-unknown"), 404, "model_not_found", "model")
        reply = await served.http.post("/tokenize", json={"model": "gpt-unknown", "prompt": "x"})
        _assert_refused(reply, 404, "model_not_found", "model")


@pytest.mark.parametrize("model", [None, ""])
async def test_without_a_model_the_first_name_that_the_tenant_may_use_is_meant(model: str | None):
    async with serve() as served:
        served.says("x")
        assert (await served.chat(model=model)).json()["model"] == "tiny"
    of_alias = replace(ANONYMOUS, models=frozenset({"tiny-alias"}))
    async with serve(directory=TenantDirectory((), of_alias)) as served:
        served.says("x")
        assert (await served.chat(model=model)).json()["model"] == "tiny-alias"
    of_nothing = replace(ANONYMOUS, models=frozenset({"another"}))
    async with serve(directory=TenantDirectory((), of_nothing)) as served:
        _assert_refused(await served.chat(model=model), 404, "model_not_found", "model")


async def test_an_alias_of_the_model_is_known_and_comes_back():
    async with serve() as served:
        served.says("x")
        assert (await served.chat(model="tiny-alias")).json()["model"] == "tiny-alias"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": [{"role": "user", "content": "x y " * 600}]}, "messages"),
        ({"max_tokens": 512}, "max_tokens"),
        ({"max_completion_tokens": 512}, "max_completion_tokens"),
    ],
)
async def test_what_the_context_cannot_hold_is_refused(fields: dict[str, Any], param: str):
    async with serve() as served:
        _assert_refused(await served.chat(**fields), 400, "context_length_exceeded", param)


async def test_a_prompt_may_fill_the_context_but_for_one_token():
    async with serve() as served:
        served.says("x")
        assert (await served.complete(prompt=[5] * 511, max_tokens=1)).status_code == 200
        reply = await served.complete(prompt=[5] * 512, max_tokens=1)
        _assert_refused(reply, 400, "context_length_exceeded", "prompt")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'{"model": "tiny", "messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"model": "tiny", "messages": [{"role": "user", "content": "\xff"}]}',
        b'{"x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    ],
)
async def test_what_is_not_proper_json_is_refused(body: bytes):
    async with serve() as served:
        reply = await served.http.post("/v1/chat/completions", content=body)
        _assert_refused(reply, 400, "invalid_request", None)


async def test_nan_is_no_number():
    async with serve() as served:
        body = b'{"model": "tiny", "messages": [{"role":"user","content":"x"}], "temperature": NaN}'
        reply = await served.http.post("/v1/chat/completions", content=body)
        _assert_refused(reply, 400, "invalid_request", "temperature")


async def test_a_body_over_the_limit_is_refused_by_its_declared_size():
    async with serve(max_body_bytes=100) as served:
        reply = await served.chat(user="x" * 200)
        _assert_refused(reply, 413, "payload_too_large", None)


async def test_a_body_over_the_limit_is_not_read_to_its_end():
    pieces_sent = 0

    async def pieces():
        nonlocal pieces_sent
        for _ in range(1000):
            pieces_sent += 1
            yield b" " * 50

    async with serve(max_body_bytes=100) as served:
        reply = await served.http.post("/v1/chat/completions", content=pieces())
        _assert_refused(reply, 413, "payload_too_large", None)
        assert pieces_sent < 10


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nowhere", 404),
        ("GET", "/health/", 404),
        ("PUT", "/v1/chat/completions", 405),
        ("POST", "/v1/models", 405),
    ],
)
async def test_unknown_routes_answer_in_the_same_shape(method: str, path: str, status: int):
    async with serve() as served:
        _assert_refused(await served.http.request(method, path), status, "route_not_found", None)


async def test_a_wrong_method_is_told_all_that_the_path_has():
    async with serve() as served:
        reply = await served.http.put("/v1/responses/resp_1")
        assert (reply.status_code, reply.headers["allow"]) == (405, "DELETE, GET")


async def test_before_a_worker_said_hello_requests_are_told_to_come_back():
    async with serve() as served:
        served.generator.served = None
        reply = await served.chat()
        _assert_refused(reply, 503, "unavailable", None)
        assert reply.headers["retry-after"] == "1"


@pytest.mark.parametrize("error", DISPOSITIONS)
async def test_every_error_has_its_status_and_only_some_say_when_to_retry(error: type[BatonError]):
    reply = error_response(error("what happened", param="field"))
    row = DISPOSITIONS[error]
    assert reply.status_code == row.http
    assert ("retry-after" in reply.headers) == (row.http in (429, 503) and row.retryable)
    assert (b"what happened" in reply.body) == (row.http < 500 or row.http in (503, 504))


async def test_a_bug_is_a_server_error_without_internals():
    async with serve() as served:
        served.generator.fault = ZeroDivisionError("secret detail")  # type: ignore[assignment]
        reply = await served.chat()
        assert reply.status_code == 500
        assert reply.json()["error"]["type"] == "server_error"
        assert "secret" not in reply.text


async def _statuses(served: Served, key: str | None) -> set[int]:
    headers = {} if key is None else {"Authorization": key}
    replies = [
        await served.chat(headers),
        await served.http.get("/v1/models", headers=headers),
        await served.http.get("/openapi.json", headers=headers),
        await served.http.get("/nowhere", headers=headers),
    ]
    return {reply.status_code for reply in replies}


@pytest.mark.parametrize(
    "key", [None, "Bearer", "Bearer ", "Bearer wrong", "Basic one", "one", "Bearer one two"]
)
async def test_without_a_known_key_nothing_but_the_probes_answers(key: str | None):
    async with serve(api_keys=("one", "two")) as served:
        assert await _statuses(served, key) == {401}
        for path in ("/health", "/ready", "/metrics", "/version"):
            assert (await served.http.get(path)).status_code == 200


async def test_each_known_key_opens():
    async with serve(api_keys=("one", "two")) as served:
        served.says("x")
        for key in ("Bearer one", "bearer two"):
            assert await _statuses(served, key) == {200, 404}


async def test_a_refused_key_is_told_in_openais_shape():
    async with serve(api_keys=("one",)) as served:
        reply = await served.chat({"Authorization": "Bearer wrong"})
        _assert_refused(reply, 401, "invalid_api_key", None)
        assert "wrong" not in reply.text


async def test_a_clients_request_id_is_echoed_and_used_for_nothing_else():
    async with serve() as served:
        served.says("x")
        reply = await served.chat({"X-Request-Id": "my-id.1"})
        assert reply.headers["x-request-id"] == "my-id.1"
        assert "my-id" not in served.generator.requests[0].request_id
        assert reply.json()["id"] == served.generator.requests[0].request_id


async def test_a_hostile_request_id_is_cut_and_cleaned():
    async with serve() as served:
        reply = await served.http.get(
            "/version", headers={"X-Request-Id": "a b<script>" + "x" * 999}
        )
        assert reply.headers["x-request-id"].startswith("abscriptx")
        assert len(reply.headers["x-request-id"]) <= 128


async def test_paths_and_models_that_clients_invent_make_no_metric_labels():
    async with serve() as served:
        for name in ("invented-one", "invented-two"):
            await served.http.get(f"/{name}")
            await served.http.get(f"/v1/models/{name}")
            await served.chat(model=name)
        text = (await served.http.get("/metrics")).text
        assert "invented" not in text
        assert 'route="other",status="404"} 2.0' in text


async def test_reasons_for_an_end_are_all_words_that_clients_are_told_of():
    async with serve() as served:
        schemas = (await served.http.get("/openapi.json")).json()["components"]["schemas"]
        reasons = {reason.value for reason in FinishReason}
        for reply, words in (
            ("ChatChoice", {*reasons, "tool_calls"}),
            ("CompletionChoice", reasons),
        ):
            assert set(schemas[reply]["properties"]["finish_reason"]["enum"]) == words


async def test_a_served_model_without_room_is_not_a_crash():
    async with serve() as served:
        served.generator.served = ServedModel(max_model_len=1, max_samples=256, vocab_size=512)
        reply = await served.chat()
        _assert_refused(reply, 400, "context_length_exceeded", "messages")
