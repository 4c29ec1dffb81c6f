"""Shows how fast the ways from this worker to each decode worker are."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from baton.ids import WorkerIdentity
from kv_transfer.session.link_speed import LinkSpeed

_MAX_PEERS = 64
"""Ways with a label of their own; beyond, those that were opened first go without."""


class LinkMetrics(Collector):
    """The links that are open, by the workers at their two ends; asked whenever the metrics are read."""

    def __init__(self, registry: CollectorRegistry, source: WorkerIdentity) -> None:
        self._source = source
        self._links: dict[WorkerIdentity, LinkSpeed] = {}
        registry.register(self)

    def opened(self, target: WorkerIdentity, link: LinkSpeed) -> None:
        """A session with a decode worker is up."""
        self._links[target] = link

    def closed(self, target: WorkerIdentity) -> None:
        """It is over."""
        self._links.pop(target, None)

    def bytes_per_second(self, target: WorkerIdentity) -> float:
        """By the latest pushes; 0 while nothing has been pushed."""
        link = self._links.get(target)
        return 0.0 if link is None else link.bytes_per_second

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """One series per pair of workers: a worker that was started again takes the place of its predecessor."""
        labels = ["backend", "source", "target"]
        rate = GaugeMetricFamily(
            "baton_kv_link_bytes_per_second",
            "Rate of the latest pushes to a decode worker; 0 before the first",
            labels=labels,
        )
        latency = GaugeMetricFamily(
            "baton_kv_link_latency_seconds",
            "Time that one page took to a decode worker when the link was opened",
            labels=labels,
        )
        newest = {target.worker_id: link for target, link in tuple(self._links.items())}
        for worker_id, link in tuple(newest.items())[-_MAX_PEERS:]:
            named = [link.backend, self._source.worker_id, worker_id]
            rate.add_metric(named, link.bytes_per_second)
            latency.add_metric(named, link.latency_s)
        yield rate
        yield latency
