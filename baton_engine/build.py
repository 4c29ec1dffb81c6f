"""Puts an engine together: model, arena, runner, scheduler, thread. What a worker process does first."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import torch

from baton.config.schema import EngineConfig, GrammarConfig, ModelConfig
from baton.config.speculative import (
    DraftModelSpeculation,
    Eagle3Speculation,
    Speculation,
    read_speculative,
)
from baton.errors import ConfigError
from baton.layout import SPARE_BLOCKS, KvLayout
from baton_engine.cache.arena import DrafterPages, KvArena, PageKernels, page_kernels
from baton_engine.cache.budget import ArenaDemand, affordable_on_cpu, affordable_on_gpu, num_blocks
from baton_engine.compiling import check_compile, compile_glue
from baton_engine.cuda_graphs import SMALL_PROMPTS, CudaGraphs, GraphBackend, StepGraphs
from baton_engine.device import (
    arena_buffer,
    choose_device,
    computing_on,
    gpu_kind,
    keep_freed_memory,
    weigh_gpu,
)
from baton_engine.draft_model import DraftModel
from baton_engine.eagle3_drafter import Eagle3Drafter
from baton_engine.host import ThreadEngineHost
from baton_engine.kernels.cpu.product_choice import Bfloat16Product, choose_product, rounding
from baton_engine.kernels.ports import BatchInvariant
from baton_engine.kernels.reference import ReferenceKernels
from baton_engine.kernels.select import (
    check_deterministic,
    check_quantization,
    choose_kv_dtype,
    triton_build,
)
from baton_engine.models.checkpoint import read_checkpoint
from baton_engine.models.config import (
    ModelSpec,
    choose_dtype,
    is_widened,
    kv_layout,
    load_spec,
    pinned,
    quantised,
    resolve_model,
)
from baton_engine.models.decoder import Decoder, HiddenObserver
from baton_engine.models.draft_spec import check_draft_length, load_draft_spec, load_head_spec
from baton_engine.models.eagle3 import Eagle3Spec
from baton_engine.models.loader import load_decoder, load_eagle3
from baton_engine.ports import (
    ArenaAllocator,
    GrammarCounts,
    LayerSink,
    SpeculationCounts,
)
from baton_engine.runner import ModelRunner
from baton_engine.scheduling.limits import EngineLimits
from baton_engine.scheduling.ordering import SchedulingPolicy
from baton_engine.scheduling.scheduler import Scheduler
from baton_engine.warm_up import warm_up

if TYPE_CHECKING:
    from baton_engine.grammar import MatcherCompiler

logger = logging.getLogger(__name__)

CPU_BLOCK_TOKENS = 16
GPU_BLOCK_TOKENS = 64
_TEXTS_WITH_DRAFTS = 8
"""A GPU's graphs are captured for so many texts with all their drafts, however few may run."""

