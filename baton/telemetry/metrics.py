"""What the metrics of all packages share: a registry of their own, buckets, and how they are written out.

Each package defines its metrics in its `metrics.py`, on a registry that it is handed: two workers in one process, or
two tests, never share counts. No label takes a value that a client can choose.
"""

import asyncio
from collections.abc import Iterator
from copy import copy

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

_SAMPLES_AT_ONCE = 128
"""They are written out in about a millisecond."""

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


async def render_in_turns(registry: CollectorRegistry) -> tuple[bytes, str]:
    """The same, in pieces between which the event loop serves others: a thousand workers have thousands of samples."""
    texts = []
    for family in registry.collect():
        for number, piece in enumerate(_pieces_of(family)):
            text = generate_latest(piece)
            # Two lines say what family it is; they stand once.
            texts.append(text.split(b"\n", 2)[2] if number else text)
            await asyncio.sleep(0)
    return b"".join(texts), CONTENT_TYPE_LATEST


class _Piece(Collector):
    """Some samples of a family."""

    def __init__(self, family: Metric, begin: int, end: int) -> None:
        self._family = copy(family)
        self._family.samples = family.samples[begin:end]

    def collect(self) -> Iterator[Metric]:
        """Those."""
        yield self._family


def _pieces_of(family: Metric) -> Iterator[_Piece]:
    """The whole family if its samples have several names: these are written in an order of their own."""
    count = len(family.samples)
    alike = len({sample.name for sample in family.samples}) == 1
    size = _SAMPLES_AT_ONCE if alike else max(1, count)
    for begin in range(0, max(1, count), size):
        yield _Piece(family, begin, begin + size)
