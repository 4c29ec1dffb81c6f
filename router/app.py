"""The router's HTTP application: its paths, and the endpoints that answer them.

`create_app` puts together what the endpoints need around a `Generator`; the server's owner owns the generator and
the tokenizer and closes them after it.
"""

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial

from fastapi import FastAPI, Request, Response
from prometheus_client import CollectorRegistry

from baton.clock import Clock, MonotonicClock
from baton.config.schema import RouterConfig
from baton.telemetry.tracing import NotTraced, Tracer
from router import openapi
from router.anthropic.messages import MessageWriter, TokenCounting
from router.anthropic.replies import CountedTokens
from router.anthropic.requests import MessagesRequest
from router.attainment import Attainment
from router.generation.endpoint import ConversationEndpoint
from router.generation.grammars import GrammarChecker
from router.generation.model_catalog import ModelCatalog
from router.generation.planner import RequestPlanner
from router.generation.prompt_encoder import PromptEncoder
from router.generation.responder import Responder
from router.generation.sampling import SamplingDefaults
from router.http import errors, operations
from router.http.account import RateLimiter
from router.http.auth import AuthMiddleware
from router.http.body import BodyReader
from router.http.errors import error_responses
from router.openai import stored
from router.openai.chat import ChatWriter
from router.openai.completions import Completions
from router.openai.models import Models
from router.openai.replies import ModelCard, ModelList
from router.openai.requests import ChatCompletionRequest
from router.openai.responses.requests import ResponsesRequest
from router.openai.responses.writer import ResponseWriter
from router.openai.tokenization import Tokenization
from router.parsing.output_format import OutputFormat, detect_format
from router.ports import Generator, RouterStatus
from router.routing.explanation import DecisionLog
from router.slo import SloClasses
from router.telemetry.collectors import RouteDecisions
from router.telemetry.metrics import RouterMetrics
from router.tenancy import Tenancy, tenancy_of_keys
from router.text.token_bytes import PieceTable
from router.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class AppSettings:
    """The application's settings.

    Attributes:
        model_names: Names that clients may use for the model; at least one, the first is the model's own.
        version: Baton's version, shown by /version.
        router: Keys and limits.
        defaults: How tokens are drawn where a request says nothing (`router.generation.sampling.read_defaults`).
        revision: The model's commit, if it has one; shown with the model.
        adapter_names: Names of adapters that clients may ask for in the model's place.
    """

    model_names: tuple[str, ...]
    version: str
    router: RouterConfig
    defaults: SamplingDefaults
    revision: str | None = None
    adapter_names: tuple[str, ...] = ()


def create_app(
    settings: AppSettings,
    generator: Generator,
    status: RouterStatus,
    tokenizer: Tokenizer,
    registry: CollectorRegistry,
    grammars: GrammarChecker,
    clock: Clock | None = None,
    tenancy: Tenancy | None = None,
    decisions: DecisionLog | None = None,
    tracer: Tracer | None = None,
    attainment: Attainment | None = None,
) -> FastAPI:
    """The application. It owns nothing: generator, tokenizer and grammars outlive it.

    Args:
        settings: Names, keys and limits.
        generator: Makes tokens.
        status: Shown by /health, /ready, /load and /metrics.
        tokenizer: The served model's.
        registry: Where the router's metrics go, and what /metrics shows.
        grammars: Checks the forms of answers.
        clock: Measures what clients wait for.
        tenancy: Tenants, limits, guardrails and audit; what the configured keys make if None.
        decisions: What routing remembers; admins may ask for it, /metrics counts it.
        tracer: Takes the spans of requests; none are recorded if None.
        attainment: Is told what became of promises to classes of service.
    """
    clock = clock or MonotonicClock()
    tenancy = tenancy or tenancy_of_keys(settings.router.api_keys, clock)
    decisions = decisions or DecisionLog("")
    slo_classes = SloClasses(settings.router.slo_classes)
    metrics = RouterMetrics(registry, settings.model_names[0], attainment)
    metrics.watch(status, slo_classes.names)
    registry.register(RouteDecisions(decisions))
    bodies = BodyReader(
        settings.router.max_body_bytes,
        timeout_s=settings.router.http_body_timeout_s,
        clock=clock,
    )
    catalog = ModelCatalog(settings.model_names, generator, settings.adapter_names)
    output_format = detect_format(
        tokenizer.chat_template,
        tokenizer.backend.token_to_id,
        tool_call_parser=settings.router.tool_call_parser,
        reasoning_parser=settings.router.reasoning_parser,
    )
    planner = RequestPlanner(
        catalog,
        generator,
        slo_classes,
        metrics,
        settings.defaults,
        grammars,
        output_format,
        timeout_s=settings.router.request_timeout_s,
    )
    prompts = PromptEncoder(tokenizer, tenancy.guards)
    tracer = tracer or NotTraced()
    responder = Responder(
        generator,
        tokenizer,
        metrics,
        clock,
        tenancy.guards,
        decisions,
        tracer,
        output_format,
        sse_keep_alive_s=settings.router.sse_keep_alive_s,
    )
    # Guardrails may change the text, so that places in it mean nothing any more: behind them marks are looked for.
    shown_format = replace(output_format, marker_ids={}) if tenancy.guards.active else output_format
    completions = Completions(
        bodies, planner, prompts, responder, tokenizer.pieces, tokenizer, tenancy.guards
    )
    app = _new_app(settings, tenancy, metrics)
    _add_conversations(app, tokenizer.pieces, shown_format, bodies, planner, prompts, responder)
    _add_generating(app, "/v1/completions", completions, openapi.COMPLETION)
    _add_models(app, Models(catalog, created_s=int(time.time()), revision=settings.revision))
    _add_counting(
        app,
        Tokenization(bodies, catalog, prompts, tokenizer, metrics),
        TokenCounting(bodies, catalog, prompts, metrics),
    )
    stored.install(app)
    operations.install(app, status, tenancy.directory, settings.version, registry)
    return app