Progress = Callable[[str, float | None], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltEngine:
    """An engine that is ready to start.

    Attributes:
        host: The engine; attach its owners, then `start` it.
        layout: Shape of its KV pages.
        limits: What it takes.
        page_kernels: Move and check its pages where they lie on a GPU; None otherwise.
        grammar_counts: What its grammars cost; None where it refuses them.
        speculation_counts: What its drafts come to; None where it makes none.
    """

    host: ThreadEngineHost
    layout: KvLayout
    limits: EngineLimits
    page_kernels: PageKernels | None
    grammar_counts: GrammarCounts | None
    speculation_counts: SpeculationCounts | None


def build_engine(
    model: ModelConfig,
    config: EngineConfig,
    *,
    secret: bytes,
    memory: ArenaAllocator,
    sink: LayerSink | None,
    progress: Progress,
    grammar: GrammarConfig | None = GrammarConfig(),  # noqa: B008 - frozen
    gpu: int = 0,
    gpu_sharers: int = 1,
) -> BuiltEngine:
    """Loads the model and takes the memory for its KV pages. Blocks, for minutes with a large model.

    Args:
        model: Which model and how to hold it.
        config: The engine's limits.
        secret: The cluster secret, 32 bytes.
        memory: Gives the bytes of the KV region.
        sink: Told when pages of a layer are complete; None where nothing is handed off.
        progress: Called with what is being done and the fraction that is done, where one is known.
        grammar: What the grammars of outputs may cost; None to refuse them all, without llguidance.
        gpu: Index of the GPU to compute on, where it is to be one.
        gpu_sharers: Workers on that GPU.

    Raises:
        ModelLoadError: The model cannot be served.
        ConfigError: A limit contradicts the model, or the device is not there.
        OutOfMemoryError: The KV region does not fit this machine.
    """
    torch.set_num_threads(config.num_threads or torch.get_num_threads())
    keep_freed_memory()
    progress("reading the model's files", None)
    choice = _choose(model, config, gpu)
    with computing_on(choice.device):
        limits = _limits(model, config, choice, gpu_sharers)
        pages = limits.num_blocks + SPARE_BLOCKS
        given = memory.allocate(choice.layout.region_bytes(pages), choice.device.index)
        arena = KvArena(choice.layout, pages, arena_buffer(given))
        progress("preparing kernels", None)
        decoder = _load(choice.path, choice.spec, choice, model, config, progress)
        if config.compile:
            decoder = compile_glue(decoder)
        apart = config.deterministic and not isinstance(decoder.kernels, BatchInvariant)
        backend = _graph_backend(choice.device, config)
        drafter = _drafter(
            choice, decoder, arena, limits, model, config, progress, backend, apart=apart
        )
        observer = None if drafter is None else drafter.observer
        graphs = _graphs(
            decoder, arena, limits, config, backend, drafted=drafter is not None, observer=observer
        )
        progress("reading the tokenizer", None)
        grammars = None if grammar is None else _grammar_compiler(choice, grammar)
        most_rows = None if graphs is None else _most_rows(limits, choice.speculation)
        scheduler = _scheduler(limits, choice, config, secret, most_rows)
        runner = ModelRunner(decoder, arena, sink, graphs, drafter=drafter, one_by_one=apart)
        moving = page_kernels(arena)
        if choice.device.type == "cuda":
            progress("computing the first steps", None)
            warm_up(runner, limits=limits, drafter=drafter, page_kernels=moving)
        host = ThreadEngineHost(
            scheduler,
            runner,
            grammars=grammars,
            drafter=drafter,
            ahead=choice.device.type != "cpu" if config.plan_ahead is None else config.plan_ahead,
        )
        return BuiltEngine(
            host=host,
            layout=choice.layout,
            limits=limits,
            page_kernels=moving,
            grammar_counts=None if grammars is None else grammars.counts,
            speculation_counts=scheduler.speculation_counts,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Choice:
    """What is to be served, and how it is held; decided before anything large is read."""

    path: Path
    device: torch.device
    spec: ModelSpec
    dtype: torch.dtype
    product: Bfloat16Product
    kv_dtype: torch.dtype
    layout: KvLayout
    speculation: Speculation | None
    drafter: "_DrafterChoice | None"


@dataclass(frozen=True, slots=True, kw_only=True)
class _DrafterChoice:
    """What guesses tokens: a model, or a head, whose one layer is then `spec`."""

    path: Path
    spec: ModelSpec
    head: Eagle3Spec | None = None


def _choose_drafter(
    speculation: Speculation | None, target: ModelSpec, path: Path, quantization: str
) -> _DrafterChoice | None:
    match speculation:
        case DraftModelSpeculation():
            found, spec = load_draft_spec(speculation, target, path)
            return _DrafterChoice(path=found, spec=quantised(spec, quantization))
        case Eagle3Speculation():
            found, head = load_head_spec(speculation, target)
            spec = quantised(head.layer, quantization)
            return _DrafterChoice(path=found, spec=spec, head=head)
        case _:
            return None


def _load(
    path: Path,
    spec: ModelSpec,
    choice: _Choice,
    model: ModelConfig,
    config: EngineConfig,
    progress: Progress,
) -> Decoder:
    return load_decoder(
        path,
        spec,
        choice.dtype,
        choice.device,
        progress,
        quantization=model.quantization,
        kv_dtype=choice.kv_dtype,
        fixed_rows=config.deterministic,
        product=choice.product,
    )


def _drafter(
    choice: _Choice,
    target: Decoder,
    arena: KvArena,
    limits: EngineLimits,
    model: ModelConfig,
    config: EngineConfig,
    progress: Progress,
    backend: GraphBackend | None,
    *,
    apart: bool,
) -> DraftModel | Eagle3Drafter | None:
    """What guesses tokens by weights of its own, where there is to be such."""
    if choice.drafter is None:
        return None
    path, spec = choice.drafter.path, choice.drafter.spec
    progress("loading the draft model", None)
    if choice.drafter.head is not None:
        head = load_eagle3(
            path,
            choice.drafter.head,
            target,
            quantization=model.quantization,
            fixed_rows=config.deterministic,
            product=choice.product,
        )
        return Eagle3Drafter(
            head,
            arena,
            num_model_layers=choice.spec.num_layers,
            eos_token_ids=choice.spec.eos_token_ids,
            one_by_one=apart,
        )
    decoder = _load(path, spec, choice, model, config, progress)
    pages = DrafterPages(
        arena,
        first_layer=choice.spec.num_layers,
        num_layers=spec.num_layers,
        kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
    )
    return DraftModel(
        decoder,
        arena,
        pages,
        eos_token_ids=choice.spec.eos_token_ids,
        graphs=_graphs(decoder, arena, limits, config, backend, pages=pages),
        one_by_one=apart,
    )


def _choose(model: ModelConfig, config: EngineConfig, gpu: int) -> _Choice:
    device = choose_device(config.device, gpu)
    check_compile(config, device)
    path = resolve_model(model.model, model.revision)
    spec = load_spec(path)
    product = choose_product(
        config.cpu_product,
        device,
        is_used="bfloat16" in (spec.dtype, model.dtype),
        must_agree=config.deterministic,
    )
    dtype = choose_dtype(spec, model.dtype, device, product)
    check_quantization(model.quantization, device, dtype)
    spec = quantised(spec, model.quantization)
    if config.deterministic:
        check_deterministic(device, dtype)
        kind = gpu_kind(device)
        spec = pinned(spec, f"{kind}-{triton_build()}" if kind else rounding(product))
    speculation = read_speculative(config.speculative_config)
    drafter = _choose_drafter(speculation, spec, path, model.quantization)
    widened = is_widened(spec, model.dtype, dtype)
    kv_dtype = choose_kv_dtype(config.kv_cache_dtype, dtype, device, widened=widened)
    head = None if drafter is None else drafter.head
    if head is not None and kv_dtype.itemsize == 1:
        raise ConfigError(
            "kv_cache_dtype: the hidden states that an EAGLE-3 head reads need pages of 16 or 32 bits",
            param="engine.kv_cache_dtype",
        )
    return _Choice(
        path=path,
        device=device,
        spec=spec,
        dtype=dtype,
        product=product,
        kv_dtype=kv_dtype,
        layout=kv_layout(
            spec,
            kv_dtype,
            config.block_size or _block_tokens(device),
            None if drafter is None else drafter.spec,
            drafter_reads=0 if head is None else head.layer.hidden_size,
        ),
        speculation=speculation,
        drafter=drafter,
    )


def _scheduler(
    limits: EngineLimits,
    choice: _Choice,
    config: EngineConfig,
    secret: bytes,
    most_rows: int | None,
) -> Scheduler:
    return Scheduler(
        limits,
        layout=choice.layout,
        secret=secret,
        eos_ids=choice.spec.eos_token_ids,
        enable_prefix_caching=config.enable_prefix_caching,
        policy=SchedulingPolicy(
            tbt_s=config.tbt_target_s,
            prefill_order=config.prefill_order,
            preemption=config.preemption,
            output_headroom=config.output_headroom,
        ),
        speculation=choice.speculation,
        most_rows=most_rows,
    )


def _grammar_compiler(choice: _Choice, config: GrammarConfig) -> "MatcherCompiler | None":
    from baton_engine.grammar import load_compiler

    spec = choice.spec
    return load_compiler(
        choice.path, config, vocab_size=spec.vocab_size, eos_ids=spec.eos_token_ids
    )


def _graph_backend(device: torch.device, config: EngineConfig) -> GraphBackend | None:
    """One for the model's graphs and a drafter's, which share its stream and its memory: nothing of the model is in
    flight while tokens are guessed. None on a CPU.
    """
    if device.type != "cuda" or not config.cuda_graphs:
        return None
    return CudaGraphs()


def _graphs(
    decoder: Decoder,
    arena: KvArena,
    limits: EngineLimits,
    config: EngineConfig,
    backend: GraphBackend | None,
    *,
    drafted: bool = False,
    pages: DrafterPages | None = None,
    observer: HiddenObserver | None = None,
) -> StepGraphs | None:
    """None where nothing captures kernels, and where torch serves for them."""
    if backend is None or isinstance(decoder.kernels, ReferenceKernels):
        return None
    return StepGraphs(
        decoder,
        arena,
        most_rows=_most_rows(limits, read_speculative(config.speculative_config)),
        # A drafter computes its own KV of prompts beside the model's, of which no graph knows.
        most_chunk_tokens=0 if drafted or pages is not None else SMALL_PROMPTS,
        table_width=limits.num_blocks_for(limits.max_model_len),
        backend=backend,
        pages=pages,
        observer=observer,
    )


def _most_rows(limits: EngineLimits, speculation: Speculation | None) -> int:
    """Of a step that is repeated from a graph: drafts have rows of their own, and pay where few texts are decoded."""
    if speculation is None:
        return limits.max_running
    return max(limits.max_running, _TEXTS_WITH_DRAFTS * (1 + speculation.num_speculative_tokens))


def _block_tokens(device: torch.device) -> int:
    return GPU_BLOCK_TOKENS if device.type == "cuda" else CPU_BLOCK_TOKENS


def _affordable(choice: _Choice, config: EngineConfig, sharers: int) -> int:
    """Bytes that pages may take unasked."""
    if choice.device.type == "cpu":
        return affordable_on_cpu(config, psutil.virtual_memory().available)
    paths = [choice.path] if choice.drafter is None else [choice.path, choice.drafter.path]
    num_weights = sum(read_checkpoint(path).num_elements for path in paths)
    return affordable_on_gpu(
        config,
        total_bytes=weigh_gpu(choice.device),
        weights_bytes=num_weights * choice.dtype.itemsize,
        sharers=sharers,
    )


def _limits(
    model: ModelConfig, config: EngineConfig, choice: _Choice, sharers: int
) -> EngineLimits:
    spec, layout = choice.spec, choice.layout
    longest = spec.max_position_embeddings
    if model.max_model_len is not None and model.max_model_len > longest:
        raise ConfigError(
            f"max_model_len is {model.max_model_len}, but the model was made for {longest} tokens",
            param="model.max_model_len",
        )
    max_model_len = model.max_model_len or longest
    if choice.drafter is not None and choice.drafter.head is None:
        check_draft_length(choice.drafter.spec, max_model_len)
    demand = ArenaDemand(
        layout=layout,
        max_model_len=max_model_len,
        affordable_bytes=_affordable(choice, config, sharers),
    )
    limits = EngineLimits(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=max_model_len,
        block_tokens=layout.block_tokens,
        num_blocks=num_blocks(config, demand),
        vocab_size=spec.vocab_size,
    )
    if limits.longest_text < max_model_len:
        logger.warning(
            "the pages hold texts of %d tokens at most; %d (max_model_len) take %d bytes",
            limits.longest_text,
            max_model_len,
            limits.num_blocks_for(max_model_len) * layout.page_bytes,
        )
    return limits
