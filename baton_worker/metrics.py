"""What a worker counts: its load, and what became of the legs that it was given.

What only the half that sends pages or the one that receives them can count, that half counts. The `vllm:*` names are
those that existing dashboards and gateway pickers read.
"""

from collections.abc import Callable, Iterator
from operator import attrgetter

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.metrics_core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from baton.errors import BatonError
from baton.generation import WorkerLoad
from baton.telemetry.metrics import REQUEST_LATENCY_BUCKETS_S
from baton_engine.ports import GrammarCounts, SpeculationCounts
from kv_transfer.ledger.outbox import HandOffDone


class WorkerMetrics:
    """One worker's load, and what became of the legs it was given."""

    def __init__(self, registry: CollectorRegistry, *, block_tokens: int, num_blocks: int) -> None:
        self.registry = registry
        self._load = LoadMetrics(registry)
        self._transfers = Gauge(
            "baton_transfers_in_flight", "Hand-offs that are not over", registry=registry
        )
        self._legs = _Legs(registry)
        self._hand_offs = _HandOffs(registry)
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

    def handed_off(self, done: HandOffDone) -> None:
        """The receiving worker has a leg's pages."""
        self._hand_offs.pages.inc(done.blocks_sent)
        self._hand_offs.bytes.inc(done.bytes_sent)
        self._hand_offs.reserve_wait_s.observe(done.reserve_wait_s)
        self._hand_offs.unhidden_s.observe(done.unhidden_s)

    def pooled(self) -> None:
        """A prompt was left in the pool."""
        self._hand_offs.pooled.inc()

    def failed(self, kind: str, error: BatonError) -> None:
        """A leg failed; kinds and error codes are closed sets."""
        self._legs.failures.labels(kind, error.code).inc()

    def legs_ended(self, kind: str, outcome: str, total: int) -> None:
        """So many legs of a kind have ended in this way since the start."""
        before = self._legs_told.get((kind, outcome), 0)
        self._legs_told[kind, outcome] = total
        self._legs.ended.labels(kind, outcome).inc(total - before)

    def ticket_refused(self, reason: str) -> None:
        """A permit or ticket that was shown is not valid; reasons are a closed set."""
        self._refusals.tickets.labels(reason).inc()

    def handshake_refused(self, field: str) -> None:
        """A session with another worker did not come about; fields are a closed set."""
        self._refusals.handshakes.labels(field).inc()

    def connection_refused(self, reason: str) -> None:
        """A connection to the arena was closed before its peer had proven itself; reasons are a closed set.
        From any thread.
        """
        self._refusals.connections.labels(reason).inc()

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
            "baton_legs", "Legs by how they ended", ["kind", "outcome"], registry=registry
        )
        self.failures = Counter(
            "baton_leg_failures",
            "Legs that failed, by error code",
            ["kind", "reason"],
            registry=registry,
        )


