"""How tokens are drawn, out of a request, the model's own defaults and what its context leaves."""

import json
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from baton.errors import InvalidRequestError, ModelLoadError
from baton.generation import SamplingParams
from router.openai.model_limits import check_vocabulary
from router.openai.requests import DrawingBody
from router.ports import ServedModel

_SEED_MASK = 2**64 - 1
_Number = TypeVar("_Number", int, float)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingDefaults:
    """What holds where a request says nothing."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    repetition_penalty: float = 1.0


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
    request: DrawingBody,
    defaults: SamplingDefaults,
    model: ServedModel,
    *,
    max_tokens: int,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
) -> SamplingParams:
    """The engine's parameters. A request without a seed gets one here, so that every retry draws the same tokens.

    At least one token is drawn, also where none is wanted: a prompt's scores come with it.

    Raises:
        InvalidRequestError: A token id outside the vocabulary, or more tokens at least than at most.
    """
    logit_bias = request.biases
    stop_token_ids = tuple(request.stop_token_ids or ())
    check_vocabulary(logit_bias, model, "logit_bias")
    check_vocabulary(stop_token_ids, model, "stop_token_ids")
    min_tokens = request.min_tokens or 0
    if min_tokens > max_tokens:
        raise InvalidRequestError(
            f"min_tokens is {min_tokens}, at most {max_tokens} can be generated.",
            param="min_tokens",
        )
    seed = secrets.randbits(63) if request.seed is None else request.seed & _SEED_MASK
    return SamplingParams(
        temperature=_or(request.temperature, defaults.temperature),
        top_k=max(0, _or(request.top_k, defaults.top_k)),
        top_p=_or(request.top_p, defaults.top_p),
        min_p=request.min_p or 0.0,
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        repetition_penalty=_or(request.repetition_penalty, defaults.repetition_penalty),
        seed=seed,
        logit_bias=logit_bias,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        stop_token_ids=stop_token_ids,
        max_tokens=max(1, max_tokens),
        min_tokens=min_tokens,
        ignore_eos=bool(request.ignore_eos),
    )


def _or(value: _Number | None, default: _Number) -> _Number:
    return default if value is None else value
