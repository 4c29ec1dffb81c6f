"""What the workers report of themselves, as one router's /metrics shows it: per worker, in the names that dashboards know.

Gateways and dashboards find the whole cluster at one address. What only a worker knows (its transfers, its legs) it tells at
an address of its own (`cluster.metrics_port`).
"""

from collections.abc import Callable, Iterator

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from baton.generation import WorkerLoad
from router.routing.view import ClusterView, WorkerView

_LABELS = ("model_name", "worker")
_Read = Callable[[WorkerLoad], float]
_Kind = type[GaugeMetricFamily] | type[CounterMetricFamily]


class WorkerLoads(Collector):
    """Reads the last reports whenever the metrics are scraped; workers that are gone are gone from here too.

    Args:
        view: The connected workers. Their names are the operator's, so that the label is bounded.
        model_name: The served model's.
    """

    def __init__(self, view: ClusterView, model_name: str) -> None:
        self._view = view
        self._model_name = model_name

    def collect(self) -> Iterator[Metric]:
        """One family per name, with one sample per worker."""
        for kind, name, text, read in _FAMILIES:
            yield self._family(kind, name, text, read)
        yield self._cache_config()

    def _family(self, kind: _Kind, name: str, text: str, read: _Read) -> Metric:
        family = kind(name, text, labels=_LABELS)
        for worker in self._view.workers:
            family.add_metric(self._labels(worker), read(worker.load))
        return family

    def _cache_config(self) -> GaugeMetricFamily:
        labels = (*_LABELS, "block_size", "num_gpu_blocks")
        family = GaugeMetricFamily("vllm:cache_config_info", "1; the labels say it.", labels=labels)
        for worker in self._view.workers:
            sizes = (str(worker.hello.layout.block_tokens), str(worker.hello.num_blocks))
            family.add_metric((*self._labels(worker), *sizes), 1)
        return family

    def _labels(self, worker: WorkerView) -> tuple[str, str]:
        return self._model_name, worker.identity.worker_id


def _running(load: WorkerLoad) -> float:
    return load.running


def _waiting(load: WorkerLoad) -> float:
    return load.waiting


def _usage(load: WorkerLoad) -> float:
    return load.blocks_used / load.blocks_total if load.blocks_total else 0.0


def _hits(load: WorkerLoad) -> float:
    return load.prefix_hit_tokens


def _queries(load: WorkerLoad) -> float:
    return load.prefix_query_tokens


def _pooled(load: WorkerLoad) -> float:
    return load.pool_hit_tokens


_FAMILIES: tuple[tuple[_Kind, str, str, _Read], ...] = (
    (GaugeMetricFamily, "vllm:num_requests_running", "Sequences that run.", _running),
    (GaugeMetricFamily, "vllm:num_requests_waiting", "Sequences that wait.", _waiting),
    (GaugeMetricFamily, "vllm:kv_cache_usage_perc", "Share of KV pages in use, 0 to 1.", _usage),
    (
        CounterMetricFamily,
        "vllm:prefix_cache_hits",
        "Prompt tokens found in prefix caches.",
        _hits,
    ),
    (
        CounterMetricFamily,
        "vllm:prefix_cache_queries",
        "Prompt tokens looked up there.",
        _queries,
    ),
    (
        CounterMetricFamily,
        "baton_pool_hits",
        "Tokens whose KV was fetched from the pool.",
        _pooled,
    ),
)
