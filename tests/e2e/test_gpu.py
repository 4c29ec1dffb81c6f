"""A cluster whose workers share one GPU: what it draws is what transformers draws, and pages go from arena to arena."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from kv_transfer.memory.cuda import devices
from tests.baton_engine.tiny_models import make_model, random_prompts
from tests.e2e.reference import Reference
from tests.e2e.served import serve
from tests.e2e.test_pool_faults import ask_all, pooled
from tests.e2e.test_speculation import answered_plainly, drafts_that_changed_nothing

pytestmark = pytest.mark.alone

PROMPTS = [list(range(3, 3 + length)) for length in (1, 17, 64, 65, 300)]
FLAGS = (
    *("--device", "cuda", "--dtype", "float32", "--block-size", "16"),
    *("--kv-cache-memory", "64MiB", "--prefill-workers", "1", "--decode-workers", "1"),
)


@pytest.mark.gpu
@pytest.mark.skipif(not devices(), reason="no GPU")
@pytest.mark.parametrize("backend", ["cuda_ipc", "nixl"])
def test_prompts_that_are_handed_over_on_a_gpu_go_on_as_transformers_would(
    tmp_path: Path, backend: str
) -> None:
    checkpoint = make_model(tmp_path / "model", "llama")
    reference = Reference(checkpoint)
    with (
        serve(str(checkpoint), *FLAGS, "--transfer-backends", backend) as served,
        served.client() as http,
    ):
        for prompt in PROMPTS:
            asked = {
                "model": str(checkpoint),
                "prompt": prompt,
                "max_tokens": 24,
                "temperature": 0,
                "ignore_eos": True,
                "return_token_ids": True,
            }
            reply = http.post("/v1/completions", json=asked)
            assert reply.status_code == 200, reply.text
            drawn = reply.json()["choices"][0]["token_ids"]
            assert len(drawn) == 24
            reference.assert_greedy(prompt, drawn)


def _drawn(url: str, prompt: list[int]) -> dict[str, Any]:
    """Tokens and log-probabilities of a draw with a seed."""
    asked = {
        "model": "m",
        "prompt": prompt,
        "max_tokens": 24,
        "seed": 7,
        "temperature": 0.9,
        "logprobs": 3,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    reply = httpx.post(f"{url}/v1/completions", json=asked, timeout=300.0)
    assert reply.status_code == 200, reply.text
    choice: dict[str, Any] = reply.json()["choices"][0]
    return {"token_ids": choice["token_ids"], "logprobs": choice["logprobs"]}


@pytest.mark.gpu
@pytest.mark.skipif(not devices(), reason="no GPU")
def test_a_deterministic_engine_on_a_gpu_gives_a_request_the_same_bits_beside_others(
    tmp_path: Path,
) -> None:
    checkpoint = make_model(tmp_path / "model", "qwen3", head_dim=64, dtype=torch.bfloat16)
    flags = ("--device", "cuda", "--deterministic", "--hybrid-workers", "1")
    prompts = random_prompts(12, 300)
    with serve(str(checkpoint), "--served-model-name", "m", *flags) as served:
        alone = [_drawn(served.url, prompt) for prompt in prompts]
        with ThreadPoolExecutor(len(prompts)) as clients:
            together = list(clients.map(lambda prompt: _drawn(served.url, prompt), prompts))
    assert together == alone


@pytest.mark.gpu
@pytest.mark.skipif(not devices(), reason="no GPU")
@pytest.mark.parametrize("by", ["ngram", "draft_model", "eagle3"])
def test_a_pair_that_guesses_on_a_gpu_answers_as_a_worker_that_does_not(
    tmp_path: Path, by: str
) -> None:
    flags = (
        "--device",
        "cuda",
        "--dtype",
        "bfloat16",
        "--kv-cache-memory",
        "32MiB",
        "--deterministic",
    )
    plain = answered_plainly(tmp_path, *flags)
    # A GPU's step over so small a model is the host's time: drafts rarely pay, and few are made.
    drafts, _ = drafts_that_changed_nothing(tmp_path, plain, by, *flags)
    assert drafts


@pytest.mark.gpu
@pytest.mark.skipif(not devices(), reason="no GPU")
def test_pages_of_a_gpu_go_to_the_pool_and_come_back_right(tmp_path: Path) -> None:
    """Workers hold fewer prompts than are asked."""
    checkpoint = make_model(tmp_path / "model", "llama")
    with pooled(checkpoint, BATON_ENGINE_DEVICE="cuda") as cluster:
        ask_all(cluster, checkpoint)
        assert ask_all(cluster, checkpoint) > 0


@pytest.mark.gpu
@pytest.mark.skipif(not devices(), reason="no GPU")
def test_a_gpu_compiles_nothing_once_its_workers_are_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "triton"
    monkeypatch.setenv("TRITON_CACHE_DIR", str(cache))
    checkpoint = make_model(tmp_path / "model", "qwen3", head_dim=64, dtype=torch.bfloat16)
    flags = ("--device", "cuda", "--kv-cache-memory", "64MiB", "--served-model-name", "m")
    with serve(
        str(checkpoint), *flags, "--prefill-workers", "1", "--decode-workers", "1"
    ) as served:
        compiled = _kernels_in(cache)
        assert compiled
        asked = [
            {"prompt": prompt, "max_tokens": 8 + number, "ignore_eos": True} | _SAMPLING[number % 4]
            for number, prompt in enumerate(random_prompts(24, 700))
        ]

        def ask(body: dict[str, Any]) -> None:
            url = f"{served.url}/v1/completions"
            reply = httpx.post(url, json={"model": "m"} | body, timeout=300.0)
            assert reply.status_code == 200, reply.text

        for clients in (1, 5, 24):
            with ThreadPoolExecutor(clients) as pool:
                list(pool.map(ask, asked))
        assert _kernels_in(cache) == compiled


_SAMPLING: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 0.8, "seed": 1},
    {"temperature": 0.8, "top_k": 5, "top_p": 0.9},
    {"temperature": 0.8, "min_p": 0.05, "n": 2, "logprobs": 3},
)


def _kernels_in(cache: Path) -> set[str]:
    return {path.name for path in cache.rglob("*.cubin")}
