"""A request that may be worked on: its tenant, its class of service, its model; and the generation requests that it becomes.

Every endpoint that generates takes a request (`RequestPlanner.take`), makes token ids of what it was sent
(`router.openai.prompt`), plans what is generated (`RequestPlanner.plan`) and replies with it (`router.openai.respond`).
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
from router.openai.model_limits import TokenLimit, check_vocabulary
from router.openai.models import ModelCatalog
from router.openai.requests import DrawingBody
from router.openai.sampling import SamplingDefaults, sampling_params
from router.ports import GenerationRequest, Generator, ServedModel
from router.slo import Slo, SloBook
from router.telemetry.metrics import RouterMetrics
from router.tenants.tenant import Tenant

_BYTES_PER_TOKEN = 4
"""In a body, about."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestContext:
    """One request whose body has been read, and which may be worked on.

    Attributes:
        account: The tenant that pays, and what it has used.
        request_id: What its reply is called.
        created: When it was taken, Unix time; every reply and every chunk says it.
        name: The name by which its client asked for the model; said again too.
        limit: How many tokens it wants.
        slo: The class that it is served in.
        model: What the workers hold.
    """

    account: RequestAccount
    request_id: RequestId
    created: int
    name: str
    limit: TokenLimit
    slo: Slo
    model: ServedModel

    @property
    def tenant(self) -> Tenant:
        """The tenant that pays."""
        return self.account.tenant

    def event_head(self, kind: str) -> bytes:
        """The beginning of a stream's event, up to and without its `choices`."""
        fields = {"id": self.request_id, "object": kind, "created": self.created}
        return b"data: " + msgspec.json.encode(fields | {"model": self.name})[:-1]


class RequestPlanner:
    """Takes requests, or refuses them, before their prompt is looked at; and plans what is generated for them after.

    Args:
        catalog: The served model.
        generator: Knows whether there is room for another request.
        slo_book: The classes of service.
        metrics: Counts refusals.
        defaults: How tokens are drawn where a request says nothing.
        timeout_s: Deadline of a request.
    """

    def __init__(
        self,
        catalog: ModelCatalog,
        generator: Generator,
        slo_book: SloBook,
        metrics: RouterMetrics,
        defaults: SamplingDefaults,
        *,
        timeout_s: float,
    ) -> None:
        self._catalog = catalog
        self._generator = generator
        self._slo_book = slo_book
        self._metrics = metrics
        self._defaults = defaults
        self._timeout_s = timeout_s

    async def take(
        self, request: Request, body: DrawingBody, limit: TokenLimit, kind: str
    ) -> RequestContext:
        """The context of a request, whose reply's id begins with `kind`. What can be refused without looking at the prompt
        is refused here, before it costs anything.

        Raises:
            ModelNotFoundError: The model is not named, unknown, or not for this tenant.
            InvalidRequestError: The tier is not for this tenant.
            RateLimitedError: The tenant has no tokens left.
            OverloadedError: Too many are waiting.
            UnavailableError: No worker has said in time what it holds, or the router stops.
        """
        account = account_of(request)
        name = self._catalog.require_name(body.model, account)
        slo = self._slo_book.chosen(
            account.tenant.slo_class, service_tier=body.service_tier, priority=body.priority or 0
        )
        with self._metrics.counting_refusals(account.tenant.tenant_class):
            account.require_tokens(_prompt_tokens(request), limit.wanted)
            self._generator.check_capacity(account.tenant, slo)
        return RequestContext(
            account=account,
            request_id=new_request_id(kind),
            created=int(time.time()),
            name=name,
            limit=limit,
            slo=slo,
            model=await self._catalog.require_model(),
        )

    def plan(
        self,
        context: RequestContext,
        body: DrawingBody,
        prompts: Sequence[Sequence[int]],
        *,
        samples: int = 1,
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
    ) -> list[GenerationRequest]:
        """One generation request per prompt: the last place where a request can be refused cheaply.

        Args:
            context: The request.
            body: Its body.
            prompts: Token ids.
            samples: How many are drawn of each prompt.
            logprobs: How many likeliest tokens are listed beside each drawn one; None for no log-probabilities at all.
            prompt_logprobs: The same for the prompt's own tokens.

        Raises:
            InvalidRequestError: A prompt is empty, too long for what is asked, or not of this model's vocabulary.
        """
        planned = [
            self._prompt(context, body, tokens, samples, logprobs, prompt_logprobs)
            for tokens in prompts
        ]
        _check_scores(planned, prompt_logprobs)
        return [
            GenerationRequest(
                # The first one has the HTTP request's own id, those after it a number besides.
                request_id=RequestId(f"{context.request_id}-{number}")
                if number
                else context.request_id,
                prompt=prompt,
                timeout_s=self._timeout_s,
                tenant=context.tenant,
                session=body.user or "",
                slo=context.slo,
            )
            for number, prompt in enumerate(planned)
        ]

    def _prompt(
        self,
        context: RequestContext,
        body: DrawingBody,
        tokens: Sequence[int],
        samples: int,
        logprobs: int | None,
        prompt_logprobs: int | None,
    ) -> Prompt:
        limit, model = context.limit, context.model
        tokens = _truncated(tokens, body.truncate_prompt_tokens, limit, model)
        if not tokens:
            raise InvalidRequestError("The prompt has no tokens.", param=limit.prompt_param)
        max_tokens = limit.resolve(len(tokens), model)
        packed = PackedTokens.of(tokens)
        check_vocabulary(packed, model, limit.prompt_param)
        return Prompt(
            prompt_tokens=packed,
            samples=tuple(range(samples)),
            sampling=sampling_params(
                body,
                self._defaults,
                model,
                max_tokens=max_tokens,
                logprobs=logprobs,
                prompt_logprobs=prompt_logprobs,
            ),
            cache_scope=narrow_scope(context.tenant.cache_scope, body.cache_salt),
            tenant=context.tenant.tenant_id,
        )


def _prompt_tokens(request: Request) -> int:
    """About so many tokens the prompt has, by the length of the body."""
    length = request.headers.get("content-length", "")
    return int(length) // _BYTES_PER_TOKEN if length.isdecimal() else 1


def _truncated(
    tokens: Sequence[int], keep: int | None, limit: TokenLimit, model: ServedModel
) -> Sequence[int]:
    """The last `keep` tokens; -1 keeps what the model's length leaves beside the output that is asked for."""
    if keep is None:
        return tokens
    if keep < 0:
        keep = max(1, model.max_model_len - max(1, limit.asked or limit.default or 1))
    return tokens[-keep:]


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