class _HandOffs:
    """Hand-offs as the sender sees them."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.pages = Counter("baton_kv_sent_pages", "KV pages handed off", registry=registry)
        self.bytes = Counter("baton_kv_sent_bytes", "Bytes handed off", registry=registry)
        self.reserve_wait_s = Histogram(
            "baton_kv_reserve_wait_seconds",
            "From the first chunk until pages were granted",
            buckets=REQUEST_LATENCY_BUCKETS_S,
            registry=registry,
        )
        self.unhidden_s = Histogram(
            "baton_kv_transfer_unhidden_seconds",
            "From the first token to the verified commit",
            buckets=REQUEST_LATENCY_BUCKETS_S,
            registry=registry,
        )
        self.pooled = Counter(
            "baton_kv_pool_detours",
            "Prompts left in the pool because the receiving worker had no room",
            registry=registry,
        )


class _Refusals:
    """Tickets, handshakes and connections that were refused."""

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
        self.connections = Counter(
            "baton_kv_connections_refused",
            "Connections to the KV memory closed before the peer had proven the cluster's secret",
            ["reason"],
            registry=registry,
        )


def _usage(load: WorkerLoad) -> float:
    return load.blocks_used / load.blocks_total if load.blocks_total else 0.0


_GAUGES: dict[str, tuple[str, Callable[[WorkerLoad], float]]] = {
    "vllm:num_requests_running": ("Sequences in the running batch", attrgetter("running")),
    "vllm:num_requests_waiting": ("Sequences waiting to run", attrgetter("waiting")),
    "vllm:kv_cache_usage_perc": ("Share of KV pages in use, 0 to 1", _usage),
    "baton_kv_pages_leaked": (
        "KV pages in use though no request holds any; told when there is none",
        attrgetter("blocks_leaked"),
    ),
    "baton_draining": ("1 while the worker drains", attrgetter("draining")),
}

_PAGES: dict[str, Callable[[WorkerLoad], float]] = {
    "free": attrgetter("blocks_free"),
    "used": attrgetter("blocks_used"),
    "cached": attrgetter("blocks_cached"),
}

_COUNTERS: dict[str, tuple[str, Callable[[WorkerLoad], float]]] = {
    "baton_preemptions": ("Sequences preempted since the start", attrgetter("preemptions")),
    "vllm:prefix_cache_hits": (
        "Prompt tokens found in the prefix cache",
        attrgetter("prefix_hit_tokens"),
    ),
    "vllm:prefix_cache_queries": (
        "Prompt tokens looked up there",
        attrgetter("prefix_query_tokens"),
    ),
    "baton_pool_hits": ("Prompt tokens fetched from the pool", attrgetter("pool_hit_tokens")),
}
"""Told as totals since the start."""


class LoadMetrics:
    """One worker's load: names, descriptions and where the numbers stand in a report are in the tables above."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._gauges = [
            (Gauge(name, text, registry=registry), read) for name, (text, read) in _GAUGES.items()
        ]
        self._counters = [
            (Counter(name, text, registry=registry), read)
            for name, (text, read) in _COUNTERS.items()
        ]
        self._pages = Gauge("baton_kv_pages", "KV pages by state", ["state"], registry=registry)
        self._observed = WorkerLoad()

    def observe(self, load: WorkerLoad) -> None:
        """Takes over the worker's last report on itself."""
        before, self._observed = self._observed, load
        for gauge, read in self._gauges:
            gauge.set(read(load))
        for counter, read in self._counters:
            counter.inc(read(load) - read(before))
        for state, read in _PAGES.items():
            self._pages.labels(state).set(read(load))


class GrammarMetrics(Collector):
    """What a worker's grammars have cost, read from the engine's own counts.

    Args:
        counts: The engine's.
    """

    def __init__(self, counts: GrammarCounts) -> None:
        self._counts = counts

    def collect(self) -> Iterator[Metric]:
        """See prometheus_client."""
        counts = self._counts
        grammars = CounterMetricFamily(
            "baton_grammars",
            "Grammars of prompts: compiled, found among those kept, refused, and evicted from these",
            labels=["outcome"],
        )
        for outcome in ("compiled", "found", "refused", "evicted"):
            grammars.add_metric([outcome], getattr(counts, outcome))
        yield grammars
        for name, text, value in (
            ("baton_grammar_compile_seconds", "Compiling took, all together", counts.compile_s),
            ("baton_grammar_masks", "Masks of steps: one per row under a grammar", counts.masks),
            ("baton_grammar_mask_seconds", "Finding them took, all together", counts.mask_s),
            ("baton_grammar_late_masks", "Masks for which no step waited", counts.late),
            (
                "baton_grammar_faults",
                "Samples that their grammar ended in the middle",
                counts.faults,
            ),
        ):
            yield CounterMetricFamily(name, text, value=value)


class SpeculationMetrics(Collector):
    """What became of a worker's drafts, under vLLM's names, read from the engine's own counts.

    Args:
        counts: The engine's.
    """

    def __init__(self, counts: SpeculationCounts) -> None:
        self._counts = counts

    def collect(self) -> Iterator[Metric]:
        """See prometheus_client."""
        counts = self._counts
        for name, text, value in (
            ("num_drafts", "Times that tokens of a sequence were guessed in a step", counts.drafts),
            ("num_draft_tokens", "Tokens that were guessed", counts.draft_tokens),
            ("num_accepted_tokens", "Those of them that were right", counts.accepted_tokens),
        ):
            yield CounterMetricFamily(f"vllm:spec_decode_{name}", text, value=value)
        per_position = CounterMetricFamily(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Those that were right, by their place behind the text",
            labels=["position"],
        )
        for position, accepted in enumerate(counts.accepted_per_position):
            per_position.add_metric([str(position)], accepted)
        yield per_position
