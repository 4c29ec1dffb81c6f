"""What clients may send to /v1/responses. Nothing is stored between two requests:
a reference to an earlier one is refused.
"""

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Annotated, ClassVar, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    JsonValue,
    Tag,
    model_validator,
)
from pydantic_core import PydanticCustomError

from router.generation.answer_form import AnswerForm, CallableTools
from router.http.fields import (
    MAX_MESSAGES,
    MAX_PARTS,
    MAX_TOOLS,
    SERVED_PARTS,
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
from router.openai.conversation import (
    Arguments,
    CalledName,
    CallId,
    EarlierFunction,
    TemplateArguments,
    ToolCall,
    assistant_message,
    check_calls,
    check_template_arguments,
)
from router.openai.requests import Logprobs, ReasoningBody, check_moderation
from router.openai.tools import (
    ANY_OBJECT,
    FunctionName,
    JsonObjectFormat,
    PlainText,
    check_names,
)
from router.parsing.output_format import ToolSchema
from router.templates.renderer import ChatMessage, Conversation

LOGPROBS = "message.output_text.logprobs"
"""The entry of `include` that asks for log-probabilities."""


class InputText(BodyObject):
    """A piece of a message. Other kinds than text are not served."""

    type: Literal["input_text", "output_text", "text"]
    text: str


InputContent = (
    str | Annotated[list[InputText], Field(max_length=MAX_PARTS, fail_fast=True), SERVED_PARTS]
)


class InputMessage(BodyObject):
    """One message of a conversation. An earlier answer can be put in as it came."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: InputContent

    calls: ClassVar[Sequence[str]] = ()
    results: ClassVar[Sequence[str]] = ()
    arguments_length: ClassVar[int] = 0

    @property
    def text(self) -> str:
        """The content, its parts joined."""
        return joined(self.content)


class FunctionCallItem(BodyObject):
    """A call in an earlier answer."""

    type: Literal["function_call"]
    call_id: CallId
    name: CalledName
    arguments: Arguments

    results: ClassVar[Sequence[str]] = ()

    @property
    def calls(self) -> list[str]:
        """Its own."""
        return [self.call_id]

    @property
    def arguments_length(self) -> int:
        """Of its JSON."""
        return len(self.arguments)

    def for_template(self) -> dict[str, JsonValue]:
        """As a chat's message has it.

        Raises:
            InvalidRequestError: Its arguments are no object.
        """
        function = EarlierFunction(name=self.name, arguments=self.arguments)
        return ToolCall(id=self.call_id, function=function).for_template(param="input")


class FunctionCallOutput(BodyObject):
    """What a call gave."""

    type: Literal["function_call_output"]
    call_id: CallId
    output: InputContent

    calls: ClassVar[Sequence[str]] = ()
    arguments_length: ClassVar[int] = 0

    @property
    def results(self) -> list[str]:
        """Of the call whose result it is."""
        return [self.call_id]


class ThoughtPart(BodyObject):
    """A piece of what the model thought aloud, or of its summary."""

    type: Literal["reasoning_text", "summary_text"]
    text: str


ThoughtParts = Annotated[list[ThoughtPart], Field(max_length=MAX_PARTS, fail_fast=True)]


class ReasoningItem(BodyObject):
    """What the model thought aloud in an earlier answer; of what is encrypted, nothing is read."""

    type: Literal["reasoning"]
    summary: ThoughtParts | None = None
    content: ThoughtParts | None = None

    calls: ClassVar[Sequence[str]] = ()
    results: ClassVar[Sequence[str]] = ()
    arguments_length: ClassVar[int] = 0

    @property
    def text(self) -> str:
        """The thoughts, or else their summary."""
        return "".join(part.text for part in self.content or self.summary or ())


def _kind(item: object) -> str | None:
    return item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", None)


def _check_kinds(items: JsonValue) -> JsonValue:
    """Items of other types are right, and not served: says that, and not that they are no messages."""
    for item in items if isinstance(items, list) else ():
        kind = _kind(item)
        if isinstance(kind, str) and kind not in _KINDS:
            context = {"param": "input", "kind": kind[:40]}
            raise PydanticCustomError(UNSUPPORTED, "Items of type {kind} are not served.", context)
    return items


_KINDS = ("message", "function_call", "function_call_output", "reasoning")
InputItem = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[FunctionCallOutput, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(
        _kind,
        custom_error_type="no_item",
        custom_error_message="Has to be a message, function_call, function_call_output or reasoning.",
    ),
]
InputItems = Annotated[
    list[InputItem], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
]


def joined(content: str | Sequence[InputText]) -> str:
    """The text of a content."""
    return content if isinstance(content, str) else "".join(part.text for part in content)


def messages_of(items: Sequence[InputItem]) -> Iterator[ChatMessage]:
    """What the chat template sees: thoughts, text and calls of one answer are one message.

    Raises:
        InvalidRequestError: The arguments of a call are no object.
    """
    answer: list[InputItem] = []
    for item in items:
        is_answer = not isinstance(item, FunctionCallOutput)
        if isinstance(item, InputMessage):
            is_answer = item.role == "assistant"
        begins = isinstance(item, ReasoningItem | InputMessage) and any(
            isinstance(before, InputMessage | FunctionCallItem) for before in answer
        )
        if answer and (begins or not is_answer):
            yield _answer(answer)
            answer = []
        match item:
            case FunctionCallOutput():
                text = joined(item.output)
                yield {"role": "tool", "tool_call_id": item.call_id, "content": text}
            case InputMessage() if not is_answer:
                yield {"role": item.role, "content": item.text}
            case _:
                answer.append(item)
    if answer:
        yield _answer(answer)


def _answer(items: Sequence[InputItem]) -> ChatMessage:
    return assistant_message(
        "".join(item.text for item in items if isinstance(item, InputMessage)),
        [item.for_template() for item in items if isinstance(item, FunctionCallItem)],
        "".join(item.text for item in items if isinstance(item, ReasoningItem)),
    )


class FunctionTool(BodyObject):
    """A function that the model may call."""

    type: Literal["function"]
    name: FunctionName
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None

    def for_template(self) -> dict[str, JsonValue]:
        """As a chat describes it."""
        described = self.model_dump(exclude={"type"}, exclude_none=True)
        return {"type": "function", "function": described}

    def schema_of_call(self) -> ToolSchema:
        """What a call of it has to follow."""
        parameters = ANY_OBJECT if self.parameters is None else self.parameters
        return ToolSchema(name=self.name, parameters=parameters, strict=bool(self.strict))


def _hosted(kind: str) -> str:
    if kind in _OWN_TYPES:
        raise ValueError(f"{kind}: a field of it is missing or wrong.")
    return kind


_OWN_TYPES = ("function", "allowed_tools")
HostedType = Annotated[
    str,
    Field(pattern=r"^[a-z0-9_]{1,64}$", json_schema_extra={"not": {"enum": [*_OWN_TYPES]}}),
    AfterValidator(_hosted),
]


class HostedTool(BodyObject):
    """Any other tool: one that the server would have to run."""

    type: HostedType


class ChosenFunction(BodyObject):
    """The one function that the model is to call."""

    type: Literal["function"]
    name: FunctionName


class AllowedTools(BodyObject):
    """The functions among all that the model may call now, or of which it has to call one."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[ChosenFunction], Field(min_length=1, max_length=MAX_TOOLS)]


class HostedChoice(BodyObject):
    """A tool that the server would have to run."""

    type: HostedType


class SchemaFormat(BodyObject):
    """An answer that follows a JSON schema."""

    model_config = ConfigDict(serialize_by_alias=True)

    type: Literal["json_schema"]
    name: FunctionName
    schema_: JsonObject = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None


TextFormat = Annotated[PlainText | JsonObjectFormat | SchemaFormat, Field(discriminator="type")]


class TextSettings(BodyObject):
    """The form of the answer, and how wordy it is to be."""

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningSettings(BodyObject):
    """How much the model is to think. Only the effort reaches it, through its template; there are no summaries."""

    effort: Name | None = None
    mode: Name | None = None


class ResponsesRequest(ReasoningBody):
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
    reasoning: ReasoningSettings | None = None
    tools: list[FunctionTool | HostedTool] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: (
        Literal["none", "auto", "required"] | ChosenFunction | AllowedTools | HostedChoice | None
    ) = None
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
    def text_format(self) -> TextFormat:
        """The form of `text`; plain text where none is said."""
        asked = None if self.text is None else self.text.format
        return PlainText(type="text") if asked is None else asked

    @property
    def form_asked(self) -> AnswerForm | None:
        """What an answer of that form is held to."""
        match self.text_format:
            case JsonObjectFormat():
                return AnswerForm(kind="json", value=ANY_OBJECT, param="text")
            case SchemaFormat() as form:
                return AnswerForm(kind="json", value=form.schema_, param="text")
            case _:
                return None

    @property
    def functions(self) -> list[FunctionTool]:
        """The tools that the client calls itself."""
        return [tool for tool in self.tools or () if isinstance(tool, FunctionTool)]

    @cached_property
    def callable_tools(self) -> CallableTools | None:
        """Those that `tool_choice` leaves."""
        choice = self.tool_choice
        mode = choice.mode if isinstance(choice, AllowedTools) else choice
        if mode == "none":
            return None
        is_one = isinstance(choice, ChosenFunction)
        return CallableTools.among(
            [tool.schema_of_call() for tool in self.functions],
            self._named_tools,
            required=is_one or mode == "required",
            parallel=self.parallel_tool_calls is not False and not is_one,
        )

    @property
    def _named_tools(self) -> list[str] | None:
        """Those that `tool_choice` names; None where it names none."""
        match self.tool_choice:
            case ChosenFunction(name=name):
                return [name]
            case AllowedTools(tools=tools):
                return [tool.name for tool in tools]
            case _:
                return None

    def as_conversation(self) -> Conversation:
        """The conversation, instructions first. Functions that may not be called are not shown to the model.

        Raises:
            InvalidRequestError: Its calls and their results do not fit together, or are too long.
        """
        items = [] if isinstance(self.input, str) else self.input
        check_calls(items, param="input", id_field="call_id")
        messages: list[ChatMessage] = []
        if self.instructions is not None:
            messages.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            messages.append({"role": "user", "content": self.input})
        effort = None if self.reasoning is None else self.reasoning.effort
        given = {} if effort is None else {"reasoning_effort": effort}
        shown = self.functions if self.callable_tools is not None else []
        return Conversation(
            messages=[*messages, *messages_of(items)],
            arguments=given | (self.chat_template_kwargs or {}),
            tools=[tool.for_template() for tool in shown] or None,
            param="input",
        )

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
        choice = self.tool_choice
        hosted = [tool.type for tool in self.tools or () if isinstance(tool, HostedTool)]
        if hosted and choice != "none":
            raise unsupported("tools", f"This server runs no tools: not {hosted[0]}.")
        if isinstance(choice, HostedChoice):
            raise unsupported("tool_choice", f"This server runs no tools: not {choice.type}.")
        names = [tool.name for tool in self.functions]
        check_names(names, self._named_tools or (), required=choice == "required")
        if self.callable_tools is not None and self.answer_form is not None:
            raise refusal(self.answer_form.param, "Not together with tools that may be called.")
