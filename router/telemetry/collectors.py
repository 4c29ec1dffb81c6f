"""What /metrics reads from the router's own parts whenever it is scraped: index, decisions, restarts,
the workers' reports.
"""

from collections.abc import Callable, Iterator, Mapping

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from baton.generation import WorkerLoad
from router.dispatch.retry import Fallback, RetryCounters
from router.routing.explanation import DecisionLog
from router.routing.index import PrefixIndex
from router.routing.pairs import BrokenPairs, ProbeOutcome
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
            "baton_prefix_index_blocks",
            "Blocks in the index's table, and those of holders that are gone until they are cleared.",
            len(index),
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
            "baton_prefix_index_lost",
            "Blocks that gave way to others (router.max_indexed_blocks).",
            counts.lost,
        )


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


class PairMetrics(Collector):
    """Reads the counts whenever the metrics are scraped.

    Args:
        pairs: The router's.
    """

    def __init__(self, pairs: BrokenPairs) -> None:
        self._pairs = pairs

    def collect(self) -> Iterator[Metric]:
        """How many pairs cannot hand KV over now, and what became of the probes of their links."""
        yield GaugeMetricFamily(
            "baton_broken_pairs",
            "Pairs of workers that cannot hand KV over and get no requests as a pair.",
            len(self._pairs),
        )
        probes = CounterMetricFamily(
            "baton_link_probes", "Links of such pairs that were tried.", labels=("outcome",)
        )
        for outcome in ProbeOutcome:
            probes.add_metric((outcome.value,), self._pairs.outcomes.get(outcome, 0))
        yield probes


class RouteDecisions(Collector):
    """Reads the counts whenever the metrics are scraped.

    Args:
        log: The router's decisions.
    """

    def __init__(self, log: DecisionLog) -> None:
        self._log = log

    def collect(self) -> Iterator[Metric]:
        """One counter, with a sample for each value of `RouteKind`."""
        family = CounterMetricFamily(
            "baton_route_decisions", "Choices of workers, by how the legs lie.", labels=("kind",)
        )
        for kind, count in self._log.counts.items():
            family.add_metric((kind.value,), count)
        yield family


class WorkerRefusals(Collector):
    """Workers that were refused when they greeted.

    Args:
        refusals: How often, by the field that did not fit; read at each scrape.
    """

    def __init__(self, refusals: Mapping[str, int]) -> None:
        self._refusals = refusals

    def collect(self) -> Iterator[Metric]:
        """One counter."""
        family = CounterMetricFamily(
            "baton_workers_refused",
            "Greetings of workers that were refused, by the field that did not fit.",
            labels=("field",),
        )
        for field, count in sorted(self._refusals.items()):
            family.add_metric((field,), count)
        yield family
