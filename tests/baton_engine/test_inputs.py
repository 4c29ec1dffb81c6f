"""The tensors of a step, whichever way they are built."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.generation import SamplingParams
from baton_engine.models.decoder import DecoderInput
from baton_engine.models.inputs import InputBuilder, Padding
from baton_engine.scheduling.plan import Row
from tests.baton_engine.sequences import sequence

CPU = torch.device("cpu")
BLOCK_TOKENS, NUM_BLOCKS = 4, 64


def decode(length: int, first_page: int) -> Row:
    """The last token of a text."""
    tokens = range(100, 100 + length)
    pages = [(first_page + 7 * place) % NUM_BLOCKS for place in range(-(-length // BLOCK_TOKENS))]
    held = sequence(tokens, SamplingParams(max_tokens=1), blocks=pages)
    return Row(seq=held, start=length - 1, num_tokens=1, samples=(0,))


def lines(step: DecoderInput) -> dict[str, object]:
    """What kernels read of each part."""
    batch = step.batch
    used = [-(-context // BLOCK_TOKENS) for context in batch.context_lens.tolist()]
    return {
        "tokens": step.tokens.tolist(),
        "positions": step.positions.tolist(),
        "logit_tokens": step.logit_tokens.tolist(),
        "slots": batch.slots.tolist(),
        "query_starts": batch.query_starts.tolist(),
        "context_lens": batch.context_lens.tolist(),
        "tables": [line[:n] for line, n in zip(batch.block_tables.tolist(), used, strict=True)],
    }


@settings(max_examples=30)
@given(
    steps=st.lists(
        st.lists(st.tuples(st.integers(1, 50), st.integers(0, 63)), min_size=1, max_size=20),
        min_size=1,
        max_size=3,
    )
)
def test_decodes_alone_are_what_they_are_in_a_step_of_any_shape(steps):
    short, long = (InputBuilder(BLOCK_TOKENS, NUM_BLOCKS, CPU) for _ in range(2))
    for texts in steps:
        rows = [decode(length, page) for length, page in texts]
        padded = long.build(rows, Padding(decodes=len(rows)))
        assert lines(short.build(rows)) == lines(padded)
