"""Builds the engine of a worker that runs vLLM. What such a worker's process does first; nothing of vLLM is imported before."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blake3 import blake3

from baton.config.schema import EngineConfig, ModelConfig
from baton.errors import ConfigError, ModelLoadError
from baton.ids import LayerName
from baton.layout import KvLayout
from baton_engine.scheduling.limits import EngineLimits
from baton_vllm.block_events import BlockNames
from baton_vllm.host import VllmEngineHost
from baton_vllm.settings import engine_arguments, installed_version, missing

_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the core computes in this process, not in a child
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the launcher gives each worker its cores
    "VLLM_CONFIGURE_LOGGING": "0",  # Baton's logs are one format
}
_CPU_CACHE_BYTES = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltVllm:
    """An engine that is ready to start.

    Attributes:
        host: The engine; attach its owner, then `start` it.
        layout: Shape of its KV pages. What is in them is vLLM's: the fingerprint names its version and where it computes.
        limits: What it takes.
    """

    host: VllmEngineHost
    layout: KvLayout
    limits: EngineLimits


def build_vllm_engine(
    model: ModelConfig,
    config: EngineConfig,
    *,
    secret: bytes,
    progress: Callable[[str, float | None], None],
) -> BuiltVllm:
    """Has vLLM load the model and take the memory for its KV pages. Blocks, for minutes with a large model.

    Args:
        model: Which model and how to hold it.
        config: The engine's limits, and vLLM's own settings.
        secret: The cluster secret, 32 bytes.
        progress: Called with what is being done.

    Raises:
        ConfigError: vLLM is missing or of another version, or a setting is not one that it takes.
        ModelLoadError: vLLM refuses the model; in its words.
    """
    if (why := missing()) is not None:
        raise ConfigError(why, param="engine.kind")
    for name, value in _ENVIRONMENT.items():
        os.environ[name] = value
    progress("importing vLLM", None)
    core, vllm_config = _open(model, config, progress)
    from baton_vllm.core import VllmCore

    spec = _page_spec(core)
    layout = _layout(core, vllm_config, spec)
    limits = EngineLimits(
        max_num_seqs=vllm_config.scheduler_config.max_num_seqs,
        max_num_batched_tokens=vllm_config.scheduler_config.max_num_batched_tokens,
        max_model_len=vllm_config.model_config.max_model_len,
        block_tokens=spec.block_size,
        num_blocks=vllm_config.cache_config.num_gpu_blocks - 1,  # one is vLLM's null block
        vocab_size=vllm_config.model_config.get_vocab_size(),
    )
    eos_ids, names = _eos_ids(vllm_config.model_config), BlockNames(secret, layout)
    hosted = VllmCore(core, eos_ids)
    hosted.tell_blocks(names)
    host = VllmEngineHost(
        hosted, limits, stop_ids=frozenset(eos_ids), take_block_changes=names.take
    )
    return BuiltVllm(host=host, layout=layout, limits=limits)


def _open(
    model: ModelConfig, config: EngineConfig, progress: Callable[[str, float | None], None]
) -> tuple[Any, Any]:
    """vLLM's core and its whole configuration."""
    from vllm.config import KVEventsConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.executor import Executor

    from baton_vllm.core import ToldScheduler

    arguments = engine_arguments(model, config)
    device = current_platform.device_type
    if config.device not in ("auto", device):
        raise ConfigError(
            f"engine.device is {config.device}, this vLLM is built for {device}",
            param="engine.device",
        )
    if device == "cpu":
        arguments.setdefault("kv_cache_memory_bytes", _CPU_CACHE_BYTES)
    progress("vLLM loads the model", None)
    try:
        vllm_config = EngineArgs(
            **arguments,
            scheduler_cls=ToldScheduler,
            kv_events_config=KVEventsConfig(enable_kv_cache_events=True, publisher="null"),
        ).create_engine_config()
    except (ValueError, TypeError, NotImplementedError, OSError) as error:
        raise ModelLoadError(f"vLLM refuses {model.model}: {_words(error)}") from error
    try:
        core = EngineCore(vllm_config, Executor.get_class(vllm_config), log_stats=False)
    except (ValueError, RuntimeError, NotImplementedError, AssertionError, OSError) as error:
        raise ModelLoadError(f"vLLM cannot serve {model.model}: {_words(error)}") from error
    return core, vllm_config


def _words(error: Exception) -> str:
    """vLLM's own, in one line."""
    return " ".join(str(error).split())[:500] or type(error).__name__


def _page_spec(core: Any) -> Any:
    groups = core.scheduler.kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        raise ModelLoadError(
            f"vLLM holds the model's KV in {len(groups)} groups of layers, Baton serves those with one"
        )
    return groups[0].kv_cache_spec


def _layout(core: Any, vllm_config: Any, spec: Any) -> KvLayout:
    layers = core.scheduler.kv_cache_config.kv_cache_groups[0].layer_names
    return KvLayout(
        model_fingerprint=_fingerprint(vllm_config, type(spec).__name__),
        dtype=str(spec.dtype).removeprefix("torch."),
        block_tokens=spec.block_size,
        num_kv_heads=getattr(spec, "num_kv_heads", 1),
        head_dim=getattr(spec, "head_size", 1),
        layers=tuple(LayerName(name) for name in layers),
    )


def _fingerprint(vllm_config: Any, kind: str) -> str:
    """What fixes the bytes of a page beside its shape: the model, vLLM, and where and how it computes."""
    from vllm.platforms import current_platform

    model = vllm_config.model_config
    files = sorted(Path(model.model).glob("*.safetensors")) if Path(model.model).is_dir() else []
    parts = [
        f"vllm {installed_version()}",
        f"attention {vllm_config.attention_config.backend}",
        f"processor {current_platform.device_type} {current_platform.get_cpu_architecture()}",
        f"layout {vllm_config.cache_config.kv_cache_layout} {kind}",
        f"model {model.hf_config.to_json_string()} {model.dtype} {model.quantization}",
        f"revision {model.revision}",
        *(f"{file.name} {file.stat().st_size}" for file in files),
    ]
    return f"vllm-{blake3(chr(0).join(parts).encode()).hexdigest()[:32]}"


def _eos_ids(model: Any) -> tuple[int, ...]:
    """The model's end-of-sequence ids, from its generation settings or its configuration."""
    told = model.try_get_generation_config().get("eos_token_id")
    if told is None:
        told = getattr(model.hf_text_config, "eos_token_id", None)
    if told is None:
        return ()
    return (told,) if isinstance(told, int) else tuple(told)
