"""Builds the engine of a worker that runs vLLM. What such a worker's process does first;
nothing of vLLM is imported before.
"""

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from baton.config.schema import EngineConfig, GrammarConfig, ModelConfig
from baton.errors import ConfigError, EngineError, ModelLoadError
from baton.ids import LayerName, Role
from baton.layout import SPARE_BLOCKS, KvLayout
from baton.pretrained import PretrainedTokenizer, read_tokenizer
from baton_engine.grammar import make_compiler
from baton_engine.ports import ArenaAllocator, GrammarCounts, LayerSink
from baton_engine.scheduling.limits import EngineLimits
from baton_vllm.adapters import (
    Adapter,
    check_ranks,
    check_unchanged,
    num_held,
    read_adapters,
    refusal,
)
from baton_vllm.block_events import BlockNames
from baton_vllm.hand_offs import VllmHandOffs
from baton_vllm.host import VllmEngineHost
from baton_vllm.pool_pages import VllmPoolPages
from baton_vllm.ports import RankMemory
from baton_vllm.ranks import WorkerRanks
from baton_vllm.settings import MINOR, VISIBLE_GPUS, engine_arguments, missing, one_gpu

if TYPE_CHECKING:
    from baton_vllm.arena import VllmArena

logger = logging.getLogger(__name__)

_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the core computes in this process, not in a child
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the launcher gives each worker its cores
    "VLLM_CONFIGURE_LOGGING": "0",  # Baton's logs are one format
}
_CPU_CACHE_BYTES = 1 << 30
_PUNICA_WRAPPER = "baton_vllm.lora_rows.MaskedPunicaWrapper"


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltVllm:
    """An engine that is ready to start.

    Attributes:
        host: The engine; attach its owner, then `start` it.
        layout: Shape of its KV pages. What is in them is vLLM's:
            the fingerprint names its version and where it computes.
        limits: What it takes.
        num_blocks: Pages that a peer may be granted: all but the spare one. vLLM's null block is among them,
            and never granted.
        hands_off: Whether its pages can be handed to another worker, and another's to it.
        pools: Whether a pool can hold them.
        grammar_counts: What its grammars cost; None where they are refused.
    """

    host: VllmEngineHost
    layout: KvLayout
    limits: EngineLimits
    num_blocks: int
    hands_off: bool
    pools: bool
    grammar_counts: GrammarCounts | None


def build_vllm_engine(
    model: ModelConfig,
    config: EngineConfig,
    *,
    role: Role,
    secret: bytes,
    memory: ArenaAllocator,
    sink: LayerSink,
    progress: Callable[[str, float | None], None],
    grammar: GrammarConfig = GrammarConfig(),  # noqa: B008 - frozen
    rank_memories: Sequence[RankMemory] = (),
    gpu: int | None = None,
    gpu_sharers: int = 1,
) -> BuiltVllm:
    """Has vLLM load the model and take the memory for its KV pages. Blocks, for minutes with a large model.

    Args:
        model: Which model and how to hold it.
        config: The engine's limits, and vLLM's own settings.
        role: What the worker is to be.
        secret: The cluster secret, 32 bytes.
        memory: Gives the KV pages their bytes, on a CPU.
        rank_memories: Give them to each rank instead, where there are several (`settings.num_ranks`).
        sink: Told of pages that are to be sent.
        progress: Called with what is being done.
        grammar: What the grammars of outputs may cost.
        gpu: Index of the GPU to compute on, among those that this process sees: where it is to be one. From then on
            the process sees no other, for vLLM takes the first. None for any.
        gpu_sharers: Workers on that GPU.

    Raises:
        ConfigError: vLLM is missing or of another version, there is no such GPU, a setting is not one that it takes, or
            pages would have to be handed off that cannot be.
        ModelLoadError: vLLM refuses the model; in its words.
    """
    if (why := missing()) is not None:
        raise ConfigError(why, param="engine.kind")
    for name, value in _ENVIRONMENT.items():
        os.environ[name] = value
    if gpu is not None and config.device != "cpu":
        os.environ[VISIBLE_GPUS] = one_gpu(os.environ.get(VISIBLE_GPUS), gpu)
    config = replace(config, gpu_memory_utilization=config.gpu_memory_utilization / gpu_sharers)
    if len(rank_memories) > 1:
        if model.lora_modules or config.vllm.get("enable_lora"):
            raise _no_ranks("serve no adapters yet")
        _set_up_ranks(len(rank_memories))
    progress("importing vLLM", None)
    from baton_vllm.arena import VllmArena

    hand_offs = VllmHandOffs(sink)
    ranks = WorkerRanks(rank_memories, hand_offs, sink) if rank_memories else None
    shared = _Shared(hand_offs, VllmPoolPages(), VllmArena(memory), ranks)
    adapters = read_adapters(model.lora_modules)
    # Here, for it imports torch: workers without a model look at this module, too.
    from baton_engine.models.config import resolve_model

    directory = resolve_model(model.model, model.revision)
    core, vllm_config = _open(model, config, shared, adapters, directory, progress)
    from baton_vllm.core import VllmCore

    layout = _layout(core, vllm_config, role, shared, adapters, directory)
    limits = _limits(core, vllm_config, layout.windows, adapters)
    if pools := _pools(shared, layout):
        shared.pool_pages.name_by(secret, layout)
    names = BlockNames(secret, layout)
    progress("reading the tokenizer", None)
    tokenizer = _tokenizer(directory)
    eos_ids = _eos_ids(vllm_config.model_config, tokenizer, limits.vocab_size)
    grammars = (
        None
        if tokenizer is None
        else make_compiler(tokenizer, grammar, vocab_size=limits.vocab_size, eos_ids=eos_ids)
    )
    hosted = VllmCore(
        core,
        eos_ids,
        grammars,
        _loaded(core, adapters, progress),
        after_step=lambda: None if ranks is None else ranks.end_step(),
    )
    hosted.tell_blocks(names)
    host = VllmEngineHost(
        hosted,
        hand_offs,
        limits,
        pool_pages=shared.pool_pages,
        stop_ids=frozenset(eos_ids),
        take_block_changes=names.take,
    )
    core.model_executor.register_failure_callback(
        lambda: host.fail(EngineError("a rank of vLLM's has ended"))
    )
    return BuiltVllm(
        host=host,
        layout=layout,
        limits=limits,
        num_blocks=limits.num_blocks if shared.misfit else shared.num_pages - SPARE_BLOCKS,
        hands_off=shared.misfit is None,
        pools=pools,
        grammar_counts=None if grammars is None else grammars.counts,
    )


