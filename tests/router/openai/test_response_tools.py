"""Calls of functions and reasoning in responses: what is asked, what the template sees, what is answered."""

import json
from typing import Any

import openai
import pytest
from openai.types.responses import Response as OpenaiResponse
from pydantic import BaseModel, TypeAdapter

from router.http.errors import ErrorReply
from router.openai.responses.replies import ResponseStreamEvent
from tests.router.openai.test_responses import named_events, respond
from tests.router.openai.test_tools import TEMPLATE, TWO, call
from tests.router.served import MODEL, listening, serve

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "name": "weather", "description": "Of today.", "parameters": CITY}
NOW = {
    "type": "function",
    "name": "now",
    "parameters": {"type": "object", "default": {"logprobs": []}},
}
THINKS = {"chat_template_kwargs": {"thinks": True}}
LOGPROBS = {"include": ["message.output_text.logprobs"], "top_logprobs": 1}
EVENT: TypeAdapter[ResponseStreamEvent] = TypeAdapter(ResponseStreamEvent)


def said(output: list[Any]) -> list[tuple[Any, ...]]:
    """What items say, without their ids."""
    found: list[tuple[Any, ...]] = []
    for item in output:
        match item["type"]:
            case "function_call":
                found.append(("call", item["name"], json.loads(item["arguments"]), item["status"]))
            case kind:
                text = "".join(part["text"] for part in item["content"])
                found.append((kind, text, item["status"]))
    return found


def logged(output: list[Any]) -> list[Any]:
    """The log-probabilities of all messages."""
    messages = [item for item in output if item["type"] == "message"]
    return [entry for item in messages for part in item["content"] for entry in part["logprobs"]]


def check_stream(events: list[tuple[str, Any]]) -> dict[str, Any]:
    """The events are numbered, items begin and end one after the other and add up to those of the response,
    which is returned.
    """
    texts: list[str] = []
    done: list[Any] = []
    for number, (name, event) in enumerate(events):
        EVENT.validate_python(event, strict=True)
        assert (name, number) == (event["type"], event["sequence_number"])
        match name.removeprefix("response."):
            case "output_item.added":
                assert event["output_index"] == len(texts) == len(done)
                texts.append("")
            case "output_item.done":
                done.append(event["item"])
            case "output_text.delta" | "reasoning_text.delta" | "function_call_arguments.delta":
                assert event["output_index"] == len(texts) - 1 == len(done)
                texts[-1] += event["delta"]
            case "output_text.done" | "reasoning_text.done":
                assert event["text"] == texts[-1]
            case "function_call_arguments.done":
                assert event["arguments"] == texts[-1]
    response: dict[str, Any] = events[-1][1]["response"]
    assert response["output"] == done
    assert len(texts) == len(done)
    return response


async def test_calls_are_answered_as_items_whole_and_in_a_stream() -> None:
    asked: dict[str, Any] = {"tools": [WEATHER, NOW], **LOGPROBS}
    async with serve(chat_template=TEMPLATE) as served:
        served.says(TWO)
        whole = (await respond(served, **asked)).json()
        OpenaiResponse.model_validate(whole, strict=True)
        assert said(whole["output"]) == [
            ("message", "I look.", "completed"),
            ("call", "weather", {"city": "Paris"}, "completed"),
            ("call", "now", {}, "completed"),
        ]
        ids = {i[key] for i in whole["output"] for key in ("id", "call_id") if key in i}
        assert len(ids) == 5
        assert whole["tools"][1]["parameters"] == NOW["parameters"]
        assert whole["output"][0]["content"][0]["logprobs"]
        events = named_events((await respond(served, stream=True, **asked)).text)
        streamed = check_stream(events)
        assert said(streamed["output"]) == said(whole["output"])
        told = [
            e for name, event in events if name.endswith("text.delta") for e in event["logprobs"]
        ]
        assert told == streamed["output"][0]["content"][0]["logprobs"]
        assert streamed["usage"] == whole["usage"]


