"""Attempts that were lost and made again, in /metrics as they happen, whatever becomes of the request in the end."""

from collections.abc import Iterator

from prometheus_client.metrics_core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from router.dispatch.retry import Fallback, RetryCounters


class RetryMetrics(Collector):
    """Reads the counts whenever the metrics are scraped.

    Args:
        counters: The dispatcher's.
        model_name: The served model's.
    """

    def __init__(self, counters: RetryCounters, model_name: str) -> None:
        self._counters = counters
        self._model_name = model_name

    def collect(self) -> Iterator[Metric]:
        """One counter for those before a first token, one for those after it, and one of what was done instead."""
        retries = CounterMetricFamily(
            "baton_prefill_retries",
            "Attempts started again before their first token.",
            labels=("model_name",),
        )
        retries.add_metric((self._model_name,), self._counters.retries)
        yield retries
        migrations = CounterMetricFamily(
            "baton_migrations",
            "Attempts that continued elsewhere after it.",
            labels=("model_name", "kind"),
        )
        migrations.add_metric((self._model_name, "resumed"), self._counters.resumptions)
        yield migrations
        fallbacks = CounterMetricFamily(
            "baton_handoff_fallbacks",
            "What was done about hand-offs that did not complete.",
            labels=("model_name", "fallback"),
        )
        for fallback in Fallback:
            labels = (self._model_name, fallback.value)
            fallbacks.add_metric(labels, self._counters.fallbacks[fallback])
        yield fallbacks
