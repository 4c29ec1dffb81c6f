"""What /v1/messages answers: one message, whole or as the events of its making."""

from typing import Annotated, Literal

from pydantic import BaseModel, Field, JsonValue

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class TextContent(BaseModel):
    """The text of a message."""

    type: Literal["text"] = "text"
    text: str


class ThinkingContent(BaseModel):
    """What the model thought aloud. Nobody signs it here."""

    type: Literal["thinking"] = "thinking"
    thinking: str
    signature: str = ""


class ToolUseContent(BaseModel):
    """A call of a tool."""

    type: Literal["tool_use"] = "tool_use"
    id: str
    name: str
    input: dict[str, JsonValue]


MessageContent = Annotated[
    TextContent | ThinkingContent | ToolUseContent, Field(discriminator="type")
]


class MessageTokensDetails(BaseModel):
    """What output tokens were spent on."""

    thinking_tokens: int = 0


class MessageUsage(BaseModel):
    """Token counts. As Anthropic counts, `input_tokens` are those that no cache held."""

    input_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int = 0
    output_tokens: int
    output_tokens_details: MessageTokensDetails = MessageTokensDetails()


class MessageReply(BaseModel):
    """Reply of POST /v1/messages."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[MessageContent]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage


class MessageStart(BaseModel):
    """The message, empty."""

    type: Literal["message_start"] = "message_start"
    message: MessageReply


class ContentBlockStart(BaseModel):
    """A block, empty."""

    type: Literal["content_block_start"] = "content_block_start"
    index: int
    content_block: MessageContent


class TextDelta(BaseModel):
    """Some more text."""

    type: Literal["text_delta"] = "text_delta"
    text: str


class ThinkingDelta(BaseModel):
    """Some more thoughts."""

    type: Literal["thinking_delta"] = "thinking_delta"
    thinking: str


class InputJsonDelta(BaseModel):
    """Some more of the JSON of a call's input; all of a call joined are one object."""

    type: Literal["input_json_delta"] = "input_json_delta"
    partial_json: str


class ContentBlockDelta(BaseModel):
    """A block grew."""

    type: Literal["content_block_delta"] = "content_block_delta"
    index: int
    delta: Annotated[TextDelta | ThinkingDelta | InputJsonDelta, Field(discriminator="type")]


class ContentBlockStop(BaseModel):
    """A block is done; the next one may begin."""

    type: Literal["content_block_stop"] = "content_block_stop"
    index: int


class StopDelta(BaseModel):
    """Why a message ended."""

    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(BaseModel):
    """The message is all there."""

    type: Literal["message_delta"] = "message_delta"
    delta: StopDelta
    usage: MessageUsage


class MessageStop(BaseModel):
    """The stream's last event."""

    type: Literal["message_stop"] = "message_stop"


class Ping(BaseModel):
    """Says nothing; comes where a stream has nothing to say for a while."""

    type: Literal["ping"] = "ping"


class ErrorFields(BaseModel):
    """What went wrong."""

    type: str
    message: str


class AnthropicErrorReply(BaseModel):
    """Every answer that is not a success, and the last event of a stream that cannot go on."""

    type: Literal["error"] = "error"
    error: ErrorFields


MessageStreamEvent = Annotated[
    MessageStart
    | ContentBlockStart
    | ContentBlockDelta
    | ContentBlockStop
    | MessageDelta
    | MessageStop
    | Ping
    | AnthropicErrorReply,
    Field(discriminator="type"),
]


class CountedTokens(BaseModel):
    """Reply of POST /v1/messages/count_tokens."""

    input_tokens: int
