"""`baton serve --engine vllm` with a pool: a worker that starts again has its prompts from there,
and answers as vLLM does by itself.
"""

from pathlib import Path
from typing import Any

import pytest

from baton_vllm.settings import missing
from tests.baton_engine.tiny_models import make_model
from tests.baton_vllm.engine_run import prompt_tokens
from tests.baton_vllm.vllm_alone import tokens_of_vllm
from tests.e2e.served import Served, assert_gone, eventually, maps_pool, serve

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(600),
    pytest.mark.skipif(missing() is not None, reason=missing() or ""),
]

BLOCK = 32
LENGTHS = (199, 230, 300)
NEW_TOKENS = 24
CLUSTER = """
engine:
  max_num_batched_tokens: 64
  max_num_seqs: 16
  vllm:
    enforce_eager: true
pool: {enabled: true, memory_bytes: 64MiB, lookup_timeout_s: 5}
router:
  local_prefill_tokens: 0
"""
FLAGS = ("--engine", "vllm", "--dtype", "float32", "--kv-cache-memory", "64MiB")
PAIR = ("--prefill-workers", "1", "--decode-workers", "1", "--block-size", str(BLOCK))


def tokens(cluster: Served, prompt: list[int]) -> list[int]:
    asked = {"model": "tiny", "prompt": prompt, "temperature": 0, "max_tokens": NEW_TOKENS}
    asked |= {"ignore_eos": True, "return_token_ids": True}
    with cluster.client() as client:
        answer = client.post("/v1/completions", json=asked)
    assert answer.status_code == 200, answer.text
    found: list[int] = answer.json()["choices"][0]["token_ids"]
    return found


def prefill(cluster: Served) -> dict[str, Any]:
    """What is known of the prefill worker; nothing while there is none."""
    return next((worker for worker in cluster.workers() if worker["role"] == "prefill"), {})


def test_a_prefill_worker_that_starts_again_fetches_its_prompts_and_hands_them_off(tmp_path: Path):
    model = make_model(tmp_path / "model", "llama", head_dim=32)
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    prompts = [prompt_tokens(length) for length in LENGTHS]
    wanted = tokens_of_vllm(model, [(prompt, {}) for prompt in prompts])
    flags = ("-f", str(tmp_path / "cluster.yaml"), *FLAGS, *PAIR)
    with serve(str(model), *flags, "--served-model-name", "tiny") as served:
        eventually(lambda: maps_pool(served, "prefill", "decode"), "workers map the pool", 90.0)
        assert [tokens(served, prompt) for prompt in prompts] == wanted
        num_full = sum((length + NEW_TOKENS - 1) // BLOCK for length in LENGTHS)
        eventually(
            lambda: served.told("pool", "top").get("stored_blocks", 0) >= num_full,
            "all full blocks are in the pool",
            60.0,
        )
        victim, before = served.child("prefill"), prefill(served)["incarnation"]
        victim.kill()
        assert_gone([victim])
        eventually(
            lambda: (
                prefill(served).get("incarnation", before) != before
                and maps_pool(served, "prefill")
            ),
            "the worker is back",
            120.0,
        )

        assert [tokens(served, prompt) for prompt in prompts] == wanted

        pooled = sum((length - 1) // BLOCK * BLOCK for length in LENGTHS)
        eventually(
            lambda: prefill(served)["load"]["pool_hit_tokens"] == pooled,
            "every full block of the prompts was fetched",
        )
        assert prefill(served)["load"]["prefix_hit_tokens"] == 0
