"""The `openai` package: typed answers, calls of tools and streams of both, as chats and as responses."""

import sys
from typing import Any, Literal

import openai
from pydantic import BaseModel, Field

ASKED: Any = [{"role": "user", "content": "What is the weather?"}]


class Weather(BaseModel, extra="forbid"):
    """What it is like somewhere."""

    city: Literal["Rome", "Paris"]
    days: int = Field(ge=0, le=9)


def chats(client: openai.OpenAI, model: str) -> None:
    common: Any = {"model": model, "messages": ASKED, "max_tokens": 600}
    tool = openai.pydantic_function_tool(Weather, name="weather")
    typed = client.chat.completions.parse(response_format=Weather, **common)
    assert isinstance(typed.choices[0].message.parsed, Weather)

    answer = client.chat.completions.parse(
        tools=[tool], tool_choice="required", parallel_tool_calls=False, **common
    )
    assert answer.choices[0].finish_reason == "tool_calls"
    calls = answer.choices[0].message.tool_calls or []
    assert isinstance(calls[0].function.parsed_arguments, Weather)

    named: Any = {"type": "function", "function": {"name": "weather"}}
    with client.chat.completions.stream(tools=[tool], tool_choice=named, **common) as stream:
        kinds = {event.type for event in stream}
        (call,) = stream.get_final_completion().choices[0].message.tool_calls or []
    assert {"tool_calls.function.arguments.delta", "tool_calls.function.arguments.done"} <= kinds
    assert isinstance(call.function.parsed_arguments, Weather)

    with client.chat.completions.stream(response_format=Weather, **common) as stream:
        assert any(event.type == "content.delta" for event in stream)
        final = stream.get_final_completion().choices[0].message
    assert isinstance(final.parsed, Weather)

    message = answer.choices[0].message.model_dump(exclude_none=True)
    results = [{"role": "tool", "tool_call_id": c.id, "content": "sunny"} for c in calls]
    history: Any = [*ASKED, message, *results]
    went_on = client.chat.completions.create(
        model=model, messages=history, tools=[tool], max_tokens=4
    )
    assert went_on.choices[0].finish_reason in ("length", "stop", "tool_calls")


def responses(client: openai.OpenAI, model: str) -> None:
    common: Any = {"model": model, "input": ASKED, "max_output_tokens": 600}
    parameters = openai.pydantic_function_tool(Weather)["function"]["parameters"]
    tool: Any = {
        "type": "function", "name": "weather", "parameters": parameters, "strict": True
    }  # fmt: skip
    typed = client.responses.parse(text_format=Weather, **common)
    assert isinstance(typed.output_parsed, Weather)
    assert typed.text is not None
    assert typed.text.format is not None
    assert typed.text.format.type == "json_schema"

    with client.responses.stream(text_format=Weather, **common) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert isinstance(final.output_parsed, Weather)
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == final.output_text
    (done,) = [event for event in events if event.type == "response.output_text.done"]
    assert done.parsed == final.output_parsed
    assert [events[0].type, events[-1].type] == ["response.created", "response.completed"]

    answer = client.responses.create(
        tools=[tool], tool_choice="required", parallel_tool_calls=False, **common
    )
    calls = [item for item in answer.output if item.type == "function_call"]
    assert all(Weather.model_validate_json(call.arguments) for call in calls)

    choice: Any = {"type": "function", "name": "weather"}
    with client.responses.stream(tools=[tool], tool_choice=choice, **common) as stream:
        kinds = {event.type for event in stream}
        (item,) = stream.get_final_response().output
    assert "response.function_call_arguments.done" in kinds
    assert item.type == "function_call"
    assert Weather.model_validate_json(item.arguments)

    results = [
        {"type": "function_call_output", "call_id": c.call_id, "output": "sunny"} for c in calls
    ]
    history: Any = [*ASKED, *answer.model_dump(exclude_none=True)["output"], *results]
    went_on = client.responses.create(model=model, input=history, tools=[tool], max_output_tokens=4)
    assert went_on.status in ("completed", "incomplete")


if __name__ == "__main__":
    url, model = sys.argv[1:]
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        chats(client, model)
        responses(client, model)
