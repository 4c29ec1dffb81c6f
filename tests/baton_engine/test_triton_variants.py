"""No kernel is compiled while requests run: what steps ask for has been asked for before the first."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.baton_engine.triton_cases import needs_triton

pytestmark = needs_triton


def variants(steps: int, timeout_s: float) -> dict[str, list[int]]:
    told = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    answer = subprocess.run(
        [sys.executable, "-m", "tests.baton_engine.variants", str(steps)],
        cwd=Path(__file__).resolve().parents[2],
        env=told,
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout_s,
    )
    assert answer.returncode == 0, answer.stderr
    found: dict[str, list[int]] = json.loads(answer.stdout)
    return found


def check(found: dict[str, list[int]]) -> None:
    assert {"prefill_attention_kernel", "decode_attention_kernel", "top_p_kernel"} <= set(found)
    late = {kernel: steps for kernel, steps in found.items() if max(steps) >= 0}
    assert not late


def test_a_few_steps_ask_for_no_variant_that_the_warm_up_did_not() -> None:
    check(variants(60, 100))


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_twenty_thousand_steps_ask_for_none() -> None:
    check(variants(20_000, 1400))
