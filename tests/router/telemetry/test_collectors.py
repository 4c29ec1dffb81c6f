"""What /metrics tells of the router's own parts."""

from prometheus_client import CollectorRegistry

from baton.errors import UnreachableError
from baton.generation import WorkerLoad
from baton.ids import Role
from router.dispatch.retry import RetryCounters
from router.routing.index import PrefixIndex
from router.routing.pairs import BrokenPairs
from router.routing.view import ClusterView
from router.telemetry.collectors import PairMetrics, RetryMetrics, WorkerLoads
from tests.router.known_workers import hello


def _served() -> tuple[ClusterView, CollectorRegistry]:
    view, registry = ClusterView(PrefixIndex()), CollectorRegistry()
    registry.register(WorkerLoads(view, "m"))
    for name, role in (("p0", Role.PREFILL), ("d0", Role.DECODE)):
        view.join(hello(name, role), f"unix:{name}", 0.0)
    return view, registry


def test_every_worker_is_shown_as_it_last_reported():
    view, registry = _served()
    worker = next(worker for worker in view.workers if worker.identity.worker_id == "d0")
    load = WorkerLoad(
        running=3,
        waiting=2,
        blocks_total=10,
        blocks_used=4,
        prefix_hit_tokens=7,
        prefix_query_tokens=9,
    )
    worker.report(load, 1.0)
    labels = {"model_name": "m", "worker": "d0"}
    shown = {
        "vllm:num_requests_running": 3,
        "vllm:num_requests_waiting": 2,
        "vllm:kv_cache_usage_perc": 0.4,
        "vllm:prefix_cache_hits_total": 7,
        "vllm:prefix_cache_queries_total": 9,
    }
    for name, value in shown.items():
        assert registry.get_sample_value(name, labels) == value, name
    sizes = {"block_size": "4", "num_gpu_blocks": "64"}
    assert registry.get_sample_value("vllm:cache_config_info", labels | sizes) == 1


def test_a_worker_that_is_gone_is_not_shown():
    view, registry = _served()
    worker = next(iter(view.workers))
    view.lose(worker.identity)
    labels = {"model_name": "m", "worker": "p0"}
    assert registry.get_sample_value("vllm:num_requests_running", labels) is None
    assert registry.get_sample_value("vllm:num_requests_running", labels | {"worker": "d0"}) == 0


def test_restarts_show_at_once_in_the_names_that_dashboards_know():
    registry, restarts = CollectorRegistry(), RetryCounters()
    registry.register(RetryMetrics(restarts, "tiny"))
    restarts.retries, restarts.resumptions = 2, 1
    model = {"model_name": "tiny"}
    assert registry.get_sample_value("baton_prefill_retries_total", model) == 2
    assert registry.get_sample_value("baton_migrations_total", model | {"kind": "resumed"}) == 1


def test_broken_pairs_and_the_probes_of_their_links_are_counted():
    registry, pairs = CollectorRegistry(), BrokenPairs()
    registry.register(PairMetrics(pairs))
    prefill, decode = (hello(name, Role.HYBRID).identity for name in ("p0", "d0"))
    no_way = UnreachableError("nothing passes")
    pairs.failed(prefill, decode, no_way, 0.0)
    assert registry.get_sample_value("baton_broken_pairs") == 1
    assert pairs.due(2.0)
    pairs.probed(prefill, decode, no_way, 2.0)
    assert pairs.due(5.0)
    pairs.probed(prefill, decode, None, 5.0)
    assert registry.get_sample_value("baton_broken_pairs") == 0
    counted = {
        outcome: registry.get_sample_value("baton_link_probes_total", {"outcome": outcome})
        for outcome in ("carries", "failed", "unanswered")
    }
    assert counted == {"carries": 1, "failed": 1, "unanswered": 0}
