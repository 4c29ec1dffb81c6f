import json
import os
import re
from pathlib import Path
from typing import get_origin

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.config import env
from baton.config.load import from_json, load, to_json
from baton.config.ports import port_of
from baton.config.rules import RULES
from baton.config.schema import BatonConfig
from baton.config.setting import SECRETS, TYPES, Setting
from baton.config.speculative import (
    DraftModelSpeculation,
    Eagle3Speculation,
    NgramSpeculation,
    SuffixSpeculation,
    read_speculative,
)
from baton.errors import ConfigError


def flag(path: str, value: object) -> Setting:
    return Setting(path=path, value=value, source=f"--{path}")


@pytest.fixture
def cluster_yaml(tmp_path: Path):
    def write(text: str) -> Path:
        file = tmp_path / "cluster.yaml"
        file.write_text(text)
        return file

    return write


def refusal(file: Path | None = None, **sources) -> str:
    with pytest.raises(ConfigError) as caught:
        load(file, **sources)
    message = caught.value.message
    assert "\n" not in message
    return message.replace(str(file), "cluster.yaml")


def test_with_no_source_every_setting_has_its_default():
    assert load() == BatonConfig()


def test_an_empty_file_and_empty_sections_change_nothing(cluster_yaml):
    assert load(cluster_yaml("")) == BatonConfig()
    assert load(cluster_yaml("router:\nengine: {}\n")) == BatonConfig()


