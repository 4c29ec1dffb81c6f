"""How near two ways to compute a model come to each other, as their clients see it: for tests of bfloat16, int8 weights
and fp8 KV against float32.
"""

from dataclasses import dataclass

import torch

from baton.generation import SamplingParams
from baton_engine.cache.arena import KvArena
from baton_engine.models.decoder import Decoder
from baton_engine.models.inputs import InputBuilder
from baton_engine.models.prepare import prepare_decoder
from baton_engine.scheduling.plan import Row
from tests.baton_engine.stepping import make_runner, make_texts

TOP = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Closeness:
    """What differs between the log-probabilities of two computations over the same positions.

    Attributes:
        overlap: Mean share of the five likeliest tokens that both name.
        least_overlap: The same at the worst position.
        delta: Mean |Δ log-probability| of the tokens that are among the exact computation's five likeliest.
        largest_delta: The largest of them.
    """

    overlap: float
    least_overlap: float
    delta: float
    largest_delta: float


def closeness(exact: torch.Tensor, rounded: torch.Tensor) -> Closeness:
    """Compares logits `[num_positions, vocab]`, any floating dtype, position by position."""
    exact, rounded = exact.double().log_softmax(-1), rounded.double().log_softmax(-1)
    likeliest = exact.topk(TOP, dim=-1).indices
    theirs = rounded.topk(TOP, dim=-1).indices
    shared = (likeliest.unsqueeze(-1) == theirs.unsqueeze(-2)).any(-1).double().mean(-1)
    delta = (exact.gather(-1, likeliest) - rounded.gather(-1, likeliest)).abs()
    return Closeness(
        overlap=shared.mean().item(),
        least_overlap=shared.min().item(),
        delta=delta.mean().item(),
        largest_delta=delta.max().item(),
    )


def assert_near(
    exact: torch.Tensor,
    rounded: torch.Tensor,
    *,
    overlap: float,
    delta: float,
    largest_delta: float,
) -> None:
    """Asserts finite logits within bounds: at least `overlap`, at most the deltas (`Closeness`); and that something was
    rounded at all, lest a test compares a computation with itself.
    """
    assert torch.isfinite(rounded).all()
    found = closeness(exact, rounded)
    assert found.largest_delta > 0.0, "the two computations are one and the same"
    assert found.overlap >= overlap, found
    assert found.delta <= delta, found
    assert found.largest_delta <= largest_delta, found


def logits_after_each(
    decoder: Decoder,
    tokens: list[int],
    *,
    block_tokens: int = 16,
    chunk: int | None = None,
    arena: KvArena | None = None,
) -> torch.Tensor:
    """Logits `[num_tokens, vocab]` after each of `tokens`, computed `chunk` tokens at a time (None: at once).

    With a chunk of 1 every token is a decode that reads all KV before it back from the pages. An `arena` other than the
    decoder's own kind may be given, if it has enough pages.
    """
    params = SamplingParams(max_tokens=1, temperature=0.0)
    (text,), num_blocks = make_texts([tokens], params, block_tokens=block_tokens, chunks=(1,))
    if arena is None:
        _, arena = make_runner(decoder, block_tokens=block_tokens, num_blocks=num_blocks)
    inputs = InputBuilder(
        block_tokens,
        arena.num_blocks,
        decoder.device,
        prepare_decoder(decoder, arena),
    )
    parts = []
    step = chunk or len(tokens)
    for start in range(0, len(tokens), step):
        size = min(step, len(tokens) - start)
        row = Row(seq=text.seq, start=start, num_tokens=size, samples=(), num_scored=size)
        parts.append(decoder.forward(inputs.build([row]), arena))
    return torch.cat(parts)
