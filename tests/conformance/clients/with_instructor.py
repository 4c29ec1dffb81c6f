"""`instructor`: typed answers by tools, by strict tools, by JSON schemas and by asking for JSON; and piece by piece."""

import sys
from typing import Any, Literal

import instructor
import openai
from pydantic import BaseModel, Field

ASKED: Any = [{"role": "user", "content": "What is the weather?"}]
MODES = (instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA)


class Weather(BaseModel, extra="forbid"):
    """What it is like somewhere."""

    city: Literal["Rome", "Paris"]
    days: int = Field(ge=0, le=9)


if __name__ == "__main__":
    url, model = sys.argv[1:]
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as plain:
        for mode in MODES:
            client = instructor.from_openai(plain, mode=mode)
            asked: Any = {"model": model, "messages": ASKED, "max_tokens": 600}
            found = client.chat.completions.create(response_model=Weather, max_retries=0, **asked)
            assert isinstance(found, Weather), mode
            pieces = list(client.chat.completions.create_partial(response_model=Weather, **asked))
            assert pieces[-1].city in ("Rome", "Paris"), mode