def test_a_flag_wins_over_the_environment_and_the_environment_over_the_file(cluster_yaml):
    file = cluster_yaml("router: {port: 1, host: file}\nlog: {level: error}\nmodel: {seed: 3}")
    environment = env.settings({"BATON_ROUTER_PORT": "2", "BATON_ROUTER_HOST": "environment"})
    config = load(file, environment=environment, flags=[flag("router.port", 3)])
    assert (config.router.port, config.router.host) == (3, "environment")
    assert (config.log.level, config.model.seed) == ("error", 3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("router: {port: abc}", "cluster.yaml: router.port: expected int, got 'abc'"),
        ("router: {port: '80'}", "cluster.yaml: router.port: expected int, got '80'"),
        ("router: {port: true}", "cluster.yaml: router.port: expected int, got True"),
        ("router: {port: 65536}", "cluster.yaml: router.port: must be from 0 to 65535, not 65536"),
        ("router: {http_body_timeout_s: 0}", "router.http_body_timeout_s: must be from 1 to 86400"),
        ("router: {http_keep_alive_s: 0}", "router.http_keep_alive_s: must be from 1 to 86400"),
        ("router: {sse_keep_alive_s: 0}", "router.sse_keep_alive_s: must be from 1 to 86400"),
        ("router: {root_path: llm}", "router.root_path: must be a path such as /llm"),
        ("router: {root_path: /llm/}", "router.root_path: must be a path such as /llm"),
        ("router: {root_path: /v1/x}", "router.root_path: must be a path such as /llm"),
        (
            "router: {chat_template_content_format: text}",
            "router.chat_template_content_format: must be auto, string or openai, not 'text'",
        ),
        ("router: {prot: 1}", "cluster.yaml: router.prot: no such setting; did you mean port?"),
        (
            "router: {slo_classes: {standard: {tbt: 1}}}",
            "cluster.yaml: router.slo_classes.standard.tbt: no such setting; did you mean tbt_s?",
        ),
        ("ruoter: {}", "cluster.yaml: ruoter: no such section; did you mean router?"),
        ("router: 7", "cluster.yaml: router: expected settings, got 7"),
        ("[1]", "cluster.yaml: expected sections such as `router:`, got [1]"),
        ("engine: {block_size: 24}", "engine.block_size: must be a power of two from 1 to 256"),
        ("engine: {block_size: x}", "engine.block_size: expected int or null, got 'x'"),
        ("engine: {gpu_memory_utilization: 0}", "must be above 0 and at most 1"),
        ("engine: {gpu_memory_utilization: .nan}", "must be above 0 and at most 1"),
        ("engine: {kv_cache_memory_bytes: 4 apples}", "expected a size such as 4GiB"),
        ("cluster: {decode_workers: -1}", "cluster.decode_workers: must be at least 0, not -1"),
        ("cluster: {decode_workers: 0}", "needs a prefill and a decode worker, or a hybrid one"),
        ("cluster: {restart_backoff_s: .inf}", "cluster.restart_backoff_s: must be above 0"),
        ("cluster: {workers: a:1}", "cluster.workers: expected a list of str, got 'a:1'"),
        (
            "transfer: {backends: [pigeon]}",
            "transfer.backends: must name at least one of: cuda_ipc, shm, nixl, ucx",
        ),
        ("transfer: {ports: 7100}", "transfer.ports: expected str"),
        ("transfer: {ports: 7100-7110}", "must be the first and the last of at least 16 ports"),
        ("transfer: {ports: 7199-7100}", "must be the first and the last of at least 16 ports"),
        ("transfer: {ports: 65500-65536}", "must be the first and the last of at least 16 ports"),
        (
            "transfer: {ports: 7990-8010}",
            "transfer.ports is 7990-8010, which holds the port of router.port",
        ),
        (
            "pool: {directory: redis, redis_url: 'redis://x', peer_address: '0.0.0.0:7002'}",
            "others cannot reach 0.0.0.0:7002; set pool.advertise_address to host:port",
        ),
        ("ray: {worker_ports: '7001'}", "ray.worker_ports: must be the first and the last port"),
        (
            "{transfer: {ports: 7100-7199}, ray: {worker_ports: 7001-7100}}",
            "ray.worker_ports is 7001-7100, which shares ports with transfer.ports",
        ),
        ("grammar: {max_bytes: 1000000}", "grammar.max_bytes: must be from 1 to 262144"),
        ("grammar: {threads: 0}", "grammar.threads: must be at least 1, not 0"),
        ("grammar: {max_symbols: -1}", "grammar.max_symbols: must be at least 1, not -1"),
        ("pool: {tenant_bytes: 9999999999TiB}", "pool.tenant_bytes: must be below 2**63, not"),
        ("pool: {publish_queue_blocks: 9223372036854775808}", "must be below 2**63, not"),
        ("log: {level: loud}", "log.level: must be debug, info, warning or error, not 'loud'"),
        ("router: {port: 1\n", "cluster.yaml:2: expected ',' or '}', but got '<stream end>'"),
        ("a: !!python/object:os.system x", "could not determine a constructor"),
        (
            "router: {port: 1}\nmodel: {}\nrouter: {host: a}",
            "cluster.yaml:3: router is given twice",
        ),
        ("router:\n  port: 1\n  'port': 2", "cluster.yaml:3: port is given twice"),
        ("router: {port: 2026-13-45}", "cluster.yaml:1: not a valid timestamp; quote what is text"),
        ("router: {port: !!int x}", "cluster.yaml:1: not a valid int"),
        ("router: {port: !!int ''}", "cluster.yaml:1: not a valid int"),
        ("router: {port: !!bool x}", "cluster.yaml:1: not a valid bool"),
        ("router: {port: !!timestamp x}", "cluster.yaml:1: not a valid timestamp"),
        (f"\nrouter: {{port: {'9' * 5000}}}", "cluster.yaml:2: not a valid int"),
        ("[" * 5000, "cluster.yaml: nested too deeply"),
        ("engine: {vllm: &a {x: *a}}", "engine.vllm: nested too deeply"),
        (f"engine: {{kv_cache_memory_bytes: {'9' * 400}T}}", "expected a size such as 4GiB"),
        ("cluster: {worker_names: ['a:²']}", "cluster.worker_names"),
        (f"cluster: {{worker_names: ['a:{'9' * 5000}']}}", "cluster.worker_names"),
        ("transfer: {lease_s: 7200}", "transfer.lease_s: must be from 0.05 to 3600"),
        ("transfer: {lease_s: 0.01}", "transfer.lease_s: must be from 0.05 to 3600"),
        ("router: {silence_timeout_s: 0.5}", "router.silence_timeout_s: must be at least 1"),
        ("pool: {node_lease_s: 86401}", "pool.node_lease_s: must be above 0 and at most 86400"),
    ],
)
def test_a_wrong_file_is_refused_in_one_line_that_names_the_place(cluster_yaml, text, message):
    assert message in refusal(cluster_yaml(text))


