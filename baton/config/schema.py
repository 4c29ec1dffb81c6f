"""Every setting of Baton, with its default, in one place. Frozen; each part is handed only its section.

Units stand in the names. `None` means "decide at start from what the machine has"; what was decided is logged.
"""

from dataclasses import dataclass, field

from baton.ids import Role


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Which model, and how it is held.

    Attributes:
        model: Directory or Hugging Face hub id; empty for the demo model that comes with Baton.
        revision: Hub revision to pin.
        served_model_name: Names clients may use; empty for the model's own.
        lora_modules: LoRA adapters that are served beside the model, `NAME=PATH` each: a request asks for one by giving
            its name as the model. With `engine.kind` vllm and `engine.vllm.enable_lora`.
        dtype: `auto`, `float32`, `float16` or `bfloat16`.
        quantization: How the matrices of the weights are held: `none` for as `dtype` says, or `int8`,
            on CPUs with AVX-512 VNNI.
        max_model_len: Prompt and output together, in tokens; None for what the model was made for.
        seed: Seeds what a request leaves open.
    """

    model: str = ""
    revision: str | None = None
    served_model_name: tuple[str, ...] = ()
    lora_modules: tuple[str, ...] = ()
    dtype: str = "auto"
    quantization: str = "none"
    max_model_len: int | None = None
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """One engine's limits.

    Attributes:
        kind: Which engine computes: `baton`, or `vllm` (docs/guides/choose-an-engine.md).
        vllm: With `vllm`: settings of its own, by its own names. Those that have one of Baton's,
            or that Baton decides, are refused.
        device: `auto`, `cpu` or `cuda`.
        block_size: Tokens per KV page, one number in the whole cluster; None for 64 on GPU and 16 on CPU.
        kv_cache_memory_bytes: Bytes of KV pages per worker; None derives it from the machine.
        kv_cache_dtype: What KV pages hold: `auto` for what the model computes in (bfloat16 where a model of bfloat16 is
            only widened for a CPU), or `fp8_e4m3`, 8 bits: twice the tokens of bfloat16 in the same memory, a little
            less exact. One choice in the whole cluster.
        gpu_memory_utilization: Share of the GPU's memory for weights and KV.
        max_num_seqs: Sequences that run at once.
        max_num_batched_tokens: Token budget of one step.
        enable_prefix_caching: Keep finished blocks for later prompts.
        num_threads: Threads for computing on the CPU; None divides the machine's cores among its workers.
        cpu_product: What multiplies bfloat16 weights on a CPU: `panels`, own code in float32; `pairs`, the same in
            bfloat16, where the processor multiplies it; `compressed_panels` and `compressed_pairs`, the same results to
            the bit with weights that take three quarters of the memory; `onednn`, torch's of bfloat16; `mixed`,
            `compressed_pairs` for decodes and `onednn` for prompts, with the weights held twice; `amx`, `pairs` for
            decodes and own code with AMX's tiles for prompts, right on AMX and not fast yet; `widened`, torch's of
            float32; or `auto`, which takes the fastest of all but `amx`: compared once per kind of processor, in a
            second or a few, and kept in the user's cache directory. Where `deterministic` is set, give all workers the
            same; `auto` is refused beside it where nothing can be kept, `mixed` always.
        cuda_graphs: On a GPU, launch the kernels of a small step (decodes, and up to 128 tokens of prompts) all at
            once; captured at start, which takes some seconds.
        plan_ahead: Plan a step of nothing but decodes, and launch it, while the one before it is computed, so that no
            GPU waits for the host between them; a request that comes meanwhile begins up to a step later. None does so
            on a GPU; on a CPU it only costs.
        bind_cores: Give each worker's computing threads cores of their own, where there are enough.
        compile: On a GPU, have `torch.compile` fuse the little that a step computes between its kernels;
            takes up to a minute at start.
        deterministic: A request gets the same bits whatever else is computed with it, whether its prefix was cached,
            and whichever workers serve it, as long as all of them are set so and compute on processors of one kind. On
            a CPU prompts take longer; on a GPU it takes Triton and 16 bits, and contexts are not cut into pieces.
        tbt_target_s: Time between tokens that a worker keeps for the sequences that decode on it while it computes
            prompts beside them, by computing less of these per step; a class of service that promises a time of its
            own (`router.slo_classes`) has that instead. None sets no bound for other requests.
        prefill_order: Which prompt is computed next: `slack`, by priority and by the time that is left until the first
            token is due; or `arrival`.
        preemption: Which sequence is preempted when pages run out: by `arrival` the last arrived, by `priority` the
            lowest, by `slo` the one with the longest target of time between tokens.
        output_headroom: Share of the pages that all outputs may still take for which there must be room before another
            request is admitted: at 0 most run at once, at 1 none with a single sample is ever preempted.
        speculative_config: How workers that decode guess tokens, several of which one step can confirm, in vLLM's JSON
            names: `{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 5, "prompt_lookup_min": 3}`,
            or by what was generated for other requests of the same cache scope too `{"method": "suffix"}`, or by a
            second model of the same vocabulary `{"method": "draft_model", "model": PATH, "num_speculative_tokens": 3}`,
            or by an EAGLE-3 head (method `eagle3`, in vLLM's format), which prefill workers then need too: its KV goes
            with the model's, and workers of which only one has it refuse each other. What comes out is the same bit for
            bit with `deterministic`; otherwise it needs batch-invariant arithmetic, as a row's last bits may depend on
            how many are computed beside it. Empty for none.
    """

    kind: str = "baton"
    vllm: dict[str, object] = field(default_factory=dict)
    device: str = "auto"
    block_size: int | None = None
    kv_cache_memory_bytes: int | None = None
    kv_cache_dtype: str = "auto"
    gpu_memory_utilization: float = 0.9
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    enable_prefix_caching: bool = True
    num_threads: int | None = None
    cpu_product: str = "auto"
    cuda_graphs: bool = True
    plan_ahead: bool | None = None
    compile: bool = False
    bind_cores: bool = True
    deterministic: bool = False
    tbt_target_s: float | None = None
    prefill_order: str = "slack"
    preemption: str = "arrival"
    output_headroom: float = 0.0
    speculative_config: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarConfig:
    """What the form that a client wants an answer in (`response_format`, `structured_outputs`) may cost. Checked by
    routers, and again by workers; give all of them the same.

    Attributes:
        max_bytes: Longest schema, regular expression or grammar, as JSON or text; 256 KiB at most.
        max_depth: Levels of a schema. What its parts refer to may lead deeper, as far as 8 MiB of stack let llguidance
            follow it: some 800 to 1,800 levels.
        max_symbols: Symbols in the productions of a compiled grammar.
        max_states: States of its lexer; each takes up to three kilobytes of a worker's memory while an output that
            found it runs, or its grammar is kept.
        compile_fuel: Work to compile one, in llguidance's units: about 50,000 take a millisecond.
        step_fuel: Work to find which tokens may come next, once per token: about 70,000 take a millisecond.
        max_compiled: Compiled grammars that a process keeps, those used last; beyond that, who has the most gives one
            up. A worker keeps fewer where compiling them and finding their masks has taken 4 s of a core, with which
            their memory grows.
        max_compiling_per_tenant: Grammars of one tenant that a router checks or has waiting for it; beyond that, 429.
        check_s_per_minute_per_tenant: Seconds of a processor that a router gives to checking one tenant's new grammars,
            per minute, and at once to who asked for none before; beyond that, 429 until as much time has passed. A
            grammar that is known costs nothing.
        threads: Threads that check or compile, per process.
    """

    max_bytes: int = 64 * 1024
    max_depth: int = 32
    max_symbols: int = 200_000
    max_states: int = 20_000
    compile_fuel: int = 500_000
    step_fuel: int = 100_000
    max_compiled: int = 128
    max_compiling_per_tenant: int = 16
    check_s_per_minute_per_tenant: float = 6.0
    threads: int = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class SloClass:
    """One class of service: what is promised to the requests in it. None promises nothing,
    so that none is refused for it.

    Attributes:
        ttft_s: Time to first token. A request that is predicted to miss it, because others wait, is refused at once.
        tbt_s: Time between tokens. No request is placed beside one of this class if it is predicted to break it.
        priority: Classes with higher numbers go first; those below them always keep a part.
    """

    ttft_s: float | None = None
    tbt_s: float | None = None
    priority: int = 1


def _slo_classes() -> dict[str, SloClass]:
    return {
        "interactive": SloClass(ttft_s=2.0, tbt_s=0.1, priority=2),
        "standard": SloClass(),
        "batch": SloClass(priority=0),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """The HTTP surface and how it chooses workers.

    Attributes:
        host: Interface that HTTP binds to.
        port: HTTP port.
        api_keys: Accepted bearer keys; empty accepts everyone.
        policy: Which workers run a request: `predictive`, `prefix_affinity`, `least_loaded`, `round_robin`, `random`,
            `session`, or a class of the operator's own as `package.module:Class` (docs/guides/add-a-routing-policy.md).
        local_prefill_tokens: With `predictive`, a decode worker may compute up to so many tokens of a prompt itself,
            where that is predicted to be better; 0 forbids it.
        local_prefill_stall_s: The longest time for which that may hold up the sequences that decode there.
        local_decode_sequences: Where no decode worker has room, a prefill worker without a prompt to compute may decode
            up to so many sequences itself; 0 forbids it.
        chat_template: File of the template that conversations are written by, or the template itself;
            empty for the model's own.
        chat_template_content_format: What the template is given as the content of a message: `string` for its text,
            `openai` for a list of one part with that text, `auto` for what the template asks for.
        tool_call_parser: How the model writes calls of tools, by vLLM's name for it; `auto` for what its chat template
            writes, `none` to refuse tools.
        reasoning_parser: The same of its reasoning; with `none` reasoning is part of the answer.
        root_path: The path under which a proxy shows this server, such as `/llm`; whether the proxy takes it off makes
            no difference.
        max_body_bytes: Larger bodies get 413. Those of more than 32 KiB are parsed in pieces, one body at a time.
        request_timeout_s: Deadline of one request, queueing included.
        http_body_timeout_s: How long a request's body may take to come; then 408.
        http_keep_alive_s: How long a client's connection may be open without a request. A load balancer in front that
            keeps idle connections longer sends requests into ones that were just closed (deploy/README.md, "Behind a
            load balancer").
        sse_keep_alive_s: A stream of events on which nothing was sent for so long is sent a comment, or the event
            `ping` of `/v1/messages`; one that has not begun begins after three times as long. A load balancer's bound
            on replies without data has to be longer than that.
        max_connections: HTTP connections on which requests are answered. Where there are as many, one without a request
            gives way to a new one, and where all have one, probes are answered still.
            None for what the limit of file descriptors leaves.
        max_attempts: How often the legs of a request may be started before it fails; those that decoded on a worker
            which drained, and outlasted that, do not count.
        worker_wait_s: How long a request waits while there is no worker that could take it; then 503. About what a
            restart takes, model included. One whose client has some of its tokens waits until its deadline. One that
            was begun and waits for room on workers that are full is given to one of them after that.
        silence_timeout_s: A worker that says nothing for this long, a second at least, though it should twice per
            second, is suspected: its requests go on elsewhere, and it gets nothing new until it is heard from.
        max_queued_bytes_per_client: Output a slow client may leave unread before its request is cancelled.
        guardrails: Checks of what is asked and answered, in order: entry points of the group `baton.guardrails`, or
            `package.module:attribute`. Their code runs in the router.
        slo_classes: Classes of service by name; `interactive`, `standard` and `batch` unless given. Requests of tenants
            that name no class are `standard`, so there must be one.
        prefill_window_tokens: Prompt tokens that a prefill worker is sent ahead; what comes after waits in the router,
            where tenants take turns. Twice a step's budget (`engine.max_num_batched_tokens`) keeps a worker busy.
        max_waiting_requests: Requests in line at most; beyond that, 429.
        max_waiting_requests_per_tenant: The same of one tenant.
        max_waiting_prompt_tokens: Prompt tokens in line at most; a token takes about 36 bytes.
        max_waiting_prompt_tokens_per_tenant: The same of one tenant.
        max_indexed_blocks: KV blocks of workers' and pool nodes' caches of which this router remembers who holds them;
            beyond that, new ones take the place of others. What that takes: docs/guides/sizing.md.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    policy: str = "predictive"
    local_prefill_tokens: int = 512
    local_prefill_stall_s: float = 0.05
    local_decode_sequences: int = 0
    chat_template: str = ""
    chat_template_content_format: str = "auto"
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    root_path: str = ""
    max_body_bytes: int = 8 * 1024 * 1024
    request_timeout_s: float = 600.0
    http_body_timeout_s: float = 60.0
    http_keep_alive_s: float = 75.0
    sse_keep_alive_s: float = 15.0
    max_connections: int | None = None
    max_attempts: int = 3
    worker_wait_s: float = 15.0
    silence_timeout_s: float = 5.0
    max_queued_bytes_per_client: int = 4 * 1024 * 1024
    guardrails: tuple[str, ...] = ()
    slo_classes: dict[str, SloClass] = field(default_factory=_slo_classes)
    prefill_window_tokens: int = 4096
    max_waiting_requests: int = 8192
    max_waiting_requests_per_tenant: int = 4096
    max_waiting_prompt_tokens: int = 16 * 1024 * 1024
    max_waiting_prompt_tokens_per_tenant: int = 8 * 1024 * 1024
    max_indexed_blocks: int = 4_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class RolesConfig:
    """How workers' roles follow the load (`router/roles/planner.py`).

    Attributes:
        planner: `off`; `dry_run`, which says what it would do; `on`. Of several routers that share a Redis
            (`tenants.redis_url`) one plans.
        ttft_target_s: What has piled up on prefill workers is to be computed in this time.
        tbt_target_s: Time between tokens on decode workers, where no request was promised a shorter one.
        high_pressure: A worker changes its role when a pool has more than this share of what it should have at most.
        gain: By this share at least of the pressure a change must lower it.
        sustained_s: A change must have been worth it for so long.
        cooldown_s: After a change there is no other for so long.
        drain_timeout_s: How long a worker may take to finish what its new role does not take; else it stays what it is.
        pinned_s: A worker whose role an operator has changed (`baton role`) is left alone for so long, and so are numbers
            of workers (`baton scale`).
        tolerated_misses: Share of requests that may miss what their class of service promises before the planner takes a
            pool to have more to do than it thought.
        scale: Whether the planner also changes the number of workers, where `baton serve` started them: one more where a
            change of a role would not help, one less where the others have little to do.
        min_workers: It leaves so many at least, of all kinds.
        max_workers: It has so many at most; `cluster.max_workers` holds too.
        low_pressure: It ends a worker if less than this is predicted for those that stay; below `high_pressure`.
        scale_sustained_s: A change of the number must have been called for for so long.
        scale_cooldown_s: After a change of the number there is no other for so long.
        scale_start_timeout_s: A worker that is wanted and not there is waited for as long as this before the planner
            decides without it: longer than a worker takes to start.
    """

    planner: str = "off"
    ttft_target_s: float = 2.0
    tbt_target_s: float = 0.05
    high_pressure: float = 0.8
    gain: float = 0.15
    sustained_s: float = 10.0
    cooldown_s: float = 60.0
    drain_timeout_s: float = 300.0
    pinned_s: float = 900.0
    tolerated_misses: float = 0.05
    scale: bool = False
    min_workers: int = 2
    max_workers: int = 8
    low_pressure: float = 0.5
    scale_sustained_s: float = 60.0
    scale_cooldown_s: float = 120.0
    scale_start_timeout_s: float = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantsConfig:
    """Tenants that may use the cluster: where they are described, and how routers share what they count.

    Attributes:
        source: Where the tenants document is: `file`, or `redis`, where `baton tenants publish` puts it.
        file: Path of the tenants document (YAML); empty for none, so that `router.api_keys` alone decide.
        reload_s: How often is looked whether the document changed.
        redis_url: Redis that routers share limits through, `redis://`, `rediss://` or `unix://`; empty if there is one
            router, which then keeps the counts itself.
        redis_prefix: Begins all keys there; clusters that share a Redis need different ones.
        redis_timeout_s: How long a request waits for Redis before its router decides alone.
        routers: How many routers there are at least. While Redis is away each gives out this part of every limit.
        lease_s: How long a request of a router that died stays counted.
    """

    source: str = "file"
    file: str = ""
    reload_s: float = 2.0
    redis_url: str = ""
    redis_prefix: str = "baton"
    redis_timeout_s: float = 0.25
    routers: int = 1
    lease_s: float = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditConfig:
    """The audit log.

    Attributes:
        file: Where one line of JSON per request goes; empty for none.
        content: Whether prompts and outputs of all tenants stand in it, not only of those whose entry says so.
    """

    file: str = ""
    content: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AdminConfig:
    """The operators' HTTP surface, apart from the clients'.

    Attributes:
        host: Interface that it binds to.
        port: Its port; None for no such surface.
        api_keys: Keys that operators must send one of; there must be one.
    """

    host: str = "127.0.0.1"
    port: int | None = None
    api_keys: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferConfig:
    """How KV pages are handed off.

    Attributes:
        backends: Allowed backends, preferred first; those that are not installed, or do not reach the arena's memory,
            are not offered.
        ports: First and last TCP port on which peers of other hosts are let in to KV memory, as `7100-7199`; empty for
            any that is free. Every pair of workers takes one on each side, and every backend one; 16 at least.
        expect_timeout_s: How long a decode worker waits for an announced transfer;
            covers queueing at the prefill worker.
        reserve_timeout_s: How long a decode worker may leave a reservation unanswered for lack of room.
        quiesce_timeout_s: How long an aborted transfer may stay unacknowledged before its peer is fenced.
        lease_s: A prefill worker whose heartbeats stop for this long, from 0.05 to 3600, is suspected:
            it is cut off and another takes over.
        retry_grace_s: How long a decode worker keeps a reservation for another prefill worker after one was lost.
        pool_after_s: How long a computed prompt waits for room on its decode worker before it is left in the pool, to
            be fetched from there; without a pool it waits on.
        checksums: Verify every page before it is decoded.
    """

    backends: tuple[str, ...] = ("cuda_ipc", "shm", "nixl", "ucx")
    ports: str = ""
    expect_timeout_s: float = 600.0
    reserve_timeout_s: float = 60.0
    quiesce_timeout_s: float = 5.0
    lease_s: float = 5.0
    retry_grace_s: float = 2.0
    pool_after_s: float = 0.5
    checksums: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolConfig:
    """The pooled KV store: one node per host, which that host's workers share.

    Attributes:
        enabled: Whether there is one. Off unless asked for: it takes a process and memory of the host, and pays where
            workers' own prefix caches overflow.
        memory_bytes: Of this host's slab; None for a quarter of the memory that is free at start, 4 GiB at most.
        nodes: Nodes to start here. More than one is for tests and demonstrations: each stands for a host,
            with workers of its own.
        address: Where the node's service for workers listens; empty for a Unix socket beside the workers'.
        peer_address: `host:port` where nodes of other hosts reach this one; empty for a Unix socket,
            which those of this host reach.
        advertise_address: Where the directory says that it is, if not at `peer_address`.
        failure_domain: What fails together with this node: a rack, a zone. Copies of hot blocks go to another one.
        ssd_dir: Directory of the SSD tier; empty for none. It survives restarts.
        ssd_bytes: That it may take.
        eviction: What goes first when memory is full: `lru`, `s3fifo` or `cost`.
        ssd_eviction: The same of the disk.
        high_watermark: Share of the slab above which blocks are moved down before a put needs room.
        low_watermark: Share at which that stops.
        directory: `memory` or `redis`; several nodes need the latter.
        redis_url: Of the directory.
        redis_prefix: Begins all its keys; clusters that share a Redis need different ones.
        redis_timeout_s: How long a process waits for Redis before it goes on without.
        node_lease_s: A node that is silent for this long, a day at most, is taken for dead, and its blocks for lost.
        put_timeout_s: A put that is not committed by then is given up.
        lease_s: For how long a reader's blocks stay.
        lookup_timeout_s: How long a request waits for the pool's answer before it is computed without.
        publish_queue_blocks: Blocks of one worker that may wait to be put; the oldest are dropped.
        tenant_bytes: KV bytes that a tenant without `kv_bytes` in the tenants document may hold on all nodes together.
        fetch_bytes: Of blocks that are on their way from other nodes at a time.
        fetch_timeout_s: What has not come from another node by then is given up.
        replicate_reads: Reads of a block in a minute from which on a second node is asked to hold it; 0: never.
        max_replicas: Nodes that hold a hot block because it is hot.
        metrics_address: `host:port` of the node's Prometheus endpoint; empty for none,
            or the one that `cluster.metrics_port` gives.
    """

    enabled: bool = False
    memory_bytes: int | None = None
    nodes: int = 1
    address: str = ""
    peer_address: str = ""
    advertise_address: str = ""
    failure_domain: str = ""
    ssd_dir: str = ""
    ssd_bytes: int = 0
    eviction: str = "cost"
    ssd_eviction: str = "cost"
    high_watermark: float = 0.95
    low_watermark: float = 0.9
    directory: str = "memory"
    redis_url: str = ""
    redis_prefix: str = "baton"
    redis_timeout_s: float = 0.25
    node_lease_s: float = 10.0
    put_timeout_s: float = 10.0
    lease_s: float = 30.0
    lookup_timeout_s: float = 0.05
    publish_queue_blocks: int = 1024
    tenant_bytes: int | None = None
    fetch_bytes: int = 256 << 20
    fetch_timeout_s: float = 5.0
    replicate_reads: float = 8.0
    max_replicas: int = 3
    metrics_address: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """One worker process.

    Attributes:
        worker_id: Stable name, such as `prefill-0`.
        role: What it serves.
        address: gRPC address it binds: `unix:/path` or `host:port`.
        advertise_address: Where prefill workers reach its Transfer service, if not at `address`: behind a proxy, or
            bound to every interface of a pod.
        stall_timeout_s: Work without progress for this long turns health to NOT_SERVING.
        drain_timeout_s: How long a drain waits for what is in flight.
        metrics_address: `host:port` of this worker's Prometheus endpoint; empty for none.
        cores: On which its engine computes; empty for any.
        gpu: Index of its GPU, where it computes on one.
        gpu_sharers: Workers on that GPU, which share `engine.gpu_memory_utilization` evenly.
    """

    worker_id: str
    role: Role
    address: str
    advertise_address: str = ""
    stall_timeout_s: float = 60.0
    drain_timeout_s: float = 30.0
    metrics_address: str = ""
    cores: tuple[int, ...] = ()
    gpu: int = 0
    gpu_sharers: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """How many of what, and how they are supervised.

    Attributes:
        prefill_workers: Number of prefill workers to start.
        decode_workers: Number of decode workers to start.
        hybrid_workers: Number of workers that do both. With these asked for, the numbers above default to 0.
        max_workers: So many workers of all kinds `baton serve` runs at most, also after `baton scale`.
        workers: Addresses of workers that run elsewhere; the router joins them to the ones started here.
        pool_nodes: Addresses of pool nodes that run elsewhere: the router watches what they hold.
        discovery: How routers find workers and pool nodes that are not listed: `static`, not at all; `dns`, by the
            names below; `redis`, where those that listen on TCP register (docs/guides/discovery.md).
        worker_names: With `dns`: names of workers, `host:port` for A or AAAA records, or `_service._tcp.domain` for SRV
            records. A name that ends with a dot is not tried under search domains.
        pool_node_names: With `dns`: the same of pool nodes.
        dns_servers: With `dns`: servers to ask, `address` or `address:port`; those of the system unless given.
        redis_url: With `redis`: where processes register, `redis://`, `rediss://` or `unix://`.
        redis_prefix: Begins the keys there. It is the scope of discovery:
            clusters that share a Redis need different ones.
        redis_timeout_s: How long an answer of Redis is waited for.
        labels: Where this process stands, such as `{zone: a, rack: r7}`; registered with it,
            and shown by `baton status --json`.
        runtime_dir: Directory of this cluster's sockets; empty for one named after the HTTP port, in the machine's
            directory for temporary files. Made at start and removed at the end. Operators' commands look there where
            the environment gives it.
        secret: Cluster secret in hex (32 bytes); empty draws a new one at start.
        tls_certificate: File with the certificate of this process (PEM, with those between it and the authority); empty
            for one that is issued in memory from `secret`. Needs `tls_key` and `tls_authority`.
        tls_key: File with its private key.
        tls_authority: File with the certificate by which those of the other processes are signed.
        restart_backoff_s: First wait before a process that ended is started again; doubles with each end in a row up to
            `restart_backoff_max_s`. None at the first end of one that had served for a second. One end is forgiven for
            every five seconds for which the process was ready.
        restart_backoff_max_s: Longest such wait.
        startup_timeout_s: How long a process may take to become ready without showing progress.
        drain_timeout_s: How long a stop waits for requests in flight.
        standby: Whether `baton serve` keeps a process whose imports are done, which takes the place of a worker that
            ends; it takes about 180 MiB. Not with vLLM.
        metrics_port: First of as many ports on the loopback interface as there are workers started here: each answers
            Prometheus on one, in the order prefill, decode, hybrid; the pool's node, where there is one, on the next.
            None for no such ports.
    """

    prefill_workers: int = 1
    decode_workers: int = 1
    hybrid_workers: int = 0
    max_workers: int = 64
    workers: tuple[str, ...] = ()
    pool_nodes: tuple[str, ...] = ()
    discovery: str = "static"
    worker_names: tuple[str, ...] = ()
    pool_node_names: tuple[str, ...] = ()
    dns_servers: tuple[str, ...] = ()
    redis_url: str = ""
    redis_prefix: str = "baton"
    redis_timeout_s: float = 0.25
    labels: dict[str, str] = field(default_factory=dict)
    runtime_dir: str = ""
    secret: str = ""
    tls_certificate: str = ""
    tls_key: str = ""
    tls_authority: str = ""
    restart_backoff_s: float = 0.5
    restart_backoff_max_s: float = 30.0
    startup_timeout_s: float = 300.0
    drain_timeout_s: float = 10.0
    standby: bool = True
    metrics_port: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RayConfig:
    """What `baton serve --launcher ray` asks Ray for.

    Attributes:
        address: Of the Ray cluster, `host:port`, or `auto` for the one that this machine belongs to;
            empty starts Ray on this machine.
        num_cpus: CPUs of each worker; its engine computes with as many threads.
        num_gpus: GPUs of each worker.
        resources: Further resources of each worker, by Ray's names.
        labels: What the labels of a worker's node must be, as Ray's label selectors: `{ray.io/accelerator-type: H100}`.
        strategy: How the workers of one pool lie: `SPREAD` over nodes, `PACK`, `STRICT_PACK` on one node,
            or `STRICT_SPREAD`.
        placement_timeout_s: How long a place for each worker is waited for at start.
        worker_ports: The first and the last port at which workers listen on their nodes, as `7001-7032`, so that network
            policies can name them; at least as many as workers share a node. Empty for any. KV memory and transports
            listen on `transfer.ports` beside them.
    """

    address: str = ""
    num_cpus: float = 1.0
    num_gpus: float = 0.0
    resources: dict[str, float] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)
    strategy: str = "SPREAD"
    placement_timeout_s: float = 20.0
    worker_ports: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceConfig:
    """OpenTelemetry traces of requests. Prompts and answers never stand in them.

    Attributes:
        enabled: Whether there are any; needs the extra `otel`.
        endpoint: Of a collector that speaks OTLP over gRPC. OTEL_EXPORTER_OTLP_TRACES_ENDPOINT and
            OTEL_EXPORTER_OTLP_ENDPOINT give it too.
        sample_ratio: Share of requests to trace among those whose client does not say.
    """

    enabled: bool = False
    endpoint: str = "http://localhost:4317"
    sample_ratio: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LogConfig:
    """Logs of every process.

    Attributes:
        level: `debug`, `info`, `warning` or `error`.
        format: `text` for people, `json` for machines.
    """

    level: str = "info"
    format: str = "text"


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedConfig:
    """How fast the worker of `baton run simulated` is, which has no model; the engine's other limits hold for it too.

    Attributes:
        role: Which legs it takes: `prefill`, `decode` or `hybrid`.
        prefill_tokens_per_s: Prompt tokens computed per second.
        step_s: Time of a step, whatever is in it.
        sequence_s: What each sequence that decodes adds to it.
        num_blocks: Pages of its KV cache; they are small and hold zeros.
    """

    role: str = Role.HYBRID.value
    prefill_tokens_per_s: float = 20_000.0
    step_s: float = 0.01
    sequence_s: float = 0.0
    num_blocks: int = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class BatonConfig:
    """The whole configuration; the keys of cluster.yaml are the names of its fields."""

    model: ModelConfig = field(default_factory=ModelConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    grammar: GrammarConfig = field(default_factory=GrammarConfig)
    router: RouterConfig = field(default_factory=RouterConfig)
    roles: RolesConfig = field(default_factory=RolesConfig)
    tenants: TenantsConfig = field(default_factory=TenantsConfig)
    audit: AuditConfig = field(default_factory=AuditConfig)
    admin: AdminConfig = field(default_factory=AdminConfig)
    transfer: TransferConfig = field(default_factory=TransferConfig)
    pool: PoolConfig = field(default_factory=PoolConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    ray: RayConfig = field(default_factory=RayConfig)
    log: LogConfig = field(default_factory=LogConfig)
    trace: TraceConfig = field(default_factory=TraceConfig)
    simulated: SimulatedConfig = field(default_factory=SimulatedConfig)
