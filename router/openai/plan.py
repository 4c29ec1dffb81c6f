"""From token ids and a checked body to the jobs that will be run: the last place where a request can be refused cheaply."""

from collections.abc import Sequence
from dataclasses import dataclass

from baton.errors import InvalidRequestError
from baton.generation import Prompt
from baton.hashing import narrow_scope
from baton.ids import RequestId
from baton.tokens import PackedTokens
from router.openai.choices import TextOptions
from router.openai.fields import MAX_PROMPT_LOGPROBS
from router.openai.jobs import JobRun
from router.openai.order import Order
from router.openai.requests import DrawingBody
from router.openai.sampling import TokenLimit, sampling_params
from router.openai.vocabulary import check_vocabulary
from router.ports import GenerationRequest, ServedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What is to be drawn of each prompt, in the terms of no endpoint in particular.

    Attributes:
        limit: Of the tokens.
        samples: How many.
        logprobs: How many likeliest tokens are listed beside each drawn one; None for no log-probabilities at all.
        prompt_logprobs: The same for the prompt's own tokens.
    """

    limit: TokenLimit
    samples: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None


def plan_runs(
    order: Order, body: DrawingBody, prompts: Sequence[Sequence[int]], wanted: Wanted
) -> list[JobRun]:
    """One job per prompt, with the choices numbered as OpenAI does: all of the first prompt, then the next.

    Raises:
        InvalidRequestError: A prompt is empty, too long for what is asked, or not of this model's vocabulary.
    """
    options = TextOptions(
        stops=body.stops,
        include_stop=bool(body.include_stop_str_in_output),
        min_tokens=body.min_tokens or 0,
        skip_special=body.skip_special_tokens is not False,
        silent=wanted.limit.asked == 0,
    )
    planned = [_prompt(order, body, tokens, wanted) for tokens in prompts]
    _check_scores(planned, wanted)
    jobs = [_job(order, body, prompt, number) for number, prompt in enumerate(planned)]
    return [
        JobRun(job, order.serving, options, number * wanted.samples)
        for number, job in enumerate(jobs)
    ]


def _prompt(order: Order, body: DrawingBody, tokens: Sequence[int], wanted: Wanted) -> Prompt:
    limit, model = wanted.limit, order.model
    tokens = _truncated(tokens, body.truncate_prompt_tokens, limit, model)
    if not tokens:
        raise InvalidRequestError("The prompt has no tokens.", param=limit.prompt_param)
    max_tokens = limit.resolve(len(tokens), model)
    packed = PackedTokens.of(tokens)
    check_vocabulary(packed, model, limit.prompt_param)
    return Prompt(
        prompt_tokens=packed,
        samples=tuple(range(wanted.samples)),
        sampling=sampling_params(
            body,
            order.serving.defaults,
            model,
            max_tokens=max_tokens,
            logprobs=wanted.logprobs,
            prompt_logprobs=wanted.prompt_logprobs,
        ),
        cache_scope=narrow_scope(order.tenant.cache_scope, body.cache_salt),
        tenant=order.tenant.tenant_id,
    )


def _truncated(
    tokens: Sequence[int], keep: int | None, limit: TokenLimit, model: ServedModel
) -> Sequence[int]:
    """The last `keep` tokens; -1 keeps what the context holds beside the output that is asked for."""
    if keep is None:
        return tokens
    if keep < 0:
        keep = max(1, model.max_model_len - max(1, limit.asked or limit.default or 1))
    return tokens[-keep:]


def _check_scores(prompts: Sequence[Prompt], wanted: Wanted) -> None:
    """All figures about a prompt wait for its last token: there may not be too many."""
    if wanted.prompt_logprobs is None:
        return
    figures = sum(len(p.prompt_tokens) for p in prompts) * (1 + wanted.prompt_logprobs)
    if figures > MAX_PROMPT_LOGPROBS:
        raise InvalidRequestError(
            f"prompt_logprobs: at most {MAX_PROMPT_LOGPROBS} figures about prompt tokens, this asks for {figures}.",
            param="prompt_logprobs",
        )


def _job(order: Order, body: DrawingBody, prompt: Prompt, number: int) -> GenerationRequest:
    """The first job has the request's own id, those after it a number besides."""
    request_id = order.head.request_id
    return GenerationRequest(
        request_id=RequestId(f"{request_id}-{number}") if number else request_id,
        prompt=prompt,
        deadline_s=order.serving.request_timeout_s,
        tenant=order.tenant,
        session=body.user or "",
        slo=order.slo,
    )