def test_what_is_merged_into_a_section_may_be_given_again(cluster_yaml):
    text = "router: &r {<<: &x {port: 1, host: a}, port: 2}\nlog: {<<: {}, <<: {level: error}}"
    config = load(cluster_yaml(text))
    assert (config.router.port, config.router.host, config.log.level) == (2, "a", "error")


def test_a_port_that_is_none_is_that_of_no_address(cluster_yaml):
    assert load(flags=[flag("pool.address", "a:²")]).pool.address == "a:²"
    assert [port_of(text) for text in ("a:65535", "[::1]:7", "a:65536", "a:²", "unix:/a:1")] == [
        65535,
        7,
        None,
        None,
        None,
    ]


def test_a_missing_file_is_refused(tmp_path):
    assert refusal(tmp_path / "absent.yaml") == "cluster.yaml: no such file or directory"


def test_an_environment_variable_is_read_by_the_type_of_its_setting():
    environment = env.settings(
        {
            "BATON_ENGINE_ENABLE_PREFIX_CACHING": "false",
            "BATON_ROUTER_API_KEYS": "one, two",
            "BATON_ENGINE_KV_CACHE_MEMORY_BYTES": "512M",
            "BATON_CLUSTER_DRAIN_TIMEOUT_S": "1.5",
            "BATON_MODEL_SERVED_MODEL_NAME": "",
            "UNRELATED": "x",
        }
    )
    config = load(environment=environment)
    assert config.engine.enable_prefix_caching is False
    assert config.router.api_keys == ("one", "two")
    assert config.engine.kv_cache_memory_bytes == 512 * 2**20
    assert config.cluster.drain_timeout_s == 1.5
    assert config.model.served_model_name == ()


def test_a_wrong_environment_variable_is_named():
    environment = env.settings({"BATON_ROUTER_PORT": "abc"})
    assert refusal(environment=environment) == "BATON_ROUTER_PORT: expected int, got 'abc'"


def test_a_misspelt_environment_variable_is_refused_with_a_suggestion():
    with pytest.raises(ConfigError, match=r"no such setting; did you mean BATON_ROUTER_PORT\?"):
        env.settings({"BATON_ROUTER_PROT": "1"})


def test_a_variable_of_records_is_refused_by_the_name_that_these_lack():
    variables = env.settings(
        {"BATON_ROUTER_SLO_CLASSES": '{"standard": {"ttft_s": 1, "ttl_s": 2}}'}
    )
    said = refusal(environment=variables)
    assert said.startswith("BATON_ROUTER_SLO_CLASSES.standard.ttl_s: no such setting")


def test_records_within_settings_are_of_the_one_form_whose_names_are_checked():
    nested = {path for path, declared in TYPES.items() if "baton.config" in str(declared)}
    assert nested == {path for path in nested if get_origin(TYPES[path]) is dict}
    assert "router.slo_classes" in nested


def test_a_secret_is_read_from_the_file_that_a_variable_names(tmp_path: Path):
    for name, text in {"secret": "5e" * 32 + "\n", "keys": "one, two\n"}.items():
        (tmp_path / name).write_text(text)
    environment = env.settings(
        {
            "BATON_CLUSTER_SECRET_FILE": str(tmp_path / "secret"),
            "BATON_ROUTER_API_KEYS_FILE": str(tmp_path / "keys"),
        }
    )
    config = load(environment=environment)
    assert (config.cluster.secret, config.router.api_keys) == ("5e" * 32, ("one", "two"))


@pytest.mark.parametrize("path", sorted(SECRETS))
def test_every_secret_may_be_a_file(path):
    assert f"BATON_{path.replace('.', '_').upper()}_FILE" in env.FILES


def test_a_secret_of_a_file_that_is_wrong_is_not_shown(tmp_path: Path):
    file = tmp_path / "secret"
    file.write_text("not hex")
    said = refusal(environment=env.settings({"BATON_CLUSTER_SECRET_FILE": str(file)}))
    assert said.startswith("BATON_CLUSTER_SECRET_FILE: ")
    assert "not hex" not in said


@pytest.mark.parametrize(
    ("content", "problem"),
    [(None, "no such file or directory"), (b" \n", "is empty"), (b"\xff", "not UTF-8 text")],
)
def test_a_file_without_a_secret_is_refused_by_its_variable(tmp_path: Path, content, problem):
    file = tmp_path / "secret"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=f"^BATON_CLUSTER_SECRET_FILE: {file}: {problem}$"):
        env.settings({"BATON_CLUSTER_SECRET_FILE": str(file)})


