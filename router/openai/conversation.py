"""The messages of a chat completion, and what the model's template sees of them."""

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal, Protocol, Self

from pydantic import BaseModel, ConfigDict, Field, JsonValue, model_validator
from pydantic_core import PydanticCustomError, from_json

from baton.errors import InvalidRequestError
from router.http.fields import (
    MAX_ARGUMENTS_LENGTH,
    MAX_MESSAGES,
    MAX_PARTS,
    MAX_TEMPLATE_KWARGS,
    MAX_TOOLS,
    REFUSED,
    SERVED_PARTS,
    UNSUPPORTED,
    BodyObject,
    JsonObject,
    refusal,
)
from router.parsing.reading import TOOL_NAME
from router.templates.renderer import Conversation


class TextPart(BodyObject):
    """A piece of a message's content. Other kinds than text are not served."""

    type: Literal["text"]
    text: str


Content = str | Annotated[list[TextPart], Field(max_length=MAX_PARTS, fail_fast=True), SERVED_PARTS]


CallId = Annotated[str, Field(min_length=1, max_length=256)]
Arguments = Annotated[str, Field(max_length=MAX_ARGUMENTS_LENGTH)]
CalledName = Annotated[str, Field(pattern=f"^{TOOL_NAME.pattern}$")]
"""The name in an earlier call: whatever a model may write, also of no tool that there is."""


def whole_arguments(text: str) -> JsonObject:
    """The object that a call's arguments are. Of a call that broke off, what is there; what stands behind an object is
    left out. Arguments that a model begins of its own accord may be no JSON, or what no reply can hold: then nothing.
    """
    try:
        found = from_json(text or "{}", allow_partial=True, allow_inf_nan=False)
        json.dumps(found, allow_nan=False)  # 1e999 was read as infinite
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


class EarlierFunction(BodyObject):
    """What an earlier answer called. `arguments` are as they were answered: the JSON of an object, or what a model
    began as one.
    """

    name: CalledName
    arguments: Arguments

    def parsed(self, param: str) -> JsonValue:
        """The object; `param` is the body's field that it came in.

        Raises:
            InvalidRequestError: No answer has such arguments.
        """
        if self.arguments and not self.arguments.lstrip().startswith("{"):
            raise InvalidRequestError(
                f"{param}: the arguments of a call of {self.name} are not the JSON of an object.",
                param=param,
            )
        return whole_arguments(self.arguments)


class ToolCall(BodyObject):
    """A call in an earlier answer."""

    id: CallId
    type: Literal["function"] = "function"
    function: EarlierFunction

    def for_template(self, param: str = "messages") -> dict[str, JsonValue]:
        """Templates write arguments themselves: they are given the object.

        Raises:
            InvalidRequestError: There is none, in the body's field `param`.
        """
        function = {"name": self.function.name, "arguments": self.function.parsed(param)}
        return {"id": self.id, "type": "function", "function": function}


class Message(BaseModel):
    """One message of a conversation."""

    model_config = ConfigDict(strict=True, extra="allow")

    role: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
    content: Content | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None

    @model_validator(mode="after")
    def _check_content(self) -> Self:
        if self.content is None and self.role != "assistant":
            raise PydanticCustomError(REFUSED, "A message of this role needs content.")
        if self.tool_calls and self.role != "assistant":
            raise refusal("tool_calls", "Only messages of the assistant have calls.")
        for name in ("function_call", "audio", "refusal"):
            if (self.model_extra or {}).get(name):
                raise PydanticCustomError(
                    UNSUPPORTED, "This server does not support {name}.", {"name": name}
                )
        return self

    @property
    def calls(self) -> list[str]:
        """Ids of the calls in it."""
        return [call.id for call in self.tool_calls or ()]

    @property
    def results(self) -> list[str]:
        """Ids of the calls whose results it has."""
        given = self.tool_call_id
        return [given] if self.role == "tool" and given is not None else []

    @property
    def arguments_length(self) -> int:
        """Characters of JSON in its calls."""
        return sum(len(call.function.arguments) for call in self.tool_calls or ())

    @property
    def ignored(self) -> list[str]:
        """What it has besides that says something; templates are not given it."""
        return [name for name, value in (self.model_extra or {}).items() if value]

    @property
    def text(self) -> str:
        """The content, its parts joined."""
        content = self.content or ""
        return content if isinstance(content, str) else "".join(part.text for part in content)

    def for_template(self) -> dict[str, JsonValue]:
        """What the chat template sees."""
        answer = assistant_message(
            self.text,
            [call.for_template() for call in self.tool_calls or ()],
            self.reasoning_content or self.reasoning or "",
        )
        named = {"name": self.name, "tool_call_id": self.tool_call_id}
        given = {key: value for key, value in named.items() if value is not None}
        return {**answer, "role": self.role, **given}


