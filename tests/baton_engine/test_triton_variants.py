"""No kernel is compiled while requests run: what steps ask for has been asked for before the first."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.baton_engine.triton_cases import needs_triton

pytestmark = needs_triton
WAYS = ("eager", "graphs", "deterministic", "draft_model", "eagle3")
FROM_GRAPHS = {
    "eager": set[str](),
    "graphs": {"decodes", "drafts", "prompts", "mixed"},
    "deterministic": {"decodes", "drafts"},
    "draft_model": {"decodes", "drafts"},
    "eagle3": {"decodes", "drafts"},
}


def replayed(steps: int, ways: tuple[str, ...], timeout_s: float) -> dict[str, Any]:
    told = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    answer = subprocess.run(
        [sys.executable, "-m", "tests.baton_engine.variants", str(steps), *ways],
        cwd=Path(__file__).resolve().parents[2],
        env=told,
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout_s,
    )
    assert answer.returncode == 0, answer.stderr
    found: dict[str, Any] = json.loads(answer.stdout)
    return found


def check(found: dict[str, Any]) -> None:
    """Also that there was something to ask for, in steps of every kind."""
    for way, what in found.items():
        kernels = {"prefill_attention_kernel", "rotate_and_store_kernel", "top_p_kernel"}
        kernels |= {"add_parts_kernel"} if way == "deterministic" else {"decode_attention_kernel"}
        kernels |= {"few_rows_kernel"} if way != "deterministic" else set()
        assert kernels <= set(what["variants"])
        assert set(what["kinds"]) == FROM_GRAPHS[way] | {"eager"}
        late = {kernel: steps for kernel, steps in what["variants"].items() if max(steps) >= 0}
        assert not late, way


def test_a_few_steps_ask_for_no_variant_that_the_warm_up_did_not() -> None:
    check(replayed(60, WAYS, 250))


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("way", WAYS)
def test_twenty_thousand_steps_ask_for_none(way: str) -> None:
    check(replayed(20_000, (way,), 2900))