def test_a_secret_and_its_file_together_are_refused(tmp_path: Path):
    given = {"BATON_CLUSTER_SECRET": "5e" * 32, "BATON_CLUSTER_SECRET_FILE": "/nowhere"}
    with pytest.raises(ConfigError, match="given beside BATON_CLUSTER_SECRET; give one"):
        env.settings(given)


def test_children_do_not_learn_where_secrets_lie(monkeypatch):
    monkeypatch.setenv("BATON_CLUSTER_SECRET_FILE", "/run/secrets/baton/cluster-secret")
    assert "BATON_CLUSTER_SECRET_FILE" not in env.child_environment(num_threads=1)


def test_variables_that_kubernetes_makes_for_a_service_named_baton_router_are_no_settings():
    links = {
        "BATON_ROUTER_PORT": "tcp://10.0.0.7:8000",
        "BATON_ROUTER_SERVICE_HOST": "10.0.0.7",
        "BATON_ROUTER_SERVICE_PORT_HTTP": "8000",
        "BATON_ROUTER_PORT_8000_TCP_ADDR": "10.0.0.7",
    }
    assert env.settings(links) == []


def test_a_wrong_flag_is_named():
    settings = [Setting(path="router.port", value=70000, source="--port")]
    assert refusal(flags=settings) == "--port: must be from 0 to 65535, not 70000"


def test_a_secret_is_never_repeated_in_an_error(cluster_yaml):
    assert "hunter2" not in refusal(cluster_yaml("cluster: {secret: hunter2}"))
    assert "4711" not in refusal(cluster_yaml("router: {api_keys: [4711]}"))


@pytest.mark.parametrize(
    ("pool", "setting"),
    [
        ("{nodes: 2}", "pool.nodes"),
        ("{peer_address: '10.0.0.1:9100'}", "pool.peer_address"),
        (
            "{nodes: 2, directory: redis, redis_url: 'redis://r', ssd_dir: /d, ssd_bytes: 1}",
            "pool.ssd_dir",
        ),
    ],
)
def test_several_pool_nodes_need_a_directory_that_they_share_and_places_of_their_own(
    cluster_yaml, pool, setting
):
    assert setting in refusal(cluster_yaml(f"pool: {pool}"))


@pytest.mark.parametrize(
    ("cluster", "said"),
    [
        ("{discovery: consul}", "cluster.discovery: must be static, dns or redis"),
        ("{discovery: dns}", "cluster.discovery is dns, which needs cluster.worker_names"),
        ("{discovery: dns, worker_names: [decode]}", "cluster.worker_names: must hold names such"),
        ("{discovery: dns, worker_names: ['d:70000']}", "cluster.worker_names: must hold names"),
        ("{discovery: dns, worker_names: [_grpc.decode]}", "cluster.worker_names: must hold names"),
        ("{discovery: redis}", "cluster.discovery is redis, which needs cluster.redis_url"),
        (
            "{discovery: redis, redis_url: 'redis://r'}",
            "cluster.discovery is redis, which needs cluster.secret",
        ),
        ("{worker_names: ['d:1']}", "cluster.worker_names needs cluster.discovery dns"),
        (
            "{discovery: dns, worker_names: ['d:1'], redis_url: 'redis://r'}",
            "cluster.redis_url needs cluster.discovery redis: it is dns",
        ),
        ("{redis_prefix: ''}", "cluster.redis_prefix: must not be empty"),
        ("{redis_timeout_s: 0}", "cluster.redis_timeout_s: must be above 0"),
        ("{labels: {zone: [a]}}", "cluster.labels: expected"),
    ],
)
def test_a_discovery_that_cannot_find_anybody_is_refused_by_its_setting(
    cluster_yaml, cluster, said
):
    assert said in refusal(cluster_yaml(f"cluster: {cluster}"))


