"""A request that may be worked on: its tenant, its class of service, its model; and the jobs that it becomes.

Every endpoint that generates takes a request (`take_request`), makes token ids of what it was sent (`router.openai.prompt`),
plans jobs for them (`plan_runs`) and replies with what they generate (`router.openai.respond`).
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
from starlette.requests import Request

from baton.errors import InvalidRequestError
from baton.generation import Prompt
from baton.hashing import narrow_scope
from baton.ids import RequestId, new_request_id
from baton.tokens import PackedTokens
from router.http.account import RequestAccount, account_of
from router.http.fields import MAX_PROMPT_LOGPROBS
from router.openai.job_run import JobRun, TextOptions
from router.openai.model_limits import TokenLimit, check_vocabulary
from router.openai.requests import DrawingBody
from router.openai.sampling import sampling_params
from router.openai.serving import Serving
from router.ports import GenerationRequest, ServedModel
from router.slo import Slo
from router.tenants.tenant import Tenant

_BYTES_PER_TOKEN = 4
"""In a body, about."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyHead:
    """What every reply and every chunk of one request repeats."""

    request_id: RequestId
    created: int
    model: str

    def as_json(self, kind: str) -> bytes:
        """The beginning of an event's JSON object, up to and without its `choices`."""
        fields = {"id": self.request_id, "object": kind, "created": self.created}
        return b"data: " + msgspec.json.encode(fields | {"model": self.model})[:-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestContext:
    """One request, and what working on it takes.

    Attributes:
        serving: What all requests share.
        account: The request's own account.
        head: What its reply is called.
        slo: The class that it is served in.
        model: What the workers hold.
    """

    serving: Serving
    account: RequestAccount
    head: ReplyHead
    slo: Slo
    model: ServedModel

    @property
    def tenant(self) -> Tenant:
        """Who pays."""
        return self.account.tenant


async def take_request(
    request: Request, serving: Serving, body: DrawingBody, limit: TokenLimit, kind: str
) -> RequestContext:
    """The context of a request, whose reply's id begins with `kind`. What can be refused without looking at the prompt is
    refused here, before it costs anything.

    Raises:
        ModelNotFoundError: The model is not named, unknown, or not for this tenant.
        InvalidRequestError: The tier is not for this tenant.
        RateLimitedError: The tenant has no tokens left.
        OverloadedError: Too many are waiting.
        UnavailableError: No worker has said in time what it holds, or the router stops.
    """
    account = account_of(request)
    name = serving.require_name(body.model, account)
    slo = serving.slo_book.chosen(
        account.tenant.slo_class, service_tier=body.service_tier, priority=body.priority or 0
    )
    with serving.refusals_counted(account):
        account.require_tokens(_prompt_tokens(request), limit.wanted)
        serving.generator.check_capacity(account.tenant, slo)
    head = ReplyHead(request_id=new_request_id(kind), created=int(time.time()), model=name)
    model = await serving.require_model()
    return RequestContext(serving=serving, account=account, head=head, slo=slo, model=model)


def _prompt_tokens(request: Request) -> int:
    """About so many tokens the prompt has, by the length of the body."""
    length = request.headers.get("content-length", "")
    return int(length) // _BYTES_PER_TOKEN if length.isdecimal() else 1


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
    context: RequestContext, body: DrawingBody, prompts: Sequence[Sequence[int]], wanted: Wanted
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
    planned = [_prompt(context, body, tokens, wanted) for tokens in prompts]
    _check_scores(planned, wanted)
    jobs = [_job(context, body, prompt, number) for number, prompt in enumerate(planned)]
    return [
        JobRun(job, context.serving, options, number * wanted.samples)
        for number, job in enumerate(jobs)
    ]


def _prompt(
    context: RequestContext, body: DrawingBody, tokens: Sequence[int], wanted: Wanted
) -> Prompt:
    limit, model = wanted.limit, context.model
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
            context.serving.defaults,
            model,
            max_tokens=max_tokens,
            logprobs=wanted.logprobs,
            prompt_logprobs=wanted.prompt_logprobs,
        ),
        cache_scope=narrow_scope(context.tenant.cache_scope, body.cache_salt),
        tenant=context.tenant.tenant_id,
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


def _job(
    context: RequestContext, body: DrawingBody, prompt: Prompt, number: int
) -> GenerationRequest:
    """The first job has the request's own id, those after it a number besides."""
    request_id = context.head.request_id
    return GenerationRequest(
        request_id=RequestId(f"{request_id}-{number}") if number else request_id,
        prompt=prompt,
        deadline_s=context.serving.request_timeout_s,
        tenant=context.tenant,
        session=body.user or "",
        slo=context.slo,
    )
