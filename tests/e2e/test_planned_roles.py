"""A planner in the router of a running cluster: a worker changes its role under load,
and no request is the worse for it.
"""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.baton_engine.tiny_models import make_model
from tests.e2e.reference import Reference
from tests.e2e.served import Served, assert_at_rest, eventually, serve

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

MAX_TOKENS = 100
SETTINGS = {
    "BATON_ROLES_PLANNER": "on",
    "BATON_ROLES_TBT_TARGET_S": "1",
    "BATON_ROLES_SUSTAINED_S": "2",
    "BATON_ROLES_COOLDOWN_S": "120",
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("llama"), "llama")


def _ask(cluster: Served, number: int) -> tuple[list[int], list[int]]:
    prompt = [10 + (7 * number + place) % 200 for place in range(30)]
    body = {
        "model": "m",
        "prompt": prompt,
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    answer = httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=60.0)
    assert answer.status_code == 200, answer.text
    return prompt, answer.json()["choices"][0]["token_ids"]


def test_a_prefill_worker_becomes_a_decode_worker_under_load_and_nothing_fails(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in SETTINGS.items():
        monkeypatch.setenv(name, value)
    flags = ("--dtype", "float32", "--kv-cache-memory", "32MiB", "--served-model-name", "m")
    with serve(str(checkpoint), *flags, "--prefill-workers", "2", "--max-num-seqs", "2") as cluster:

        def decode_workers() -> int:
            return sum(worker["role"] == "decode" for worker in cluster.workers())

        assert decode_workers() == 1
        replies: list[tuple[list[int], list[int]]] = []
        with ThreadPoolExecutor(8) as clients:

            def more() -> bool:
                """Four times as many texts at once as a decode worker has places."""
                asked = [clients.submit(_ask, cluster, number) for number in range(8)]
                replies.extend(one.result(timeout=60) for one in asked)
                return decode_workers() == 2

            eventually(more, "a prefill worker decodes", timeout_s=90)
            more()
        reference = Reference(checkpoint)
        for prompt, tokens in replies:
            assert len(tokens) == MAX_TOKENS
            reference.assert_greedy(prompt, tokens)
        told = [entry["event"] for entry in cluster.told("explain", "--planner")["entries"]]
        assert any("becomes a decode worker: pressure" in event for event in told)
        assert told[-1].startswith("now: pressure")
        assert_at_rest(cluster)
