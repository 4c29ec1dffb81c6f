"""The `anthropic` package: tools whole and in streams, results of calls, typed answers, counted tokens."""

import sys
from typing import Any, Literal

import anthropic
from pydantic import BaseModel

ASKED: Any = [{"role": "user", "content": "What is the weather?"}]


class Weather(BaseModel, extra="forbid"):
    """What it is like somewhere."""

    city: Literal["Rome", "Paris"]
    days: Literal[1, 2, 3]  # bounds of numbers are not in the schema that the package sends


if __name__ == "__main__":
    url, model = sys.argv[1:]
    tool: Any = {
        "name": "weather",
        "description": "Of today.",
        "input_schema": Weather.model_json_schema(),
    }
    common: Any = {
        "model": model,
        "messages": ASKED,
        "max_tokens": 600,
    }
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        for choice in (
            {"type": "any", "disable_parallel_tool_use": True},
            {"type": "tool", "name": "weather"},
        ):
            answer = client.messages.create(tools=[tool], tool_choice=choice, **common)
            assert answer.stop_reason == "tool_use"
            (block,) = answer.content
            assert block.type == "tool_use"
            assert Weather.model_validate(block.input)
            with client.messages.stream(tools=[tool], tool_choice=choice, **common) as stream:
                kinds = {event.type for event in stream}
                (streamed,) = stream.get_final_message().content
            assert "input_json" in kinds
            assert streamed.type == "tool_use"
            assert Weather.model_validate(streamed.input)

        result = {"type": "tool_result", "tool_use_id": block.id, "content": "sunny"}
        history: Any = [
            *ASKED,
            {"role": "assistant", "content": answer.content},
            {"role": "user", "content": [result]},
        ]
        went_on = client.messages.create(model=model, messages=history, tools=[tool], max_tokens=4)
        assert went_on.stop_reason in ("max_tokens", "end_turn", "tool_use")

        typed = client.messages.parse(output_format=Weather, **common)
        assert isinstance(typed.parsed_output, Weather)

        counted = client.messages.count_tokens(model=model, messages=ASKED, tools=[tool])
        assert counted.input_tokens > 0
