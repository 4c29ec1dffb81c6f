"""Shows how fast each transfer backend moves pages from this worker."""

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Gauge

from kv_transfer.link import MeasuredSender


def export_links(registry: CollectorRegistry, senders: Mapping[str, MeasuredSender]) -> None:
    """Adds a gauge that asks the senders whenever it is read."""
    gauge = Gauge(
        "baton_kv_link_bytes_per_second",
        "Rate of the latest pushes, mean over the open links; 0 before the first",
        ["backend"],
        registry=registry,
    )
    for name, sender in senders.items():
        gauge.labels(backend=name).set_function(sender.bytes_per_second)
