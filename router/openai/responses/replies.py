"""What /v1/responses answers: one response with its items, whole or as the events of its making."""

from typing import Annotated, Literal

from pydantic import BaseModel, Field

from router.http.errors import ErrorDetails
from router.http.fields import JsonObject
from router.openai.replies import ChatTokenLogprob
from router.openai.responses.requests import TextFormat

Status = Literal["in_progress", "completed", "incomplete"]


class OutputText(BaseModel):
    """The text of a message."""

    type: Literal["output_text"] = "output_text"
    text: str
    annotations: list[None] = []
    logprobs: list[ChatTokenLogprob] = []


class OutputMessage(BaseModel):
    """The model's answer."""

    type: Literal["message"] = "message"
    id: str
    role: Literal["assistant"] = "assistant"
    status: Status
    content: list[OutputText]


class FunctionCall(BaseModel):
    """A call of a function."""

    type: Literal["function_call"] = "function_call"
    id: str
    call_id: str
    name: str
    arguments: str
    status: Status


class ReasoningText(BaseModel):
    """What the model thought aloud."""

    type: Literal["reasoning_text"] = "reasoning_text"
    text: str


class Reasoning(BaseModel):
    """The thoughts before an answer; nobody sums them up."""

    type: Literal["reasoning"] = "reasoning"
    id: str
    summary: list[None] = []
    content: list[ReasoningText]
    status: Status


OutputItem = Annotated[OutputMessage | FunctionCall | Reasoning, Field(discriminator="type")]


class InputTokensDetails(BaseModel):
    """Where input tokens came from."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(BaseModel):
    """What output tokens were spent on."""

    reasoning_tokens: int = 0


class ResponseUsage(BaseModel):
    """Token counts."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails = OutputTokensDetails()
    total_tokens: int


class IncompleteDetails(BaseModel):
    """Why a response is not complete."""

    reason: Literal["max_output_tokens"] = "max_output_tokens"


class TextReply(BaseModel):
    """The form of the answer, as it was asked for."""

    format: TextFormat


class ResponseReply(BaseModel):
    """A response."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Status
    background: Literal[False] = False
    error: ErrorDetails | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: None = None
    service_tier: str
    store: Literal[False] = False
    temperature: float
    text: TextReply
    tool_choice: Literal["none", "auto", "required"] | JsonObject
    tools: list[JsonObject]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    usage: ResponseUsage | None = None
    user: str | None


class _Event(BaseModel):
    sequence_number: int


class ResponseEvent(_Event):
    """The response as it stands: at its beginning and at its end."""

    type: Literal[
        "response.created", "response.in_progress", "response.completed", "response.incomplete"
    ]
    response: ResponseReply


class ItemEvent(_Event):
    """An item begins or is done; the next one may begin."""

    type: Literal["response.output_item.added", "response.output_item.done"]
    output_index: int
    item: OutputItem


class _PlacedEvent(_Event):
    """About an item."""

    item_id: str
    output_index: int


class _PartOfItem(_PlacedEvent):
    """About its one part."""

    content_index: int = 0


class PartEvent(_PartOfItem):
    """A part of an item begins or is done."""

    type: Literal["response.content_part.added", "response.content_part.done"]
    part: Annotated[OutputText | ReasoningText, Field(discriminator="type")]


class TextDeltaEvent(_PartOfItem):
    """Some more text."""

    type: Literal["response.output_text.delta"]
    delta: str
    logprobs: list[ChatTokenLogprob] = []


class TextDoneEvent(_PartOfItem):
    """All of the text."""

    type: Literal["response.output_text.done"]
    text: str
    logprobs: list[ChatTokenLogprob] = []


class ReasoningDeltaEvent(_PartOfItem):
    """Some more thoughts."""

    type: Literal["response.reasoning_text.delta"]
    delta: str


class ReasoningDoneEvent(_PartOfItem):
    """All thoughts of an item."""

    type: Literal["response.reasoning_text.done"]
    text: str


class ArgumentsDeltaEvent(_PlacedEvent):
    """Some more of a call's arguments."""

    type: Literal["response.function_call_arguments.delta"]
    delta: str


class ArgumentsDoneEvent(_PlacedEvent):
    """All of them."""

    type: Literal["response.function_call_arguments.done"]
    name: str
    arguments: str


class ErrorEvent(_Event):
    """The response cannot go on."""

    type: Literal["error"]
    code: str
    message: str
    param: str | None


ResponseStreamEvent = Annotated[
    ResponseEvent
    | ItemEvent
    | PartEvent
    | TextDeltaEvent
    | TextDoneEvent
    | ReasoningDeltaEvent
    | ReasoningDoneEvent
    | ArgumentsDeltaEvent
    | ArgumentsDoneEvent
    | ErrorEvent,
    Field(discriminator="type"),
]
