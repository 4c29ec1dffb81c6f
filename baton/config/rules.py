"""What a setting's value must satisfy beyond its type. A table; `load` names the place of a value that breaks it."""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from baton.config.lora import are_lora_modules, read_lora_modules
from baton.config.ports import MIN_PORTS, is_wildcard, parse_ports, port_of
from baton.config.schema import BatonConfig, ClusterConfig, EngineConfig
from baton.ids import Role


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One demand on one setting. None, which means "decide at start", satisfies every rule.

    Attributes:
        path: The setting, such as `router.port`.
        holds: Whether a value satisfies it. A NaN never does: every comparison with it is false.
        demand: Reads on after the setting's name: `must be at least 1`.
        choices: All values that satisfy it, where they are a few.
    """

    path: str
    holds: Callable[[Any], bool]
    demand: str
    choices: tuple[str, ...] = ()


def _at_least(low: float, *paths: str) -> list[Rule]:
    """Also below what is told to other processes, and to the system, as 64 bits."""
    return [
        rule
        for path in paths
        for rule in (
            Rule(path=path, holds=lambda v: low <= v, demand=f"must be at least {low}"),
            Rule(path=path, holds=lambda v: v < 2**63, demand="must be below 2**63"),
        )
    ]


def _above_zero(*paths: str) -> list[Rule]:
    return [
        Rule(path=path, holds=lambda v: 0 < v < float("inf"), demand="must be above 0")
        for path in paths
    ]


def _one_of(path: str, choices: Sequence[str]) -> Rule:
    return Rule(
        path=path,
        holds=lambda v: v in choices,
        demand=f"must be {_any_of(choices)}",
        choices=tuple(choices),
    )


def _any_of(choices: Sequence[str]) -> str:
    return f"{', '.join(choices[:-1])} or {choices[-1]}" if len(choices) > 1 else choices[0]


def _positive(time_s: float | None) -> bool:
    return time_s is None or 0 < time_s < float("inf")


MAX_GRAMMAR_BYTES = 256 * 1024

_CLASS_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
"""`package.module:Class`, of an operator's own."""

_ROOT_PATH = re.compile(r"(?!/v1(/|$))(/[A-Za-z0-9._~-]+)+")
"""Below /v1 are paths of the server's own."""

POLICIES = (
    "predictive",
    "prefix_affinity",
    "least_loaded",
    "round_robin",
    "random",
    "session",
)
DTYPES = ("auto", "float32", "float16", "bfloat16")
PREFILL_ORDERS = ("slack", "arrival")
PREEMPTIONS = ("arrival", "priority", "slo")
QUANTIZATIONS = ("none", "int8")
DEVICES = ("auto", "cpu", "cuda")
ENGINES = ("baton", "vllm")
CPU_PRODUCTS = (
    *("auto", "panels", "pairs", "compressed_panels", "compressed_pairs"),
    *("mixed", "amx", "onednn", "widened"),
)
KV_DTYPES = ("auto", "fp8_e4m3")
LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMATS = ("text", "json")
RAY_STRATEGIES = ("SPREAD", "PACK", "STRICT_PACK", "STRICT_SPREAD")
TENANT_SOURCES = ("file", "redis")
BACKENDS = ("cuda_ipc", "shm", "nixl", "ucx")
EVICTIONS = ("lru", "s3fifo", "cost")
DIRECTORIES = ("memory", "redis")
DISCOVERIES = ("static", "dns", "redis")
MOST_LABELS, MOST_LABEL_CHARS, MOST_LABELS_BYTES = 16, 128, 6144

_DNS_NAME = re.compile(
    r"_[A-Za-z0-9-]+\._[a-z]+\.[A-Za-z0-9_.-]+|[A-Za-z0-9][A-Za-z0-9_.-]*:\d{1,5}"
)
"""`_service._tcp.domain`, or `host:port`."""
CONTENT_FORMATS = ("auto", "string", "openai")

