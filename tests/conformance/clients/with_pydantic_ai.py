"""`pydantic-ai`: typed answers by an output tool and by a JSON schema, and functions whose results are sent back, whole
and in streams; over chats and responses.
"""

import asyncio
import sys
from collections.abc import Sequence
from typing import Literal

from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput, RunContext, ToolOutput
from pydantic_ai.capabilities import PrepareOutputTools
from pydantic_ai.messages import ModelMessage, ToolCallPart, ToolReturnPart
from pydantic_ai.models import Model
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.settings import ModelSettings
from pydantic_ai.tools import Tool, ToolDefinition
from pydantic_ai.usage import UsageLimits

SETTINGS: ModelSettings = {"max_tokens": 600, "parallel_tool_calls": False}


class Weather(BaseModel, extra="forbid"):
    """What it is like somewhere."""

    city: Literal["Rome", "Paris"]
    days: int = Field(ge=0, le=9)


async def ask(model: Model) -> None:
    for output in (ToolOutput(Weather), NativeOutput(Weather)):
        agent = Agent(model, output_type=output, model_settings=SETTINGS)
        found = await agent.run("What is the weather?")
        assert isinstance(found.output, Weather)
        async with agent.run_stream("What is the weather?") as stream:
            assert isinstance(await stream.get_output(), Weather)


async def with_functions(model: Model) -> None:
    """The function is offered until it was called, and the answer from then on:
    a model that draws at random calls each once.
    """
    asked: list[str] = []

    async def unless_called(
        context: RunContext[None], tool: ToolDefinition
    ) -> ToolDefinition | None:
        return None if _called(context.messages) else tool

    async def once_called(
        context: RunContext[None], tools: list[ToolDefinition]
    ) -> list[ToolDefinition]:
        return tools if _called(context.messages) else []

    async def days_ahead(city: Literal["Rome", "Paris"]) -> int:
        """How many days are known of."""
        asked.append(city)
        return 3

    agent = Agent(
        model,
        deps_type=type(None),
        output_type=ToolOutput(Weather),
        model_settings=SETTINGS,
        tools=[Tool(days_ahead, takes_ctx=False, prepare=unless_called)],
        capabilities=[PrepareOutputTools(once_called)],
    )
    limits = UsageLimits(request_limit=2)
    found = await agent.run("What is the weather?", usage_limits=limits)
    assert isinstance(found.output, Weather)
    check(found.all_messages(), asked)
    asked.clear()
    async with agent.run_stream("What is the weather?", usage_limits=limits) as stream:
        assert isinstance(await stream.get_output(), Weather)
    check(stream.all_messages(), asked)


def _called(messages: Sequence[ModelMessage]) -> bool:
    return any(isinstance(part, ToolReturnPart) for message in messages for part in message.parts)


def check(messages: Sequence[ModelMessage], asked: list[str]) -> None:
    """The function was called with what the model wrote, its result sent back, and the answer came after that."""
    parts = [part for message in messages for part in message.parts]
    calls = [part for part in parts if isinstance(part, ToolCallPart)]
    assert [call.tool_name for call in calls] == ["days_ahead", "final_result"]
    assert asked == [calls[0].args_as_dict()["city"]]
    returned = [part for part in parts if isinstance(part, ToolReturnPart)]
    assert (returned[0].tool_call_id, returned[0].content) == (calls[0].tool_call_id, 3)


async def main(url: str, name: str) -> None:
    of_openai = OpenAIProvider(base_url=f"{url}/v1", api_key="none")
    for model in (
        OpenAIChatModel(name, provider=of_openai),
        OpenAIResponsesModel(name, provider=of_openai),
    ):
        await ask(model)
        await with_functions(model)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
