"""The engine of a hybrid worker draws what vLLM's own `LLM` draws,
for every family and quantisation that this platform runs.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from baton.cpu_features import cpu_flags
from baton_vllm.settings import missing
from tests.baton_vllm.families import FAMILIES, QUANTISED

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.skipif(missing() is not None, reason=missing() or ""),
]

_LATENT = "deepseek-v2-latent"
_CACHED_TOKENS = sum((length - 1) // 32 * 32 for length in (1, 33, 64, 130, 199)) + 192
"""Of the second round: full blocks of the prompts, one token less, and of the one that goes on from the last."""


def results(folder: Path, dtype: str, *names: str) -> dict[str, dict[str, Any]]:
    """All in one process, which takes longest to import vLLM."""
    run = subprocess.run(
        [sys.executable, "-m", "tests.baton_vllm.families_run", str(folder), dtype, *names],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=840,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    lines = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
    return {line["model"]: line for line in lines}


def assert_alike(result: dict[str, Any]) -> None:
    assert result["hosted"] == result["vllm"], result["model"]
    longest = max(result["hosted"][1], key=len)
    assert len(set(longest)) > 3, "a model that says one thing shows nothing"
    assert result["cached_tokens"] == _CACHED_TOKENS


@pytest.fixture(scope="module")
def of_families(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    return results(tmp_path_factory.mktemp("families"), "float32", *FAMILIES)


@pytest.mark.slow
@pytest.mark.parametrize("family", [name for name in FAMILIES if name != _LATENT])
def test_greedy_tokens_are_those_of_vllm_alone(
    of_families: dict[str, dict[str, Any]], family: str
) -> None:
    assert_alike(of_families[family])


@pytest.mark.slow
def test_latent_attention_is_refused_on_cpus_by_its_name(
    of_families: dict[str, dict[str, Any]],
) -> None:
    assert "latent attention is not served on CPUs" in of_families[_LATENT]["refused"]


@pytest.fixture(scope="module")
def of_quantised(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    return results(tmp_path_factory.mktemp("quantised"), "bfloat16", *QUANTISED)


@pytest.mark.parametrize("how", [how for how in QUANTISED if how != "fp8"])
def test_a_quantised_checkpoint_draws_what_it_draws_with_vllm_alone_or_is_refused_where_that_cannot(
    of_quantised: dict[str, dict[str, Any]], how: str
) -> None:
    if how.endswith("int4") and "avx512f" not in cpu_flags():
        assert "on this processor: " in of_quantised[how]["refused"]
    else:
        assert_alike(of_quantised[how])


def test_fp8_is_drawn_alike_where_the_processor_has_amx_and_refused_in_vllms_words_elsewhere(
    of_quantised: dict[str, dict[str, Any]],
) -> None:
    if "amx_tile" in cpu_flags():
        assert_alike(of_quantised["fp8"])
    else:
        assert of_quantised["fp8"]["refused"].startswith("vLLM cannot serve ")
        assert "fp8" in of_quantised["fp8"]["refused"].partition(": ")[2]
