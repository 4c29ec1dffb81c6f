"""An engine without a model takes the time that it is told to, and draws the same tokens again."""

import subprocess
import sys

import pytest

from baton.config.schema import EngineConfig, ModelConfig, SimulatedConfig
from baton.generation import SamplingParams
from baton.ids import BlockId, SeqId
from baton_engine.ports import PageExport
from baton_engine.scheduling.plan import Row, StepPlan
from baton_engine.simulated import SimulatedRunner, StepSpeed, build_simulated
from kv_transfer.memory.arena import WorkerMemory
from tests.baton_engine.sequences import sequence

SPEED = StepSpeed(step_s=0.5, row_s=0.25, context_s=0.0, token_s=0.125, pair_s=0.0)


def row(
    start: int, num_tokens: int, samples: tuple[int, ...] = (0,), *, num_generated: int = 0
) -> Row:
    seq = sequence([1, 2, 3, 4, 5], SamplingParams(), blocks=(0, 1), num_generated=num_generated)
    return Row(seq=seq, start=start, num_tokens=num_tokens, samples=samples)


def test_a_step_takes_what_its_rows_take():
    slept: list[float] = []
    runner = SimulatedRunner(SPEED, vocab_size=100, sleep=slept.append)
    runner.execute(StepPlan(step=1, rows=(row(4, 1, num_generated=1), row(0, 4))))
    assert slept == [pytest.approx(0.5 + 0.25 + 4 * 0.125)]


def test_what_is_drawn_depends_on_sample_and_position_alone():
    runners = [SimulatedRunner(SPEED, vocab_size=1000, sleep=lambda _: None) for _ in range(2)]
    whole, chunk = (
        runner.execute(StepPlan(step=1, rows=(rows,)))
        for runner, rows in zip(runners, (row(0, 5, (0, 1)), row(3, 2, (0, 1))), strict=True)
    )
    assert whole.tokens == chunk.tokens
    first, second = whole.tokens
    assert first != second
    assert first < 1000


def test_exported_pages_are_told_once_their_step_is_over():
    told: list[object] = []
    export = PageExport(seq_id=SeqId("s"), first_block=0, blocks=(BlockId(0),))

    class Sink:
        def save_kv_layer(self, layer):
            told.append((layer.layer_index, tuple(layer.exports), layer.ready))

    runner = SimulatedRunner(SPEED, vocab_size=9, sink=Sink(), sleep=lambda _: told.append("slept"))
    runner.execute(StepPlan(step=1, rows=(row(0, 5),), exports=(export,)))
    assert told == ["slept", (0, (export,), None)]


def test_it_takes_the_sizes_of_the_model_that_it_stands_in_for(tmp_path):
    (tmp_path / "config.json").write_text('{"vocab_size": 77, "max_position_embeddings": 99}')
    built = build_simulated(
        ModelConfig(model=str(tmp_path)),
        EngineConfig(),
        SimulatedConfig(num_blocks=8),
        secret=bytes(32),
        memory=WorkerMemory(),
        sink=None,
    )
    assert (built.limits.vocab_size, built.limits.max_model_len) == (77, 99)
    assert built.limits.num_blocks == 8


def test_it_needs_no_torch():
    code = "import sys, baton_engine.simulated; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