RULES: tuple[Rule, ...] = (
    _one_of("model.dtype", DTYPES),
    _one_of("model.quantization", QUANTIZATIONS),
    *_at_least(1, "model.max_model_len"),
    Rule(path="model.seed", holds=lambda v: 0 <= v < 2**64, demand="must be from 0 to 2**64 - 1"),
    Rule(path="model.served_model_name", holds=all, demand="must not hold an empty name"),
    Rule(
        path="model.lora_modules",
        holds=are_lora_modules,
        demand="must hold NAME=PATH, and no name twice",
    ),
    _one_of("engine.kind", ENGINES),
    _one_of("engine.device", DEVICES),
    _one_of("engine.cpu_product", CPU_PRODUCTS),
    _one_of("engine.kv_cache_dtype", KV_DTYPES),
    Rule(
        path="engine.block_size",
        holds=lambda v: 1 <= v <= 256 and v & (v - 1) == 0,
        demand="must be a power of two from 1 to 256",
    ),
    Rule(
        path="engine.gpu_memory_utilization",
        holds=lambda v: 0 < v <= 1,
        demand="must be above 0 and at most 1",
    ),
    *_at_least(
        1,
        "engine.kv_cache_memory_bytes",
        "engine.max_num_seqs",
        "engine.max_num_batched_tokens",
        "engine.num_threads",
    ),
    *_above_zero("engine.tbt_target_s"),
    _one_of("engine.prefill_order", PREFILL_ORDERS),
    _one_of("engine.preemption", PREEMPTIONS),
    Rule(
        path="engine.output_headroom",
        holds=lambda v: 0 <= v <= 1,
        demand="must be from 0 to 1",
    ),
    Rule(path="router.host", holds=bool, demand="must not be empty"),
    Rule(path="router.port", holds=lambda v: 0 <= v <= 65535, demand="must be from 0 to 65535"),
    Rule(path="router.api_keys", holds=all, demand="must not hold an empty key"),
    Rule(path="router.guardrails", holds=all, demand="must not hold an empty name"),
    _one_of("router.chat_template_content_format", CONTENT_FORMATS),
    Rule(
        path="router.root_path",
        holds=lambda v: v == "" or _ROOT_PATH.fullmatch(v) is not None,
        demand="must be a path such as /llm, without a slash at its end, and not begin with /v1",
    ),
    _one_of("tenants.source", TENANT_SOURCES),
    # It travels in a worker's command, escaped, beside a prompt (baton/rpc/bounds.py).
    Rule(
        path="grammar.max_bytes",
        holds=lambda v: 1 <= v <= MAX_GRAMMAR_BYTES,
        demand=f"must be from 1 to {MAX_GRAMMAR_BYTES}",
    ),
    *_at_least(
        1,
        "grammar.max_depth",
        "grammar.max_symbols",
        "grammar.max_states",
        "grammar.compile_fuel",
        "grammar.step_fuel",
        "grammar.max_compiled",
        "grammar.max_compiling_per_tenant",
        "grammar.threads",
    ),
    *_above_zero("grammar.check_s_per_minute_per_tenant"),
    *_at_least(1, "tenants.routers"),
    _one_of("simulated.role", [role.value for role in Role]),
    *_above_zero("simulated.prefill_tokens_per_s"),
    *_at_least(0, "simulated.step_s", "simulated.sequence_s"),
    *_at_least(1, "simulated.num_blocks"),
    *_above_zero("tenants.reload_s", "tenants.redis_timeout_s", "tenants.lease_s"),
    Rule(path="tenants.redis_prefix", holds=bool, demand="must not be empty"),
    Rule(path="admin.host", holds=bool, demand="must not be empty"),
    Rule(path="admin.port", holds=lambda v: 0 <= v <= 65535, demand="must be from 0 to 65535"),
    Rule(path="admin.api_keys", holds=all, demand="must not hold an empty key"),
    Rule(
        path="router.policy",
        holds=lambda v: v in POLICIES or _CLASS_PATH.fullmatch(v) is not None,
        demand=f"must be {_any_of((*POLICIES, 'package.module:Class'))}",
    ),
    *_at_least(
        1,
        "router.max_body_bytes",
        "router.max_connections",
        "router.max_attempts",
        "router.max_queued_bytes_per_client",
        "router.prefill_window_tokens",
        "router.max_waiting_requests",
        "router.max_waiting_requests_per_tenant",
        "router.max_waiting_prompt_tokens",
        "router.max_waiting_prompt_tokens_per_tenant",
        "router.max_indexed_blocks",
    ),
    *(
        Rule(path=path, holds=lambda v: 1 <= v <= 86400, demand="must be from 1 to 86400 (a day)")
        for path in (
            "router.http_body_timeout_s",
            "router.http_keep_alive_s",
            "router.sse_keep_alive_s",
        )
    ),
    Rule(
        path="router.slo_classes",
        holds=lambda v: "standard" in v,
        demand="must have a class named standard",
    ),
    Rule(
        path="router.slo_classes",
        holds=lambda v: all(_positive(c.ttft_s) and _positive(c.tbt_s) for c in v.values()),
        demand="must have times above 0",
    ),
    Rule(
        path="transfer.backends",
        holds=lambda v: bool(v) and set(v) <= set(BACKENDS),
        demand=f"must name at least one of: {', '.join(BACKENDS)}",
    ),
    Rule(
        path="transfer.ports",
        holds=lambda v: v == "" or len(parse_ports(v) or ()) >= MIN_PORTS,
        demand=f"must be the first and the last of at least {MIN_PORTS} ports, as 7100-7199",
    ),
    _one_of("pool.eviction", EVICTIONS),
    _one_of("pool.ssd_eviction", EVICTIONS),
    _one_of("pool.directory", DIRECTORIES),
    Rule(path="pool.redis_prefix", holds=bool, demand="must not be empty"),
    Rule(
        path="pool.failure_domain",
        holds=lambda v: len(v) <= 256,
        demand="must have at most 256 characters",
    ),
    *(
        Rule(path=path, holds=lambda v: 0 < v <= 1, demand="must be above 0 and at most 1")
        for path in ("pool.high_watermark", "pool.low_watermark")
    ),
    *_at_least(
        1,
        "pool.memory_bytes",
        "pool.nodes",
        "pool.publish_queue_blocks",
        "pool.tenant_bytes",
        "pool.fetch_bytes",
        "pool.max_replicas",
    ),
    *_at_least(0, "pool.ssd_bytes", "pool.replicate_reads"),
    *_above_zero(
        "pool.redis_timeout_s",
        "pool.put_timeout_s",
        "pool.lease_s",
        "pool.lookup_timeout_s",
        "pool.fetch_timeout_s",
    ),
    Rule(
        path="pool.node_lease_s",
        holds=lambda v: 0 < v <= 86400,  # what the statements of other nodes may ask for
        demand="must be above 0 and at most 86400 (a day)",
    ),
    *_at_least(0, "cluster.prefill_workers", "cluster.decode_workers", "cluster.hybrid_workers"),
    *_at_least(1, "cluster.max_workers"),
    *_at_least(2, "roles.min_workers", "roles.max_workers"),
    Rule(
        path="cluster.metrics_port",
        holds=lambda v: 1 <= v <= 65535,
        demand="must be from 1 to 65535",
    ),
    Rule(path="cluster.workers", holds=all, demand="must not hold an empty address"),
    Rule(path="cluster.pool_nodes", holds=all, demand="must not hold an empty address"),
    _one_of("cluster.discovery", DISCOVERIES),
    *(
        Rule(
            path=path,
            holds=lambda v: all(_is_dns_name(name) for name in v),
            demand="must hold names such as decode.workers.svc:7001 or _grpc._tcp.decode.workers.svc",
        )
        for path in ("cluster.worker_names", "cluster.pool_node_names")
    ),
    Rule(path="cluster.dns_servers", holds=all, demand="must not hold an empty address"),
    Rule(path="cluster.redis_prefix", holds=bool, demand="must not be empty"),
    Rule(
        path="cluster.labels",
        holds=lambda v: (
            len(v) <= MOST_LABELS
            and all(
                len(word) <= MOST_LABEL_CHARS and word.isprintable()
                for pair in v.items()
                for word in pair
            )
            and len(json.dumps(v, ensure_ascii=False, separators=(",", ":")).encode())
            <= MOST_LABELS_BYTES
        ),
        demand=f"must hold at most {MOST_LABELS} labels, whose names and values have at most {MOST_LABEL_CHARS} printable characters, and {MOST_LABELS_BYTES} bytes of JSON in all",
    ),
    Rule(
        path="cluster.secret",
        holds=lambda v: v == "" or re.fullmatch(r"[0-9a-fA-F]{64}", v) is not None,
        demand="must be 64 hexadecimal digits (32 bytes)",
    ),
    _one_of("roles.planner", ("off", "dry_run", "on")),
    Rule(path="roles.gain", holds=lambda v: 0 < v < 1, demand="must be above 0 and below 1"),
    Rule(
        path="roles.tolerated_misses",
        holds=lambda v: 0 <= v <= 1,
        demand="must be from 0 to 1",
    ),
    *_above_zero(
        "roles.ttft_target_s",
        "roles.tbt_target_s",
        "roles.high_pressure",
        "roles.sustained_s",
        "roles.cooldown_s",
        "roles.drain_timeout_s",
        "roles.pinned_s",
        "roles.low_pressure",
        "roles.scale_sustained_s",
        "roles.scale_cooldown_s",
        "roles.scale_start_timeout_s",
        "router.request_timeout_s",
        "router.worker_wait_s",
        "transfer.expect_timeout_s",
        "transfer.reserve_timeout_s",
        "transfer.quiesce_timeout_s",
        "transfer.retry_grace_s",
        "transfer.pool_after_s",
        "cluster.redis_timeout_s",
        "cluster.restart_backoff_s",
        "cluster.restart_backoff_max_s",
        "cluster.startup_timeout_s",
    ),
    *_at_least(1, "router.silence_timeout_s"),  # a worker reports every half second
    Rule(
        path="transfer.lease_s",
        holds=lambda v: 0.05 <= v <= 3600,  # what a peer takes (`kv_transfer.session.handshake`)
        demand="must be from 0.05 to 3600",
    ),
    *_at_least(
        0,
        "cluster.drain_timeout_s",
        "router.local_prefill_tokens",
        "router.local_prefill_stall_s",
        "router.local_decode_sequences",
    ),
    _one_of("ray.strategy", RAY_STRATEGIES),
    *_above_zero("ray.num_cpus", "ray.placement_timeout_s"),
    *_at_least(0, "ray.num_gpus"),
    Rule(
        path="ray.resources",
        holds=lambda v: all(0 < amount < float("inf") for amount in v.values()),
        demand="must hold amounts above 0",
    ),
    Rule(
        path="ray.worker_ports",
        holds=lambda v: v == "" or parse_ports(v) is not None,
        demand="must be the first and the last port, as 7001-7032",
    ),
    _one_of("log.level", LOG_LEVELS),
    Rule(path="trace.endpoint", holds=bool, demand="must not be empty"),
    Rule(path="trace.sample_ratio", holds=lambda v: 0 <= v <= 1, demand="must be from 0 to 1"),
    _one_of("log.format", LOG_FORMATS),
)


