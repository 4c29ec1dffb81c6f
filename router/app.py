"""The router's HTTP application: which paths there are, and who answers them.

`create_app` puts together what the endpoints need around a `Generator`; whoever runs the server owns the generator and
the tokenizer and closes them after it.
"""

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from fastapi import FastAPI, Request, Response
from fastapi.responses import PlainTextResponse
from prometheus_client import CollectorRegistry

from baton.clock import Clock, MonotonicClock
from baton.config.schema import RouterConfig
from baton.errors import UnavailableError
from baton.telemetry.metrics import render
from baton.telemetry.tracing import NotTraced, Tracer
from router import openapi
from router.anthropic.messages import count_tokens, messages
from router.anthropic.replies import CountedTokens
from router.http import errors
from router.http.account import RateLimiter
from router.http.auth import AuthMiddleware
from router.http.errors import error_responses
from router.http.operations import LoadReply, load
from router.openai import stored
from router.openai.chat import chat_completions
from router.openai.completions import completions
from router.openai.models import model_card, model_list
from router.openai.replies import ModelCard, ModelList
from router.openai.responses import responses
from router.openai.sampling import SamplingDefaults
from router.openai.serving import Serving
from router.openai.tokenization import Detokenized, Tokenized, detokenize, tokenize
from router.ports import Generator, RouterStatus
from router.routing.explanation import DecisionLog
from router.slo import SloBook
from router.telemetry.collectors import RouteDecisions
from router.telemetry.metrics import RouterMetrics
from router.tenancy import Tenancy, simple
from router.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class AppSettings:
    """What the HTTP face is told at start.

    Attributes:
        model_names: Names that clients may use for the model; at least one, the first is the model's own.
        version: Baton's version, shown by /version.
        router: Keys and limits.
        defaults: How tokens are drawn where a request says nothing (`router.openai.sampling.read_defaults`).
        revision: The model's commit, if it has one; shown with the model.
    """

    model_names: tuple[str, ...]
    version: str
    router: RouterConfig
    defaults: SamplingDefaults
    revision: str | None = None


def create_app(
    settings: AppSettings,
    generator: Generator,
    status: RouterStatus,
    tokenizer: Tokenizer,
    registry: CollectorRegistry,
    clock: Clock | None = None,
    tenancy: Tenancy | None = None,
    decisions: DecisionLog | None = None,
    tracer: Tracer | None = None,
) -> FastAPI:
    """The application. It owns nothing: generator and tokenizer outlive it.

    Args:
        settings: Names, keys and limits.
        generator: Makes tokens.
        status: Shown by /health, /ready, /load and /metrics.
        tokenizer: The served model's.
        registry: Where the router's metrics go, and what /metrics shows.
        clock: Measures what clients wait for.
        tenancy: Tenants, limits, guardrails and audit; what the configured keys make if None.
        decisions: What routing remembers; admins may ask for it, /metrics counts it.
        tracer: Takes the spans of requests; nobody if None.
    """
    tenancy = tenancy or simple(settings.router.api_keys, clock or MonotonicClock())
    metrics = RouterMetrics(registry, settings.model_names[0])
    slo_book = SloBook(settings.router.slo_classes)
    metrics.watch(status, slo_book.names)
    decisions = decisions or DecisionLog("")
    registry.register(RouteDecisions(decisions))
    serving = Serving(
        model_names=settings.model_names,
        created_s=int(time.time()),
        generator=generator,
        tokenizer=tokenizer,
        defaults=settings.defaults,
        metrics=metrics,
        clock=clock or MonotonicClock(),
        max_body_bytes=settings.router.max_body_bytes,
        request_timeout_s=settings.router.request_timeout_s,
        slo_book=slo_book,
        revision=settings.revision,
        guards=tenancy.guards,
        decisions=decisions,
        tracer=tracer or NotTraced(),
    )
    app = FastAPI(
        title="Baton",
        version=settings.version,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    _add_gate(app, tenancy, metrics)
    errors.install(app)
    openapi.install(app, settings.model_names)
    _add_generating(app, serving)
    stored.install(app)
    _add_models(app, serving)
    _add_counting(app, serving)
    _add_operations(app, status, registry, settings.version)
    return app


def _add_gate(app: FastAPI, tenancy: Tenancy, metrics: RouterMetrics) -> None:
    rate_limiter = RateLimiter(
        tenancy.limiter,
        tenancy.suspects,
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
    )


_GENERATING = (
    ("/v1/chat/completions", chat_completions, openapi.CHAT),
    ("/v1/completions", completions, openapi.COMPLETION),
    ("/v1/responses", responses, openapi.RESPONSE),
    ("/v1/messages", messages, openapi.MESSAGE),
)
"""The ways to ask for tokens: path, endpoint, and what the API's description says of it."""


def _add_generating(app: FastAPI, serving: Serving) -> None:
    for path, endpoint, said in _GENERATING:
        app.add_api_route(
            path,
            _answering(endpoint, serving),
            methods=["POST"],
            name=f"post_{endpoint.__name__}",
            response_model=None,
            openapi_extra=said.openapi_extra,
            responses=said.responses,
        )


def _answering(
    endpoint: Callable[[Request, Serving], Awaitable[Response]], serving: Serving
) -> Callable[[Request], Awaitable[Response]]:
    async def answering(request: Request) -> Response:
        return await endpoint(request, serving)

    return answering


def _add_models(app: FastAPI, serving: Serving) -> None:
    @app.get("/v1/models", responses=error_responses())
    async def get_models(request: Request) -> ModelList:
        return await model_list(request, serving)

    @app.get("/v1/models/{name:path}", responses=error_responses(404))
    async def get_model(name: str, request: Request) -> ModelCard:
        return await model_card(name, request, serving)


def _add_counting(app: FastAPI, serving: Serving) -> None:
    into, back = openapi.TOKENIZE, openapi.DETOKENIZE

    @app.post("/tokenize", openapi_extra=into.openapi_extra, responses=into.responses)
    async def post_tokenize(request: Request) -> Tokenized:
        return await tokenize(request, serving)

    @app.post("/detokenize", openapi_extra=back.openapi_extra, responses=back.responses)
    async def post_detokenize(request: Request) -> Detokenized:
        return await detokenize(request, serving)

    counted = openapi.COUNT_TOKENS

    @app.post(
        "/v1/messages/count_tokens",
        openapi_extra=counted.openapi_extra,
        responses=counted.responses,
    )
    async def post_count_tokens(request: Request) -> CountedTokens:
        return await count_tokens(request, serving)


def _add_operations(
    app: FastAPI, status: RouterStatus, registry: CollectorRegistry, version: str
) -> None:
    @app.get("/health", responses=error_responses(503))
    async def get_health() -> dict[str, str]:
        """Alive, and what the workers send is being moved. Says nothing about whether there are workers."""
        if not status.healthy():
            raise UnavailableError("The links to the workers make no progress.")
        return {"status": "ok"}

    @app.get("/ready", responses=error_responses(503))
    async def get_ready() -> dict[str, str]:
        """Whether a request could be served now."""
        if not status.ready():
            raise UnavailableError("No prefill and decode pair and no hybrid worker is ready.")
        return {"status": "ready"}

    @app.get("/load", responses=error_responses())
    async def get_load() -> LoadReply:
        return load(status)

    @app.get("/metrics", response_class=PlainTextResponse)
    async def get_metrics() -> Response:
        text, content_type = render(registry)
        return Response(text, headers={"Content-Type": content_type})

    @app.get("/version")
    async def get_version() -> dict[str, str]:
        return {"version": version}
