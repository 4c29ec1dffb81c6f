"""How many requests were routed in which way, as one router's /metrics shows it."""

from collections.abc import Iterator

from prometheus_client.metrics_core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from router.routing.explanation import DecisionLog


class RouteDecisions(Collector):
    """Reads the counts whenever the metrics are scraped.

    Args:
        log: The router's decisions.
    """

    def __init__(self, log: DecisionLog) -> None:
        self._log = log

    def collect(self) -> Iterator[Metric]:
        """One counter, with a sample for each value of `RouteKind`."""
        family = CounterMetricFamily(
            "baton_route_decisions", "Choices of workers, by how the legs lie.", labels=("kind",)
        )
        for kind, count in self._log.counts.items():
            family.add_metric((kind.value,), count)
        yield family