def _new_app(settings: AppSettings, tenancy: Tenancy, metrics: RouterMetrics) -> FastAPI:
    """An application without endpoints: whoever is let in, and how faults and the schema are told."""
    root_path = settings.router.root_path
    app = FastAPI(
        title="Baton",
        version=settings.version,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        servers=[{"url": root_path}] if root_path else None,
    )
    rate_limiter = RateLimiter(
        tenancy.limiter,
        tenancy.breakers,
        tenancy.clock,
        metrics,
        keep_content=tenancy.keep_content,
    )
    app.add_middleware(
        AuthMiddleware,
        directory=tenancy.directory,
        rate_limiter=rate_limiter,
        metrics=metrics,
        audit=tenancy.audit,
        clock=tenancy.clock,
        root_path=root_path,
    )
    errors.install(app)
    openapi.install(app, (*settings.model_names, *settings.adapter_names))
    return app


def _add_conversations(
    app: FastAPI,
    pieces: PieceTable,
    output_format: OutputFormat,
    bodies: BodyReader,
    planner: RequestPlanner,
    prompts: PromptEncoder,
    responder: Responder,
) -> None:
    """The same way of a request in the protocol of each API."""
    chat = ConversationEndpoint(
        ChatCompletionRequest,
        ChatCompletionRequest.as_conversation,
        partial(ChatWriter, pieces=pieces, output_format=output_format),
        "chatcmpl",
        bodies=bodies,
        planner=planner,
        prompts=prompts,
        responder=responder,
    )
    responses = ConversationEndpoint(
        ResponsesRequest,
        ResponsesRequest.as_conversation,
        partial(ResponseWriter, pieces=pieces, output_format=output_format),
        "resp",
        bodies=bodies,
        planner=planner,
        prompts=prompts,
        responder=responder,
    )
    messages = ConversationEndpoint(
        MessagesRequest,
        MessagesRequest.as_conversation,
        partial(MessageWriter, output_format=output_format),
        "msg",
        bodies=bodies,
        planner=planner,
        prompts=prompts,
        responder=responder,
    )
    _add_generating(app, "/v1/chat/completions", chat, openapi.CHAT)
    _add_generating(app, "/v1/responses", responses, openapi.RESPONSE)
    _add_generating(app, "/v1/messages", messages, openapi.MESSAGE)


def _add_generating(
    app: FastAPI,
    path: str,
    endpoint: Callable[[Request], Awaitable[Response]],
    description: openapi.EndpointDescription,
) -> None:
    """A way to ask for tokens."""

    async def post(request: Request) -> Response:
        return await endpoint(request)

    app.add_api_route(
        path,
        post,
        methods=["POST"],
        name="post_" + path.removeprefix("/v1/").replace("/", "_"),
        response_model=None,
        openapi_extra=description.openapi_extra,
        responses=description.responses,
    )


def _add_models(app: FastAPI, models: Models) -> None:
    @app.get("/v1/models", responses=error_responses())
    async def get_models(request: Request) -> ModelList:
        return await models.list(request)

    @app.get("/v1/models/{name:path}", responses=error_responses(404))
    async def get_model(name: str, request: Request) -> ModelCard:
        return await models.card(name, request)


def _add_counting(app: FastAPI, tokenization: Tokenization, counting: TokenCounting) -> None:
    into, back = openapi.TOKENIZE, openapi.DETOKENIZE

    @app.post(
        "/tokenize",
        response_model=None,
        openapi_extra=into.openapi_extra,
        responses=into.responses,
    )
    async def post_tokenize(request: Request) -> Response:
        return await tokenization.tokenize(request)

    @app.post(
        "/detokenize",
        response_model=None,
        openapi_extra=back.openapi_extra,
        responses=back.responses,
    )
    async def post_detokenize(request: Request) -> Response:
        return await tokenization.detokenize(request)

    counted = openapi.COUNT_TOKENS

    @app.post(
        "/v1/messages/count_tokens",
        openapi_extra=counted.openapi_extra,
        responses=counted.responses,
    )
    async def post_count_tokens(request: Request) -> CountedTokens:
        return await counting(request)
