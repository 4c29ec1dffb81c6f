"""What clients may send to /v1/responses. Nothing is stored between two requests: a reference to an earlier one is refused."""

from typing import Annotated, ClassVar, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, JsonValue, model_validator
from pydantic_core import PydanticCustomError

from router.generation.answer_form import AnswerForm
from router.generation.sampling import SamplingBody
from router.http.fields import (
    MAX_MESSAGES,
    MAX_PARTS,
    MAX_TOOLS,
    UNSUPPORTED,
    BodyObject,
    JsonObject,
    Name,
    TokenCount,
    only,
    refusal,
    unsupported,
)
from router.http.known_fields import Api
from router.openai.conversation import TemplateArguments, check_template_arguments
from router.openai.requests import Logprobs, check_moderation
from router.openai.tools import ANY_OBJECT, FunctionName, JsonObjectFormat, PlainText
from router.templates.renderer import ChatMessage, Conversation

LOGPROBS = "message.output_text.logprobs"
"""The entry of `include` that asks for log-probabilities."""


class InputText(BodyObject):
    """A piece of a message. Other kinds than text are not served."""

    type: Literal["input_text", "output_text", "text"]
    text: str


class InputMessage(BodyObject):
    """One message of a conversation. An earlier answer can be put in as it came."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[InputText], Field(max_length=MAX_PARTS, fail_fast=True)]

    def for_template(self) -> ChatMessage:
        """What the chat template sees; parts of the content are joined."""
        parts = [self.content] if isinstance(self.content, str) else [p.text for p in self.content]
        return {"role": self.role, "content": "".join(parts)}


InputItems = Annotated[
    list[InputMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
]


def _check_kinds(items: JsonValue) -> JsonValue:
    """Items that are no messages are right, and not served: says that, and not that they are no messages."""
    for item in items if isinstance(items, list) else ():
        kind = item.get("type", "message") if isinstance(item, dict) else "message"
        if kind != "message" and isinstance(kind, str):
            context = {"param": "input", "kind": kind[:40]}
            raise PydanticCustomError(UNSUPPORTED, "Items of type {kind} are not served.", context)
    return items


class FunctionTool(BodyObject):
    """A function that the model may call."""

    type: Literal["function"]
    name: FunctionName
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


def _hosted(kind: str) -> str:
    if kind == "function":
        raise ValueError("A function needs a name.")
    return kind


class HostedTool(BodyObject):
    """Any other tool: one that the server would have to run."""

    type: Annotated[
        str,
        Field(pattern=r"^[a-z0-9_]{1,64}$", json_schema_extra={"not": {"const": "function"}}),
        AfterValidator(_hosted),
    ]


class ChosenTool(BodyObject):
    """The one tool that the model is to call."""

    type: Name


class SchemaFormat(BodyObject):
    """An answer that follows a JSON schema."""

    type: Literal["json_schema"]
    name: FunctionName
    schema_: JsonObject = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None


class TextSettings(BodyObject):
    """The form of the answer, and how wordy it is to be."""

    format: (
        Annotated[PlainText | JsonObjectFormat | SchemaFormat, Field(discriminator="type")] | None
    ) = None
    verbosity: Literal["low", "medium", "high"] | None = None


class Reasoning(BodyObject):
    """How much the model is to think. Only the effort reaches it, through its template; there are no summaries."""

    effort: Name | None = None
    mode: Name | None = None


class ResponsesRequest(SamplingBody):
    """POST /v1/responses."""

    api: ClassVar[Api] = Api.RESPONSES

    input: Annotated[
        Annotated[str, Field(min_length=1)] | InputItems, BeforeValidator(_check_kinds)
    ]
    instructions: str | None = None
    max_output_tokens: TokenCount | None = None
    include: list[Name] | None = Field(None, max_length=64)
    top_logprobs: Logprobs | None = None
    text: TextSettings | None = None
    reasoning: Reasoning | None = None
    tools: list[FunctionTool | HostedTool] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | None = None
    chat_template_kwargs: TemplateArguments | None = None
    moderation: JsonObject | None = None
    parallel_tool_calls: bool | None = None
    # What follows does not change the answer of this server.
    max_tool_calls: int | None = None
    store: bool | None = None
    stream_options: JsonObject | None = None
    truncation: Literal["auto", "disabled"] | None = None
    safety_identifier: Name | None = None
    prompt_cache_key: Name | None = None
    prompt_cache_options: JsonObject | None = None
    prompt_cache_retention: Name | None = None

    @property
    def prompt_field(self) -> str:
        """The field that holds what the model continues."""
        return "input"

    @property
    def asked_tokens(self) -> int | None:
        """How many tokens are generated at most, if that is said."""
        return self.max_output_tokens

    @property
    def asked_tokens_field(self) -> str:
        """The field that says it."""
        return "max_output_tokens"

    @property
    def num_logprobs(self) -> int | None:
        """How many likeliest tokens are listed beside each; None for no log-probabilities at all."""
        return (self.top_logprobs or 0) if LOGPROBS in (self.include or ()) else None

    @property
    def form_asked(self) -> AnswerForm | None:
        """The form of `text`."""
        match None if self.text is None else self.text.format:
            case JsonObjectFormat():
                return AnswerForm(kind="json", value=ANY_OBJECT, param="text")
            case SchemaFormat() as form:
                return AnswerForm(kind="json", value=form.schema_, param="text")
            case _:
                return None

    def as_conversation(self) -> Conversation:
        """The conversation."""
        effort = None if self.reasoning is None else self.reasoning.effort
        given = {} if effort is None else {"reasoning_effort": effort}
        arguments = given | (self.chat_template_kwargs or {})
        return Conversation(messages=self._messages(), arguments=arguments, param="input")

    def _messages(self) -> list[ChatMessage]:
        """What was said, instructions first."""
        begun = [] if self.instructions is None else [("system", self.instructions)]
        if isinstance(self.input, str):
            begun.append(("user", self.input))
        said = [] if isinstance(self.input, str) else [item.for_template() for item in self.input]
        return [*({"role": role, "content": text} for role, text in begun), *said]

    @model_validator(mode="after")
    def _check_response(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise refusal("stream_options", "Only allowed together with stream.")
        if self.reasoning is not None:
            only("reasoning", self.reasoning.mode, "standard")
        self._check_tools()
        check_template_arguments(self.chat_template_kwargs)
        check_moderation(self.moderation)
        return self

    def _check_tools(self) -> None:
        if self.tools and self.tool_choice != "none":
            raise unsupported("tools", "Calling tools is not served yet; tool_choice none is.")
        if not self.tools and self.tool_choice not in (None, "none", "auto"):
            raise refusal("tool_choice", "Needs tools.")
