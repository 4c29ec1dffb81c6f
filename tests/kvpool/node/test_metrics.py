from prometheus_client import CollectorRegistry

from kvpool.messages import NodeUsage
from kvpool.node.metrics import NodeMetrics


def test_what_nodes_send_each_other_is_counted_and_copies_are_told_as_they_are():
    metrics = NodeMetrics(registry := CollectorRegistry())
    for copies in (4, 2):
        usage = NodeUsage(
            slots_total=8,
            slots_free=4,
            fetched_blocks=4,
            sent_blocks=3,
            failed_fetches=1,
            copies=copies,
        )
        metrics.observe(usage, slot_bytes=1, sick=False, degraded=False, routers=0)
    assert registry.get_sample_value("baton_pool_fetched_blocks_total") == 4
    assert registry.get_sample_value("baton_pool_sent_blocks_total") == 3
    assert registry.get_sample_value("baton_pool_failed_fetches_total") == 1
    assert registry.get_sample_value("baton_pool_copies") == 2
