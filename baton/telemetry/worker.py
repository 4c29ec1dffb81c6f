"""Metrics that every worker process has, whichever roles it serves; a hybrid worker's two services share them.

The `vllm:*` names are those that existing dashboards and gateway pickers read.
"""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from baton.generation import WorkerLoad
from baton.telemetry.metrics import REQUEST_LATENCY_BUCKETS_S


class WorkerMetrics:
    """One worker's load, and what became of the legs it was given."""

    def __init__(self, registry: CollectorRegistry, *, block_tokens: int, num_blocks: int) -> None:
        self.registry = registry
        self._running = Gauge(
            "vllm:num_requests_running", "Sequences in the running batch", registry=registry
        )
        self._waiting = Gauge(
            "vllm:num_requests_waiting", "Sequences waiting to run", registry=registry
        )
        self._usage = Gauge(
            "vllm:kv_cache_usage_perc", "Share of KV pages in use, 0 to 1", registry=registry
        )
        self._pages = Gauge("baton_kv_pages", "KV pages by state", ["state"], registry=registry)
        self._preemptions = Counter(
            "baton_preemptions", "Sequences preempted since the start", registry=registry
        )
        self._hits = Counter(
            "vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache", registry=registry
        )
        self._queries = Counter(
            "vllm:prefix_cache_queries", "Prompt tokens looked up there", registry=registry
        )
        self._pool_hits = Counter(
            "baton_pool_hits", "Prompt tokens fetched from the pool", registry=registry
        )
        self._draining = Gauge("baton_draining", "1 while the worker drains", registry=registry)
        self._transfers = Gauge(
            "baton_transfers_in_flight", "Hand-offs that are not over", registry=registry
        )
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
        self._legs = Counter(
            "baton_legs", "Legs by how they ended", ["service", "outcome"], registry=registry
        )
        self._tickets = Counter(
            "baton_kv_tickets_refused",
            "Permits and tickets that were not good",
            ["reason"],
            registry=registry,
        )
        self._handshakes = Counter(
            "baton_handshake_incompatible",
            "Sessions between workers refused, by the field that did not fit",
            ["field"],
            registry=registry,
        )
        self._observed = WorkerLoad()
        self._legs_told: dict[tuple[str, str], int] = {}
        cache = Gauge(
            "vllm:cache_config_info",
            "1; the labels say it",
            ["block_size", "num_gpu_blocks"],
            registry=registry,
        )
        cache.labels(block_size=str(block_tokens), num_gpu_blocks=str(num_blocks)).set(1)

    def legs_ended(self, service: str, outcome: str, total: int) -> None:
        """So many legs of a service have ended in this way since the start."""
        before = self._legs_told.get((service, outcome), 0)
        self._legs_told[service, outcome] = total
        self._legs.labels(service, outcome).inc(total - before)

    def ticket_refused(self, reason: str) -> None:
        """Somebody showed a permit or ticket that is not good; reasons are a closed set."""
        self._tickets.labels(reason).inc()

    def handshake_refused(self, field: str) -> None:
        """A session with another worker did not come about; fields are a closed set."""
        self._handshakes.labels(field).inc()

    def observe(self, load: WorkerLoad, *, transfers_in_flight: int) -> None:
        """Takes over the worker's last report on itself."""
        self._running.set(load.running)
        self._waiting.set(load.waiting)
        self._usage.set(load.blocks_used / load.blocks_total if load.blocks_total else 0.0)
        self._pages.labels("free").set(load.blocks_free)
        self._pages.labels("used").set(load.blocks_used)
        self._pages.labels("cached").set(load.blocks_cached)
        before, self._observed = self._observed, load
        self._preemptions.inc(load.preemptions - before.preemptions)
        self._hits.inc(load.prefix_hit_tokens - before.prefix_hit_tokens)
        self._pool_hits.inc(load.pool_hit_tokens - before.pool_hit_tokens)
        self._queries.inc(load.prefix_query_tokens - before.prefix_query_tokens)
        self._draining.set(load.draining)
        self._transfers.set(transfers_in_flight)
