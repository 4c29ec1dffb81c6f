from prometheus_client import CollectorRegistry

from router.restart_metrics import RestartMetrics
from router.restarts import Restarts


def test_restarts_show_at_once_in_the_names_that_dashboards_know():
    registry, restarts = CollectorRegistry(), Restarts()
    registry.register(RestartMetrics(restarts, "tiny"))
    restarts.retries, restarts.resumptions = 2, 1
    model = {"model_name": "tiny"}
    assert registry.get_sample_value("baton_prefill_retries_total", model) == 2
    assert registry.get_sample_value("baton_migrations_total", model | {"kind": "resumed"}) == 1