@pytest.mark.parametrize(
    "labels",
    [
        "{zone: " + "z" * 129 + "}",
        '{zone: "a\\nb"}',
        "{" + ", ".join(f"{n:02}{'ж' * 126}: {'ж' * 128}" for n in range(16)) + "}",
    ],
)
def test_labels_are_bounded(cluster_yaml, labels):
    said = refusal(cluster_yaml(f"cluster: {{labels: {labels}}}"))
    assert "cluster.labels: must hold at most 16" in said


def test_the_url_of_a_redis_is_never_repeated_in_an_error(cluster_yaml):
    assert "hunter2" not in refusal(cluster_yaml("cluster: {redis_url: [hunter2]}"))


def test_with_discovery_workers_here_are_optional(cluster_yaml):
    file = cluster_yaml(
        "cluster: {prefill_workers: 0, decode_workers: 0, discovery: dns,"
        " worker_names: ['d.svc:7001', _grpc._tcp.p.svc]}"
    )
    assert load(file).cluster.worker_names == ("d.svc:7001", "_grpc._tcp.p.svc")


def test_workers_elsewhere_make_workers_here_optional(cluster_yaml):
    file = cluster_yaml(
        "cluster: {prefill_workers: 0, decode_workers: 0, workers: ['10.0.0.1:9000']}"
    )
    assert load(file).cluster.workers == ("10.0.0.1:9000",)


@pytest.mark.parametrize(
    ("given", "counts"),
    [
        ({}, (1, 1, 0)),
        ({"hybrid": 2}, (0, 0, 2)),
        ({"hybrid": 2, "prefill": 1}, (1, 0, 2)),
        ({"hybrid": 0}, (1, 1, 0)),
        ({"prefill": 3}, (3, 1, 0)),
    ],
)
def test_asking_for_hybrid_workers_asks_for_no_others(given, counts):
    cluster = load(flags=[flag(f"cluster.{k}_workers", v) for k, v in given.items()]).cluster
    assert (cluster.prefill_workers, cluster.decode_workers, cluster.hybrid_workers) == counts


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("4GiB", 4 * 2**30),
        ("512M", 512 * 2**20),
        ("1.5g", 3 * 2**29),
        ("2 GB", 2 * 10**9),
        ("64k", 2**16),
        ("100", 100),
        ("100B", 100),
    ],
)
def test_a_size_may_be_written_with_a_unit(cluster_yaml, text, size_bytes):
    file = cluster_yaml(f"engine: {{kv_cache_memory_bytes: '{text}'}}")
    assert load(file).engine.kv_cache_memory_bytes == size_bytes


def test_operators_need_a_key_and_a_document_in_redis_needs_redis(cluster_yaml):
    assert "admin.api_keys" in refusal(cluster_yaml("admin: {port: 9000}"))
    assert "tenants.redis_url" in refusal(cluster_yaml("tenants: {source: redis}"))


def test_every_rule_is_about_a_setting_that_exists():
    assert {rule.path for rule in RULES} <= set(TYPES)


def test_every_default_satisfies_the_rules():
    config = BatonConfig()
    for rule in RULES:
        section, name = rule.path.split(".")
        value = getattr(getattr(config, section), name)
        assert value is None or rule.holds(value), rule.path


@given(port=st.integers(0, 65535), keys=st.lists(st.text(min_size=1)), seed=st.integers(0, 2**63))
def test_a_child_reads_back_exactly_the_configuration_it_is_sent(port, keys, seed):
    flags = [flag("router.port", port), flag("router.api_keys", keys), flag("model.seed", seed)]
    config = load(flags=flags)
    line = to_json(config)
    assert b"\n" not in line
    assert from_json(line) == config


def test_a_child_refuses_a_line_that_is_no_configuration():
    with pytest.raises(ConfigError, match="child process"):
        from_json(b'{"router": {"port": "x"}}')


def test_children_inherit_no_setting_and_so_no_secret(monkeypatch):
    monkeypatch.setenv("BATON_ROUTER_API_KEYS", "hunter2")
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    inherited = env.child_environment(num_threads=3, import_path="/here")
    assert not [name for name, value in inherited.items() if "hunter2" in value]
    assert inherited["OMP_NUM_THREADS"] == "3"
    assert re.fullmatch(r"/here:/elsewhere", inherited["PYTHONPATH"])


