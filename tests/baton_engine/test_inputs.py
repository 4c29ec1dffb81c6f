"""The tensors of a step, whichever way they are built."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.generation import SamplingParams
from baton.ids import BlockId
from baton_engine.models.decoder import DecoderInput
from baton_engine.models.inputs import InputBuilder, Padding
from baton_engine.scheduling.plan import Row
from tests.baton_engine.sequences import sequence

CPU = torch.device("cpu")
BLOCK_TOKENS, NUM_BLOCKS = 4, 64


class Text:
    """A text that grows by a token in each step, and by a page where it has to."""

    def __init__(self, length: int, first_page: int) -> None:
        self._next_page = first_page
        self._held = sequence(range(100, 99 + length), SamplingParams(max_tokens=1))

    def step(self) -> Row:
        held = self._held
        held.tokens.append(7 + len(held.tokens))
        length = len(held.tokens)
        while len(held.blocks) * BLOCK_TOKENS < length:
            held.blocks.append(BlockId(self._next_page % NUM_BLOCKS))
            self._next_page += 7
        return Row(seq=held, start=length - 1, num_tokens=1, samples=(0,))


def lines(step: DecoderInput) -> dict[str, object]:
    """What kernels read of each part."""
    batch = step.batch
    used = [-(-context // BLOCK_TOKENS) for context in batch.context_lens.tolist()]
    told = {
        "tokens": step.tokens,
        "positions": step.positions,
        "logit_tokens": step.logit_tokens,
        "slots": batch.slots,
        "query_starts": batch.query_starts,
        "context_lens": batch.context_lens,
    }
    read: dict[str, object] = {name: (one.dtype, one.tolist()) for name, one in told.items()}
    tables = batch.block_tables
    read["tables"] = [line[:n] for line, n in zip(tables.tolist(), used, strict=True)]
    return read | {"dtype of tables": tables.dtype}


@settings(max_examples=30)
@given(data=st.data())
def test_decodes_alone_are_what_they_are_in_a_step_of_any_shape(data):
    short, long = (InputBuilder(BLOCK_TOKENS, NUM_BLOCKS, CPU) for _ in range(2))
    places = st.tuples(st.integers(2, 50), st.integers(0, NUM_BLOCKS - 1))
    texts = [Text(*place) for place in data.draw(st.lists(places, min_size=1, max_size=20))]
    for _ in range(data.draw(st.integers(1, 8))):
        chosen = data.draw(st.lists(st.sampled_from(texts), min_size=1, unique_by=id))
        rows = [text.step() for text in chosen]
        padded = long.build(rows, Padding(decodes=len(rows)))
        assert lines(short.build(rows)) == lines(padded)
