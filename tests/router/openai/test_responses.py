import json
from typing import Any

import openai
import pytest
from openai.types.responses import Response as OpenaiResponse

from baton.errors import WorkerLostError
from router.http.errors import ErrorReply
from tests.router.served import MODEL, Served, listening, serve


async def respond(served: Served, **fields):
    body = {"model": MODEL, "input": "hi", **fields}
    return await served.http.post("/v1/responses", json=body)


def named_events(text: str):
    """Name and JSON of each event, in order."""
    found = []
    for block in text.strip().split("\n\n"):
        name, data = block.split("\n")
        found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return found


async def test_a_text_is_answered_as_one_message():
    async with serve() as served:
        served.says("hello there")
        reply = OpenaiResponse.model_validate((await respond(served)).json())
        assert reply.output_text == "hello there"
        assert (reply.status, reply.object) == ("completed", "response")
        assert reply.usage is not None
        assert reply.usage.total_tokens == reply.usage.input_tokens + reply.usage.output_tokens


async def test_instructions_and_items_become_the_conversation():
    async with serve() as served:
        served.says("x")
        items = [
            {"role": "user", "content": "one"},
            {
                "type": "message",
                "role": "assistant",
                "content": [{"type": "output_text", "text": "two"}],
            },
            {
                "role": "user",
                "content": [
                    {"type": "input_text", "text": "thr"},
                    {"type": "input_text", "text": "ee"},
                ],
            },
        ]
        await respond(served, input=items, instructions="be kind")
        prompt = served.generator.requests[0].prompt.prompt_tokens
        assert await served.tokenizer.decode(prompt) == (
            "<|system|>be kind<|end|><|user|>one<|end|><|assistant|>two<|end|><|user|>three<|end|><|assistant|>"
        )


async def test_an_earlier_answer_can_be_sent_back_as_it_came():
    async with serve() as served:
        served.says("first")
        output = (await respond(served)).json()["output"]
        reply = await respond(served, input=[{"role": "user", "content": "hi"}, *output])
        assert reply.status_code == 200


async def test_an_answer_cut_by_its_limit_is_incomplete():
    async with serve() as served:
        served.says("a b c d e f")
        reply = (await respond(served, max_output_tokens=2)).json()
        assert reply["status"] == reply["output"][0]["status"] == "incomplete"
        assert reply["incomplete_details"] == {"reason": "max_output_tokens"}
        assert reply["usage"]["output_tokens"] == 2


async def test_a_stream_tells_of_everything_in_order_and_adds_up_to_the_whole():
    async with serve() as served:
        served.says("hello 你好")
        whole = (await respond(served)).json()
        events = named_events((await respond(served, stream=True)).text)
        names = [name for name, _ in events]
        assert names[:4] == [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            "response.content_part.added",
        ]
        assert names[-4:] == [
            "response.output_text.done",
            "response.content_part.done",
            "response.output_item.done",
            "response.completed",
        ]
        assert set(names[4:-4]) == {"response.output_text.delta"}
        assert all(name == event["type"] for name, event in events)
        assert [event["sequence_number"] for _, event in events] == list(range(len(events)))
        assert "".join(event.get("delta", "") for _, event in events) == "hello 你好"
        final = events[-1][1]["response"]
        assert final["output"][0]["content"] == whole["output"][0]["content"]
        assert final["usage"] == whole["usage"]


@pytest.mark.parametrize(
    "asked",
    [
        {"type": "text"},
        {"type": "json_object"},
        {
            "type": "json_schema",
            "name": "n",
            "description": "Some.",
            "schema": {"type": "object", "default": {"logprobs": []}},
            "strict": True,
        },
    ],
    ids=lambda asked: asked["type"],
)
async def test_the_form_that_was_asked_for_stands_in_the_response(asked: dict[str, Any]) -> None:
    fields: dict[str, Any] = {
        "text": {"format": asked},
        "include": ["message.output_text.logprobs"],
    }
    async with serve() as served:
        served.says("{}")
        whole = (await respond(served, **fields)).json()
        OpenaiResponse.model_validate(whole, strict=True)
        assert whole["text"] == {"format": asked}
        assert whole["output"][0]["content"][0]["logprobs"]
        events = named_events((await respond(served, **fields, stream=True)).text)
        told = [event["response"]["text"] for _, event in events if "response" in event]
        assert told == [{"format": asked}] * 3


@pytest.mark.parametrize("fields", [{}, {"text": None}, {"text": {}}, {"text": {"format": None}}])
async def test_without_a_form_the_response_says_that_it_is_text(fields: dict[str, Any]) -> None:
    async with serve() as served:
        served.says("x")
        assert (await respond(served, **fields)).json()["text"] == {"format": {"type": "text"}}


