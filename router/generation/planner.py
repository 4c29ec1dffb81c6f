"""A request that may be worked on: its tenant, its class of service, its model;
and the generation requests that it becomes.

Every endpoint that generates accepts a request (`RequestPlanner.accept`), makes token ids of what it was sent
(`router.generation.prompt_encoder`) while the form of the answer is checked (`RequestPlanner.check_form_beside`), plans
what is generated (`RequestPlanner.plan`) and replies with it (`router.generation.responder`).
"""

import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from starlette.requests import Request

from baton.errors import InvalidRequestError, UnsupportedParameterError
from baton.generation import Prompt
from baton.hashing import narrow_scope
from baton.ids import RequestId, new_request_id
from baton.tokens import PackedTokens
from router.generation.answer_form import CALL_SCHEMA, AnswerForm, CallableTools
from router.generation.grammars import GrammarChecker
from router.generation.model_catalog import ModelCatalog
from router.generation.model_limits import check_vocabulary
from router.generation.sampling import SamplingBody, SamplingDefaults, sampling_params
from router.http.account import RequestAccount, account_of
from router.http.fields import MAX_PROMPT_LOGPROBS, JsonObject
from router.http.streaming import while_connected
from router.parsing.output_format import OutputFormat
from router.ports import GenerationRequest, Generator, ServedModel
from router.slo import Slo, SloClasses
from router.telemetry.metrics import RouterMetrics

_BYTES_PER_TOKEN = 4
"""In a body, about."""

