"""What a worker counts of its dealings with the pool, beside what every worker does (baton_worker/metrics.py)."""

from enum import Enum

from prometheus_client import CollectorRegistry, Counter, Histogram

from baton.pages import FetchOutcome
from baton.telemetry.metrics import REQUEST_LATENCY_BUCKETS_S


class Lookup(Enum):
    """What came of asking the node for a prompt's blocks."""

    HIT = "hit"
    MISS = "miss"
    LATE = "late"
    FAILED = "failed"


class Unpublished(Enum):
    """Why a full page did not come into the pool."""

    OVERFLOW = "overflow"
    AWAY = "away"
    REFUSED = "refused"
    OVERWRITTEN = "overwritten"
    FAILED = "failed"


class PoolMetrics:
    """One worker's reading from the pool and writing to it. Thread-safe."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._lookups = Counter(
            "baton_pool_lookups", "Prompts asked for at the node", ["outcome"], registry=registry
        )
        self._lookup_s = Histogram(
            "baton_pool_lookup_seconds",
            "What a prompt waited for the node's answer",
            buckets=REQUEST_LATENCY_BUCKETS_S,
            registry=registry,
        )
        self._fetched = Counter(
            "baton_pool_fetched_blocks", "Blocks fetched and verified", registry=registry
        )
        self._fetch_failures = Counter(
            "baton_pool_fetch_failures",
            "Sequences whose fetch failed, by error code",
            ["reason"],
            registry=registry,
        )
        self._fetch_s = Counter(
            "baton_pool_fetch_seconds", "Time in which blocks were fetched", registry=registry
        )
        self._published = Counter(
            "baton_pool_published_blocks", "Blocks put into the pool", registry=registry
        )
        self._unpublished = Counter(
            "baton_pool_unpublished_blocks",
            "Full pages that did not come into the pool, by reason",
            ["reason"],
            registry=registry,
        )
        self._publish_s = Counter(
            "baton_pool_publish_seconds", "Time in which blocks were put", registry=registry
        )
        self._failures = Counter(
            "baton_pool_node_failures", "Calls to the node that failed", registry=registry
        )

    def looked_up(self, outcome: Lookup, seconds: float) -> None:
        """A prompt was asked for."""
        self._lookups.labels(outcome.value).inc()
        self._lookup_s.observe(seconds)

    def fetched(self, outcome: FetchOutcome) -> None:
        """A step's fetches are over."""
        self._fetched.inc(outcome.num_blocks)
        self._fetch_s.inc(outcome.seconds)
        for error in outcome.failed.values():
            self._fetch_failures.labels(error.code).inc()

    def published(self, num_blocks: int, seconds: float) -> None:
        """A batch is in the pool."""
        self._published.inc(num_blocks)
        self._publish_s.inc(seconds)

    def unpublished(self, reason: Unpublished, num_blocks: int) -> None:
        """So many pages were dropped."""
        self._unpublished.labels(reason.value).inc(num_blocks)

    def node_failed(self) -> None:
        """A call to the node failed."""
        self._failures.inc()
