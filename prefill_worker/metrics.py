"""What the sending half of a worker counts beside what every worker does, and how fast its links are."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from baton.ids import WorkerIdentity
from kv_transfer.session.link_speed import LinkSpeed

_MAX_PEERS = 64
"""Links with a label of their own; beyond, those that were opened first go without."""


class SendingMetrics:
    """Hand-offs as the sender sees them, beside those of `baton_worker.metrics`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._refused = Gauge(
            "baton_kv_refused_replies",
            "Messages of receiving workers that fitted no hand-off",
            registry=registry,
        )
        self._fenced = Counter(
            "baton_fenced_writes",
            "Writes given up because the lease on the peer's pages was over",
            registry=registry,
        )
        self._fenced_told = 0
        self._unreachable = Counter(
            "baton_kv_backend_unreachable",
            "Receiving workers that could not be written to by the backend they chose; the next one was tried",
            ["backend"],
            registry=registry,
        )

        self._unreachable_peers = Counter(
            "baton_kv_unreachable_peers",
            "Sessions with receiving workers that did not come up or ended because the way there carried nothing",
            registry=registry,
        )

    def observe(self, *, refused: int, fenced: int) -> None:
        """So many messages were refused, and so many writes not made, since the start."""
        self._refused.set(refused)
        self._fenced.inc(fenced - self._fenced_told)
        self._fenced_told = fenced

    def unreachable(self, backend: str) -> None:
        """A backend does not work to some receiving worker; backends are a closed set."""
        self._unreachable.labels(backend).inc()

    def peer_unreachable(self) -> None:
        """A receiving worker cannot be reached at all, or not any more."""
        self._unreachable_peers.inc()


class LinkMetrics(Collector):
    """The links that are open, by the workers at their two ends; asked whenever the metrics are read."""

    def __init__(self, registry: CollectorRegistry, source: WorkerIdentity) -> None:
        self._source = source
        self._links: dict[WorkerIdentity, LinkSpeed] = {}
        registry.register(self)

    def opened(self, target: WorkerIdentity, link: LinkSpeed) -> None:
        """A session with a receiving worker is up."""
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
            "Rate of the latest pushes to a receiving worker; 0 before the first",
            labels=labels,
        )
        latency = GaugeMetricFamily(
            "baton_kv_link_latency_seconds",
            "Time that one page took to a receiving worker when the link was opened",
            labels=labels,
        )
        newest = {target.worker_id: link for target, link in tuple(self._links.items())}
        for worker_id, link in tuple(newest.items())[-_MAX_PEERS:]:
            named = [link.backend, self._source.worker_id, worker_id]
            rate.add_metric(named, link.bytes_per_second)
            latency.add_metric(named, link.latency_s)
        yield rate
        yield latency
