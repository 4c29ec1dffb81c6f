"""Spans to OpenTelemetry. The only module that knows its packages, which are an extra:
`pip install baton-serve[otel]`.
"""

import importlib
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from baton.clock import Clock
from baton.config.schema import TraceConfig
from baton.errors import ConfigError
from baton.telemetry.span_names import ERROR_TYPE
from baton.telemetry.tracing import Attribute, NotTraced, OpenSpan, Tracer

CLOSE_S = 2.0
"""How long what waits may take to reach the collector when the process ends."""


def open_tracer(config: TraceConfig, component: str, clock: Clock) -> Tracer:
    """The tracer of this process: one that sends to the configured collector, or none.

    Raises:
        ConfigError: Traces are asked for, and what it takes is not installed.
    """
    if not config.enabled:
        return NotTraced()
    try:
        sdk = importlib.import_module("opentelemetry.sdk.trace.export")
        otlp = importlib.import_module("opentelemetry.exporter.otlp.proto.grpc.trace_exporter")
    except ImportError as error:
        raise ConfigError(
            "trace.enabled: traces need `pip install baton-serve[otel]`", param="trace.enabled"
        ) from error
    exporter = otlp.OTLPSpanExporter(
        endpoint=config.endpoint, insecure=config.endpoint.startswith("http://")
    )
    processor = sdk.BatchSpanProcessor(exporter)
    return OtelTracer(
        processor,
        component,
        clock,
        sample_ratio=config.sample_ratio,
        give_up=exporter.shutdown,
    )


class OtelTracer:
    """A `Tracer` over the SDK.

    Args:
        processor: The SDK's, with an exporter behind it.
        component: What this process is, such as `router` or `decode-0`.
        clock: The one whose times it is given.
        sample_ratio: Share of requests that are traced when their client does not say.
        give_up: Makes the exporter drop what it cannot send.
        close_s: How long `close` waits before that.
    """

    def __init__(
        self,
        processor: Any,
        component: str,
        clock: Clock,
        *,
        sample_ratio: float = 1.0,
        give_up: Callable[[], None] = lambda: None,
        close_s: float = CLOSE_S,
    ) -> None:
        self._api = importlib.import_module("opentelemetry.trace")
        resources = importlib.import_module("opentelemetry.sdk.resources")
        sampling = importlib.import_module("opentelemetry.sdk.trace.sampling")
        context = importlib.import_module("opentelemetry.trace.propagation.tracecontext")
        sdk = importlib.import_module("opentelemetry.sdk.trace")
        resource = resources.Resource({"service.name": "baton", "service.instance.id": component})
        self._provider = sdk.TracerProvider(
            resource=resource,
            sampler=sampling.ParentBased(sampling.TraceIdRatioBased(sample_ratio)),
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("baton")
        self._context = context.TraceContextTextMapPropagator()
        self._clock = clock
        self._give_up = give_up
        self._close_s = close_s

    def begin(self, name: str, *, parent: str, start_s: float) -> OpenSpan:
        """See `Tracer`."""
        span = self._start(name, self._api.SpanKind.SERVER, parent, start_s)
        carrier: dict[str, str] = {}
        self._context.inject(carrier, self._api.set_span_in_context(span))
        sampled = span.get_span_context().trace_flags.sampled
        return _OtelSpan(span, carrier["traceparent"] if sampled else "", self._api)

    def record(
        self,
        name: str,
        *,
        parent: str,
        start_s: float,
        end_s: float,
        attributes: Mapping[str, Attribute] | None = None,
    ) -> None:
        """See `Tracer`."""
        if parent:
            span = self._start(name, self._api.SpanKind.INTERNAL, parent, start_s)
            span.set_attributes(attributes or {})
            span.end(self._wall_ns(max(start_s, end_s)))

    def close(self) -> None:
        """See `Tracer`."""
        # The SDK keeps to no limit here: while a collector is away it tries again for as long as it likes.
        sending = threading.Thread(target=self._provider.shutdown, name="last spans", daemon=True)
        sending.start()
        sending.join(self._close_s)
        if sending.is_alive():
            self._give_up()
            sending.join(self._close_s)

    def _start(self, name: str, kind: Any, parent: str, start_s: float) -> Any:
        # What a client sends as `traceparent` may be anything: the propagator takes what is well-formed.
        context = self._context.extract({"traceparent": parent}) if parent else None
        return self._tracer.start_span(
            name, context=context, kind=kind, start_time=self._wall_ns(start_s)
        )

    def _wall_ns(self, at_s: float) -> int:
        return time.time_ns() - int((self._clock.now_s() - at_s) * 1e9)


class _OtelSpan:
    def __init__(self, span: Any, trace_parent: str, api: Any) -> None:
        self._span = span
        self._api = api
        self.trace_parent = trace_parent

    def end(self, attributes: Mapping[str, Attribute], error: str = "") -> None:
        self._span.set_attributes(attributes)
        if error:
            self._span.set_attribute(ERROR_TYPE, error)
            self._span.set_status(self._api.StatusCode.ERROR)
        self._span.end()