def test_threads_that_are_to_sleep_do_unless_the_operator_says_otherwise(monkeypatch):
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    assert "OMP_WAIT_POLICY" not in env.child_environment(num_threads=1)
    sleeping = env.child_environment(num_threads=1, threads_sleep=True)
    assert sleeping["OMP_WAIT_POLICY"] == "passive"
    assert int(sleeping["GOMP_SPINCOUNT"]) > 0
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    sleeping = env.child_environment(num_threads=1, threads_sleep=True)
    assert sleeping["OMP_WAIT_POLICY"] == "active"
    assert "GOMP_SPINCOUNT" not in sleeping, "it would be stronger than the policy"


def test_grpc_in_children_is_quiet_unless_the_operator_wants_to_hear_it(monkeypatch):
    monkeypatch.delenv("GRPC_VERBOSITY", raising=False)
    assert env.child_environment(num_threads=1)["GRPC_VERBOSITY"] == "ERROR"
    monkeypatch.setenv("GRPC_VERBOSITY", "DEBUG")
    assert env.child_environment(num_threads=1)["GRPC_VERBOSITY"] == "DEBUG"


def test_the_standard_variables_name_the_collector_unless_ours_does():
    standard = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4317"}
    assert load(environment=env.settings(standard)).trace.endpoint == "http://collector:4317"
    both = standard | {"BATON_TRACE_ENDPOINT": "http://ours:4317"}
    assert load(environment=env.settings(both)).trace.endpoint == "http://ours:4317"
    assert not load(environment=env.settings(standard)).trace.enabled


def speculative(text: str) -> Setting:
    path = "engine.speculative_config"
    return Setting(path=path, value=text, source="--speculative-config", is_text=True)


@pytest.mark.parametrize(
    ("asked", "shortest", "longest"),
    [
        ("", 5, 5),
        (', "prompt_lookup_max": 4', 4, 4),
        (', "prompt_lookup_min": 2', 2, 2),
        (', "prompt_lookup_max": 4, "prompt_lookup_min": 2', 2, 4),
    ],
)
def test_speculation_is_asked_for_in_the_json_of_vllm(asked, shortest, longest):
    text = f'{{"method": "ngram", "num_speculative_tokens": 3{asked}}}'
    config = from_json(to_json(load(flags=[speculative(text)])))
    assert read_speculative(config.engine.speculative_config) == NgramSpeculation(
        num_speculative_tokens=3, prompt_lookup_max=longest, prompt_lookup_min=shortest
    )


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({}, SuffixSpeculation(num_speculative_tokens=24)),
        (
            {"suffix_decoding_max_tree_depth": 64},
            SuffixSpeculation(num_speculative_tokens=32, max_tree_depth=64),
        ),
        (
            {
                "num_speculative_tokens": 8,
                "suffix_decoding_max_tree_depth": 16,
                "suffix_decoding_max_cached_requests": 0,
                "suffix_decoding_max_spec_factor": 2,
                "suffix_decoding_min_token_prob": 0,
            },
            SuffixSpeculation(
                num_speculative_tokens=8,
                max_tree_depth=16,
                max_cached_requests=0,
                max_spec_factor=2.0,
                min_token_prob=0.0,
            ),
        ),
    ],
)
def test_suffix_decoding_is_asked_for_in_the_json_of_vllm(given, wanted):
    text = json.dumps({"method": "suffix"} | given)
    config = from_json(to_json(load(flags=[speculative(text)])))
    assert read_speculative(config.engine.speculative_config) == wanted
    default = SuffixSpeculation(num_speculative_tokens=1)
    assert (default.max_tree_depth, default.max_cached_requests) == (24, 10_000)
    assert (default.max_spec_factor, default.min_token_prob) == (1.0, 0.1)


def test_a_draft_model_is_asked_for_in_the_json_of_vllm():
    text = '{"method": "draft_model", "model": "small", "num_speculative_tokens": 3}'
    config = from_json(to_json(load(flags=[speculative(text)])))
    assert read_speculative(config.engine.speculative_config) == DraftModelSpeculation(
        num_speculative_tokens=3, model="small"
    )


def test_a_head_is_asked_for_in_the_json_of_vllm():
    text = '{"method": "eagle3", "model": "head", "num_speculative_tokens": 3}'
    config = from_json(to_json(load(flags=[speculative(text)])))
    assert read_speculative(config.engine.speculative_config) == Eagle3Speculation(
        num_speculative_tokens=3, model="head"
    )


