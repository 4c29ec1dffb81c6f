"""What is counted about limits. No label takes a tenant's name."""

from prometheus_client import CollectorRegistry, Counter, Gauge


class LimitMetrics:
    """Metrics of one router's limits on one registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._degraded = Gauge(
            "baton_limits_degraded",
            "1 while Redis gives no answer and this router gives out its part of the limits.",
            registry=registry,
        )
        self._alone = Counter(
            "baton_limits_degraded_decisions",
            "Decisions that this router made without Redis.",
            registry=registry,
        )

    def degraded(self, is_degraded: bool) -> None:
        """Whether Redis gave no answer."""
        self._degraded.set(is_degraded)

    def decided_alone(self) -> None:
        """One decision was made without Redis."""
        self._alone.inc()