def contradiction(config: BatonConfig) -> str | None:
    """What does not fit together between settings that are each in order, or None."""
    cluster = config.cluster
    if config.admin.port is not None and not config.admin.api_keys:
        return "admin.port needs admin.api_keys: operators are known by their keys"
    if config.tenants.source == "redis" and not config.tenants.redis_url:
        return "tenants.source is redis, which needs tenants.redis_url"
    if config.tenants.source == "redis" and not cluster.secret:
        return "tenants.source is redis, which needs cluster.secret: the document is sealed with it"
    if (misfit := _discovery_misfit(cluster)) is not None:
        return misfit
    if (misfit := _engine_misfit(config)) is not None:
        return misfit
    pool = config.pool
    if pool.directory == "redis" and not pool.redis_url:
        return "pool.directory is redis, which needs pool.redis_url"
    if pool.directory == "memory" and (pool.nodes > 1 or pool.peer_address):
        several = "pool.peer_address" if pool.peer_address else f"pool.nodes is {pool.nodes}, which"
        return f"{several} needs pool.directory redis: the one in memory serves a single node"
    of_one = ("address", "peer_address", "advertise_address", "ssd_dir", "metrics_address")
    named = [name for name in of_one if getattr(pool, name)]
    if pool.nodes > 1 and named:
        return f"pool.{named[0]} is of one node, but pool.nodes is {pool.nodes}"
    if pool.peer_address and is_wildcard(pool.advertise_address or pool.peer_address):
        return f"pool.peer_address: others cannot reach {pool.advertise_address or pool.peer_address}; set pool.advertise_address to host:port"
    if (taken := _in_transfer_ports(config)) is not None:
        return f"transfer.ports is {config.transfer.ports}, which holds the port of {taken}"
    if _overlap(config.ray.worker_ports, config.transfer.ports):
        return (
            f"ray.worker_ports is {config.ray.worker_ports}, which shares ports with transfer.ports"
        )
    if pool.low_watermark > pool.high_watermark:
        return "pool.low_watermark must not be above pool.high_watermark"
    if bool(pool.ssd_dir) != bool(pool.ssd_bytes):
        return "pool.ssd_dir and pool.ssd_bytes belong together"
    tls = ("tls_certificate", "tls_key", "tls_authority")
    missing = [name for name in tls if not getattr(cluster, name)]
    if missing and len(missing) < len(tls):
        return f"cluster.{missing[0]} is not set: cluster.tls_certificate, tls_key and tls_authority belong together"
    if cluster.restart_backoff_max_s < cluster.restart_backoff_s:
        return "cluster.restart_backoff_max_s must not be below cluster.restart_backoff_s"
    started_here = cluster.prefill_workers + cluster.decode_workers + cluster.hybrid_workers
    roles = config.roles
    if roles.scale and roles.low_pressure >= roles.high_pressure:
        return "roles.low_pressure must be below roles.high_pressure"
    if roles.min_workers > roles.max_workers:
        return "roles.min_workers must not be above roles.max_workers"
    if roles.scale and roles.planner == "off":
        return "roles.scale needs roles.planner to be on or dry_run"
    if started_here > cluster.max_workers:
        return f"cluster.max_workers is {cluster.max_workers}: {started_here} workers are to be started"
    ports = started_here + (pool.nodes if pool.enabled else 0)
    if cluster.metrics_port is not None and cluster.metrics_port + ports > 65536:
        return f"cluster.metrics_port: from {cluster.metrics_port} there are not {ports} ports"
    can_prefill = cluster.prefill_workers + cluster.hybrid_workers > 0
    can_decode = cluster.decode_workers + cluster.hybrid_workers > 0
    if cluster.discovery == "static" and not cluster.workers and not (can_prefill and can_decode):
        return (
            "the cluster needs a prefill and a decode worker, or a hybrid one: it has"
            f" {cluster.prefill_workers} prefill, {cluster.decode_workers} decode"
            f" and {cluster.hybrid_workers} hybrid"
        )
    return None