@dataclass(frozen=True, slots=True)
class _Shared:
    """What vLLM's connector shares with the host."""

    hand_offs: VllmHandOffs
    pool_pages: VllmPoolPages
    arena: "VllmArena"
    ranks: WorkerRanks | None

    @property
    def misfit(self) -> ConfigError | None:
        """Why pages cannot be handed off."""
        return self.arena.misfit

    @property
    def num_pages(self) -> int:
        """Of the arena, or of each rank's; with the spare one."""
        return self.arena.num_pages if self.ranks is None else self.ranks.num_pages


def _open(
    model: ModelConfig,
    config: EngineConfig,
    shared: _Shared,
    adapters: Sequence[Adapter],
    directory: Path,
    progress: Callable[[str, float | None], None],
) -> tuple[Any, Any]:
    """vLLM's core and its whole configuration. On a CPU its connector is Baton's, which holds what is `shared`, and its KV
    cache lies in the arena of these, or in the ranks' memory.
    """
    from vllm.config import KVEventsConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.executor import Executor

    from baton_vllm.connector import CONNECTOR_CONFIG, connector_objects
    from baton_vllm.core import ToldScheduler
    from baton_vllm.window_groups import choosing

    arguments = engine_arguments(model, config)
    if adapters:
        arguments["max_cpu_loras"] = num_held(adapters, arguments)
    device = current_platform.device_type
    if config.device not in ("auto", device):
        raise ConfigError(
            f"engine.device is {config.device}, this vLLM is built for {device}",
            param="engine.device",
        )
    if device == "cpu":
        arguments.setdefault("kv_cache_memory_bytes", _CPU_CACHE_BYTES)
        current_platform.get_punica_wrapper = lambda: _PUNICA_WRAPPER
        if shared.ranks is None:
            settings = CONNECTOR_CONFIG
            objects = connector_objects(
                shared.hand_offs, shared.pool_pages, shared.arena, adapters, directory
            )
        else:
            from baton_vllm.rank_connector import RANK_CONNECTOR_CONFIG, rank_objects

            settings, objects = RANK_CONNECTOR_CONFIG, rank_objects(shared.ranks, directory)
        arguments["kv_transfer_config"] = settings | {"kv_connector_extra_config": objects}
    elif shared.ranks is not None:
        raise _no_ranks("are supported on CPUs only yet")
    else:
        shared.arena.misfit = ConfigError(
            "engine.kind vllm: KV is handed off by workers on CPUs only: on a GPU a worker has to be hybrid"
        )
    progress("vLLM loads the model", None)
    try:
        vllm_config = EngineArgs(
            **arguments,
            scheduler_cls=ToldScheduler,
            kv_events_config=KVEventsConfig(enable_kv_cache_events=True, publisher="null"),
        ).create_engine_config()
    except (ValueError, TypeError, NotImplementedError, OSError) as error:
        raise ModelLoadError(f"vLLM refuses {model.model}: {_words(error)}") from error
    if adapters:
        check_ranks(adapters, vllm_config.lora_config.max_lora_rank)
    if device == "cpu" and vllm_config.model_config.use_mla:
        raise ModelLoadError(
            f"{model.model}: latent attention is not served on CPUs: vLLM {MINOR} draws other tokens there when it goes on from its own output"
        )
    try:
        core = EngineCore(vllm_config, choosing(Executor.get_class(vllm_config)), log_stats=True)
    except (ValueError, RuntimeError, NotImplementedError, AssertionError, OSError) as error:
        raise ModelLoadError(f"vLLM cannot serve {model.model}: {_words(error)}") from error
    except Exception as error:
        # Of a rank that does not come up nothing is told but this; why stands in the log.
        if shared.ranks is None:
            raise
        raise ModelLoadError(f"vLLM cannot serve {model.model}: {_words(error)}") from error
    if shared.ranks is not None:
        shared.ranks.spawned(partial(_end_ranks, core.model_executor))
    if device == "cpu" and vllm_config.quant_config is not None:
        _check_kernels(core, model)
    return core, vllm_config


