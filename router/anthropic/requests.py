"""What clients may send to /v1/messages: Anthropic's fields, and the few of vLLM's that ask for another way of drawing."""

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from router.generation.answer_form import AnswerForm
from router.generation.sampling import SamplingBody
from router.http.fields import (
    MAX_MESSAGES,
    MAX_PARTS,
    MAX_TOOLS,
    Body,
    BodyObject,
    JsonObject,
    Name,
    StopString,
    StopStrings,
    only,
    refusal,
    unsupported,
)
from router.http.known_fields import Api
from router.openai.conversation import TemplateArguments, check_template_arguments
from router.openai.tools import FunctionName
from router.templates.renderer import ChatMessage, Conversation


class TextBlock(BodyObject):
    """A piece of a message. Other kinds than text are not served."""

    type: Literal["text"]
    text: str


Blocks = Annotated[list[TextBlock], Field(max_length=MAX_PARTS, fail_fast=True)]


class MessageParam(BodyObject):
    """One message of a conversation."""

    role: Literal["user", "assistant"]
    content: str | Blocks

    def for_template(self) -> ChatMessage:
        """What the chat template sees."""
        return {"role": self.role, "content": joined(self.content)}


MessageParams = Annotated[
    list[MessageParam], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
]


class ToolDefinition(BodyObject):
    """A tool that the model may use."""

    name: FunctionName
    description: str | None = None
    input_schema: JsonObject | None = None


class ToolChoiceParam(BodyObject):
    """Whether the model is to use a tool."""

    type: Literal["none", "auto", "any", "tool"]
    name: str | None = None


class Thinking(BodyObject):
    """Whether the model is to think aloud first."""

    type: Literal["disabled", "enabled", "adaptive"]


class OutputSchema(BodyObject):
    """An answer that follows a JSON schema."""

    type: Literal["json_schema"]
    schema_: JsonObject = Field(alias="schema")


class OutputConfig(BodyObject):
    """How much effort an answer is worth, and the form that it is to have."""

    effort: Name | None = None
    format: OutputSchema | None = None


class RequestMetadata(BodyObject):
    """The end user on whose behalf the client asks."""

    user_id: Name | None = None


def joined(content: str | list[TextBlock]) -> str:
    """The text of a content."""
    return content if isinstance(content, str) else "".join(block.text for block in content)


class ConversationBody(BodyObject):
    """What both endpoints read."""

    messages: MessageParams
    system: str | Blocks | None = None
    tools: list[ToolDefinition] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: ToolChoiceParam | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: TemplateArguments | None = None
    # What follows does not change the answer of this server.
    cache_control: JsonObject | None = None

    def as_conversation(self) -> Conversation:
        """The conversation, the system's word first. A last message of the assistant is the beginning of its answer."""
        system = [] if self.system is None else [{"role": "system", "content": joined(self.system)}]
        return Conversation(
            messages=[*system, *(message.for_template() for message in self.messages)],
            continue_last=self.messages[-1].role == "assistant",
            arguments=self.chat_template_kwargs or {},
        )

    @model_validator(mode="after")
    def _check_conversation(self) -> Self:
        if self.tools and (self.tool_choice is None or self.tool_choice.type != "none"):
            raise unsupported("tools", "Using tools is not served yet; tool_choice none is.")
        if not self.tools and self.tool_choice and self.tool_choice.type in ("any", "tool"):
            raise refusal("tool_choice", "Needs tools.")
        if self.thinking is not None:
            only("thinking", self.thinking.type, "disabled")
        check_template_arguments(self.chat_template_kwargs)
        if self.output_config is not None and self.output_config.effort is not None:
            raise unsupported("output_config", "effort is not served yet.")
        return self


class MessagesRequest(ConversationBody, SamplingBody):
    """POST /v1/messages."""

    api: ClassVar[Api] = Api.MESSAGES

    max_tokens: int = Field(ge=1, lt=2**31)
    temperature: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=0, lt=2**31)
    stop: None = None
    stop_sequences: StopStrings | None = None
    metadata: RequestMetadata | None = None  # type: ignore[assignment]  # the protocols differ
    output_format: OutputSchema | None = None

    @property
    def form_asked(self) -> AnswerForm | None:
        """The form of `output_config`, or of `output_format`, its older name."""
        config, older = self.output_config, self.output_format
        if config is not None and config.format is not None:
            return AnswerForm(kind="json", value=config.format.schema_, param="output_config")
        if older is not None:
            return AnswerForm(kind="json", value=older.schema_, param="output_format")
        return None

    @property
    def default_tokens(self) -> int | None:
        """Every client has to name a limit here, and many name the largest that there is: it is cut to what is left."""
        return self.max_tokens

    @property
    def stops(self) -> tuple[StopString, ...]:
        """The stop strings."""
        return tuple(self.stop_sequences or ())

    @model_validator(mode="after")
    def _check_message(self) -> Self:
        config = self.output_config
        if self.output_format is not None and config is not None and config.format is not None:
            raise refusal("output_format", "Not together with output_config.")
        return self


class CountTokensRequest(ConversationBody, Body):
    """POST /v1/messages/count_tokens."""

    api: ClassVar[Api] = Api.COUNT_TOKENS

    model: str | None = None
