"""The steps before an engine serves leave nothing behind."""

from pathlib import Path
from typing import Any

import pytest

from baton.generation import Prompt, SamplingParams
from baton.ids import SeqId
from baton_engine.cache.arena import PageKernels
from baton_engine.fakes.engine import FakeRunner
from baton_engine.messages import Generate
from baton_engine.scheduling.plan import DraftPlan
from baton_engine.scheduling.request import State
from baton_engine.warm_up import warm_up
from tests.baton_engine.scheduling_world import limits
from tests.baton_engine.tiny_models import make_model
from tests.baton_engine.whole_engine import WholeEngine

A = SeqId("a")


class Movers:
    """Notes what is moved."""

    def __init__(self) -> None:
        self.lengths: list[int] = []

    def warm_up(self, page_bytes: int) -> None:
        self.lengths.append(page_bytes)


class Sums:
    """Of pages of six heads; notes what is hashed."""

    page_bytes = 6 * 64

    def __init__(self) -> None:
        self.layers: list[int] = []

    def of_layer(self, layer: int, blocks: list[int]) -> None:
        self.layers.append(layer)


def test_chunks_decodes_beside_them_and_every_kind_of_draw_are_computed() -> None:
    some = limits()
    runner = FakeRunner(some)
    warm_up(runner, limits=some, drafter=None, page_kernels=None)
    rows = [row for plan in runner.plans for row in plan.rows]
    params = [row.seq.params for row in rows]
    assert any(p.temperature == 0 for p in params)
    assert any(p.temperature and not p.top_k for p in params)
    looked_for = {(p.top_k > 0, p.top_p < 1, p.min_p > 0) for p in params if p.temperature}
    assert looked_for >= {(1, 1, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)}
    assert any({1} < {row.num_tokens for row in plan.rows} for plan in runner.plans)


def test_the_largest_step_is_computed_whole_and_scored() -> None:
    """Two texts, since one is not that long."""
    some = limits(max_num_batched_tokens=300)
    runner = FakeRunner(some)
    warm_up(runner, limits=some, drafter=None, page_kernels=None)
    *_, largest = runner.plans
    assert [(row.num_tokens, row.num_scored) for row in largest.rows] == [(200, 199), (100, 99)]


@pytest.mark.parametrize("block_tokens", [1, 4, 64])
def test_no_page_is_named_that_the_arena_lacks(block_tokens: int) -> None:
    some = limits(block_tokens=block_tokens, num_blocks=64 // block_tokens, max_model_len=64)
    runner = FakeRunner(some, has_drafter=True)
    warm_up(runner, limits=some, drafter=runner, page_kernels=None)
    blocks = {block for plan in runner.plans for row in plan.rows for block in row.seq.blocks}
    assert blocks == set(range(some.num_blocks))


@pytest.mark.parametrize("shift", [0, 1])
def test_a_drafter_computes_prompts_and_guesses_more_than_one_token(shift: int) -> None:
    some = limits()
    runner = FakeRunner(some, has_drafter=True, draft_shift=shift)
    asked: list[DraftPlan] = []

    class Asked:
        """Notes what is asked of the drafter."""

        def draft(self, plan: DraftPlan) -> list[list[int]]:
            asked.append(plan)
            return runner.draft(plan)

    warm_up(runner, limits=some, drafter=Asked(), page_kernels=None)
    (plan,) = asked
    assert {row.num_tokens > 1 for row in plan.rows} == {True, False}
    assert all(row.count == 2 for row in plan.rows)
    states = {row.seq.state for step in runner.plans for row in step.rows}
    assert states == {State.PREFILLING}  # of which a drafter computes its KV too


def test_an_engine_draws_the_same_after_it(tmp_path: Path) -> None:
    checkpoint = make_model(tmp_path, "llama")
    prompt = Prompt(
        prompt_tokens=tuple(range(3, 40)), sampling=SamplingParams(temperature=0.8, max_tokens=9)
    )

    def tokens(*, warm: bool) -> list[int]:
        engine = WholeEngine(checkpoint)
        if warm:
            warm_up(engine.runner, limits=engine.limits, drafter=None, page_kernels=None)
        engine.tell(Generate(seq_id=A, prompt=prompt))
        engine.run()
        return [sample.token for sample in engine.tokens(A)]

    assert tokens(warm=True) == tokens(warm=False)


def test_pages_are_moved_whole_and_by_every_share_of_their_heads() -> None:
    movers: Any = Movers()
    sums: Any = Sums()
    PageKernels(movers=movers, sums=sums, num_kv_heads=6).warm_up()
    assert movers.lengths == [6 * 64, 3 * 64, 2 * 64, 64]
    assert sums.layers == [0]
