"""What clients get back, as OpenAI's clients know it.

Whole replies are built from these models. The chunks of a stream are written without them, for speed; their models
stand in the API's description, and tests hold every chunk against them.
"""

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import BaseModel, Field

from router.generation.generation_run import GenerationRun
from router.ports import Timing

FinishWord = Literal["stop", "length", "abort"]
ChatFinishWord = Literal["stop", "length", "abort", "tool_calls"]


def _is_none(value: object) -> bool:
    return value is None


TokenIds = Annotated[list[int] | None, Field(exclude_if=_is_none)]
"""There only if the client asked for it, as everything that is no part of OpenAI's replies."""


class PromptTokensDetails(BaseModel):
    """Where prompt tokens came from."""

    cached_tokens: int


class CompletionTokensDetails(BaseModel):
    """What completion tokens were for."""

    reasoning_tokens: int


class Usage(BaseModel):
    """Token counts over all prompts and choices of a request.
    Of completion tokens there is more where some were reasoning.
    """

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: Annotated[
        CompletionTokensDetails | None, Field(exclude_if=_is_none)
    ] = None


def usage_of(runs: Sequence[GenerationRun]) -> Usage:
    """Token counts so far, over all runs of a request."""
    prompt_tokens = sum(len(run.request.prompt.prompt_tokens) for run in runs)
    output_tokens = sum(run.output_tokens for run in runs)
    reasoning = sum(run.reasoning_tokens for run in runs)
    return Usage(
        prompt_tokens=prompt_tokens,
        completion_tokens=output_tokens,
        total_tokens=prompt_tokens + output_tokens,
        prompt_tokens_details=PromptTokensDetails(
            cached_tokens=sum(run.reused_tokens for run in runs)
        ),
        completion_tokens_details=CompletionTokensDetails(reasoning_tokens=reasoning)
        if reasoning
        else None,
    )


class PromptTokenScore(BaseModel):
    """A token that stands in a prompt, or could have."""

    logprob: float
    rank: int
    decoded_token: str


PromptScoresReply = Annotated[
    list[dict[int, PromptTokenScore] | None] | None, Field(exclude_if=_is_none)
]


class TopLogprob(BaseModel):
    """A token that could have been drawn."""

    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(TopLogprob):
    """The token that was drawn, and the likeliest in its place."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """Log-probabilities of a chat choice."""

    content: list[ChatTokenLogprob]
    refusal: None = None


class CalledFunction(BaseModel):
    """What a call calls; `arguments` is the JSON of an object."""

    name: str
    arguments: str


class MessageToolCall(BaseModel):
    """A call in an answer."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class AssistantMessage(BaseModel):
    """The model's answer. Reasoning, under both of its names, and calls are there where there are some."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    reasoning: Annotated[str | None, Field(exclude_if=_is_none)] = None
    reasoning_content: Annotated[str | None, Field(exclude_if=_is_none)] = None
    tool_calls: Annotated[list[MessageToolCall] | None, Field(exclude_if=_is_none)] = None


class ChatChoice(BaseModel):
    """One answer."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: ChatFinishWord
    token_ids: TokenIds = None


class ChatCompletion(BaseModel):
    """Reply of POST /v1/chat/completions. `baton` is there if the client sent the header `X-Baton-Timing: 1`."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    service_tier: Annotated[str | None, Field(exclude_if=_is_none)] = None
    prompt_token_ids: TokenIds = None
    prompt_logprobs: PromptScoresReply = None
    baton: Annotated[Timing | None, Field(exclude_if=_is_none)] = None


class FunctionDelta(BaseModel):
    """What a chunk adds to what is called: the name with the first, pieces of the arguments with the others."""

    name: str | None = None
    arguments: str


class ToolCallDelta(BaseModel):
    """What a chunk adds to a call."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionDelta


class ChatDelta(BaseModel):
    """What a chunk adds to a message."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChatChunkChoice(BaseModel):
    """One choice's part of a chunk."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishWord | None
    token_ids: TokenIds = None


class ChatCompletionChunk(BaseModel):
    """One `data:` line of a chat stream."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    prompt_token_ids: TokenIds = None
    usage: Usage | None = None


class CompletionLogprobs(BaseModel):
    """Log-probabilities of a completion choice: lists with one entry per token.
    An echoed prompt's first token has none.
    """

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(BaseModel):
    """One continuation."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishWord
    token_ids: TokenIds = None
    prompt_token_ids: TokenIds = None
    prompt_logprobs: PromptScoresReply = None


class Completion(BaseModel):
    """Reply of POST /v1/completions. `baton`, as in a chat's, has one entry per prompt if there are several."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage
    baton: Annotated[Timing | list[Timing] | None, Field(exclude_if=_is_none)] = None


class CompletionChunkChoice(BaseModel):
    """One choice's part of a chunk."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishWord | None
    token_ids: TokenIds = None
    prompt_token_ids: TokenIds = None


class CompletionChunk(BaseModel):
    """One `data:` line of a completion stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChunkChoice]
    usage: Usage | None = None


class ModelCard(BaseModel):
    """A name that requests may give as `model`. `revision` is the commit that is served,
    where the model is the hub's; `parent` the model that an adapter belongs to.
    """

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "baton"
    root: str
    parent: str | None = None
    revision: str | None = None
    max_model_len: int | None


class ModelList(BaseModel):
    """Reply of GET /v1/models."""

    object: Literal["list"] = "list"
    data: list[ModelCard]
