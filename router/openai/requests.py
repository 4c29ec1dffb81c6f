"""What clients may send: OpenAI's fields, and those that vLLM added to them. Ranges are checked here, by name.

Parsing is strict (a bool is no number, a number no string, NaN is nothing). Unknown fields are ignored, as servers of
this protocol do; fields that are known and would change the answer, but are not served, are refused by name.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

MAX_CHOICES = 128
MAX_MESSAGES = 4096
MAX_PARTS = 1024
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 512
MAX_LOGIT_BIAS = 1024
MAX_LOGPROBS = 20
MAX_STOP_TOKEN_IDS = 1024
MAX_PROMPT_TOKENS = 2**21
"""Ends the parsing of absurd prompts early; the model's own limit is checked after it."""

TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Tokens = Annotated[list[TokenId], Field(fail_fast=True)]
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]
TokenCount = Annotated[int, Field(ge=1, lt=2**31)]

UNSUPPORTED: Mapping[str, tuple[object, ...]] = {
    "tools": ([],),
    "functions": ([],),
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "echo": (False,),
    "suffix": ("",),
    "best_of": (1,),
    "use_beam_search": (False,),
    "prompt_logprobs": (),
    "chat_template": (),
    "continue_final_message": (False,),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "prompt_embeds": (),
}
"""Fields that are not served, each with the values (besides null) that ask for nothing."""


class Body(BaseModel):
    """Any request body."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False, extra="allow")

    @model_validator(mode="after")
    def _refuse_unsupported(self) -> Self:
        for name, value in (self.model_extra or {}).items():
            if value is not None and name in UNSUPPORTED and value not in UNSUPPORTED[name]:
                raise refusal(name, "This server does not support it.")
        return self


def refusal(param: str, message: str) -> PydanticCustomError:
    """A complaint about field `param` from a check that looks at more than one field."""
    return PydanticCustomError("refused", "{message}", {"message": message, "param": param})


class StreamOptions(BaseModel):
    """What a stream holds besides its deltas."""

    model_config = ConfigDict(strict=True)

    include_usage: bool | None = None


class GenerationBody(Body):
    """What chat and plain completions have in common."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    stop: (
        StopString
        | Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS, fail_fast=True)]
        | None
    ) = None
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, lt=2**31)
    min_p: float | None = Field(None, ge=0, le=1)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, gt=0, le=100)
    logit_bias: dict[TokenId, Annotated[float, Field(ge=-100, le=100)]] | None = Field(
        None, max_length=MAX_LOGIT_BIAS
    )
    max_tokens: TokenCount | None = None
    min_tokens: int | None = Field(None, ge=0, lt=2**31)
    stop_token_ids: Tokens | None = Field(None, max_length=MAX_STOP_TOKEN_IDS)
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    return_token_ids: bool | None = None
    cache_salt: str | None = Field(None, min_length=1)
    user: str | None = Field(None, max_length=1024)
    service_tier: str | None = Field(None, min_length=1, max_length=64)
    priority: int | None = Field(None, ge=-(2**31), lt=2**31)

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @model_validator(mode="after")
    def _check_stream_options(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise refusal("stream_options", "Only allowed together with stream.")
        return self


class TextPart(BaseModel):
    """A piece of a message's content. Other kinds than text are not served."""

    model_config = ConfigDict(strict=True)

    type: Literal["text"]
    text: str


class Message(BaseModel):
    """One message of a conversation."""

    model_config = ConfigDict(strict=True, extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(max_length=MAX_PARTS, fail_fast=True)] | None = (
        None
    )
    name: str | None = None
    tool_call_id: str | None = None

    @model_validator(mode="after")
    def _check_content(self) -> Self:
        if self.content is None and self.role != "assistant":
            raise PydanticCustomError("refused", "A message of this role needs content.")
        if (self.model_extra or {}).get("tool_calls"):
            raise PydanticCustomError("refused", "This server does not support tool_calls.")
        return self

    def for_template(self) -> dict[str, str]:
        """What the chat template sees; parts of the content are joined."""
        content = self.content or ""
        text = content if isinstance(content, str) else "".join(part.text for part in content)
        optional = {"name": self.name, "tool_call_id": self.tool_call_id}
        given = {key: value for key, value in optional.items() if value is not None}
        return {"role": self.role, "content": text} | given


Messages = Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]


class ChatCompletionRequest(GenerationBody):
    """POST /v1/chat/completions."""

    messages: Messages
    max_completion_tokens: TokenCount | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    add_generation_prompt: bool = True

    @model_validator(mode="after")
    def _check_logprobs(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise refusal("top_logprobs", "Only allowed together with logprobs.")
        return self


TokenPrompt = Annotated[Tokens, Field(min_length=1, max_length=MAX_PROMPT_TOKENS)]


class CompletionRequest(GenerationBody):
    """POST /v1/completions. A prompt is a text or a list of token ids; a list of either makes several prompts."""

    prompt: (
        str
        | Annotated[list[str], Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True)]
        | TokenPrompt
        | Annotated[list[TokenPrompt], Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True)]
    )
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    add_special_tokens: bool = True

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """One entry per prompt: all texts, or all token ids."""
        prompt: Any = self.prompt
        return [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt

    @model_validator(mode="after")
    def _check_choices(self) -> Self:
        if len(self.prompts) * (self.n or 1) > MAX_CHOICES:
            raise refusal("n", f"More than {MAX_CHOICES} choices over all prompts.")
        return self


class TokenizeRequest(Body):
    """POST /tokenize: of a prompt or of a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _check_source(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise refusal("prompt", "Exactly one of prompt and messages is needed.")
        return self


class DetokenizeRequest(Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: Tokens = Field(max_length=MAX_PROMPT_TOKENS)
