"""What clients may send to /v1/messages: Anthropic's fields, and the few of vLLM's that ask for another way of drawing;
and what the model's template sees of them, which knows OpenAI's words.
"""

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import groupby
from typing import Annotated, ClassVar, Literal, Self

import msgspec
from pydantic import Discriminator, Field, JsonValue, Tag, model_validator

from baton.errors import InvalidRequestError
from router.generation.answer_form import AnswerForm, CallableTools
from router.generation.sampling import SamplingBody
from router.http.fields import (
    MAX_MESSAGES,
    MAX_PARTS,
    MAX_TOOLS,
    SERVED_PARTS,
    Body,
    BodyObject,
    JsonObject,
    Name,
    StopString,
    StopStrings,
    refusal,
    unsupported,
)
from router.http.known_fields import Api
from router.openai.conversation import (
    CalledName,
    CallId,
    TemplateArguments,
    assistant_message,
    check_calls,
    check_template_arguments,
)
from router.openai.tools import ANY_OBJECT, check_names
from router.parsing.output_format import ToolSchema
from router.templates.renderer import ChatMessage, Conversation

ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,128}$")]


class TextBlock(BodyObject):
    """A piece of a message."""

    type: Literal["text"]
    text: str


TextBlocks = Annotated[list[TextBlock], Field(max_length=MAX_PARTS, fail_fast=True), SERVED_PARTS]


class ToolUseBlock(BodyObject):
    """A call in an earlier answer."""

    type: Literal["tool_use"]
    id: CallId
    name: CalledName
    input: JsonObject


class ToolResultBlock(BodyObject):
    """What a call gave."""

    type: Literal["tool_result"]
    tool_use_id: CallId
    content: str | TextBlocks | None = None
    is_error: bool | None = None


