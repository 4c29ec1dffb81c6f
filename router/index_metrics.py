"""The prefix index in /metrics: how much it knows, and how it comes to know it."""

from collections.abc import Iterator

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from router.routing.index import PrefixIndex


class IndexMetrics(Collector):
    """Reads the index whenever the metrics are scraped.

    Args:
        index: The router's.
    """

    def __init__(self, index: PrefixIndex) -> None:
        self._index = index

    def collect(self) -> Iterator[Metric]:
        """One family per figure."""
        index, counts = self._index, self._index.counts
        yield GaugeMetricFamily(
            "baton_prefix_index_blocks", "Blocks that some holder is known to hold.", len(index)
        )
        yield GaugeMetricFamily(
            "baton_prefix_index_bytes", "Memory of the index's table.", index.size_bytes
        )
        yield CounterMetricFamily(
            "baton_prefix_index_events", "Blocks reported stored or removed.", counts.events
        )
        yield CounterMetricFamily(
            "baton_prefix_index_snapshots", "Snapshots received, whole or begun.", counts.snapshots
        )
        yield CounterMetricFamily(
            "baton_prefix_index_gaps",
            "Reports found missing; each asks for a snapshot.",
            counts.gaps,
        )
        yield CounterMetricFamily(
            "baton_prefix_index_refused", "Reports of incarnations that are gone.", counts.refused
        )
        yield CounterMetricFamily(
            "baton_prefix_index_lost", "Stored blocks for which there was no room.", counts.lost
        )
