from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from baton.generation import WorkerLoad
from baton.telemetry.metrics import render
from baton_engine.ports import GrammarCounts, SpeculationCounts
from baton_worker.metrics import GrammarMetrics, SpeculationMetrics, WorkerMetrics

KNOWN_NAMES = {
    "vllm:num_requests_running": "gauge",
    "vllm:num_requests_waiting": "gauge",
    "vllm:kv_cache_usage_perc": "gauge",
    "vllm:cache_config_info": "gauge",
    "vllm:request_queue_time_seconds": "histogram",
    "vllm:request_prefill_time_seconds": "histogram",
    "vllm:prefix_cache_hits": "counter",
    "vllm:prefix_cache_queries": "counter",
    "vllm:prompt_tokens": "counter",
    "vllm:generation_tokens": "counter",
}


def _metrics() -> WorkerMetrics:
    return WorkerMetrics(CollectorRegistry(), block_tokens=16, num_blocks=10)


def test_dashboards_and_gateway_pickers_find_the_names_that_they_know():
    text, _ = render(_metrics().registry)
    families = {
        family.name: family.type for family in text_string_to_metric_families(text.decode())
    }
    assert {name: families.get(name) for name in KNOWN_NAMES} == KNOWN_NAMES


def test_what_only_grows_is_counted_once_however_often_it_is_looked_at():
    metrics = _metrics()
    for hits, queries, preemptions in ((3, 10, 0), (3, 10, 0), (5, 30, 1)):
        load = WorkerLoad(
            prefix_hit_tokens=hits, prefix_query_tokens=queries, preemptions=preemptions
        )
        metrics.observe(load, transfers_in_flight=0)
    value = metrics.registry.get_sample_value
    assert value("vllm:prefix_cache_hits_total") == 5
    assert value("vllm:prefix_cache_queries_total") == 30
    assert value("baton_preemptions_total") == 1


def test_what_grammars_cost_is_read_where_the_engine_counts_it():
    metrics, counts = _metrics(), GrammarCounts()
    metrics.registry.register(GrammarMetrics(counts))
    counts.compiled, counts.evicted, counts.mask_s, counts.faults = 3, 1, 0.25, 2
    value = metrics.registry.get_sample_value
    assert value("baton_grammars_total", {"outcome": "compiled"}) == 3
    assert value("baton_grammars_total", {"outcome": "evicted"}) == 1
    assert value("baton_grammar_mask_seconds_total") == 0.25
    assert value("baton_grammar_faults_total") == 2


def test_drafts_are_counted_under_vllms_names():
    metrics = _metrics()
    counts = SpeculationCounts(
        drafts=2, draft_tokens=6, accepted_tokens=3, accepted_per_position=[2, 1, 0]
    )
    metrics.registry.register(SpeculationMetrics(counts))
    value = metrics.registry.get_sample_value
    assert value("vllm:spec_decode_num_drafts_total") == 2
    assert value("vllm:spec_decode_num_draft_tokens_total") == 6
    assert value("vllm:spec_decode_num_accepted_tokens_total") == 3
    per_position = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    assert value(per_position, {"position": "0"}) == 2
    assert value(per_position, {"position": "2"}) == 0
