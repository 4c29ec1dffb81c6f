"""What /v1/responses answers: one response with one message, whole or as the events of its making."""

from typing import Annotated, Literal

from pydantic import BaseModel, Field

from router.http.errors import ErrorDetails
from router.openai.replies import ChatTokenLogprob

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


class TextForm(BaseModel):
    """The form of the answer."""

    type: Literal["text"] = "text"


class TextReply(BaseModel):
    """The same where it stands in a response."""

    format: TextForm = TextForm()


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
    output: list[OutputMessage]
    parallel_tool_calls: bool
    previous_response_id: None = None
    service_tier: str
    store: Literal[False] = False
    temperature: float
    text: TextReply = TextReply()
    tool_choice: Literal["none", "auto"]
    tools: list[None] = []
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
    """A message begins or is done."""

    type: Literal["response.output_item.added", "response.output_item.done"]
    output_index: int = 0
    item: OutputMessage


class _PlacedEvent(_Event):
    """About the one part of the one message."""

    item_id: str
    output_index: int = 0
    content_index: int = 0


class PartEvent(_PlacedEvent):
    """A part of a message begins or is done."""

    type: Literal["response.content_part.added", "response.content_part.done"]
    part: OutputText


class TextDeltaEvent(_PlacedEvent):
    """Some more text."""

    type: Literal["response.output_text.delta"]
    delta: str
    logprobs: list[ChatTokenLogprob] = []


class TextDoneEvent(_PlacedEvent):
    """All of the text."""

    type: Literal["response.output_text.done"]
    text: str
    logprobs: list[ChatTokenLogprob] = []


class ErrorEvent(_Event):
    """The response cannot go on."""

    type: Literal["error"]
    code: str
    message: str
    param: str | None


ResponseStreamEvent = Annotated[
    ResponseEvent | ItemEvent | PartEvent | TextDeltaEvent | TextDoneEvent | ErrorEvent,
    Field(discriminator="type"),
]
