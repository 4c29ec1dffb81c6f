from pathlib import Path

import pytest

from bench.harness.shapes import SHAPES, write_model
from bench.preemption import preempt
from tests.waits import soon


@pytest.mark.parametrize("context", [1, 32, 50])
async def test_a_sequence_of_any_length_is_preempted(context: int, tmp_path: Path) -> None:
    write_model(SHAPES["tiny"], tmp_path)
    returned = await soon(preempt(tmp_path, context, with_pool=False))
    assert returned.seconds > 0
