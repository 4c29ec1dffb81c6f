"""The first steps of an engine, before it serves: whatever a GPU compiles or loads at first use is so by then, and no request waits for it.

Small steps are captured as graphs at start (`cuda_graphs.py`). What is left is computed here once: a prompt's chunk, a decode beside one,
every kind of draw, hashes and moves of pages.
"""

from dataclasses import replace

from baton.generation import Prompt, SamplingParams
from baton.ids import BlockId, SeqId
from baton_engine.cache.arena import PageKernels
from baton_engine.cuda_graphs import MOST_CHUNKS
from baton_engine.messages import Generate
from baton_engine.scheduling.plan import Row, StepPlan, StepRunner
from baton_engine.scheduling.request import Request

_GREEDY = SamplingParams(temperature=0.0, max_tokens=1)
_RANDOM = replace(_GREEDY, temperature=1.0)
_FILTERED = (
    replace(_RANDOM, top_k=4, top_p=0.9),
    replace(_RANDOM, top_k=4),
    replace(_RANDOM, top_p=0.9),
    replace(_RANDOM, min_p=0.01),
)
"""A draw looks for the limits that some row of a step has, and for no others."""


def warm_up(runner: StepRunner, *, block_tokens: int, page_kernels: PageKernels | None) -> None:
    """Computes steps over the first pages of the arena, which nothing holds yet. Blocks, for some seconds where nothing is in Triton's cache.

    Args:
        runner: Of the engine that is about to start.
        block_tokens: Per page.
        page_kernels: By which its pages leave; None where there are none.

    Raises:
        EngineError: A step cannot be computed here.
        DeviceLostError: Nor can any other.
    """
    length = min(8, block_tokens)
    chunk = _row(0, _GREEDY, length)
    random = _row(1, _RANDOM, length)
    filtered = [_row(2, params, length) for params in _FILTERED]
    decode = _row(3, _GREEDY, 1)
    many = (chunk,) * (MOST_CHUNKS + 1)  # which no graph repeats
    steps = [many, (decode, *many), (random,), *((row, random) for row in filtered)]
    for step, rows in enumerate(steps):
        runner.execute(StepPlan(step=step, rows=rows))
    if page_kernels is not None:
        page_kernels.warm_up()


def _row(page: int, params: SamplingParams, num_tokens: int) -> Row:
    """All of a prompt of zeros, which lies in one page."""
    prompt = Prompt(prompt_tokens=(0,) * num_tokens, sampling=params)
    sequence = Request(
        asked=Generate(seq_id=SeqId(f"warm-up {page}"), prompt=prompt)
    ).first_sequence()
    sequence.blocks.append(BlockId(page))
    return Row(seq=sequence, start=0, num_tokens=num_tokens, samples=(0,))
