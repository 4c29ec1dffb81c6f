import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.errors import EngineError
from baton.generation import SamplingParams
from baton.ids import BlockId
from baton_engine.models.block_tables import NOBODY, BlockTables
from baton_engine.scheduling.plan import Row
from baton_engine.scheduling.request import Sequence
from tests.baton_engine.sequences import sequence

CPU = torch.device("cpu")
BLOCK_TOKENS, NUM_BLOCKS = 4, 50
PAGES = st.integers(0, NUM_BLOCKS - 1)


def text(pages: list[int]) -> Sequence:
    return sequence([5], SamplingParams(max_tokens=1), blocks=pages)


def whole(held: Sequence) -> Row:
    """A row whose context takes all pages of the text."""
    end = len(held.blocks) * BLOCK_TOKENS
    return Row(seq=held, start=end - 1, num_tokens=1, samples=(0,))


def tables_of(tables: BlockTables, rows: list[Row], padding: int = 0) -> list[list[int]]:
    """What the device reads, up to the end of each text, and of so many rows of padding."""
    changes = tables.update(rows)
    kept = np.pad(changes.rows, (0, padding), constant_values=NOBODY)
    sent = [torch.from_numpy(part.copy()) for part in (kept, changes.places, changes.pages)]
    read = tables.gather(changes.width, *sent)
    assert read.shape == (len(rows) + padding, changes.width)
    lengths = [len(row.seq.blocks) for row in rows] + [changes.width] * padding
    return [line[:length] for line, length in zip(read.tolist(), lengths, strict=True)]


@pytest.mark.parametrize("device", [None, CPU], ids=["host's", "mirrored"])
@settings(max_examples=60)
@given(data=st.data())
def test_the_device_reads_every_texts_pages_whatever_happened_to_them(device, data):
    tables = BlockTables(BLOCK_TOKENS, NUM_BLOCKS, device, page_stride=3)
    texts = [text([1]) for _ in range(20)]
    for _ in range(data.draw(st.integers(1, 12))):
        chosen = data.draw(st.lists(st.sampled_from(texts), min_size=1, unique_by=id))
        for held in chosen:
            match data.draw(st.sampled_from(["same", "longer", "shorter", "replaced", "another"])):
                case "longer":
                    held.blocks += [BlockId(page) for page in data.draw(st.lists(PAGES))]
                case "shorter":
                    del held.blocks[data.draw(st.integers(1, len(held.blocks))) :]
                case "replaced":
                    place = data.draw(st.integers(0, len(held.blocks) - 1))
                    held.blocks[place] = BlockId(data.draw(PAGES))
                case "another":
                    pages = data.draw(st.lists(PAGES, min_size=1, max_size=40))
                    held.blocks = [BlockId(page) for page in pages]
        padding = data.draw(st.integers(0, 3))
        read = tables_of(tables, [whole(held) for held in chosen], padding)
        wanted = [[3 * page for page in held.blocks] for held in chosen]
        assert read[: len(chosen)] == wanted
        assert not any(page for line in read[len(chosen) :] for page in line)


def test_a_step_sends_the_pages_that_are_new_and_no_others():
    tables = BlockTables(BLOCK_TOKENS, NUM_BLOCKS, CPU)
    one, other = text([4, 7, 9]), text([8, 2])
    tables_of(tables, [whole(one), whole(other)])
    assert len(tables.update([whole(one), whole(other)]).places) == 0
    one.blocks.append(BlockId(11))
    other.blocks[1] = BlockId(3)
    changes = tables.update([whole(one), whole(other)])
    assert sorted(changes.pages.tolist()) == [3, 11]


def test_more_texts_than_there_were_rows_take_turns():
    tables = BlockTables(BLOCK_TOKENS, NUM_BLOCKS, CPU)
    texts = [text([number % NUM_BLOCKS, 2]) for number in range(100)]
    for _ in range(2):
        for held in texts:
            assert tables_of(tables, [whole(held)]) == [list(held.blocks)]


@pytest.mark.parametrize("device", [None, CPU], ids=["host's", "mirrored"])
def test_a_page_outside_the_arena_spoils_its_own_step_only(device):
    tables = BlockTables(BLOCK_TOKENS, NUM_BLOCKS, device)
    good, bad = text([4, 7]), text([4, NUM_BLOCKS])
    with pytest.raises(EngineError, match="outside the arena's 50"):
        tables.update([whole(good), whole(bad)])
    bad.blocks[1] = BlockId(9)
    assert tables_of(tables, [whole(good), whole(bad)]) == [[4, 7], [4, 9]]


def test_places_are_read_where_slots_are_reckoned():
    tables = BlockTables(BLOCK_TOKENS, NUM_BLOCKS, None)
    rows = tables.update([whole(text([4, 7])), whole(text([8]))]).rows
    assert tables.pages_at(rows[[0, 0, 1]], np.array([1, 0, 0])).tolist() == [7, 4, 8]
