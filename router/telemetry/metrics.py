"""What the router counts. Names that dashboards for vLLM know keep that spelling; the rest is `baton_*`.

All label values come from fixed sets: served model name, known routes, status codes, finish reasons, phases, the
classes that the operator named.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from baton.errors import OverloadedError
from baton.generation import FinishReason
from baton.telemetry.metrics import (
    REQUEST_LATENCY_BUCKETS_S,
    SHORT_LATENCY_BUCKETS_S,
    TOKEN_LATENCY_BUCKETS_S,
)
from baton.telemetry.tally import Tally
from router.attainment import Attainment, Target
from router.ports import RouterStatus, Timing


class RouterMetrics:
    """Metrics of one router on one registry.

    Args:
        registry: Takes them.
        model_name: Stands on those of the model.
        attainment: Is told too what became of promises; None where nobody plans by it.
    """

    def __init__(
        self, registry: CollectorRegistry, model_name: str, attainment: Attainment | None = None
    ) -> None:
        self.registry = registry
        self._attainment = attainment or Attainment()
        self._http_requests = Counter(
            "baton_http_requests",
            "HTTP requests answered.",
            ["route", "status"],
            registry=registry,
        )
        self._disconnects = Counter(
            "baton_client_disconnects", "Clients gone before their reply ended.", registry=registry
        )
        self._in_flight = Gauge(
            "baton_requests_in_flight", "Prompts accepted and not finished.", registry=registry
        )
        self._model_name = model_name
        self._define_queue()
        self._define_counters()
        self._define_histograms()

    def watch(self, status: RouterStatus, slo_classes: Iterable[str]) -> None:
        """Reads what is in flight and in line from `status` whenever the metrics are scraped."""
        self._in_flight.set_function(status.in_flight)
        for name in slo_classes:
            waiting = partial(_waiting_in, status, name)
            self._queue_length.labels(self._model_name, name).set_function(waiting)

    def rejected(self, tenant_class: str, reason: str) -> None:
        """A request was refused; `tenant_class` and `reason` are from bounded sets."""
        self._rejected.labels(tenant_class, reason).inc()

    @contextmanager
    def counting_refusals(self, tenant_class: str) -> Iterator[None]:
        """Counts a refusal that is raised inside."""
        try:
            yield
        except OverloadedError as error:
            self.rejected(tenant_class, error.reason)
            raise

    def http_answered(self, route: str, status: int) -> None:
        """One HTTP request was answered; `route` is a declared path or `other`."""
        self._http_requests.labels(route, str(status)).inc()

    def client_gone(self) -> None:
        """A client closed its connection before its reply ended."""
        self._disconnects.inc()

    def first_token(self, seconds: float) -> None:
        """A prompt's first token came `seconds` after the request."""
        self._first_token.observe(seconds)

    def next_token(self, seconds: float) -> None:
        """A sample's next token came `seconds` after the one before."""
        self._between_tokens.observe(seconds)

    def sample_finished(self, reason: FinishReason) -> None:
        """One sample reached its end."""
        self._success[reason].inc()

    def tokens_drawn(self, prompt_tokens: int, output_tokens: int) -> None:
        """So many were drawn for a prompt that is over, whole or broken off."""
        self._prompt_tokens.inc(prompt_tokens)
        self._generation_tokens.inc(output_tokens)

    def job_finished(self, timing: Timing, slo_class: str, total_s: float) -> None:
        """All samples of one prompt reached their end, `total_s` after the request came."""
        self._queue_wait.labels(self._model_name, slo_class).observe(timing.admission_s)
        self._cached_tokens.inc(timing.cached_tokens)
        self._pooled_tokens.inc(timing.pooled_tokens)
        self._end_to_end.observe(total_s)
        self._queue.observe(timing.queue_s)
        self._prefill.observe(timing.prefill_s)
        self._decode.observe(timing.decode_s)
        self._inference.observe(timing.prefill_s + timing.decode_s)
        self._route.observe(timing.route_s)
        if timing.blocks_sent:
            self._handoff.observe(timing.handoff_s)
            self._unhidden.observe(timing.unhidden_s)
            self._decode_queue.observe(timing.decode_queue_s)
            self._handoff_bytes.inc(timing.bytes_sent)

    def first_token_promise(self, slo_class: str, *, kept: bool) -> None:
        """A request that was promised a time to its first token got it in that time, or not."""
        self._promise(slo_class, Target.TTFT, kept=kept)

    def pace_promise(self, slo_class: str, *, kept: bool) -> None:
        """A request that was promised a time between its tokens had no more on average, or not."""
        self._promise(slo_class, Target.TBT, kept=kept)

    def _promise(self, slo_class: str, target: Target, *, kept: bool) -> None:
        self._promises.labels(self._model_name, slo_class, target.value, _outcome(kept)).inc()
        self._attainment.note(slo_class, target, kept=kept)

    def _define_queue(self) -> None:
        self._queue_length = Gauge(
            "baton_queue_length",
            "Requests that wait in the router until there is room.",
            ["model_name", "slo_class"],
            registry=self.registry,
        )
        self._queue_wait = Histogram(
            "baton_queue_wait_seconds",
            "Waiting in the router until there was room.",
            ["model_name", "slo_class"],
            registry=self.registry,
            buckets=REQUEST_LATENCY_BUCKETS_S,
        )
        self._promises = Counter(
            "baton_slo_requests",
            "Requests that were promised a time to first token or between tokens, and what became of it.",
            ["model_name", "slo_class", "target", "outcome"],
            registry=self.registry,
        )
        self._rejected = Counter(
            "baton_rejected",
            "Requests refused because of load or limits.",
            ["tenant_class", "reason"],
            registry=self.registry,
        )

    def _define_counters(self) -> None:
        self._prompt_tokens = self._counter("vllm:prompt_tokens", "Prompt tokens served.")
        self._generation_tokens = self._counter("vllm:generation_tokens", "Tokens generated.")
        self._cached_tokens = self._counter(
            "baton_prompt_tokens_cached", "Prompt tokens whose KV a prefix cache held."
        )
        self._pooled_tokens = self._counter(
            "baton_prompt_tokens_pooled", "Prompt tokens whose KV was fetched from the pool."
        )
        self._handoff_bytes = self._counter("baton_handoff_bytes", "KV bytes handed off.")
        success = Counter(
            "vllm:request_success",
            "Samples that reached their end.",
            ["model_name", "finished_reason"],
            registry=self.registry,
        )
        self._success = {r: success.labels(self._model_name, r.value) for r in FinishReason}

    def _define_histograms(self) -> None:
        self._first_token = self._histogram(
            "vllm:time_to_first_token_seconds", "From the request to its first token."
        )
        self._between_tokens = Tally(
            "vllm:inter_token_latency_seconds",
            "Between two tokens.",
            TOKEN_LATENCY_BUCKETS_S,
            {"model_name": self._model_name},
            self.registry,
        )
        self._end_to_end = self._histogram(
            "vllm:e2e_request_latency_seconds", "From the request to its last token."
        )
        self._queue = self._histogram("vllm:request_queue_time_seconds", "Waiting for prefill.")
        self._prefill = self._histogram("vllm:request_prefill_time_seconds", "Prefilling.")
        self._decode = self._histogram("vllm:request_decode_time_seconds", "Decoding.")
        self._inference = self._histogram(
            "vllm:request_inference_time_seconds", "Prefilling and decoding."
        )
        self._route = self._histogram(
            "baton_route_seconds", "Choosing the workers.", SHORT_LATENCY_BUCKETS_S
        )
        self._handoff = self._histogram("baton_handoff_seconds", "First page sent to commit.")
        self._unhidden = self._histogram(
            "baton_handoff_unhidden_seconds", "The part of a hand-off that decoding waited for."
        )
        self._decode_queue = self._histogram(
            "baton_decode_queue_seconds", "From the hand-off to the decode worker's first token."
        )

    def _counter(self, name: str, text: str) -> Counter:
        counter = Counter(name, text, ["model_name"], registry=self.registry)
        return counter.labels(self._model_name)

    def _histogram(
        self, name: str, text: str, buckets: tuple[float, ...] = REQUEST_LATENCY_BUCKETS_S
    ) -> Histogram:
        histogram = Histogram(name, text, ["model_name"], registry=self.registry, buckets=buckets)
        return histogram.labels(self._model_name)


def _outcome(kept: bool) -> str:
    return "met" if kept else "missed"


def _waiting_in(status: RouterStatus, slo_class: str) -> float:
    return status.waiting().get(slo_class, 0)
