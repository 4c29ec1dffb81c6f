"""What the receiving half of a worker counts beside what every worker does (baton_worker/metrics.py)."""

from prometheus_client import CollectorRegistry, Counter, Gauge


class ReceivingMetrics:
    """Hand-offs as the receiver sees them."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._refused = Gauge(
            "baton_kv_refused_messages",
            "Messages of sending workers that fitted no transfer",
            registry=registry,
        )
        self._cut_off = Counter(
            "baton_kv_fenced_peers", "Sending workers cut off for not stopping", registry=registry
        )
        self._corrupt = Counter(
            "baton_kv_integrity_failures",
            "Hand-offs whose pages had other checksums than their sender's",
            registry=registry,
        )
        self._corrupt_told = 0
        self._quarantined = Gauge(
            "baton_kv_pages_quarantined",
            "KV pages out of use because a lost sending worker may still write there",
            registry=registry,
        )

    def observe(self, *, refused: int, corrupted: int, quarantined: int) -> None:
        """So many messages were refused and hand-offs corrupt since the start; so many pages are out of use now."""
        self._refused.set(refused)
        self._corrupt.inc(corrupted - self._corrupt_told)
        self._corrupt_told = corrupted
        self._quarantined.set(quarantined)

    def cut_off(self) -> None:
        """A peer's session was ended because it did not confirm an abort."""
        self._cut_off.inc()
