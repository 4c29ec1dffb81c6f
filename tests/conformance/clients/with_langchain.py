"""`langchain-openai`: `bind_tools` and `with_structured_output`, whole and in streams, and the results of calls;
over chats and responses.
"""

import sys
from typing import Any, Literal

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field


class Weather(BaseModel, extra="forbid"):
    """What it is like somewhere."""

    city: Literal["Rome", "Paris"]
    days: int = Field(ge=0, le=9)


def ask(chat: ChatOpenAI) -> None:
    asked: Any = [HumanMessage("What is the weather?")]
    for choice in ("any", "Weather"):
        bound = chat.bind_tools([Weather], tool_choice=choice, parallel_tool_calls=False)
        answer = bound.invoke(asked)
        assert [call["name"] for call in answer.tool_calls] == ["Weather"]
        assert Weather.model_validate(answer.tool_calls[0]["args"])
        whole: Any = None
        for chunk in bound.stream(asked):
            whole = chunk if whole is None else whole + chunk
        assert Weather.model_validate(whole.tool_calls[0]["args"])
    results = [ToolMessage("sunny", tool_call_id=call["id"]) for call in answer.tool_calls]
    assert chat.bind_tools([Weather]).invoke([*asked, answer, *results], max_tokens=4) is not None
    for method in ("json_schema", "function_calling"):
        found = chat.with_structured_output(Weather, method=method).invoke(asked)
        assert isinstance(found, Weather), method


if __name__ == "__main__":
    url, model = sys.argv[1:]
    common: Any = {
        "base_url": f"{url}/v1",
        "api_key": "none",
        "model": model,
        "max_tokens": 600,
    }
    ask(ChatOpenAI(**common))
    ask(ChatOpenAI(**common, use_responses_api=True))
