"""What clients may send to be answered: OpenAI's fields for chat and plain completions, and those that vLLM added to
them.

Fields that do not change what is answered (`store`, `metadata`, `prediction`, …) are checked for their types and have
no effect; their names are told to the client.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from baton.generation import BeamSearchParams, EarlyStopping
from router.generation.answer_form import AnswerForm, CallableTools
from router.generation.sampling import SamplingBody
from router.http.fields import (
    MAX_CHOICES,
    MAX_LOGPROBS,
    MAX_PROMPT_TOKENS,
    BodyObject,
    JsonObject,
    Name,
    TokenCount,
    Tokens,
    only,
    refusal,
    unsupported,
)
from router.http.known_fields import Api
from router.openai.conversation import (
    Messages,
    TemplateArguments,
    check_template_arguments,
    conversation_of,
)
from router.openai.tools import (
    FunctionChoice,
    Functions,
    ResponseFormat,
    ToolChoice,
    Tools,
    asked_form,
    callable_tools,
    check_functions,
    check_tools,
)
from router.templates.renderer import Conversation

DEFAULT_COMPLETION_TOKENS = 16
"""Of plain completions; a chat is given what the context leaves."""

OF_DRAWING = ("min_p", "seed", "temperature", "top_k", "top_p")
"""Fields that say how tokens are drawn: without effect where texts are searched for."""

Logprobs = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]


class StreamOptions(BodyObject):
    """What a stream holds besides its deltas."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class GenerationBody(SamplingBody):
    """What chat and plain completions have in common."""

    stream_options: StreamOptions | None = None
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    max_tokens: TokenCount | None = None
    prompt_logprobs: Logprobs | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = Field(None, ge=-10, le=10)
    early_stopping: bool | Literal["never"] | None = None

    @property
    def ignored(self) -> list[str]:
        """The fields that were sent and have no effect: where texts are searched for,
        those too that say how tokens are drawn.
        """
        idle = OF_DRAWING if self.use_beam_search else ()
        return [*super().ignored, *(name for name in idle if getattr(self, name) is not None)]

    @property
    def beam_search(self) -> BeamSearchParams | None:
        """How the likeliest texts are searched for; None where tokens are drawn."""
        if not self.use_beam_search:
            return None
        penalty, stopping = self.length_penalty, self.early_stopping
        return BeamSearchParams(
            length_penalty=1.0 if penalty is None else penalty,
            early_stopping=EarlyStopping(str(stopping or False).lower()),
        )

    @property
    def num_samples(self) -> int:
        """How many are drawn of each prompt."""
        return self.n or 1

    @property
    def num_prompt_logprobs(self) -> int | None:
        """How many likeliest tokens are listed beside each of the prompt; None where prompts are not scored."""
        return self.prompt_logprobs

    @property
    def asked_tokens(self) -> int | None:
        """How many tokens are generated at most, if that is said."""
        return self.max_tokens

    @property
    def usage_in_stream(self) -> bool:
        """Whether a stream ends with its token counts."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def usage_in_chunks(self) -> bool:
        """Whether every chunk of a stream holds the token counts so far."""
        options = self.stream_options
        return self.usage_in_stream and options is not None and bool(options.continuous_usage_stats)

    @model_validator(mode="after")
    def _check_generation(self) -> Self:
        if self.stream and self.prompt_logprobs is not None:
            raise refusal("prompt_logprobs", "Not in a stream.")
        if self.stream_options is not None and not self.stream:
            raise refusal("stream_options", "Only allowed together with stream.")
        if self.use_beam_search:
            self._check_beams()
        elif self.early_stopping:
            raise refusal("early_stopping", "Only allowed together with use_beam_search.")
        elif self.length_penalty not in (None, 1.0):
            raise refusal("length_penalty", "Only allowed together with use_beam_search.")
        return self

    def _check_beams(self) -> None:
        """Refuses what would have a say in which texts are found, and has none."""
        if self.stream:
            raise refusal("use_beam_search", "Not in a stream: no text is known before the end.")
        steering: dict[str, object] = {
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "repetition_penalty": self.repetition_penalty not in (None, 1.0),
            "logit_bias": self.biases,
            "min_tokens": self.min_tokens,
            "allowed_token_ids": self.allowed_token_ids,
            "bad_words": self.bad_words,
            "stop": self.stops,
            "stop_token_ids": self.stop_token_ids,
        }
        if (form := self.answer_form) is not None:
            steering[form.param] = form
        for name, asked in steering.items():
            if asked:
                raise refusal(name, "Not together with use_beam_search.")


class ReasoningBody(SamplingBody):
    """What chats and responses have in common: both tell what the model thinks aloud apart from its answer."""

    max_thinking_tokens: TokenCount | None = None
    thinking_token_budget: TokenCount | None = None
    include_reasoning: bool | None = None

    @property
    def most_thinking_tokens(self) -> int | None:
        """`max_thinking_tokens`, or vLLM's name for it."""
        most = self.max_thinking_tokens
        return self.thinking_token_budget if most is None else most

    @property
    def thinking_field(self) -> str:
        """The one of the two that counts."""
        return (
            "thinking_token_budget" if self.max_thinking_tokens is None else "max_thinking_tokens"
        )

    @property
    def tells_reasoning(self) -> bool:
        """Always: there is a place for it."""
        return True


