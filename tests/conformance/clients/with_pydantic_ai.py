"""`pydantic-ai`: typed answers by an output tool and by a JSON schema, whole and in streams; over chats and responses."""

import asyncio
import sys
from typing import Literal

from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models import Model
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider


class Weather(BaseModel, extra="forbid"):
    """What it is like somewhere."""

    city: Literal["Rome", "Paris"]
    days: int = Field(ge=0, le=9)


async def ask(model: Model) -> None:
    for output in (ToolOutput(Weather), NativeOutput(Weather)):
        agent = Agent(
            model,
            output_type=output,
            model_settings={"max_tokens": 600, "parallel_tool_calls": False},
        )
        found = await agent.run("What is the weather?")
        assert isinstance(found.output, Weather)
        async with agent.run_stream("What is the weather?") as stream:
            assert isinstance(await stream.get_output(), Weather)


async def main(url: str, name: str) -> None:
    of_openai = OpenAIProvider(base_url=f"{url}/v1", api_key="none")
    await ask(OpenAIChatModel(name, provider=of_openai))
    await ask(OpenAIResponsesModel(name, provider=of_openai))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
