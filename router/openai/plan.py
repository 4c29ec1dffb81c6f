"""From token ids and a checked body to the jobs that will be run: the last place where a request can be refused cheaply."""

from collections.abc import Sequence

from baton.errors import InvalidRequestError
from baton.generation import Prompt
from baton.hashing import narrow_scope
from baton.ids import RequestId
from router.openai.choices import TextOptions
from router.openai.jobs import JobRun
from router.openai.requests import GenerationBody
from router.openai.sampling import TokenLimit, sampling_params
from router.openai.serving import Serving
from router.openai.vocabulary import check_vocabulary
from router.ports import GenerationJob, ServedModel
from router.slo import Slo
from router.tenants.tenant import Tenant


def plan_runs(
    serving: Serving,
    body: GenerationBody,
    prompts: Sequence[Sequence[int]],
    *,
    tenant: Tenant,
    model: ServedModel,
    request_id: RequestId,
    limit: TokenLimit,
    logprobs: int | None,
) -> list[JobRun]:
    """One job per prompt, with the choices numbered as OpenAI does: all of the first prompt, then the next.

    Raises:
        InvalidRequestError: A prompt is empty, too long for what is asked, or not of this model's vocabulary; or the tier
            is not for this tenant.
    """
    options = TextOptions(
        stops=body.stops,
        include_stop=bool(body.include_stop_str_in_output),
        min_tokens=body.min_tokens or 0,
    )
    planned = [_prompt(serving, body, tokens, tenant, model, limit, logprobs) for tokens in prompts]
    slo = serving.slo_book.chosen(
        tenant.slo_class, service_tier=body.service_tier, priority=body.priority or 0
    )
    return [
        JobRun(
            _job(serving, prompt, tenant, slo, request_id, number),
            serving,
            options,
            number * (body.n or 1),
        )
        for number, prompt in enumerate(planned)
    ]


def _prompt(
    serving: Serving,
    body: GenerationBody,
    tokens: Sequence[int],
    tenant: Tenant,
    model: ServedModel,
    limit: TokenLimit,
    logprobs: int | None,
) -> Prompt:
    if not tokens:
        raise InvalidRequestError("The prompt has no tokens.", param=limit.prompt_param)
    max_tokens = limit.resolve(len(tokens), model)
    check_vocabulary(tokens, model, limit.prompt_param)
    return Prompt(
        prompt_tokens=tuple(tokens),
        samples=tuple(range(body.n or 1)),
        sampling=sampling_params(
            body, serving.defaults, model, max_tokens=max_tokens, logprobs=logprobs
        ),
        cache_scope=narrow_scope(tenant.cache_scope, body.cache_salt),
    )


def _job(
    serving: Serving, prompt: Prompt, tenant: Tenant, slo: Slo, request_id: RequestId, number: int
) -> GenerationJob:
    """The first job has the request's own id, those after it a number besides."""
    return GenerationJob(
        request_id=RequestId(f"{request_id}-{number}") if number else request_id,
        prompt=prompt,
        deadline_s=serving.request_timeout_s,
        tenant=tenant,
        slo=slo,
    )
