from prometheus_client import CollectorRegistry

from router.dispatch.retry import RetryCounters
from router.restart_metrics import RetryMetrics


def test_restarts_show_at_once_in_the_names_that_dashboards_know():
    registry, restarts = CollectorRegistry(), RetryCounters()
    registry.register(RetryMetrics(restarts, "tiny"))
    restarts.retries, restarts.resumptions = 2, 1
    model = {"model_name": "tiny"}
    assert registry.get_sample_value("baton_prefill_retries_total", model) == 2
    assert registry.get_sample_value("baton_migrations_total", model | {"kind": "resumed"}) == 1
