"""The steps before an engine serves leave nothing behind."""

from pathlib import Path

from baton.generation import Prompt, SamplingParams
from baton.ids import SeqId
from baton_engine.fakes.engine import FakeRunner
from baton_engine.messages import Generate
from baton_engine.warm_up import warm_up
from tests.baton_engine.scheduling_world import limits
from tests.baton_engine.tiny_models import make_model
from tests.baton_engine.whole_engine import BLOCK_TOKENS, WholeEngine

A = SeqId("a")


def test_chunks_decodes_beside_them_and_every_kind_of_draw_are_computed() -> None:
    some = limits()
    runner = FakeRunner(some)
    warm_up(runner, block_tokens=some.block_tokens, page_kernels=None)
    rows = [row for plan in runner.plans for row in plan.rows]
    params = [row.seq.params for row in rows]
    assert any(p.temperature == 0 for p in params)
    assert any(p.temperature and not p.top_k for p in params)
    looked_for = {(p.top_k > 0, p.top_p < 1, p.min_p > 0) for p in params if p.temperature}
    assert looked_for >= {(1, 1, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)}
    assert any({1} < {row.num_tokens for row in plan.rows} for plan in runner.plans)
    assert all(len(row.seq.blocks) == 1 for row in rows)


def test_an_engine_draws_the_same_after_it(tmp_path: Path) -> None:
    checkpoint = make_model(tmp_path, "llama")
    prompt = Prompt(
        prompt_tokens=tuple(range(3, 40)), sampling=SamplingParams(temperature=0.8, max_tokens=9)
    )

    def tokens(*, warm: bool) -> list[int]:
        engine = WholeEngine(checkpoint)
        if warm:
            warm_up(engine.runner, block_tokens=BLOCK_TOKENS, page_kernels=None)
        engine.tell(Generate(seq_id=A, prompt=prompt))
        engine.run()
        return [sample.token for sample in engine.tokens(A)]

    assert tokens(warm=True) == tokens(warm=False)