class ChatCompletionRequest(ReasoningBody, GenerationBody):
    """POST /v1/chat/completions."""

    api: ClassVar[Api] = Api.CHAT

    messages: Messages
    max_completion_tokens: TokenCount | None = None
    logprobs: bool | None = None
    top_logprobs: Logprobs | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: TemplateArguments | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    functions: Functions | None = None
    function_call: FunctionChoice | None = None
    response_format: ResponseFormat | None = None
    modalities: list[Literal["text", "audio"]] | None = Field(None, max_length=2)
    moderation: JsonObject | None = None
    # What follows does not change the answer of this server.
    audio: JsonObject | None = None
    prediction: JsonObject | None = None
    web_search_options: JsonObject | None = None
    reasoning_effort: Name | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    store: bool | None = None
    safety_identifier: Name | None = None
    prompt_cache_key: Name | None = None
    prompt_cache_options: JsonObject | None = None
    prompt_cache_retention: Name | None = None

    @property
    def ignored(self) -> list[str]:
        """The fields that were sent and have no effect, those of messages included."""
        in_messages = {name for message in self.messages for name in message.ignored}
        return [*super().ignored, *(f"messages.{name}" for name in sorted(in_messages))]

    @property
    def num_logprobs(self) -> int | None:
        """How many likeliest tokens are listed beside each; None for no log-probabilities at all."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def num_prompt_logprobs(self) -> int | None:
        """The same beside each token of the prompt, also where that is echoed; None where prompts are not scored."""
        if self.prompt_logprobs is None and self.echo and not self.stream:
            return self.top_logprobs if self.logprobs else None
        return self.prompt_logprobs

    @property
    def asked_tokens(self) -> int | None:
        """`max_completion_tokens`, or its older name."""
        newer = self.max_completion_tokens
        return self.max_tokens if newer is None else newer

    @property
    def asked_tokens_field(self) -> str:
        """The one of the two that counts."""
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    @property
    def form_asked(self) -> AnswerForm | None:
        """The form of `response_format`."""
        return asked_form(self.response_format)

    @cached_property
    def callable_tools(self) -> CallableTools | None:
        """Those of `tools` that `tool_choice` leaves."""
        parallel = self.parallel_tool_calls is not False
        return callable_tools(self.tools, self.tool_choice, parallel=parallel)

    def as_conversation(self) -> Conversation:
        """The conversation. Tools that may not be called are not shown to the model, as in vLLM."""
        shown = self.tools if self.callable_tools is not None else None
        effort = self.reasoning_effort
        given = {} if effort is None else {"reasoning_effort": effort}
        return conversation_of(
            self.messages,
            add_generation_prompt=self.add_generation_prompt,
            continue_last=self.continue_final_message,
            arguments=given | (self.chat_template_kwargs or {}),
            add_special_tokens=bool(self.add_special_tokens),
            tools=[tool.model_dump(exclude_none=True) for tool in shown] if shown else None,
        )

    @model_validator(mode="after")
    def _check_chat(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise refusal("top_logprobs", "Only allowed together with logprobs.")
        if self.continue_final_message and self.add_generation_prompt:
            raise refusal("continue_final_message", "Not together with add_generation_prompt.")
        check_template_arguments(self.chat_template_kwargs)
        check_tools(self.tools, self.tool_choice)
        if self.callable_tools is not None and self.answer_form is not None:
            raise refusal(self.answer_form.param, "Not together with tools that may be called.")
        check_functions(self.functions, self.function_call)
        check_moderation(self.moderation)
        only("modalities", self.modalities, ["text"])
        return self


def check_moderation(moderation: JsonObject | None) -> None:
    """Refuses requests to hold texts back: this server does not moderate. Scores are advice, which may be missing.

    Raises:
        PydanticCustomError: Unsupported.
    """
    policy = (moderation or {}).get("policy")
    for side in policy.values() if isinstance(policy, dict) else ():
        if isinstance(side, dict):
            only("moderation", side.get("mode"), "score")


TokenPrompt = Annotated[Tokens, Field(min_length=1, max_length=MAX_PROMPT_TOKENS)]


class CompletionRequest(GenerationBody):
    """POST /v1/completions. A prompt is a text or a list of token ids; a list of either makes several prompts."""

    api: ClassVar[Api] = Api.COMPLETIONS

    prompt: (
        str
        | Annotated[list[str], Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True)]
        | TokenPrompt
        | Annotated[list[TokenPrompt], Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True)]
    )
    suffix: str | None = None
    logprobs: Logprobs | None = None
    best_of: int | None = Field(None, ge=0, le=MAX_CHOICES)
    response_format: ResponseFormat | None = None

    @property
    def form_asked(self) -> AnswerForm | None:
        """The form of `response_format`."""
        return asked_form(self.response_format)

    @property
    def prompts(self) -> list[str] | list[Sequence[int]]:
        """One entry per prompt: all texts, or all token ids."""
        prompt: Any = self.prompt
        return [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt

    @property
    def num_samples(self) -> int:
        """How many are drawn of each prompt: as many as there are to choose from."""
        return max(self.best_of or 1, self.n or 1)

    @property
    def num_samples_field(self) -> str:
        """The field that says so."""
        return "best_of" if (self.best_of or 1) > (self.n or 1) else "n"

    @property
    def prompt_field(self) -> str:
        """The field that holds what the model continues."""
        return "prompt"

    @property
    def default_tokens(self) -> int | None:
        """As OpenAI does it."""
        return DEFAULT_COMPLETION_TOKENS

    @property
    def num_logprobs(self) -> int | None:
        """How many likeliest tokens are listed beside each.
        The best of several that are drawn are chosen by their log-probabilities.
        """
        chooses = self.num_samples > (self.n or 1) and not self.use_beam_search
        return 0 if self.logprobs is None and chooses else self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        """How many likeliest tokens are listed beside each of the prompt; None where prompts are not scored."""
        echoed = self.logprobs if self.echo else None
        wanted = [count for count in (self.prompt_logprobs, echoed) if count is not None]
        return max(wanted, default=None)

    @model_validator(mode="after")
    def _check_choices(self) -> Self:
        if len(self.prompts) * self.num_samples > MAX_CHOICES:
            raise refusal("n", f"More than {MAX_CHOICES} choices over all prompts.")
        if self.best_of and self.best_of < (self.n or 1):
            raise refusal("best_of", "Less than n.")
        if self.stream and self.num_samples > (self.n or 1):
            raise refusal("best_of", "The best is not known before the end: not in a stream.")
        if self.suffix and not isinstance(self.prompt, str):
            raise unsupported("suffix", "Only with a single text as prompt.")
        return self