class ThinkingBlock(BodyObject):
    """What the model thought aloud in an earlier answer."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(BodyObject):
    """Thoughts that nobody can read: they are left out."""

    type: Literal["redacted_thinking"]
    data: str


Block = Annotated[
    TextBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock | RedactedThinkingBlock,
    Field(discriminator="type"),
]
_OF_ASSISTANT = (ToolUseBlock, ThinkingBlock, RedactedThinkingBlock)


class MessageParam(BodyObject):
    """One message of a conversation."""

    role: Literal["user", "assistant"]
    content: str | Annotated[list[Block], Field(max_length=MAX_PARTS, fail_fast=True), SERVED_PARTS]

    @property
    def blocks(self) -> Sequence[Block]:
        """The content in blocks."""
        content = self.content
        return [TextBlock(type="text", text=content)] if isinstance(content, str) else content

    @property
    def calls(self) -> list[str]:
        """Ids of the calls in it."""
        return [block.id for block in self.blocks if isinstance(block, ToolUseBlock)]

    @property
    def results(self) -> list[str]:
        """Ids of the calls whose results it has."""
        return [block.tool_use_id for block in self.blocks if isinstance(block, ToolResultBlock)]

    @property
    def arguments_length(self) -> int:
        """Of the input of its calls, as JSON."""
        inputs = [block.input for block in self.blocks if isinstance(block, ToolUseBlock)]
        return sum(len(msgspec.json.encode(given)) for given in inputs)

    def for_template(self) -> list[ChatMessage]:
        """What the chat template sees: results of calls as messages of their own."""
        return self._answer() if self.role == "assistant" else list(self._turns())

    def _answer(self) -> list[ChatMessage]:
        calls: list[dict[str, JsonValue]] = [
            {
                "id": block.id,
                "type": "function",
                "function": {"name": block.name, "arguments": block.input},
            }
            for block in self.blocks
            if isinstance(block, ToolUseBlock)
        ]
        thought = [block.thinking for block in self.blocks if isinstance(block, ThinkingBlock)]
        return [assistant_message(joined(self.blocks), calls, "".join(thought))]

    def _turns(self) -> Iterator[ChatMessage]:
        for kind, blocks in groupby(self.blocks, key=type):
            if kind is TextBlock:
                yield {"role": "user", "content": joined(list(blocks))}
                continue
            for block in blocks:
                assert isinstance(block, ToolResultBlock)
                # Templates have no field for it.
                text = "Error: " * bool(block.is_error) + joined(block.content or "")
                yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": text}
        if not self.blocks:
            yield {"role": "user", "content": ""}

    @model_validator(mode="after")
    def _check_blocks(self) -> Self:
        wrong = ToolResultBlock if self.role == "assistant" else _OF_ASSISTANT
        found = next((block for block in self.blocks if isinstance(block, wrong)), None)
        if found is not None:
            raise refusal(None, f"A message of the {self.role} has no {found.type}.")
        return self


MessageParams = Annotated[
    list[MessageParam], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
]


class ToolDefinition(BodyObject):
    """A tool that the model may use."""

    type: Literal["custom"] | None = None
    name: ToolName
    description: str | None = None
    input_schema: JsonObject | None = None
    strict: bool | None = None

    def for_template(self) -> dict[str, JsonValue]:
        """As OpenAI describes one, which is what templates know."""
        described: dict[str, JsonValue] = {"name": self.name}
        if self.description is not None:
            described["description"] = self.description
        described["parameters"] = self.parameters
        return {"type": "function", "function": described}

    @property
    def parameters(self) -> JsonObject:
        """Of its input."""
        return ANY_OBJECT if self.input_schema is None else self.input_schema


class ServerTool(BodyObject):
    """Any other tool: one that the server would have to run,
    or of which it would have to know more than its client says.
    """

    type: Annotated[
        str, Field(pattern=r"^[a-z0-9_]{1,64}$", json_schema_extra={"not": {"const": "custom"}})
    ]


def _tool_tag(tool: object) -> str:
    kind = tool.get("type") if isinstance(tool, dict) else getattr(tool, "type", None)
    return "custom" if kind in (None, "custom") else "server"


Tool = Annotated[
    Annotated[ToolDefinition, Tag("custom")] | Annotated[ServerTool, Tag("server")],
    Discriminator(_tool_tag),
]


class ToolChoiceParam(BodyObject):
    """Whether the model is to use a tool."""

    type: Literal["none", "auto", "any", "tool"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    @property
    def named(self) -> list[str] | None:
        """The tool that is to be used; None where any may be."""
        return [self.name] if self.type == "tool" and self.name is not None else None

    @model_validator(mode="after")
    def _check_name(self) -> Self:
        if self.type == "tool" and self.name is None:
            raise refusal(None, "Needs the name of the tool that is to be used.")
        return self


class Thinking(BodyObject):
    """Whether the model is to think aloud first, and for how many tokens at most."""

    type: Literal["disabled", "enabled", "adaptive"]
    display: Literal["summarized", "omitted"] | None = None
    budget_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None


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


def joined(content: str | Sequence[Block]) -> str:
    """The text of a content."""
    if isinstance(content, str):
        return content
    return "".join(block.text for block in content if isinstance(block, TextBlock))


class ConversationBody(BodyObject):
    """What both endpoints read."""

    messages: MessageParams
    system: str | TextBlocks | None = None
    tools: list[Tool] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: ToolChoiceParam | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: TemplateArguments | None = None
    # What follows does not change the answer of this server.
    cache_control: JsonObject | None = None

    @property
    def custom_tools(self) -> list[ToolDefinition]:
        """The tools that the client runs itself."""
        return [tool for tool in self.tools or () if isinstance(tool, ToolDefinition)]

    @cached_property
    def callable_tools(self) -> CallableTools | None:
        """Those of `tools` that `tool_choice` leaves."""
        choice = self.tool_choice or ToolChoiceParam(type="auto")
        if choice.type == "none":
            return None
        return CallableTools.among(
            [
                ToolSchema(name=tool.name, parameters=tool.parameters, strict=bool(tool.strict))
                for tool in self.custom_tools
            ],
            choice.named,
            required=choice.type in ("any", "tool"),
            parallel=not choice.disable_parallel_tool_use and choice.type != "tool",
            schema_field="input_schema",
        )

    def as_conversation(self) -> Conversation:
        """The conversation, the system's word first. A last message of the assistant is the beginning of its answer.

        Raises:
            InvalidRequestError: Its calls and their results do not fit together.
        """
        check_calls(self.messages, param="messages", id_field="content.tool_use_id")
        last = self.messages[-1]
        continues = last.role == "assistant"
        if continues and last.calls:
            raise InvalidRequestError(
                "messages: a call needs its result before the model goes on.", param="messages"
            )
        system = [] if self.system is None else [{"role": "system", "content": joined(self.system)}]
        said = [turn for message in self.messages for turn in message.for_template()]
        shown = self.custom_tools if self.callable_tools is not None else []
        return Conversation(
            messages=[*system, *said],
            continue_last=continues,
            tools=[tool.for_template() for tool in shown] or None,
            arguments=self._for_template() | (self.chat_template_kwargs or {}),
        )

    def _for_template(self) -> dict[str, JsonValue]:
        """What templates call the fields about thinking: Qwen's and DeepSeek's names of the switch,
        OpenAI's of the effort.
        """
        given: dict[str, JsonValue] = {}
        if self.thinking is not None and self.thinking.type != "adaptive":
            given["enable_thinking"] = given["thinking"] = self.thinking.type == "enabled"
        if self.output_config is not None and self.output_config.effort is not None:
            given["reasoning_effort"] = self.output_config.effort
        return given

    @model_validator(mode="after")
    def _check_conversation(self) -> Self:
        check_template_arguments(self.chat_template_kwargs)
        choice = self.tool_choice or ToolChoiceParam(type="auto")
        for tool in self.tools or ():
            if isinstance(tool, ServerTool) and choice.type != "none":
                raise unsupported("tools", f"This server runs no tools: not {tool.type}.")
        check_names(
            [tool.name for tool in self.custom_tools],
            choice.named or (),
            required=choice.type == "any",
        )
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
    def most_thinking_tokens(self) -> int | None:
        """The budget of `thinking`."""
        thinking = self.thinking
        if thinking is None or thinking.type != "enabled":
            return None
        return thinking.budget_tokens

    @property
    def thinking_field(self) -> str:
        """Where it is said."""
        return "thinking"

    @property
    def tells_reasoning(self) -> bool:
        """Always: messages have a block for it."""
        return True

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
        if self.callable_tools is not None and self.answer_form is not None:
            raise refusal(self.answer_form.param, "Not together with tools that may be called.")
        budget = self.most_thinking_tokens
        if budget is not None and budget >= self.max_tokens:
            raise refusal("thinking", "budget_tokens has to be less than max_tokens.")
        return self


class CountTokensRequest(ConversationBody, Body):
    """POST /v1/messages/count_tokens."""

    api: ClassVar[Api] = Api.COUNT_TOKENS

    model: str | None = None
