"""What a decode worker counts beside what every worker does (baton/telemetry/worker.py)."""

from prometheus_client import CollectorRegistry, Counter, Gauge

from baton.errors import BatonError


class DecodeMetrics:
    """Legs and hand-offs as the receiver sees them."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._failures = Counter(
            "baton_decode_leg_failures", "Legs failed, by error code", ["reason"], registry=registry
        )
        self._refused = Gauge(
            "baton_kv_refused_messages",
            "Messages of prefill workers that fitted no transfer",
            registry=registry,
        )
        self._cut_off = Counter(
            "baton_kv_fenced_peers", "Prefill workers cut off for not stopping", registry=registry
        )

        self._corrupt = Counter(
            "baton_kv_integrity_failures",
            "Hand-offs whose pages had other checksums than their sender's",
            registry=registry,
        )
        self._corrupt_told = 0
        self._quarantined = Gauge(
            "baton_kv_pages_quarantined",
            "KV pages out of use because a lost prefill worker may still write there",
            registry=registry,
        )

    def failed(self, error: BatonError) -> None:
        """A leg failed; error codes are a closed set."""
        self._failures.labels(reason=error.code).inc()

    def refused(self, messages: int) -> None:
        """So many messages have been refused since the start."""
        self._refused.set(messages)

    def integrity(self, *, corrupted: int, quarantined: int) -> None:
        """So many hand-offs were corrupt since the start; so many pages are out of use now."""
        self._corrupt.inc(corrupted - self._corrupt_told)
        self._corrupt_told = corrupted
        self._quarantined.set(quarantined)

    def cut_off(self) -> None:
        """A peer's session was ended because it did not confirm an abort."""
        self._cut_off.inc()