_T = TypeVar("_T")


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
        in_reasoning: Whether the prompt ends within the model's reasoning.
    """

    account: RequestAccount
    request_id: RequestId
    created: int
    slo: Slo
    model: ServedModel
    grammar: str = ""
    in_reasoning: bool = False


class RequestPlanner:
    """Accepts requests, or refuses them, before their prompt is looked at; and plans what is generated for them after.

    Args:
        catalog: The served model.
        generator: Knows whether there is room for another request.
        slo_classes: The classes of service.
        metrics: Counts refusals.
        defaults: How tokens are drawn where a request says nothing.
        grammars: Checks the forms of answers.
        output_format: How the model writes calls and reasoning.
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
        output_format: OutputFormat,
        *,
        timeout_s: float,
    ) -> None:
        self._catalog = catalog
        self._generator = generator
        self._slo_classes = slo_classes
        self._metrics = metrics
        self._defaults = defaults
        self._grammars = grammars
        self._output_format = output_format
        self._timeout_s = timeout_s

    async def accept(self, request: Request, body: SamplingBody, id_prefix: str) -> RequestContext:
        """The context of a request, whose reply's id begins with `id_prefix`. What can be refused without looking at
        the prompt is refused here, before it costs anything.

        Raises:
            ModelNotFoundError: The model is unknown, or not for this tenant.
            InvalidRequestError: The tier is not for this tenant.
            RateLimitedError: The tenant has no tokens left.
            OverloadedError: Too many are waiting.
            UnavailableError: No worker has said in time what it holds, or the router stops.
        """
        account = account_of(request)
        self._catalog.require_name(body.model, account)
        slo = self._slo_classes.chosen(
            account.tenant.slo_class, service_tier=body.service_tier, priority=body.priority or 0
        )
        _check_tools(body.callable_tools, self._output_format, self._grammars)
        _check_budget(body, self._output_format)
        with self._metrics.counting_refusals(account.tenant.tenant_class):
            wanted = body.default_tokens if body.asked_tokens is None else body.asked_tokens
            account.require_tokens(_prompt_tokens(request), wanted)
            self._generator.check_capacity(account.tenant, slo)
        return RequestContext(
            account=account,
            request_id=new_request_id(id_prefix),
            created=int(time.time()),
            slo=slo,
            model=await self._catalog.require_model(),
        )

    async def check_form_beside(
        self,
        request: Request,
        context: RequestContext,
        body: SamplingBody,
        encode: Callable[[], Coroutine[Any, Any, _T]],
    ) -> tuple[RequestContext, _T]:
        """Has the form that the answer must have checked while `encode` makes token ids of the prompt; a form that is
        known, or refused without a look at it, is so before that begins. `encode` is cancelled when the client goes
        away.

        Returns:
            The context with the form's grammar, and what `encode` returns.

        Raises:
            ClientGoneError: The client went away; `encode` has ended.
            BatonError: As `behind_prompt`, and as `encode`; where both fail, what is wrong with the form.
        """
        tenant = context.account.tenant
        with self._metrics.counting_refusals(tenant.tenant_class):
            check = self._grammars.begin(body.answer_form, tenant.tenant_id)
        grammar, encoded = await while_connected(
            request.receive, check.text_beside(encode), self._metrics.client_gone
        )
        return replace(context, grammar=grammar), encoded

    async def behind_prompt(
        self, context: RequestContext, body: SamplingBody, prompt_end: str
    ) -> RequestContext:
        """The context once it is known how the prompt ends: a model that begins within its reasoning is held to its
        form after that, and to the number of tokens that it may think; and to calls that are required.

        Raises:
            InvalidRequestError: No answer can have the form that is asked for.
            OverloadedError: Too many forms of this tenant are being checked.
            RateLimitedError: Checking this tenant's has taken too long of late.
        """
        in_reasoning = body.tells_reasoning and self._output_format.opens_reasoning(prompt_end)
        form = _form_behind(body, self._output_format, in_reasoning=in_reasoning)
        if form is None:
            return replace(context, in_reasoning=in_reasoning)
        with self._metrics.counting_refusals(context.account.tenant.tenant_class):
            grammar = await self._grammars.text_of(form, context.account.tenant.tenant_id)
        return replace(context, in_reasoning=in_reasoning, grammar=grammar)

    def truncated(
        self, context: RequestContext, body: SamplingBody, tokens: Sequence[int]
    ) -> Sequence[int]:
        """What of a prompt the model is given."""
        return _truncated(tokens, body, context.model)

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
        tokens = self.truncated(context, body, tokens)
        if not tokens:
            raise InvalidRequestError("The prompt has no tokens.", param=body.prompt_field)
        if body.num_samples > model.max_samples:
            field, most = body.num_samples_field, model.max_samples
            message = f"{field}: Workers run at most {most} samples of a prompt at once."
            raise InvalidRequestError(message, param=field)
        sampling = sampling_params(
            body,
            self._defaults,
            model,
            prompt_tokens=len(tokens),
            bad_words=bad_words,
            stop_ids=self._output_format.stop_ids if body.tells_reasoning else (),
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
            adapter=self._catalog.adapter_of(context.account.model),
        )


def _check_tools(
    tools: CallableTools | None, output_format: OutputFormat, grammars: GrammarChecker
) -> None:
    """Refuses tools that the model cannot call.

    Raises:
        InvalidRequestError: What calls are to be held to is no schema, takes no object, or is too large.
        UnsupportedParameterError: Its calls are not known, or it cannot be held to one.
    """
    if tools is None:
        return
    if output_format.tools is None:
        raise UnsupportedParameterError(
            "tools: this model's chat template writes no calls that this server knows (router.tool_call_parser).",
            param="tools",
        )
    if tools.strict and not tools.required and not output_format.can_hold:
        named = next(tool.name for tool in tools.tools if tool.strict)
        raise UnsupportedParameterError(
            f"tools.{named}.strict: a call that the model begins of its own accord, as {output_format.tools.name} writes it, cannot"
            " be held to a schema.",
            param="tools",
        )
    held = tools.tools if tools.required else [tool for tool in tools.tools if tool.strict]
    grammars.check_size([tool.parameters for tool in held], "tools")
    for tool in held:
        if not tool.takes_objects:
            raise InvalidRequestError(
                f"tools.{tool.name}.{tools.schema_field}.type: must be, or list, object: a call's arguments are one.",
                param="tools",
            )
    if (unheld := output_format.unheld(held)) is not None:
        tool, path = unheld
        whole = f"tools.{tool.name}.{tools.schema_field}"
        grammars.check_schema(tool.parameters, whole, "tools")
        where = ".".join(filter(None, (whole, path)))
        raise UnsupportedParameterError(
            f"{where}: a call as {output_format.tools.name} writes it cannot be held to this schema.",
            param="tools",
        )


