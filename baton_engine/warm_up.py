"""The first steps of an engine, before it serves: whatever a GPU compiles or loads at first use is so by then,
and no request waits for it.

Small steps are captured as graphs at start (`cuda_graphs.py`). What is left is computed here once: a prompt's chunk, a
decode beside one, the largest step that is ever planned, every kind of draw, a drafter's guesses,
hashes and moves of pages.
"""

from dataclasses import replace

from baton.generation import Prompt, SamplingParams
from baton.ids import BlockId, SeqId
from baton_engine.cache.arena import PageKernels
from baton_engine.cuda_graphs import MOST_CHUNKS
from baton_engine.messages import Generate
from baton_engine.scheduling.limits import EngineLimits
from baton_engine.scheduling.plan import Drafter, DraftPlan, DraftRow, Row, StepPlan, StepRunner
from baton_engine.scheduling.request import Request, Sequence, State

_GREEDY = SamplingParams(temperature=0.0, max_tokens=1)
_RANDOM = replace(_GREEDY, temperature=1.0)
_FILTERED = (
    replace(_RANDOM, top_k=4, top_p=0.9),
    replace(_RANDOM, top_k=4),
    replace(_RANDOM, top_p=0.9),
    replace(_RANDOM, min_p=0.01),
)
"""A draw looks for the limits that some row of a step has, and for no others."""
_SCORED = replace(_GREEDY, prompt_logprobs=0)
_PRODUCTS = (16, 32, 64)
"""Tokens of a step up to which products of few rows have a kernel each (`few_rows_matmul.tile_of`)."""
_FEW = 8
"""Tokens of a chunk."""
_GUESSES = 2


def warm_up(
    runner: StepRunner,
    *,
    limits: EngineLimits,
    drafter: Drafter | None,
    page_kernels: PageKernels | None,
) -> None:
    """Computes steps over the first pages of the arena, which nothing holds yet. Blocks,
    for some seconds where nothing is in Triton's cache.

    Args:
        runner: Of the engine that is about to start.
        limits: Of the same.
        drafter: The same; None where there is none.
        page_kernels: By which its pages leave; None where there are none.

    Raises:
        EngineError: A step cannot be computed here.
        DeviceLostError: Nor can any other.
    """
    most = min(limits.max_model_len, limits.num_blocks * limits.block_tokens)
    few = min(_FEW, most)
    chunk = _row(_GREEDY, few, limits)
    random = _row(_RANDOM, few, limits)
    filtered = [_row(params, few, limits) for params in _FILTERED]
    decode = _row(_GREEDY, 1, limits)
    many = (chunk,) * (MOST_CHUNKS + 1)  # which no graph repeats
    steps = [many, (decode, *many), (random,), *((row, random) for row in filtered)]
    steps += [
        _scored([min(tokens, most, limits.max_num_batched_tokens)], limits) for tokens in _PRODUCTS
    ]
    for step, rows in enumerate([*steps, _largest(most, limits)]):
        runner.execute(StepPlan(step=step, rows=rows))
    if drafter is not None:
        length = few - _GUESSES
        texts = tuple(_guessed(start, length, limits) for start in (1, length - 1))
        drafter.draft(DraftPlan(rows=texts))
    if page_kernels is not None:
        page_kernels.warm_up()


def _largest(most: int, limits: EngineLimits) -> tuple[Row, ...]:
    budget = limits.max_num_batched_tokens
    return _scored([most] * (budget // most) + [budget % most], limits)


def _scored(lengths: list[int], limits: EngineLimits) -> tuple[Row, ...]:
    """Prompts of which every token goes through the output head too: by their number products choose their kernels
    (`few_rows_matmul`, `row_matmul`).
    """
    rows = (_row(_SCORED, length, limits) for length in lengths if length)
    return tuple(replace(row, num_scored=row.num_tokens - 1) for row in rows)


def _row(params: SamplingParams, num_tokens: int, limits: EngineLimits) -> Row:
    """All of a prompt of zeros."""
    text = _text(params, num_tokens, limits)
    text.state = State.PREFILLING
    return Row(seq=text, start=0, num_tokens=num_tokens, samples=(0,))


def _guessed(start: int, length: int, limits: EngineLimits) -> DraftRow:
    """What follows such a text: the first token from what is left of it, from `start` on,
    each other one from the one before.
    """
    text = _text(_GREEDY, length, limits, room=_GUESSES)
    text.state = State.RUNNING
    return DraftRow(seq=text, start=start, num_tokens=length - start, count=_GUESSES)


def _text(params: SamplingParams, length: int, limits: EngineLimits, *, room: int = 0) -> Sequence:
    """With pages for `room` more tokens. All share the first ones: what stands there means nothing."""
    prompt = Prompt(prompt_tokens=(0,) * length, sampling=params)
    sequence = Request(asked=Generate(seq_id=SeqId("warm-up"), prompt=prompt)).first_sequence()
    sequence.blocks += [BlockId(page) for page in range(limits.num_blocks_for(length + room))]
    return sequence
