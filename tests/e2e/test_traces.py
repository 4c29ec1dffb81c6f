"""One request's spans, from the client's own down to those of both workers, as OpenTelemetry's SDK gets to see them."""

import importlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from baton.clock import MonotonicClock
from baton.config.schema import GrammarConfig, RouterConfig, TraceConfig
from baton.errors import ConfigError
from baton.ids import Role
from baton.telemetry import span_names
from baton.telemetry.metrics import new_registry
from baton.telemetry.otel import OtelTracer, open_tracer
from baton.telemetry.tracing import NotTraced
from router.app import AppSettings, create_app
from router.generation.grammars import GrammarChecker
from router.generation.sampling import SamplingDefaults
from router.service import compose, running
from tests.decode_worker.cluster import SECRET, node
from tests.router.served import tiny_tokenizer

CLIENT_TRACE, CLIENT_SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED = f"00-{CLIENT_TRACE}-{CLIENT_SPAN}-01"
NOT_SAMPLED = f"00-{CLIENT_TRACE}-{CLIENT_SPAN}-00"
STATIONS = {
    span_names.ADMISSION: "router",
    span_names.ROUTE: "router",
    span_names.PREFILL_QUEUE: "prefill",
    span_names.PREFILL: "prefill",
    span_names.TRANSFER: "prefill",
    span_names.DECODE_QUEUE: "decode",
    span_names.DECODE: "decode",
}
SECRET_WORD = "xylophone"


class Spans:
    """What the exporters of all processes got."""

    def __init__(self) -> None:
        memory = importlib.import_module("opentelemetry.sdk.trace.export.in_memory_span_exporter")
        self.exporter = memory.InMemorySpanExporter()
        self.tracers: list[OtelTracer] = []

    def tracer(self, component: str) -> OtelTracer:
        export = importlib.import_module("opentelemetry.sdk.trace.export")
        processor = export.SimpleSpanProcessor(self.exporter)
        self.tracers.append(OtelTracer(processor, component, MonotonicClock()))
        return self.tracers[-1]

    def by_name(self) -> dict[str, Any]:
        finished = self.exporter.get_finished_spans()
        named = {span.name: span for span in finished}
        assert len(named) == len(finished), [span.name for span in finished]
        return named


@asynccontextmanager
async def traced(folder: Path, *roles: Role) -> AsyncIterator[tuple[httpx.AsyncClient, Spans]]:
    """A router over these workers, all in this process, each with a tracer of its own."""
    spans, tokenizer = Spans(), tiny_tokenizer()
    nodes = [node(role, folder, tracer=spans.tracer(role.value)) for role in roles]
    workers = [await each.__aenter__() for each in nodes]
    parts = compose(RouterConfig(), [w.address for w in workers], SECRET)
    settings = AppSettings(
        model_names=("tiny",), version="1", router=RouterConfig(), defaults=SamplingDefaults()
    )
    registry = new_registry()
    grammars = GrammarChecker(GrammarConfig(), tokenizer.special_texts, registry)
    app = create_app(
        settings,
        parts.generator,
        parts.status,
        tokenizer,
        registry,
        grammars,
        tracer=spans.tracer("router"),
    )
    transport = httpx.ASGITransport(app=app)
    try:
        async with running(parts):
            while len(parts.view.workers) < len(workers):
                await parts.discovery.next_worker()
            async with httpx.AsyncClient(transport=transport, base_url="http://baton") as http:
                yield http, spans
    finally:
        for each in reversed(nodes):
            await each.__aexit__(None, None, None)
        for tracer in spans.tracers:
            tracer.close()
        grammars.close()
        tokenizer.close()


async def _ask(http: httpx.AsyncClient, **headers: str) -> httpx.Response:
    body = {"model": "tiny", "prompt": SECRET_WORD, "max_tokens": 5, "temperature": 0}
    return await http.post("/v1/completions", json=body, headers=headers)


def _hex(span_id: int) -> str:
    return f"{span_id:016x}"


async def test_one_trace_goes_from_the_client_over_the_router_to_both_workers(tmp_path: Path):
    async with traced(tmp_path, Role.PREFILL, Role.DECODE) as (http, spans):
        assert (await _ask(http, traceparent=SAMPLED)).status_code == 200
    found = spans.by_name()
    request = found.pop("text_completion tiny")
    assert _hex(request.parent.span_id) == CLIENT_SPAN
    components = {n: s.resource.attributes["service.instance.id"] for n, s in found.items()}
    assert components == STATIONS
    for span in (request, *found.values()):
        assert f"{span.context.trace_id:032x}" == CLIENT_TRACE
    for span in found.values():
        assert span.parent.span_id == request.context.span_id
        assert span.start_time <= span.end_time
    order = [name for name in STATIONS if name != span_names.TRANSFER]
    starts = [found[name].start_time for name in order]
    assert starts == sorted(starts), "each station begins after the one before"


async def test_the_requests_span_says_in_genais_words_what_it_was_and_nothing_of_its_content(
    tmp_path: Path,
):
    async with traced(tmp_path, Role.HYBRID) as (http, spans):
        reply = (await _ask(http)).json()
    found = spans.by_name()
    said = found["text_completion tiny"].attributes
    assert said[span_names.OPERATION] == "text_completion"
    assert said[span_names.REQUEST_MODEL] == "tiny"
    assert said[span_names.INPUT_TOKENS] == reply["usage"]["prompt_tokens"]
    assert said[span_names.OUTPUT_TOKENS] == reply["usage"]["completion_tokens"] == 5
    assert said[span_names.FINISH_REASONS] == "length"
    assert span_names.PREFILL in found, "a worker that does both tells of both"
    assert not any(SECRET_WORD in str(span.attributes) for span in found.values())


async def test_a_client_that_does_not_want_its_request_traced_gets_no_span(tmp_path: Path):
    async with traced(tmp_path, Role.HYBRID) as (http, spans):
        assert (await _ask(http, traceparent=NOT_SAMPLED)).status_code == 200
    assert spans.by_name() == {}


async def test_a_client_that_names_its_span_badly_gets_a_trace_of_its_own(tmp_path: Path):
    async with traced(tmp_path, Role.HYBRID) as (http, spans):
        assert (await _ask(http, traceparent="00-nonsense")).status_code == 200
    assert spans.by_name()["text_completion tiny"].parent is None


def test_nobody_traces_unless_asked():
    assert isinstance(open_tracer(TraceConfig(), "router", MonotonicClock()), NotTraced)


def test_traces_without_their_packages_are_refused_by_name(monkeypatch: pytest.MonkeyPatch):
    def absent(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr("baton.telemetry.otel.importlib.import_module", absent)
    with pytest.raises(ConfigError, match="otel"):
        open_tracer(TraceConfig(enabled=True), "router", MonotonicClock())