def _check_kernels(core: Any, model: ModelConfig) -> None:
    """Computes a token. What vLLM is built with differs from processor to processor: without AVX-512 what multiplies
    weights of 4 bits is missing, which it finds in the first step.

    Raises:
        ModelLoadError: It cannot compute with these weights here.
    """
    try:
        core.model_executor.collective_rpc("execute_dummy_batch")
    except Exception as error:
        core.shutdown()
        raise ModelLoadError(
            f"vLLM cannot serve {model.model} on this processor: {_words(error)}"
        ) from error


def _end_ranks(executor: Any) -> None:
    """A rank has ended. Unless vLLM ends all of them, the others wait for it in the middle of a layer, where they hear no
    signal, and vLLM waits ten seconds for them.
    """
    if executor.is_failed or not getattr(executor, "shutting_down", False):
        for rank in executor.workers:
            rank.proc.kill()


def _no_ranks(why: str) -> ConfigError:
    path = "engine.vllm.tensor_parallel_size"
    return ConfigError(f"{path}: several ranks {why}", param=path)


def _set_up_ranks(ranks: int) -> None:
    """For the processes that vLLM starts: they inherit it."""
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = (
        "spawn"  # this process has threads: no fork of it is sound
    )
    threads = int(os.environ.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0)))
    os.environ["OMP_NUM_THREADS"] = str(max(1, threads // ranks))


def _loaded(
    core: Any, adapters: Sequence[Adapter], progress: Callable[[str, float | None], None]
) -> dict[str, Any]:
    """vLLM's requests of the adapters, by name, each of which it has loaded and keeps: what it cannot serve is known
    before anything is served, and what becomes of the files afterwards is all one.
    """
    from vllm.lora.request import LoRARequest

    requests: dict[str, Any] = {}
    for adapter in adapters:
        progress(f"vLLM loads the adapter {adapter.name}", None)
        request = LoRARequest(adapter.name, adapter.number, str(adapter.path))
        try:
            core.add_lora(request)
        except Exception as error:  # whatever vLLM makes of another model's matrices
            raise refusal(adapter.name, f"vLLM cannot load it: {_words(error)}") from error
        check_unchanged(adapter)
        requests[adapter.name] = request
    return requests


def _words(error: Exception) -> str:
    """vLLM's own, in one line, without what pydantic says of its arguments."""
    said = " ".join(str(error).split()).partition(" [type=")[0]
    return said[:500] or type(error).__name__


def _block_tokens(groups: Sequence[Any]) -> int:
    sizes: set[int] = {group.kv_cache_spec.block_size for group in groups}
    if len(sizes) != 1:
        raise ModelLoadError(
            f"vLLM holds the model's KV in {len(groups)} groups of layers with blocks of {sorted(sizes)} tokens, Baton serves those with one size"
        )
    return sizes.pop()


def _layout(
    core: Any,
    vllm_config: Any,
    role: Role,
    shared: _Shared,
    adapters: Sequence[Adapter],
    directory: Path,
) -> KvLayout:
    """Of the pages, of all ranks together.

    Raises:
        ConfigError: They would have to be handed off, and cannot be.
    """
    if shared.ranks is not None:
        try:
            heads = vllm_config.model_config.get_total_num_kv_heads()
            return shared.ranks.layouts(heads)[0].whole
        except ConfigError as error:
            shared.arena.misfit = error
    if shared.misfit is None:
        return shared.arena.layout
    if role is not Role.HYBRID:
        core.shutdown()  # ranks are processes
        raise shared.misfit
    return _layout_that_stays(core, vllm_config, shared.ranks, adapters, directory)


def _layout_that_stays(
    core: Any,
    vllm_config: Any,
    ranks: WorkerRanks | None,
    adapters: Sequence[Adapter],
    directory: Path,
) -> KvLayout:
    """Of pages that are not handed off. Where the model is in the ranks' processes they know what decides the bytes."""
    from baton_vllm.arena import fingerprint_of
    from baton_vllm.connector import page_facts
    from baton_vllm.window_groups import windows_of

    config = core.scheduler.kv_cache_config
    spec = config.kv_cache_groups[0].kv_cache_spec
    return KvLayout(
        model_fingerprint=fingerprint_of(page_facts(vllm_config, config, adapters, directory))
        if ranks is None
        else ranks.fingerprint,
        dtype=str(spec.dtype).removeprefix("torch."),
        block_tokens=spec.block_size,
        num_kv_heads=getattr(spec, "num_kv_heads", 1),
        head_dim=getattr(spec, "head_size", 1),
        layers=tuple(
            LayerName(name) for group in config.kv_cache_groups for name in group.layer_names
        ),
        windows=windows_of(config.kv_cache_groups),
    )


def _pools(shared: _Shared, layout: KvLayout) -> bool:
    """Whether a pool can hold the pages; why not is logged."""
    no_part = "this worker has no part in a pool"
    if shared.misfit is not None:
        logger.warning(
            "this worker hands nothing off, and has no part in a pool: %s", shared.misfit
        )
    elif layout.windows:
        windows = "/".join(str(window) for window in layout.windows)
        logger.warning("%s: layers keep windows of %s tokens, 0 for all", no_part, windows)
    elif shared.ranks is not None:
        logger.warning("%s: its pages lie on several ranks", no_part)
    else:
        return True
    return False


def _limits(
    core: Any, vllm_config: Any, windows: Sequence[int], adapters: Sequence[Adapter]
) -> EngineLimits:
    from baton_vllm.window_groups import longest

    groups = core.scheduler.kv_cache_config.kv_cache_groups
    scheduling, max_model_len = vllm_config.scheduler_config, vllm_config.model_config.max_model_len
    # One is vLLM's null block; the spare one has been taken out of its pool.
    num_blocks = core.scheduler.kv_cache_manager.block_pool.num_gpu_blocks - 1
    if windows:
        max_model_len = longest(
            groups,
            num_blocks=num_blocks,
            step_tokens=scheduling.max_num_batched_tokens,
            max_model_len=max_model_len,
        )
    return EngineLimits(
        max_num_seqs=scheduling.max_num_seqs,
        max_num_batched_tokens=scheduling.max_num_batched_tokens,
        max_model_len=max_model_len,
        block_tokens=_block_tokens(groups),
        num_blocks=num_blocks,
        vocab_size=vllm_config.model_config.get_vocab_size(),
        adapters=frozenset(adapter.name for adapter in adapters),
    )


def _tokenizer(directory: Path) -> PretrainedTokenizer | None:
    """The model's; None where none can be read."""
    try:
        return read_tokenizer(directory)
    except ModelLoadError as error:
        logger.warning("grammars are refused, there is no tokenizer for them: %s", error)
        return None


def _eos_ids(model: Any, tokenizer: PretrainedTokenizer | None, vocab_size: int) -> tuple[int, ...]:
    """The model's end-of-sequence ids, as vLLM's front has them (v1/engine/input_processor.py): from its generation
    settings or its configuration, and that of the tokenizer.
    """
    told = model.try_get_generation_config().get("eos_token_id")
    if told is None:
        told = getattr(model.hf_text_config, "eos_token_id", None)
    ids = [told] if isinstance(told, int) else [*(told or ())]
    if tokenizer is not None and (eos := tokenizer.special_tokens.get("eos_token")) is not None:
        own = tokenizer.backend.token_to_id(eos)
        if own is not None and own < vocab_size:  # else it is never drawn
            ids.append(own)
    return tuple(dict.fromkeys(ids))