_OF_DISCOVERY = {
    "worker_names": "dns",
    "pool_node_names": "dns",
    "dns_servers": "dns",
    "redis_url": "redis",
}
"""Settings of `cluster` that one kind of discovery alone reads."""


def _discovery_misfit(cluster: ClusterConfig) -> str | None:
    """What the chosen discovery lacks, or does not read; None if all fits."""
    for name, kind in _OF_DISCOVERY.items():
        if getattr(cluster, name) and cluster.discovery != kind:
            return f"cluster.{name} needs cluster.discovery {kind}: it is {cluster.discovery}"
    if cluster.discovery == "dns" and not cluster.worker_names:
        return "cluster.discovery is dns, which needs cluster.worker_names"
    if cluster.discovery == "redis" and not cluster.redis_url:
        return "cluster.discovery is redis, which needs cluster.redis_url"
    if cluster.discovery == "redis" and not cluster.secret:
        return "cluster.discovery is redis, which needs cluster.secret: registrations are sealed with it"
    return None


def _is_dns_name(name: str) -> bool:
    return _DNS_NAME.fullmatch(name) is not None and (
        name.startswith("_") or 1 <= (port_of(name) or 0) <= 65535
    )


_OWN_ENGINE_ONLY = (
    "compile",
    "cpu_product",
    "deterministic",
    "output_headroom",
    "plan_ahead",
    "preemption",
    "prefill_order",
    "speculative_config",
    "tbt_target_s",
)
"""Fields of `EngineConfig` that Baton's own engine alone obeys."""


