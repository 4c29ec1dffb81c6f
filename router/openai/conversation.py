"""The messages of a chat completion, and what the model's template sees of them."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, JsonValue, model_validator
from pydantic_core import PydanticCustomError

from router.http.fields import (
    MAX_MESSAGES,
    MAX_PARTS,
    MAX_TEMPLATE_KWARGS,
    REFUSED,
    UNSUPPORTED,
    BodyObject,
    refusal,
)
from router.templates.renderer import Conversation


class TextPart(BodyObject):
    """A piece of a message's content. Other kinds than text are not served."""

    type: Literal["text"]
    text: str


Content = str | Annotated[list[TextPart], Field(max_length=MAX_PARTS, fail_fast=True)]


class Message(BaseModel):
    """One message of a conversation."""

    model_config = ConfigDict(strict=True, extra="allow")

    role: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
    content: Content | None = None
    name: str | None = None
    tool_call_id: str | None = None

    @model_validator(mode="after")
    def _check_content(self) -> Self:
        if self.content is None and self.role != "assistant":
            raise PydanticCustomError(REFUSED, "A message of this role needs content.")
        for name in ("tool_calls", "function_call", "audio", "refusal"):
            if (self.model_extra or {}).get(name):
                raise PydanticCustomError(
                    UNSUPPORTED, "This server does not support {name}.", {"name": name}
                )
        return self

    @property
    def ignored(self) -> list[str]:
        """What it has besides that says something; templates are not given it."""
        return [name for name, value in (self.model_extra or {}).items() if value]

    def for_template(self) -> dict[str, str]:
        """What the chat template sees; parts of the content are joined."""
        content = self.content or ""
        text = content if isinstance(content, str) else "".join(part.text for part in content)
        optional = {"name": self.name, "tool_call_id": self.tool_call_id}
        given = {key: value for key, value in optional.items() if value is not None}
        return {"role": self.role, "content": text} | given


Messages = Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]


def conversation_of(
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool | None,
    continue_last: bool | None,
    arguments: Mapping[str, JsonValue],
    add_special_tokens: bool,
) -> Conversation:
    """The conversation as a body with these fields means it."""
    return Conversation(
        messages=[message.for_template() for message in messages],
        add_generation_prompt=add_generation_prompt is not False,
        continue_last=bool(continue_last),
        arguments=arguments,
        add_special_tokens=add_special_tokens,
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