def test_nothing_is_speculated_unless_asked_for():
    assert read_speculative(BatonConfig().engine.speculative_config) is None


@pytest.mark.parametrize(
    ("text", "field", "why"),
    [
        ('{"num_speculative_tokens": 3}', "method", "must be one of ngram, suffix, draft_model"),
        ('{"method": "eagle", "num_speculative_tokens": 3}', "method", "eagle is not built"),
        ('{"method": "eagle3", "num_speculative_tokens": 3}', "model", "must be given"),
        ('{"method": "medusa", "num_speculative_tokens": 3}', "method", "medusa is not built"),
        ('{"method": "suffix", "num_speculative_tokens": 33}', "num_speculative_tokens", "1 to 32"),
        ('{"method": "suffix", "model": "x"}', "model", "is no setting of the method suffix"),
        ('{"method": "suffix", "prompt_lookup_max": 2}', "prompt_lookup_max", "is no setting of"),
        *(
            (
                f'{{"method": "suffix", "suffix_decoding_{name}": {value}}}',
                f"suffix_decoding_{name}",
                why,
            )
            for name, value, why in (
                ("max_tree_depth", "1", "a whole number from 2 to 256"),
                ("max_tree_depth", "257", "a whole number from 2 to 256"),
                ("max_tree_depth", '"24"', "a whole number from 2 to 256"),
                ("max_cached_requests", "-1", "a whole number from 0 to 1000000"),
                ("max_cached_requests", "1.5", "a whole number from 0 to 1000000"),
                ("max_spec_factor", "-0.1", "a number from 0 to 32"),
                ("max_spec_factor", "33", "a number from 0 to 32"),
                ("max_spec_factor", "true", "a number from 0 to 32"),
                ("min_token_prob", "1.01", "a number from 0 to 1"),
                ("min_token_prob", '"0.1"', "a number from 0 to 1"),
                ("corpus_tokens", "1000", "is no setting of the method suffix"),
            )
        ),
        ('{"method": "draft_model", "model": "x"}', "num_speculative_tokens", "must be given"),
        ('{"method": "draft_model", "num_speculative_tokens": 3}', "model", "must be given"),
        (
            '{"method": "draft_model", "num_speculative_tokens": 3, "model": 4}',
            "model",
            "must be a text",
        ),
        (
            '{"method": "draft_model", "num_speculative_tokens": 3, "model": "x",'
            ' "prompt_lookup_max": 2}',
            "prompt_lookup_max",
            "is no setting of the method draft_model",
        ),
        ('{"method": "ngram"}', "num_speculative_tokens", "must be given"),
        ('{"method": "ngram", "num_speculative_tokens": 33}', "num_speculative_tokens", "1 to 32"),
        ('{"method": "ngram", "num_speculative_tokens": true}', "num_speculative_tokens", "1 to"),
        (
            '{"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 0}',
            "prompt_lookup_max",
            "from 1 to 64",
        ),
        (
            '{"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2,'
            ' "prompt_lookup_min": 3}',
            "prompt_lookup_min",
            "must not be above prompt_lookup_max (2)",
        ),
        (
            '{"method": "ngram", "num_speculative_tokens": 2, "model": "x"}',
            "model",
            "is no setting of the method ngram",
        ),
    ],
)
def test_what_of_speculation_there_is_not_is_refused_by_its_field(text, field, why):
    told = refusal(flags=[speculative(text)])
    assert told.startswith(f"--speculative-config: engine.speculative_config.{field}: ")
    assert why in told


def test_a_speculative_config_that_is_no_json_object_is_refused():
    assert "expected JSON" in refusal(flags=[speculative("ngram")])
    assert "expected" in refusal(flags=[speculative("[1]")])


@pytest.mark.parametrize("decided", [None, "90"])
def test_rays_processes_wait_for_their_head_unless_the_operator_has_decided(monkeypatch, decided):
    name = "RAY_gcs_rpc_server_reconnect_timeout_s"
    monkeypatch.setenv(name, decided or "")
    if decided is None:
        monkeypatch.delenv(name)
    env.outlast_ray_head()
    assert os.environ[name] == (decided or str(30 * 24 * 3600))
