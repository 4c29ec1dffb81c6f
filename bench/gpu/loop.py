"""The engine's own loop over a decoder with random weights: scheduler, graphs, plan-ahead and all,
without a checkpoint, a worker or HTTP.
"""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue

import torch

from baton.generation import Prompt, SamplingParams
from baton.ids import SeqId
from baton_engine.cache.arena import KvArena
from baton_engine.cuda_graphs import StepGraphs
from baton_engine.host import ThreadEngineHost
from baton_engine.messages import Failed, Generate, StepEvents
from baton_engine.models.config import kv_layout
from baton_engine.models.decoder import Decoder
from baton_engine.runner import ModelRunner
from baton_engine.scheduling.limits import EngineLimits
from baton_engine.scheduling.scheduler import Scheduler
from bench.gpu.place import Place

_STEP_TIMEOUT_S = 120.0
_BUDGET_TOKENS = 2048


@dataclass(slots=True)
class LoopRun:
    """What came of some sequences that ran at once.

    Attributes:
        tokens: Of each sequence.
        seconds: From the first step to the last token.
        step_s: Seconds between the ends of two steps that follow each other, while all of them decode.
    """

    tokens: list[list[int]]
    seconds: float = 0.0
    step_s: list[float] = field(default_factory=list)

    @property
    def median_step_s(self) -> float:
        """Of a step that decodes all sequences."""
        return statistics.median(self.step_s)


def arena_for(place: Place, decoder: Decoder, tokens: int, dtype: torch.dtype) -> KvArena:
    """An arena for so many tokens of KV."""
    layout = kv_layout(decoder.spec, dtype, place.block_tokens)
    pages = -(-tokens // place.block_tokens)
    memory = torch.zeros(layout.region_bytes(pages), dtype=torch.uint8, device=place.device)
    return KvArena(layout, pages, memory if place.on_gpu else memory.numpy().data)


def run_loop(
    place: Place,
    decoder: Decoder,
    dtype: torch.dtype,
    prompts: Sequence[Sequence[int]],
    *,
    output_tokens: int,
    ahead: bool,
    seed: int | None = None,
) -> LoopRun:
    """Generates `output_tokens` after each prompt, all of them submitted before the first step: greedily,
    or at random of a seed.

    Raises:
        BatonError: A sequence failed.
        queue.Empty: No step came for two minutes.
    """
    longest = max(map(len, prompts)) + output_tokens
    per_text = -(-longest // place.block_tokens) * place.block_tokens
    arena = arena_for(place, decoder, len(prompts) * per_text, dtype)
    limits = EngineLimits(
        max_num_seqs=len(prompts),
        max_num_batched_tokens=_BUDGET_TOKENS,
        max_model_len=longest,
        block_tokens=place.block_tokens,
        num_blocks=arena.num_blocks,
        vocab_size=decoder.spec.vocab_size,
    )
    scheduler = Scheduler(limits, layout=arena.layout, secret=bytes(32), eos_ids=())
    graphs = StepGraphs(
        decoder,
        arena,
        most_rows=limits.max_running,
        table_width=limits.num_blocks_for(longest),
        backend=place.graphs(),
    )
    host = ThreadEngineHost(scheduler, ModelRunner(decoder, arena, graphs=graphs), ahead=ahead)
    told: SimpleQueue[StepEvents] = SimpleQueue()
    host.attach(told.put)
    sampling = SamplingParams(
        temperature=0.0 if seed is None else 1.0,
        seed=seed or 0,
        max_tokens=output_tokens,
        ignore_eos=True,
    )
    for number, tokens in enumerate(prompts):
        prompt = Prompt(prompt_tokens=tuple(tokens), sampling=sampling)
        host.submit(Generate(seq_id=SeqId(str(number)), prompt=prompt))
    begin_s = time.perf_counter()
    host.start()
    try:
        run = _collect(told, len(prompts))
        run.seconds = time.perf_counter() - begin_s
        return run
    finally:
        host.close()


def _collect(told: "SimpleQueue[StepEvents]", sequences: int) -> LoopRun:
    run, unfinished, last_s = LoopRun([[] for _ in range(sequences)]), sequences, 0.0
    while unfinished:
        step = told.get(timeout=_STEP_TIMEOUT_S)
        now_s = time.perf_counter()
        for event in step.events:
            if isinstance(event, Failed):
                raise event.error
        if step.sampled is None:
            continue
        columns = (step.sampled.seq_ids, step.sampled.tokens, step.sampled.finish_reasons)
        for seq_id, token, finish in zip(*columns, strict=True):
            run.tokens[int(seq_id)].append(token)
            unfinished -= finish is not None
        if len(step.sampled.seq_ids) == sequences and all(len(t) > 1 for t in run.tokens):
            run.step_s.append(now_s - last_s)
        last_s = now_s
    return run