async def test_reasoning_is_an_item_of_its_own_and_counted() -> None:
    async with serve(chat_template=TEMPLATE) as served:
        served.says("let me see</think>Well." + call("now"))
        asked = {"tools": [NOW], **THINKS}
        whole = (await respond(served, **asked)).json()
        OpenaiResponse.model_validate(whole, strict=True)
        assert said(whole["output"]) == [
            ("reasoning", "let me see", "completed"),
            ("message", "Well.", "completed"),
            ("call", "now", {}, "completed"),
        ]
        streamed = check_stream(named_events((await respond(served, stream=True, **asked)).text))
        assert said(streamed["output"]) == said(whole["output"])
        hidden = (await respond(served, include_reasoning=False, **asked)).json()
        assert said(hidden["output"]) == said(whole["output"])[1:]


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ("let me see</think>Yes.", THINKS),
        ("let me see</think>Yes.", {**THINKS, "include_reasoning": False}),
        (" \n Yes, 你好. \n", {}),
        ("I look. \n" + call("now"), {}),
        (call("now") + "\nI looked.", {}),
        ('Say <tool_call> or <tool_call>{"name": 5}</tool_call>.', {}),
        ("Well <tool_call>.", {"stop": "tool"}),
        ("I look." + call("weather", city="Paris"), {"max_output_tokens": 12}),
        ("one two three " * 6 + call("now"), {"stream_interval": 50}),
    ],
)
async def test_log_probabilities_are_those_of_the_tokens_of_a_message(
    text: str, fields: dict[str, Any]
) -> None:
    asked: dict[str, Any] = {"tools": [WEATHER, NOW], **LOGPROBS, **fields}
    async with serve(chat_template=TEMPLATE) as served:
        served.says(text)
        whole = (await respond(served, **asked)).json()["output"]
        events = named_events((await respond(served, stream=True, **asked)).text)
        streamed = check_stream(events)["output"]
        assert logged(streamed) == logged(whole)
        (message,) = [item for item in whole if item["type"] == "message"]
        spelt = bytes(byte for entry in logged([message]) for byte in entry["bytes"])
        is_cut = message is not whole[-1] or "max_output_tokens" in fields
        end = "" if is_cut else fields.get("stop", "<|end|>")
        assert spelt.decode() == message["content"][0]["text"] + end
        told = [
            e
            for name, event in events
            if name.endswith("text.delta")
            for e in event.get("logprobs", ())
        ]
        assert told == logged(streamed)


async def test_an_answer_that_is_cut_within_a_call_is_incomplete() -> None:
    async with serve(chat_template=TEMPLATE) as served:
        served.says('Hm <tool_call>\n{"name": "weather", "arguments": {"city": "Par')
        limit = len(served.generator.script[0])
        reply = (await respond(served, tools=[WEATHER], max_output_tokens=limit)).json()
        assert reply["status"] == "incomplete"
        assert [item["status"] for item in reply["output"]] == ["completed", "incomplete"]
        assert reply["output"][1]["arguments"] == '{"city": "Par'


async def test_an_answer_that_says_nothing_has_an_empty_message() -> None:
    async with serve(chat_template=TEMPLATE) as served:
        served.says("")
        whole = (await respond(served)).json()
        assert said(whole["output"]) == [("message", "", "completed")]
        streamed = check_stream(named_events((await respond(served, stream=True)).text))
        assert said(streamed["output"]) == said(whole["output"])


async def test_an_earlier_answer_and_results_reach_the_template_as_it_came() -> None:
    async with serve(chat_template=TEMPLATE) as served:
        served.says("hm</think>I look." + call("weather", city="Rome"))
        output = (await respond(served, tools=[WEATHER], **THINKS)).json()["output"]
        result = {
            "type": "function_call_output",
            "call_id": output[-1]["call_id"],
            "output": [{"type": "input_text", "text": "sunny"}],
        }
        history = [{"role": "user", "content": "hi"}, *output, result]
        assert (await respond(served, tools=[WEATHER], input=history)).status_code == 200
        text = await served.tokenizer.decode(served.generator.requests[-1].prompt.prompt_tokens)
        assert '"name": "weather", "description": "Of today."' in text
        assert text.endswith(
            "<|user|>hi<|end|><|assistant|>I look.<tool_call>weather city=Rome</tool_call>[hm]<|end|>"
            "<|tool|>sunny<|end|><|assistant|>"
        )


