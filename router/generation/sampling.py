"""How tokens are drawn: what a client asks for, what the model's files recommend,
and what the engine is given of both.
"""

import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal, Self, TypeVar

import msgspec
from pydantic import Field, model_validator

from baton.errors import InvalidRequestError, ModelLoadError, PromptTooLongError
from baton.generation import BeamSearchParams, SamplingParams
from baton.tokens import PackedTokens
from router.generation.answer_form import (
    AnswerForm,
    CallableTools,
    Choices,
    StructuredOutputs,
)
from router.generation.model_limits import check_vocabulary
from router.http.fields import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BEAM_FIGURES,
    MAX_LOGIT_BIAS,
    MAX_STOP_TOKEN_IDS,
    MAX_STREAM_INTERVAL,
    BadWords,
    Body,
    JsonObject,
    Metadata,
    Name,
    StopString,
    StopStrings,
    TokenCount,
    Tokens,
    refusal,
)
from router.ports import ServedModel

_SEED_MASK = 2**64 - 1
_LEAST_REPETITION, _MOST_REPETITION = 0.01, 100.0
"""Scores are divided by it in float32: by one much closer to 0 they would not be finite."""

_Number = TypeVar("_Number", int, float)


class SamplingBody(Body):
    """The body of any request that is answered with tokens of the model: how they are drawn, and when that ends."""

    model: str | None = None
    stream: bool | None = None
    stream_interval: int | None = Field(None, ge=1, le=MAX_STREAM_INTERVAL)
    stop: StopString | StopStrings | None = None
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, lt=2**31)
    min_p: float | None = Field(None, ge=0, le=1)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, ge=_LEAST_REPETITION, le=_MOST_REPETITION)
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = Field(
        None, max_length=MAX_LOGIT_BIAS
    )
    min_tokens: TokenCount | None = None
    allowed_token_ids: Tokens | None = Field(None, min_length=1, max_length=MAX_ALLOWED_TOKEN_IDS)
    bad_words: BadWords | None = None
    stop_token_ids: Tokens | None = Field(None, max_length=MAX_STOP_TOKEN_IDS)
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = Field(None, ge=-1, lt=2**31)
    truncation_side: Literal["left", "right"] | None = None
    cache_salt: str | None = Field(None, min_length=1)
    priority: int | None = Field(None, ge=-(2**31), lt=2**31)
    user: Name | None = None
    session_id: Name | None = None
    metadata: Metadata | None = None
    service_tier: str | None = Field(None, min_length=1, max_length=64)
    structured_outputs: StructuredOutputs | None = None
    guided_json: JsonObject | str | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None

    @property
    def form_asked(self) -> AnswerForm | None:
        """The form that the answer is to have by the field of this API; None for plain text."""
        return None

    @property
    def answer_form(self) -> AnswerForm | None:
        """The form that the answer is to have, by whichever field."""
        forms = self._forms()
        return forms[0] if forms else None

    def _forms(self) -> list[AnswerForm]:
        forms = [] if self.form_asked is None else [self.form_asked]
        if self.structured_outputs is not None:
            forms += self.structured_outputs.forms()
        for kind in ("json", "regex", "choice", "grammar"):
            value = getattr(self, f"guided_{kind}")
            if value is not None:
                forms.append(AnswerForm(kind=kind, value=value, param=f"guided_{kind}"))
        return forms

    @cached_property
    def callable_tools(self) -> CallableTools | None:
        """Tools that the answer may call; None where it may call none."""
        return None

    @property
    def most_thinking_tokens(self) -> int | None:
        """How many tokens the model may think at most, if that is said."""
        return None

    @property
    def thinking_field(self) -> str:
        """The field that says it."""
        return "max_thinking_tokens"

    @property
    def tells_reasoning(self) -> bool:
        """Whether replies tell reasoning apart from the answer."""
        return False

    @property
    def prompt_field(self) -> str:
        """The field that holds what the model continues."""
        return "messages"

    @property
    def num_samples(self) -> int:
        """How many are drawn of each prompt."""
        return 1

    @property
    def num_samples_field(self) -> str:
        """The field that says so."""
        return "n"

    @property
    def num_logprobs(self) -> int | None:
        """How many likeliest tokens are listed beside each drawn one; None for no log-probabilities at all."""
        return None

    @property
    def num_prompt_logprobs(self) -> int | None:
        """The same beside each token of the prompt; None where prompts are not scored."""
        return None

    @property
    def beam_search(self) -> BeamSearchParams | None:
        """How the likeliest texts are searched for; None where tokens are drawn."""
        return None

    @property
    def asked_tokens(self) -> int | None:
        """How many tokens the client asks for at most. More than the context leaves are refused."""
        return None

    @property
    def asked_tokens_field(self) -> str:
        """The field that says it."""
        return "max_tokens"

    @property
    def default_tokens(self) -> int | None:
        """At most so many are generated where none are asked for, or what the context leaves;
        None for all that it leaves.
        """
        return None

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def served_tier(self) -> str | None:
        """The tier that the reply names; `auto` leaves the choice to the server and gets the default, and so does
        `standard_only`, of which OpenAI's clients know nothing.
        """
        return "default" if self.service_tier in ("auto", "standard_only") else self.service_tier

    @cached_property
    def allowed(self) -> PackedTokens:
        """`allowed_token_ids`, each once and ascending; empty for all."""
        return PackedTokens.of(sorted(set(self.allowed_token_ids or ())))

    @property
    def biases(self) -> dict[int, float]:
        """`logit_bias` by token id. A bias of 0 has no effect, on any token."""
        return {int(token): bias for token, bias in (self.logit_bias or {}).items() if bias}

    @model_validator(mode="after")
    def _check_drawing(self) -> Self:
        for token, bias in (self.logit_bias or {}).items():
            if bias and not (token.isascii() and token.isdecimal() and len(token) < 11):
                raise refusal("logit_bias", f"{token[:20]!r} is not a token id.")
        forms = self._forms()
        if len(forms) > 1:
            raise refusal(forms[1].param, f"Not together with {forms[0].param}.")
        if forms and self.allowed_token_ids:
            raise refusal("allowed_token_ids", f"Not together with {forms[0].param}.")
        if self.truncate_prompt_tokens == 0:
            raise refusal("truncate_prompt_tokens", "Leaves nothing of the prompt.")
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingDefaults:
    """What holds where a request says nothing."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[
        float, msgspec.Meta(ge=_LEAST_REPETITION, le=_MOST_REPETITION)
    ] = 1.0


def read_defaults(directory: Path) -> SamplingDefaults:
    """The model's recommendations from its generation_config.json, which vLLM's users expect to be applied.

    Raises:
        ModelLoadError: The file is there and is not what it should be.
    """
    path = directory / "generation_config.json"
    if not path.is_file():
        return SamplingDefaults()
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        known = {
            k: v for k, v in stored.items() if k in SamplingDefaults.__slots__ and v is not None
        }
        return msgspec.convert(known, SamplingDefaults)
    except (ValueError, AttributeError, msgspec.ValidationError) as error:
        raise ModelLoadError(f"{path} cannot be read: {error}") from error


def sampling_params(
    body: SamplingBody,
    defaults: SamplingDefaults,
    model: ServedModel,
    *,
    prompt_tokens: int,
    bad_words: Sequence[tuple[int, ...]] = (),
    stop_ids: tuple[int, ...] = (),
    grammar: str = "",
) -> SamplingParams:
    """The engine's parameters. A request without a seed gets one here, so that every retry draws the same tokens.

    At least one token is drawn, also where none is wanted: a prompt's scores come with it. `bad_words` are the body's,
    as tokens. `stop_ids` end the model's turn, unless the client wants it to go on (`ignore_eos`).

    Raises:
        PromptTooLongError: The prompt's tokens leave no room, or not as much as is asked for.
        InvalidRequestError: A token id outside the vocabulary, none left of those that are allowed, more tokens at
            least than at most, or more than a beam search may find.
    """
    max_tokens = _max_tokens(body, model, prompt_tokens)
    if body.beam_search is not None:
        return _beam_search(body, body.beam_search, max_tokens, grammar)
    logit_bias = body.biases
    stop_token_ids = tuple(body.stop_token_ids or ())
    check_vocabulary(logit_bias, model, "logit_bias")
    check_vocabulary(stop_token_ids, model, "stop_token_ids")
    check_vocabulary(body.allowed, model, "allowed_token_ids")
    banned = {word[0] for word in bad_words if len(word) == 1}
    if 0 < len(body.allowed) <= len(banned) and banned.issuperset(body.allowed):
        raise InvalidRequestError(
            "bad_words: none of allowed_token_ids is left.", param="bad_words"
        )
    min_tokens = body.min_tokens or 0
    if min_tokens > max_tokens:
        raise InvalidRequestError(
            f"min_tokens is {min_tokens}, at most {max_tokens} can be generated.",
            param="min_tokens",
        )
    seed = secrets.randbits(63) if body.seed is None else body.seed & _SEED_MASK
    return SamplingParams(
        temperature=_or(body.temperature, defaults.temperature),
        top_k=max(0, _or(body.top_k, defaults.top_k)),
        top_p=_or(body.top_p, defaults.top_p),
        min_p=_or(body.min_p, defaults.min_p),
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repetition_penalty=_or(body.repetition_penalty, defaults.repetition_penalty),
        seed=seed,
        logit_bias=logit_bias,
        logprobs=body.num_logprobs,
        prompt_logprobs=body.num_prompt_logprobs,
        stop_token_ids=stop_token_ids if body.ignore_eos else (*stop_token_ids, *stop_ids),
        max_tokens=max(1, max_tokens),
        min_tokens=min_tokens,
        ignore_eos=bool(body.ignore_eos),
        allowed_token_ids=body.allowed,
        bad_words=tuple(bad_words),
        grammar=grammar,
    )


def _beam_search(
    body: SamplingBody, asked: BeamSearchParams, max_tokens: int, grammar: str
) -> SamplingParams:
    """What the engine is asked where nothing is drawn. All texts are told at their end: their size is bounded."""
    if grammar:
        raise InvalidRequestError(
            "use_beam_search: Not where the answer has a form.", param="use_beam_search"
        )
    figures = 1 if body.num_logprobs is None else 2 + body.num_logprobs
    most = MAX_BEAM_FIGURES // (figures * body.num_samples)
    field = body.asked_tokens_field
    if body.asked_tokens is not None and max_tokens > most:
        raise InvalidRequestError(
            f"{field}: {body.num_samples} beams may have {most} tokens each, with the log-probabilities that are asked for.",
            param=field,
        )
    return SamplingParams(
        temperature=0.0,
        logprobs=body.num_logprobs,
        prompt_logprobs=body.num_prompt_logprobs,
        max_tokens=max(1, min(max_tokens, most)),
        ignore_eos=bool(body.ignore_eos),
        beam_search=asked,
    )


def _max_tokens(body: SamplingBody, model: ServedModel, prompt_tokens: int) -> int:
    """Tokens to generate at most."""
    room = model.max_model_len - prompt_tokens
    length = f"This model's maximum context length is {model.max_model_len} tokens"
    if room < 1:
        raise PromptTooLongError(
            f"{length}, the prompt has {prompt_tokens}; no room is left for output.",
            param=body.prompt_field,
        )
    asked, default = body.asked_tokens, body.default_tokens
    if asked is None:
        return room if default is None else min(room, default)
    if asked > room:
        field = body.asked_tokens_field
        raise PromptTooLongError(
            f"{length}, the prompt has {prompt_tokens} and {field} asks for {asked}.", param=field
        )
    return asked


def _or(value: _Number | None, default: _Number) -> _Number:
    return default if value is None else value
