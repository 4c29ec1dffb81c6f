"""What the fields of requests are made of: bounds, types that carry them, and the ways in which a field is refused.

Ranges are checked while the body is parsed, by name. Parsing is strict (a bool is no number, a number no string, NaN is
nothing). Fields that are known and would change the answer, but are not served, are refused by name with the code
`unsupported_parameter` (`router.http.known_fields`); those that nobody knows are answered, and named to the client.
"""

from typing import Annotated, Any, ClassVar, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, JsonValue, model_validator
from pydantic_core import PydanticCustomError

from router.http.known_fields import Api, is_idle, refusal_of

MAX_CHOICES = 128
MAX_MESSAGES = 4096
MAX_PARTS = 1024
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 512
MAX_LOGIT_BIAS = 1024
MAX_LOGPROBS = 20
MAX_STREAM_INTERVAL = 256
"""Tokens of one chunk, which is written in one go, with the log-probabilities of all."""
MAX_STOP_TOKEN_IDS = 1024
MAX_ALLOWED_TOKEN_IDS = 8192
"""Each costs something in every step of the engine."""
MAX_BAD_WORDS = 64
MAX_BAD_WORD_TOKENS = 1024
"""Of all bad words together, each once without and once with a space before it; as many as vLLM takes."""
MAX_PROMPT_TOKENS = 2**21
"""Ends the parsing of absurd prompts early; the model's own limit is checked after it."""
MAX_PROMPT_LOGPROBS = 2**17
"""Figures about one request's prompts: each token's, and those of the likeliest in its place."""
MAX_BEAM_FIGURES = 2**14
"""Tokens and figures about them of all texts that one beam search finds: told in one message,
which takes the router 25 ms to read.
"""
MAX_REPEATED = 2**21
"""Of prompts that are said again with each of several choices: their tokens, and figures about them, over all choices.
"""
MAX_ARGUMENTS_LENGTH = 262_144
"""Of the calls in a conversation, in all: they are parsed on the event loop, in some 25 ms."""
MAX_TOOLS = 128
MAX_NAME_LENGTH = 1024
MAX_METADATA = 16
MAX_TEMPLATE_KWARGS = 64
MAX_FIELDS = 256
"""Members of a body itself, unknown ones included."""
MAX_CONTAINERS = 65_536
"""Arrays and objects. Enough for the largest bodies of use: thousands of messages with parts and tools."""
MAX_ELEMENTS = 3_000_000
"""Of all arrays and objects together: a prompt of two million token ids, and room for the rest."""
MAX_VALUES = 131_072
"""Keys and values of one message, and of all that is neither messages nor token ids: enough for 128 tools of a hundred
properties.
"""

LONG_LISTS = {"messages": MAX_MESSAGES, "input": MAX_MESSAGES}
"""Fields with lists that are long in use, and how many elements each may have."""
TOKEN_LISTS = ("prompt", "tokens")
"""Fields with token ids."""

TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Tokens = Annotated[list[TokenId], Field(fail_fast=True)]
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]
BadWords = Annotated[list[StopString], Field(max_length=MAX_BAD_WORDS, fail_fast=True)]
StopStrings = Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS, fail_fast=True)]
TokenCount = Annotated[int, Field(ge=0, lt=2**31)]
Name = Annotated[str, Field(max_length=MAX_NAME_LENGTH)]
JsonObject = dict[str, JsonValue]
Metadata = Annotated[
    dict[
        Annotated[str, Field(max_length=64)],
        Annotated[str, Field(max_length=512)],
    ],
    Field(max_length=MAX_METADATA),
]

REFUSED = "refused"
UNSUPPORTED = "unsupported"
"""Types of the complaints below, as `router.http.errors` reads them."""


class BodyObject(BaseModel):
    """Any object within a body. What it has besides its fields is ignored."""

    model_config = ConfigDict(strict=True)


class Body(BaseModel):
    """Any request body; `router.http.known_fields` says what becomes of its fields."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False, extra="allow")

    api: ClassVar[Api]
    """The endpoint that reads it."""

    @property
    def ignored(self) -> list[str]:
        """The fields that were sent and have no effect."""
        extra = self.model_extra or {}
        given = {name: getattr(self, name) for name in self.model_fields_set - extra.keys()} | extra
        return sorted(name for name, value in given.items() if is_idle(name, value, self.api))

    @model_validator(mode="after")
    def _refuse_unserved(self) -> Self:
        for name, value in (self.model_extra or {}).items():
            if (why := refusal_of(name, value, self.api)) is not None:
                raise unsupported(name, why)
        return self


def refusal(param: str | None, message: str) -> PydanticCustomError:
    """A complaint about field `param` from a check that looks at more than one field; None for the field that holds
    what is checked.
    """
    return PydanticCustomError(REFUSED, "{message}", {"message": message, "param": param})


def unsupported(
    param: str | None, message: str = "This server does not support it."
) -> PydanticCustomError:
    """The same about a field, or a value of it, that is right but not served here."""
    return PydanticCustomError(UNSUPPORTED, "{message}", {"message": message, "param": param})


_OTHER_PARTS = frozenset(
    {
        "audio",
        "container_upload",
        "document",
        "file",
        "image",
        "image_url",
        "input_audio",
        "input_file",
        "input_image",
        "input_video",
        "refusal",
        "search_result",
        "server_tool_use",
        "tool_reference",
        "video",
        "video_url",
        "web_search_tool_result",
    }
)
"""Types of the parts of a content that other servers take."""


def _check_parts(parts: object) -> object:
    kinds = (
        (part.get("type") for part in parts if isinstance(part, dict))
        if isinstance(parts, list)
        else ()
    )
    for kind in kinds:
        if isinstance(kind, str) and kind in _OTHER_PARTS:
            raise unsupported(None, f"Parts of type {kind!r} are not served.")
    return parts


SERVED_PARTS = BeforeValidator(_check_parts)
"""For a content's list of parts: says of images and the like that they are not served, not that they are no text."""


def only(param: str, value: Any, *served: object) -> None:
    """Refuses what is neither null nor one of `served`.

    Raises:
        PydanticCustomError: Unsupported.
    """
    if value is not None and value not in served:
        raise unsupported(param)