def _engine_misfit(config: BatonConfig) -> str | None:
    """What the chosen engine cannot do, or None."""
    engine = config.engine
    if (misfit := _adapters_misfit(config)) is not None:
        return misfit
    if engine.kind != "vllm":
        return "engine.vllm needs engine.kind vllm" if engine.vllm else None
    own = EngineConfig()
    for name in _OWN_ENGINE_ONLY:
        if getattr(engine, name) != getattr(own, name):
            return f"engine.{name} is of the engine baton: engine.kind is vllm"
    if not engine.cuda_graphs:
        return "engine.cuda_graphs is of the engine baton: give vLLM's as engine.vllm.enforce_eager: true"
    if config.model.quantization != "none":
        return "model.quantization is of the engine baton: give vLLM's as engine.vllm.quantization"
    return None


def _adapters_misfit(config: BatonConfig) -> str | None:
    """Why the adapters cannot be served, or None."""
    model, engine = config.model, config.engine
    adapters = read_lora_modules(model.lora_modules)
    if not adapters:
        return None
    if engine.kind != "vllm":
        return "model.lora_modules needs engine.kind vllm"
    if engine.vllm.get("enable_lora") is not True:
        return "model.lora_modules needs engine.vllm.enable_lora: true"
    for name in model.served_model_name or (model.model,):
        if name in adapters:
            return f"model.lora_modules: {name} is the model's own name"
    return None


def _overlap(one: str, other: str) -> bool:
    mine, theirs = parse_ports(one) or range(0), parse_ports(other) or range(0)
    return bool(range(max(mine.start, theirs.start), min(mine.stop, theirs.stop)))


def _in_transfer_ports(config: BatonConfig) -> str | None:
    """A setting whose port transports might take before it is bound."""
    ports = parse_ports(config.transfer.ports) or range(0)
    named: dict[str, int | None] = {
        "router.port": config.router.port,
        "admin.port": config.admin.port,
        "cluster.metrics_port": config.cluster.metrics_port,
        "pool.address": port_of(config.pool.address),
        "pool.peer_address": port_of(config.pool.peer_address),
        "pool.metrics_address": port_of(config.pool.metrics_address),
    }
    return next((path for path, port in named.items() if port in ports), None)
