"""A request that may be worked on: its tenant, its class of service, its model; and the generation requests that it becomes.

Every endpoint that generates accepts a request (`RequestPlanner.accept`), makes token ids of what it was sent
(`router.generation.prompt_encoder`), plans what is generated (`RequestPlanner.plan`) and replies with it (`router.generation.responder`).
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from starlette.requests import Request

from baton.errors import InvalidRequestError
from baton.generation import Prompt
from baton.hashing import narrow_scope
from baton.ids import RequestId, new_request_id
from baton.tokens import PackedTokens
from router.generation.grammars import GrammarChecker
from router.generation.model_catalog import ModelCatalog
from router.generation.model_limits import check_vocabulary
from router.generation.sampling import SamplingBody, SamplingDefaults, sampling_params
from router.http.account import RequestAccount, account_of
from router.http.fields import MAX_PROMPT_LOGPROBS
from router.ports import GenerationRequest, Generator, ServedModel
from router.slo import Slo, SloClasses
from router.telemetry.metrics import RouterMetrics

_BYTES_PER_TOKEN = 4
"""In a body, about."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestContext:
    """One request whose body has been read, and which may be worked on.

    Attributes:
        account: The tenant that pays, what it has used, and the name by which its client asked for the model.
        request_id: What its reply is called.
        created: When it was taken, Unix time; every reply and every chunk says it.
        slo: The class that it is served in.
        model: What the workers hold.
        grammar: What the answer must follow; empty for anything.
    """

    account: RequestAccount
    request_id: RequestId
    created: int
    slo: Slo
    model: ServedModel
    grammar: str = ""


class RequestPlanner:
    """Accepts requests, or refuses them, before their prompt is looked at; and plans what is generated for them after.

    Args:
        catalog: The served model.
        generator: Knows whether there is room for another request.
        slo_classes: The classes of service.
        metrics: Counts refusals.
        defaults: How tokens are drawn where a request says nothing.
        grammars: Checks the forms of answers.
        timeout_s: Deadline of a request.
    """

    def __init__(
        self,
        catalog: ModelCatalog,
        generator: Generator,
        slo_classes: SloClasses,
        metrics: RouterMetrics,
        defaults: SamplingDefaults,
        grammars: GrammarChecker,
        *,
        timeout_s: float,
    ) -> None:
        self._catalog = catalog
        self._generator = generator
        self._slo_classes = slo_classes
        self._metrics = metrics
        self._defaults = defaults
        self._grammars = grammars
        self._timeout_s = timeout_s

    async def accept(self, request: Request, body: SamplingBody, id_prefix: str) -> RequestContext:
        """The context of a request, whose reply's id begins with `id_prefix`. What can be refused without looking at the prompt
        is refused here, before it costs anything.

        Raises:
            ModelNotFoundError: The model is unknown, or not for this tenant.
            InvalidRequestError: The tier is not for this tenant, or no answer can have the form that is asked for.
            RateLimitedError: The tenant has no tokens left.
            OverloadedError: Too many are waiting.
            UnavailableError: No worker has said in time what it holds, or the router stops.
        """
        account = account_of(request)
        self._catalog.require_name(body.model, account)
        slo = self._slo_classes.chosen(
            account.tenant.slo_class, service_tier=body.service_tier, priority=body.priority or 0
        )
        with self._metrics.counting_refusals(account.tenant.tenant_class):
            wanted = body.default_tokens if body.asked_tokens is None else body.asked_tokens
            account.require_tokens(_prompt_tokens(request), wanted)
            self._generator.check_capacity(account.tenant, slo)
            grammar = await self._grammars.text_of(body.answer_form, account.tenant.tenant_id)
        return RequestContext(
            account=account,
            request_id=new_request_id(id_prefix),
            created=int(time.time()),
            slo=slo,
            model=await self._catalog.require_model(),
            grammar=grammar,
        )

    def plan(
        self,
        context: RequestContext,
        body: SamplingBody,
        prompts: Sequence[Sequence[int]],
        bad_words: Sequence[tuple[int, ...]] = (),
    ) -> list[GenerationRequest]:
        """One generation request per prompt: the last place where a request can be refused cheaply.

        Args:
            context: The request.
            body: Its body.
            prompts: Token ids.
            bad_words: The body's, as tokens.

        Raises:
            InvalidRequestError: A prompt is empty, too long for what is asked, or not of this model's vocabulary.
        """
        planned = [self._prompt(context, body, tokens, bad_words) for tokens in prompts]
        _check_scores(planned, body.num_prompt_logprobs)
        return [
            GenerationRequest(
                # The first one has the HTTP request's own id, those after it a number besides.
                request_id=RequestId(f"{context.request_id}-{number}")
                if number
                else context.request_id,
                prompt=prompt,
                timeout_s=self._timeout_s,
                tenant=context.account.tenant,
                session=body.session_id or body.user or "",
                slo=context.slo,
            )
            for number, prompt in enumerate(planned)
        ]

    def _prompt(
        self,
        context: RequestContext,
        body: SamplingBody,
        tokens: Sequence[int],
        bad_words: Sequence[tuple[int, ...]],
    ) -> Prompt:
        model, tenant = context.model, context.account.tenant
        tokens = _truncated(tokens, body, model)
        if not tokens:
            raise InvalidRequestError("The prompt has no tokens.", param=body.prompt_field)
        sampling = sampling_params(
            body,
            self._defaults,
            model,
            prompt_tokens=len(tokens),
            bad_words=bad_words,
            grammar=context.grammar,
        )
        packed = PackedTokens.of(tokens)
        check_vocabulary(packed, model, body.prompt_field)
        return Prompt(
            prompt_tokens=packed,
            samples=tuple(range(body.num_samples)),
            sampling=sampling,
            cache_scope=narrow_scope(tenant.cache_scope, body.cache_salt),
            tenant=tenant.tenant_id,
        )


def _prompt_tokens(request: Request) -> int:
    """About so many tokens the prompt has, by the length of the body."""
    length = request.headers.get("content-length", "")
    return int(length) // _BYTES_PER_TOKEN if length.isdecimal() else 1


def _truncated(tokens: Sequence[int], body: SamplingBody, model: ServedModel) -> Sequence[int]:
    """The last `truncate_prompt_tokens`, or the first where the prompt is to lose its end; -1 keeps what the model's length leaves
    beside the output that is asked for.
    """
    keep = body.truncate_prompt_tokens
    if keep is None:
        return tokens
    if keep < 0:
        keep = max(1, model.max_model_len - max(1, body.asked_tokens or body.default_tokens or 1))
    return tokens[:keep] if body.truncation_side == "right" else tokens[-keep:]


def _check_scores(prompts: Sequence[Prompt], prompt_logprobs: int | None) -> None:
    """All figures about a prompt wait for its last token: there may not be too many."""
    if prompt_logprobs is None:
        return
    figures = sum(len(p.prompt_tokens) for p in prompts) * (1 + prompt_logprobs)
    if figures > MAX_PROMPT_LOGPROBS:
        raise InvalidRequestError(
            f"prompt_logprobs: at most {MAX_PROMPT_LOGPROBS} figures about prompt tokens, this asks for {figures}.",
            param="prompt_logprobs",
        )