def assistant_message(
    content: str, calls: Sequence[dict[str, JsonValue]], reasoning: str
) -> dict[str, JsonValue]:
    """What the chat template sees of an earlier answer."""
    optional: dict[str, JsonValue] = {
        "tool_calls": list(calls),
        "reasoning_content": reasoning,
        # gpt-oss's name for it; its template refuses a message with calls that has both.
        "thinking": "" if calls and content else reasoning,
    }
    given = {key: value for key, value in optional.items() if value}
    return {"role": "assistant", "content": content, **given}


Messages = Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]


def conversation_of(
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool | None,
    continue_last: bool | None,
    arguments: Mapping[str, JsonValue],
    add_special_tokens: bool,
    tools: Sequence[Mapping[str, JsonValue]] | None = None,
) -> Conversation:
    """The conversation as a body with these fields means it.

    Raises:
        InvalidRequestError: Its calls and their results do not fit together, or are too long.
    """
    check_calls(messages, param="messages", id_field="tool_call_id")
    if continue_last and messages[-1].tool_calls:
        raise InvalidRequestError(
            "continue_final_message: not where the last message has calls.",
            param="continue_final_message",
        )
    return Conversation(
        messages=[message.for_template() for message in messages],
        add_generation_prompt=add_generation_prompt is not False,
        continue_last=bool(continue_last),
        tools=tools,
        arguments=arguments,
        add_special_tokens=add_special_tokens,
    )


class HistoryItem(Protocol):
    """A message, or what stands for one, in the words of any API."""

    @property
    def calls(self) -> Sequence[str]:
        """Ids of the calls in it."""

    @property
    def results(self) -> Sequence[str]:
        """Ids of the calls whose results it has."""

    @property
    def arguments_length(self) -> int:
        """Characters of JSON in its calls that are still to be parsed."""


def check_calls(items: Sequence[HistoryItem], *, param: str, id_field: str) -> None:
    """Refuses calls that are too long together, and results of calls that nobody made.

    Args:
        items: What was said, in order.
        param: The body's field that they came in.
        id_field: The field of an item that names a call.

    Raises:
        InvalidRequestError: There is one; says which item.
    """
    called: set[str] = set()
    length = 0
    for place, item in enumerate(items):
        called.update(item.calls)
        length += item.arguments_length
        unknown = next((found for found in item.results if found not in called), None)
        if unknown is not None:
            raise InvalidRequestError(
                f"{param}.{place}.{id_field}: nothing before it has a call {unknown[:100]!r}.",
                param=param,
            )
    if length > MAX_ARGUMENTS_LENGTH:
        raise InvalidRequestError(
            f"{param}: the arguments of all calls have {length} characters, at most {MAX_ARGUMENTS_LENGTH} are taken.",
            param=param,
        )


TemplateArguments = Annotated[dict[str, JsonValue], Field(max_length=MAX_TEMPLATE_KWARGS)]

_TEMPLATES_OWN = frozenset(
    {
        *("conversation", "messages", "tools", "documents", "chat_template", "tokenize"),
        *("add_generation_prompt", "continue_final_message", "padding", "truncation"),
        *(
            "max_length",
            "return_tensors",
            "sanitize_control_tokens",
            "return_dict",
            "return_assistant_tokens_mask",
        ),
        *("tokenizer_kwargs", "bos_token", "eos_token", "raise_exception", "strftime_now"),
    }
)
"""Names that rendering itself gives to a template; a client cannot choose them."""


def check_template_arguments(arguments: TemplateArguments | None) -> None:
    """Refuses arguments that are not a client's to give.

    Raises:
        PydanticCustomError: There is one.
    """
    for name in arguments or ():
        if name in _TEMPLATES_OWN or not name.isidentifier():
            raise refusal("chat_template_kwargs", f"{name[:40]!r} cannot be given to a template.")