@pytest.mark.parametrize(
    ("choice", "callable_"),
    [
        ("required", {"weather", "now"}),
        ({"type": "function", "name": "now"}, {"now"}),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "now"}]},
            {"now"},
        ),
    ],
)  # fmt: skip
async def test_required_functions_are_a_grammar(choice: Any, callable_: set[str]) -> None:
    async with serve(chat_template=TEMPLATE) as served:
        served.says(call("now"))
        reply = await respond(served, tools=[WEATHER, NOW], tool_choice=choice)
        grammar = served.generator.requests[-1].prompt.sampling.grammar
        assert {name for name in ("weather", "now") if name in grammar} == callable_
        assert reply.json()["tool_choice"] == choice


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"tools": [NOW, NOW]}, "invalid_request", "tools"),
        ({"tools": [NOW], "tool_choice": {"type": "function", "name": "x"}}, "invalid_request", "tool_choice"),
        ({"tools": [NOW], "tool_choice": {"type": "function"}}, "invalid_request", "tool_choice"),
        ({"tools": [NOW], "tool_choice": {"type": "web_search_preview"}}, "unsupported_parameter", "tool_choice"),
        ({"tools": [NOW], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "x"}]}},
         "invalid_request", "tool_choice"),
        ({"tools": [NOW, {"type": "mcp"}]}, "unsupported_parameter", "tools"),
        ({"tools": [WEATHER | {"strict": True, "parameters": {"not": {}}}]}, "unsupported_parameter", "tools"),
        ({"tools": [NOW], "text": {"format": {"type": "json_object"}}}, "invalid_request", "text"),
        ({"input": [{"type": "function_call_output", "call_id": "a", "output": "x"}]}, "invalid_request", "input"),
        ({"input": [{"type": "function_call", "call_id": "a", "name": "now", "arguments": "[]"}]}, "invalid_request", "input"),
        ({"max_thinking_tokens": -1}, "invalid_request", "max_thinking_tokens"),
    ],
)  # fmt: skip
async def test_what_contradicts_itself_is_refused_by_its_field(
    fields: dict[str, Any], code: str, param: str
) -> None:
    async with serve(chat_template=TEMPLATE) as served:
        reply = await respond(served, **fields)
        error = ErrorReply.model_validate_json(reply.content, strict=True).error
        assert (reply.status_code, error.code, error.param) == (400, code, param)


class Weather(BaseModel):
    city: str


async def test_openais_client_adds_a_stream_of_calls_up() -> None:
    tool = openai.pydantic_function_tool(Weather, name="weather")["function"]
    asked: Any = {"type": "function", "strict": False, "name": "weather"}
    asked["parameters"] = tool["parameters"]
    async with serve(chat_template=TEMPLATE) as served, listening(served.app) as url:
        served.says("hm</think>I look." + call("weather", city="Rome"))
        client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none")
        async with (
            client,
            client.responses.stream(
                model=MODEL, input="hi", tools=[asked], extra_body=THINKS
            ) as stream,
        ):
            kinds = [event.type async for event in stream]
            final = await stream.get_final_response()
        assert "response.function_call_arguments.delta" in kinds
        reasoning, message, called = final.output
        assert (reasoning.type, message.type, called.type) == (
            "reasoning",
            "message",
            "function_call",
        )
        assert called.type == "function_call"
        assert json.loads(called.arguments) == {"city": "Rome"}
        assert final.output_text == "I look."


async def test_openais_client_parses_arguments_and_answers() -> None:
    tool: Any = {"type": "function", "strict": True, "name": "weather", "parameters": CITY}
    async with serve(chat_template=TEMPLATE) as served, listening(served.app) as url:
        client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none")
        async with client:
            served.says(call("weather", city="Rome"))
            called = await client.responses.parse(model=MODEL, input="hi", tools=[tool])
            assert [item.type for item in called.output] == ["function_call"]
            assert called.output[0].parsed_arguments == {"city": "Rome"}  # type: ignore[union-attr]
            served.says('hm</think>{"city": "Rome"}')
            answer = await client.responses.parse(
                model=MODEL, input="hi", text_format=Weather, extra_body=THINKS
            )
            assert answer.output_parsed == Weather(city="Rome")


async def test_openais_client_streams_a_typed_answer() -> None:
    async with serve(chat_template=TEMPLATE) as served, listening(served.app) as url:
        served.says('{"city": "Rome"}')
        client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none")
        async with (
            client,
            client.responses.stream(model=MODEL, input="hi", text_format=Weather) as stream,
        ):
            events = [event async for event in stream]
            final = await stream.get_final_response()
    kinds = [event.type for event in events]
    deltas = [e.delta for e in events if e.type == "response.output_text.delta"]
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * len(deltas),
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert json.loads("".join(deltas)) == {"city": "Rome"}
    (done,) = [event for event in events if event.type == "response.output_text.done"]
    assert done.parsed == final.output_parsed == Weather(city="Rome")
    assert final.text is not None
    assert final.text.format is not None
    assert final.text.format.type == "json_schema"
