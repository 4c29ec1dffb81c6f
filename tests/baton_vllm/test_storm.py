"""A cluster of two prefill and two decode workers with vLLM lives through a storm of faults: no hang,
no wrong token, no lost page.
"""

from pathlib import Path

import pytest

from baton_vllm.settings import missing
from tests.baton_engine.tiny_models import make_model
from tests.chaos.storm import Weather
from tests.chaos.test_storm import SETTINGS, check, live_through

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.alone,
    pytest.mark.timeout(900),
    pytest.mark.skipif(missing() is not None, reason=missing() or ""),
]

FLAGS = (
    *("--engine", "vllm", "--dtype", "float32", "--log-level", "warning"),
    *("--kv-cache-memory", "8MiB", "--block-size", "32"),
    *("--prefill-workers", "2", "--decode-workers", "2"),
)
CONFIG = """
engine: {max_num_batched_tokens: 64, max_num_seqs: 16, vllm: {enforce_eager: true}}
"""


@pytest.mark.parametrize(
    ("requests", "interval_s"),
    [(150, 0.5), pytest.param(500, 1.0, marks=[pytest.mark.chaos, pytest.mark.slow])],
)
def test_a_storm_over_workers_with_vllm_costs_no_token_and_no_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, requests: int, interval_s: float
) -> None:
    """A worker with vLLM is away for as long as its imports take,
    so that faults come less often than with our engine.
    """
    checkpoint = make_model(tmp_path / "llama", "llama", head_dim=32)
    (tmp_path / "cluster.yaml").write_text(CONFIG)
    for name, value in SETTINGS.items():
        monkeypatch.setenv(name, value)

    account = live_through(
        checkpoint,
        requests=requests,
        seed=5,
        weather=Weather(interval_s=interval_s, longest_stop_s=3.0),
        flags=("-f", str(tmp_path / "cluster.yaml"), *FLAGS),
    )

    assert account.faults["kill"] + account.faults["stop"] > 0
    check(checkpoint, account)
