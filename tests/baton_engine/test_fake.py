import pytest

from baton.errors import EngineError
from baton.generation import SamplingParams
from baton.ids import BlockId, SeqId
from baton_engine.fakes.engine import FakeRunner
from baton_engine.ports import PageExport
from baton_engine.scheduling.plan import Row, StepPlan
from baton_engine.scheduling.request import Sequence
from tests.baton_engine.scheduling_world import limits
from tests.baton_engine.sequences import sequence


def text(*blocks: int) -> Sequence:
    return sequence([1, 2, 3, 4, 5], SamplingParams(), blocks=blocks)


def plan(seq: Sequence, start: int, num_tokens: int, **rest) -> StepPlan:
    row = Row(seq=seq, start=start, num_tokens=num_tokens, samples=(0,))
    return StepPlan(step=1, rows=(row,), **rest)


def test_chunks_draw_what_the_whole_prompt_draws():
    whole, chunked = FakeRunner(limits()), FakeRunner(limits())
    expected = whole.execute(plan(text(3, 5), 0, 5))
    chunked.execute(plan(text(0, 1), 0, 2))
    assert chunked.execute(plan(text(0, 1), 2, 3)) == expected
    assert expected.tokens[0] == next(whole.draw_all((1, 2, 3, 4, 5), 0))


def test_reading_a_page_that_was_never_written_raises():
    with pytest.raises(EngineError, match="nothing was written"):
        FakeRunner(limits()).execute(plan(text(0, 1), 4, 1))


def test_the_content_of_pages_decides_what_is_drawn():
    right, wrong = FakeRunner(limits()), FakeRunner(limits())
    for runner in (right, wrong):
        runner.execute(plan(text(0, 1), 0, 4))
    wrong.pages[0][3] += 1
    assert right.execute(plan(text(0, 1), 4, 1)) != wrong.execute(plan(text(0, 1), 4, 1))


def test_pages_are_copied_before_anything_is_computed():
    runner = FakeRunner(limits())
    runner.execute(plan(text(0, 1), 0, 4))
    before = list(runner.pages[0])
    runner.execute(plan(text(0, 1), 0, 1, copies=((BlockId(0), BlockId(7)),)))
    assert runner.pages[7] == before


def test_the_sink_hears_of_exports_once_per_layer():
    heard: list[tuple[int, list[PageExport]]] = []

    class Sink:
        def save_kv_layer(self, layer):
            heard.append((layer.layer_index, list(layer.exports)))

    export = PageExport(seq_id=SeqId("s"), first_block=0, blocks=(BlockId(0),))
    runner = FakeRunner(limits(), sink=Sink(), num_layers=2)
    runner.execute(plan(text(0, 1), 0, 5, exports=(export,)))
    assert heard == [(0, [export]), (1, [export])]
