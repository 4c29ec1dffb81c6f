"""Attempts that were lost and made again, in /metrics as they happen: a job that fails in the end had its restarts too."""

from collections.abc import Iterator

from prometheus_client.metrics_core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from router.restarts import Restarts, Rung


class RestartMetrics(Collector):
    """Reads the counts whenever the metrics are scraped.

    Args:
        restarts: The dispatcher's.
        model_name: The served model's.
    """

    def __init__(self, restarts: Restarts, model_name: str) -> None:
        self._restarts = restarts
        self._model_name = model_name

    def collect(self) -> Iterator[Metric]:
        """One counter for those before a first token, one for those after it, and one of how they went on."""
        retries = CounterMetricFamily(
            "baton_prefill_retries",
            "Attempts started again before their first token.",
            labels=("model_name",),
        )
        retries.add_metric((self._model_name,), self._restarts.retries)
        yield retries
        migrations = CounterMetricFamily(
            "baton_migrations",
            "Attempts that went on elsewhere after it.",
            labels=("model_name", "kind"),
        )
        migrations.add_metric((self._model_name, "resumed"), self._restarts.resumptions)
        yield migrations
        rungs = CounterMetricFamily(
            "baton_handoff_rungs",
            "What was done about hand-offs that did not come to their end.",
            labels=("model_name", "rung"),
        )
        for rung in Rung:
            rungs.add_metric((self._model_name, rung.value), self._restarts.rungs[rung])
        yield rungs
