"""What the metrics of all packages share: a registry of their own, buckets, and how they are written out.

Each package defines its metrics in its `metrics.py`, on a registry that it is handed: two workers in one process, or
two tests, never share counts. No label takes a value that a client can choose.
"""

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

REQUEST_LATENCY_BUCKETS_S = (
    *(0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0),
)
"""For what a whole request, its first token or one of its phases takes."""

TOKEN_LATENCY_BUCKETS_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05),
    *(0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5),
)
"""For the time between two tokens, or one step of an engine."""

SHORT_LATENCY_BUCKETS_S = (0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05, 0.25)
"""For decisions that are meant to take less than a millisecond."""


def new_registry() -> CollectorRegistry:
    """An empty registry."""
    return CollectorRegistry(auto_describe=True)


def render(registry: CollectorRegistry) -> tuple[bytes, str]:
    """All metrics of `registry` in Prometheus' text format, and its content type."""
    return generate_latest(registry), CONTENT_TYPE_LATEST