async def test_logprobs_come_when_they_are_to_be_included():
    async with serve() as served:
        served.says("hi")
        asked = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
        (text,) = (await respond(served, **asked)).json()["output"][0]["content"]
        assert [len(entry["top_logprobs"]) for entry in text["logprobs"]] == [2] * len(
            text["logprobs"]
        )
        events = named_events((await respond(served, **asked, stream=True)).text)
        streamed = [
            e for name, event in events if name.endswith("delta") for e in event["logprobs"]
        ]
        assert streamed == text["logprobs"]
        assert (await respond(served)).json()["output"][0]["content"][0]["logprobs"] == []


async def test_a_fault_in_mid_stream_is_the_streams_last_event():
    async with serve() as served:
        served.says("hello world")
        served.generator.fault = WorkerLostError("decode-0 was lost.")
        served.generator.fault_after = 2
        name, event = named_events((await respond(served, stream=True)).text)[-1]
        assert (name, event["type"], event["code"]) == ("error", "error", "worker_lost")


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"input": None}, "invalid_request", "input"),
        ({"input": []}, "invalid_request", "input"),
        ({"input": ""}, "invalid_request", "input"),
        ({"input": [{"role": "robot", "content": "x"}]}, "invalid_request", "input"),
        ({"input": [{"type": "function_call_output"}]}, "invalid_request", "input"),
        ({"input": [{"type": "web_search_call"}]}, "unsupported_parameter", "input"),
        ({"input": [{"type": 5}]}, "invalid_request", "input"),
        ({"input": [5]}, "invalid_request", "input"),
        ({"previous_response_id": "resp_1"}, "unsupported_parameter", "previous_response_id"),
        ({"conversation": "c"}, "unsupported_parameter", "conversation"),
        ({"prompt": {"id": "p"}}, "unsupported_parameter", "prompt"),
        ({"background": True}, "unsupported_parameter", "background"),
        ({"tools": [{"type": "web_search"}]}, "unsupported_parameter", "tools"),
        ({"tools": [{"type": "function"}], "tool_choice": "none"}, "invalid_request", "tools"),
        ({"tool_choice": "required"}, "invalid_request", "tool_choice"),
        (
            {"text": {"format": {"type": "json_schema", "name": "n", "schema": {"not": {}}}}},
            "unsupported_parameter",
            "text",
        ),
        ({"text": {"format": {"type": "json_schema"}}}, "invalid_request", "text"),
        ({"top_logprobs": 21}, "invalid_request", "top_logprobs"),
        ({"max_output_tokens": 512}, "context_length_exceeded", "max_output_tokens"),
        ({"input": "x y " * 600}, "context_length_exceeded", "input"),
        ({"temperature": 3}, "invalid_request", "temperature"),
    ],
)
async def test_what_cannot_be_answered_is_refused_by_its_name(fields, code, param):
    async with serve() as served:
        reply = await respond(served, **fields)
        error = ErrorReply.model_validate_json(reply.content, strict=True).error
        assert (reply.status_code, error.code, error.param) == (400, code, param)
        assert served.generator.requests == []


async def test_what_changes_no_answer_is_taken():
    async with serve() as served:
        served.says("x")
        reply = await respond(
            served,
            store=True,
            metadata={"a": "b"},
            parallel_tool_calls=False,
            tools=[{"type": "function", "name": "f"}, {"type": "web_search"}],
            tool_choice="none",
            truncation="auto",
            reasoning={"effort": "low", "summary": "auto"},
            text={"format": {"type": "text"}, "verbosity": "low"},
            background=False,
            user="me",
        )
        assert reply.status_code == 200, reply.text
        told = reply.json()
        assert (told["metadata"], told["store"], told["user"]) == ({"a": "b"}, False, "me")


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/responses/resp_1"),
        ("DELETE", "/v1/responses/resp_1"),
        ("POST", "/v1/responses/resp_1/cancel"),
        ("GET", "/v1/responses/resp_1/input_items"),
        ("GET", "/v1/chat/completions/c"),
        ("POST", "/v1/chat/completions/c"),
        ("DELETE", "/v1/chat/completions/c"),
        ("GET", "/v1/chat/completions/c/messages"),
    ],
)
async def test_nothing_that_was_answered_is_found_again(method: str, path: str):
    async with serve() as served:
        reply = await served.http.request(method, path)
        error = ErrorReply.model_validate_json(reply.content, strict=True).error
        assert (reply.status_code, error.code) == (404, "not_found")


async def test_the_list_of_stored_completions_is_empty():
    async with serve() as served:
        assert (await served.http.get("/v1/chat/completions")).json()["data"] == []


async def test_the_client_of_openai_works_unchanged():
    async with serve() as served, listening(served.app) as url:
        served.says("hello 你好")
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
            whole = await client.responses.create(model=MODEL, input="hi")
            assert whole.output_text == "hello 你好"
            async with client.responses.stream(model=MODEL, input="hi") as stream:
                deltas = [e.delta async for e in stream if e.type == "response.output_text.delta"]
                final = await stream.get_final_response()
            assert "".join(deltas) == final.output_text == "hello 你好"
            with pytest.raises(openai.NotFoundError):
                await client.responses.retrieve(whole.id)
