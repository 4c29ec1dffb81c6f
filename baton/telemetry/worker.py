"""Metrics that every worker process has, whichever roles it serves; a hybrid worker's two services share them.

The `vllm:*` names are those that existing dashboards and gateway pickers read.
"""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from baton.generation import WorkerLoad
from baton.telemetry.load import LoadMetrics
from baton.telemetry.metrics import REQUEST_LATENCY_BUCKETS_S


class WorkerMetrics:
    """One worker's load, and what became of the legs it was given."""

    def __init__(self, registry: CollectorRegistry, *, block_tokens: int, num_blocks: int) -> None:
        self.registry = registry
        self._load = LoadMetrics(registry)
        self._transfers = Gauge(
            "baton_transfers_in_flight", "Hand-offs that are not over", registry=registry
        )
        self._legs = _Legs(registry)
        self._refusals = _Refusals(registry)
        self._legs_told: dict[tuple[str, str], int] = {}
        cache = Gauge(
            "vllm:cache_config_info",
            "1; the labels say it",
            ["block_size", "num_gpu_blocks"],
            registry=registry,
        )
        cache.labels(block_size=str(block_tokens), num_gpu_blocks=str(num_blocks)).set(1)

    def prefilled(self, *, prompt_tokens: int, queue_s: float, prefill_s: float) -> None:
        """A leg's prompt was computed here."""
        self._legs.queue_s.observe(queue_s)
        self._legs.prefill_s.observe(prefill_s)
        self._legs.prompt_tokens.inc(prompt_tokens)

    def drew(self, tokens: int) -> None:
        """So many tokens were drawn here."""
        self._legs.generation_tokens.inc(tokens)

    def legs_ended(self, service: str, outcome: str, total: int) -> None:
        """So many legs of a service have ended in this way since the start."""
        before = self._legs_told.get((service, outcome), 0)
        self._legs_told[service, outcome] = total
        self._legs.ended.labels(service, outcome).inc(total - before)

    def ticket_refused(self, reason: str) -> None:
        """Somebody showed a permit or ticket that is not good; reasons are a closed set."""
        self._refusals.tickets.labels(reason).inc()

    def handshake_refused(self, field: str) -> None:
        """A session with another worker did not come about; fields are a closed set."""
        self._refusals.handshakes.labels(field).inc()

    def observe(self, load: WorkerLoad, *, transfers_in_flight: int) -> None:
        """Takes over the worker's last report on itself."""
        self._load.observe(load)
        self._transfers.set(transfers_in_flight)


class _Legs:
    """How legs went."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.queue_s = Histogram(
            "vllm:request_queue_time_seconds",
            "From a leg's arrival to its first chunk",
            buckets=REQUEST_LATENCY_BUCKETS_S,
            registry=registry,
        )
        self.prefill_s = Histogram(
            "vllm:request_prefill_time_seconds",
            "From the first chunk to the first token",
            buckets=REQUEST_LATENCY_BUCKETS_S,
            registry=registry,
        )
        self.prompt_tokens = Counter(
            "vllm:prompt_tokens", "Tokens of prompts prefilled here", registry=registry
        )
        self.generation_tokens = Counter(
            "vllm:generation_tokens", "Tokens drawn here", registry=registry
        )
        self.ended = Counter(
            "baton_legs", "Legs by how they ended", ["service", "outcome"], registry=registry
        )


class _Refusals:
    """Who was not believed, or not let in."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.tickets = Counter(
            "baton_kv_tickets_refused",
            "Permits and tickets that were not good",
            ["reason"],
            registry=registry,
        )
        self.handshakes = Counter(
            "baton_handshake_incompatible",
            "Sessions between workers refused, by the field that did not fit",
            ["field"],
            registry=registry,
        )