def _check_budget(body: SamplingBody, output_format: OutputFormat) -> None:
    """Refuses a number of thinking tokens where thinking is not told apart.

    Raises:
        UnsupportedParameterError: It is not.
    """
    if body.most_thinking_tokens is not None and output_format.reasoning is None:
        raise UnsupportedParameterError(
            f"{body.thinking_field}: this model's reasoning is not told apart (router.reasoning_parser).",
            param=body.thinking_field,
        )


def _form_behind(
    body: SamplingBody, output_format: OutputFormat, *, in_reasoning: bool
) -> AnswerForm | None:
    """The form of an answer that depends on how its prompt ends; None where none does."""
    tools, most = body.callable_tools, body.most_thinking_tokens
    form = body.answer_form
    if tools is not None and _are_held(tools, output_format):
        form = _calls_form(tools, output_format, thinks=most is None)
    elif form is None and most is not None:
        form = AnswerForm(kind="text", value=output_format.any_lark(), param=body.thinking_field)
    elif form is None or not body.tells_reasoning:
        return None
    if output_format.reasoning is None and not output_format.is_harmony:
        return form if form.kind == "calls" else None
    header = output_format.is_harmony and form.kind not in ("calls", "text")
    return replace(
        form,
        reasoning=output_format.reasoning_lark(most, in_reasoning=in_reasoning, before_text=header),
        must_reason=in_reasoning or header,
    )


def _are_held(tools: CallableTools, output_format: OutputFormat) -> bool:
    """Whether calls are a grammar: where there has to be one, or some are held to a schema; and that the model calls
    none that it is shown and may not call, where what it begins of its own accord can be held.
    """
    return tools.required or tools.strict or (not tools.are_all and output_format.can_hold)


def _calls_form(tools: CallableTools, output_format: OutputFormat, *, thinks: bool) -> AnswerForm:
    """The form of an answer that has to call tools, or of calls that it may begin:
    then those of tools that are not strict are of any object.
    """
    if tools.required:
        held = tools.tools
        calls = output_format.calls_lark(held, parallel=tools.parallel, schema=CALL_SCHEMA)
    else:
        loose: JsonObject = {"type": "object"}
        held = tuple(t if t.strict else replace(t, parameters=loose) for t in tools.tools)
        calls = output_format.strict_lark(
            held, parallel=tools.parallel, schema=CALL_SCHEMA, thinks=thinks
        )
    return AnswerForm(
        kind="calls",
        value={f"{tool.name}.{tools.schema_field}": tool.parameters for tool in held},
        param="tools",
        calls=calls,
        call_schemas=tuple(output_format.call_schemas(held)),
    )


def _prompt_tokens(request: Request) -> int:
    """About so many tokens the prompt has, by the length of the body."""
    length = request.headers.get("content-length", "")
    return int(length) // _BYTES_PER_TOKEN if length.isdecimal() else 1


def _truncated(tokens: Sequence[int], body: SamplingBody, model: ServedModel) -> Sequence[int]:
    """The last `truncate_prompt_tokens`, or the first where the prompt is to lose its end; -1 keeps what the model's
    length leaves beside the output that is asked for. A limit that is cut to what the prompt leaves asks for half of
    that length at most.
    """
    keep = body.truncate_prompt_tokens
    if keep is None:
        return tokens
    if keep < 0:
        length, asked = model.max_model_len, body.asked_tokens
        if asked is None:
            asked = min(body.default_tokens or 1, length // 2)
        keep = max(1, length - max(1, asked))
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
