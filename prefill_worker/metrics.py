"""What a prefill worker counts beside what every worker does (baton/telemetry/worker.py)."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from baton.errors import BatonError
from baton.telemetry.metrics import REQUEST_LATENCY_BUCKETS_S
from kv_transfer.ledger.outbox import HandOver


class PrefillMetrics:
    """Hand-offs as the sender sees them."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._pages = Counter("baton_kv_sent_pages", "KV pages handed over", registry=registry)
        self._bytes = Counter("baton_kv_sent_bytes", "Bytes handed over", registry=registry)
        self._failures = Counter(
            "baton_kv_transfer_failures",
            "Hand-offs that failed, by error code",
            ["reason"],
            registry=registry,
        )
        self._reserve_wait_s = Histogram(
            "baton_kv_reserve_wait_seconds",
            "From the first chunk until pages were granted",
            buckets=REQUEST_LATENCY_BUCKETS_S,
            registry=registry,
        )
        self._unhidden_s = Histogram(
            "baton_kv_transfer_unhidden_seconds",
            "From the first token to the verified commit",
            buckets=REQUEST_LATENCY_BUCKETS_S,
            registry=registry,
        )
        self._refused = Gauge(
            "baton_kv_refused_replies",
            "Messages of decode workers that fitted no hand-off",
            registry=registry,
        )
        self._fenced = Counter(
            "baton_fenced_writes",
            "Writes given up because the lease on the peer's pages was over",
            registry=registry,
        )

        self._unreachable = Counter(
            "baton_kv_backend_unreachable",
            "Decode workers that could not be written to by the backend they chose; the next one was tried",
            ["backend"],
            registry=registry,
        )

        self._detours = Counter(
            "baton_kv_pool_detours",
            "Prompts left in the pool because the decode worker had no room",
            registry=registry,
        )

    def refused(self, messages: int) -> None:
        """So many messages have been refused since the start."""
        self._refused.set(messages)

    def unreachable(self, backend: str) -> None:
        """A backend does not work to some decode worker; backends are a closed set."""
        self._unreachable.labels(backend).inc()

    def fenced_write(self) -> None:
        """A write came too late and was not made."""
        self._fenced.inc()

    def handed_over(self, done: HandOver) -> None:
        """A decode worker has the pages."""
        self._pages.inc(done.blocks_sent)
        self._bytes.inc(done.bytes_sent)
        self._reserve_wait_s.observe(done.reserve_wait_s)
        self._unhidden_s.observe(done.unhidden_s)

    def detoured(self) -> None:
        """A prompt was left in the pool."""
        self._detours.inc()

    def failed(self, error: BatonError) -> None:
        """A leg failed; error codes are a closed set."""
        self._failures.labels(reason=error.code).inc()
