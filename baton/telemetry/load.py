"""What a worker last reported of itself, as metrics."""

from collections.abc import Callable
from operator import attrgetter

from prometheus_client import CollectorRegistry, Counter, Gauge

from baton.generation import WorkerLoad


def _usage(load: WorkerLoad) -> float:
    return load.blocks_used / load.blocks_total if load.blocks_total else 0.0


_GAUGES: dict[str, tuple[str, Callable[[WorkerLoad], float]]] = {
    "vllm:num_requests_running": ("Sequences in the running batch", attrgetter("running")),
    "vllm:num_requests_waiting": ("Sequences waiting to run", attrgetter("waiting")),
    "vllm:kv_cache_usage_perc": ("Share of KV pages in use, 0 to 1", _usage),
    "baton_kv_pages_leaked": (
        "KV pages in use though no request holds any; told when there is none",
        attrgetter("blocks_leaked"),
    ),
    "baton_draining": ("1 while the worker drains", attrgetter("draining")),
}

_PAGES: dict[str, Callable[[WorkerLoad], float]] = {
    "free": attrgetter("blocks_free"),
    "used": attrgetter("blocks_used"),
    "cached": attrgetter("blocks_cached"),
}

_COUNTERS: dict[str, tuple[str, Callable[[WorkerLoad], float]]] = {
    "baton_preemptions": ("Sequences preempted since the start", attrgetter("preemptions")),
    "vllm:prefix_cache_hits": (
        "Prompt tokens found in the prefix cache",
        attrgetter("prefix_hit_tokens"),
    ),
    "vllm:prefix_cache_queries": (
        "Prompt tokens looked up there",
        attrgetter("prefix_query_tokens"),
    ),
    "baton_pool_hits": ("Prompt tokens fetched from the pool", attrgetter("pool_hit_tokens")),
}
"""Told as totals since the start."""


class LoadMetrics:
    """One worker's load: names, descriptions and where the numbers stand in a report are in the tables above."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._gauges = [
            (Gauge(name, text, registry=registry), read) for name, (text, read) in _GAUGES.items()
        ]
        self._counters = [
            (Counter(name, text, registry=registry), read)
            for name, (text, read) in _COUNTERS.items()
        ]
        self._pages = Gauge("baton_kv_pages", "KV pages by state", ["state"], registry=registry)
        self._observed = WorkerLoad()

    def observe(self, load: WorkerLoad) -> None:
        """Takes over the worker's last report on itself."""
        before, self._observed = self._observed, load
        for gauge, read in self._gauges:
            gauge.set(read(load))
        for counter, read in self._counters:
            counter.inc(read(load) - read(before))
        for state, read in _PAGES.items():
            self._pages.labels(state).set(read(load))
