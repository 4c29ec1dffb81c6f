"""Tokens of a whole cluster, over HTTP, against transformers in float32."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.baton_engine.tiny_models import make_model, random_prompts
from tests.e2e.reference import Reference
from tests.e2e.served import Served, serve

DISAGGREGATED = ("--prefill-workers", "1", "--decode-workers", "1")
HYBRID = ("--hybrid-workers", "1")
COMMON = ("--dtype", "float32", "--kv-cache-memory", "64MiB", "--max-num-batched-tokens", "256")
OUTPUT_TOKENS = 24
FAMILIES = ("llama3", "mistral", "qwen2", "qwen3")
TOPOLOGIES = {"1P+1D": DISAGGREGATED, "hybrid": HYBRID}


@pytest.fixture(scope="module")
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    tied = request.param in ("llama3", "qwen3")
    return make_model(tmp_path_factory.mktemp(request.param), request.param, tie=tied)


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> Reference:
    return Reference(checkpoint)


def _is_repeated(family: str, topology: str) -> bool:
    """Families differ in the engine alone: a pair is asked about two of them, one of which has a window, and a hybrid
    worker, which hands nothing over, about one.
    """
    return family not in (("qwen3",) if topology == "hybrid" else ("mistral", "qwen3"))


@pytest.mark.parametrize(
    ("checkpoint", "topology"),
    [
        pytest.param(
            family,
            flags,
            id=f"{family}-{topology}",
            marks=[pytest.mark.slow] if _is_repeated(family, topology) else [],
        )
        for family in FAMILIES
        for topology, flags in TOPOLOGIES.items()
    ],
    indirect=["checkpoint"],
    scope="module",
)
def test_greedy_tokens_are_those_of_transformers(
    checkpoint: Path, reference: Reference, topology: tuple[str, ...]
) -> None:
    prompts = random_prompts(20, 600)
    with serve(str(checkpoint), *topology, *COMMON) as cluster:
        first = _complete_all(cluster, prompts)
        again = _complete_all(cluster, prompts)  # every prompt's full blocks are cached now
        for prompt in (prompts[1], prompts[-1]):
            _check_prompt_logprobs(cluster, reference, prompt)
    for prompt, choice in zip(prompts, first, strict=True):
        reference.assert_greedy(prompt, choice["token_ids"])
        assert len(choice["token_ids"]) == OUTPUT_TOKENS
    for prompt, choice in zip(prompts, again, strict=True):
        reference.assert_greedy(prompt, choice["token_ids"])
    longest = again[-1]["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert longest >= len(prompts[-1]) - 2 * 16
    _check_logprobs(reference, prompts, first)


def _complete_all(cluster: Served, prompts: list[list[int]]) -> list[dict[str, Any]]:
    """Sends every prompt at once; the answers in order, each with its `usage`."""
    with cluster.client() as client, ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(lambda prompt: _complete(client, prompt), prompts))


def _complete(client: httpx.Client, prompt: list[int]) -> dict[str, Any]:
    body = {
        "model": client.get("/v1/models").json()["data"][0]["id"],
        "prompt": prompt,
        "max_tokens": OUTPUT_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": 5,
        "return_token_ids": True,
    }
    response = client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    answer = response.json()
    choice: dict[str, Any] = answer["choices"][0]
    return choice | {"usage": answer["usage"]}


def _check_prompt_logprobs(cluster: Served, reference: Reference, prompt: list[int]) -> None:
    """A prompt that lies in the prefix cache is scored as a whole, within 1e-4 of transformers."""
    expected = reference.logits(prompt).log_softmax(-1)
    with cluster.client() as client:
        model = client.get("/v1/models").json()["data"][0]["id"]
        body = {"model": model, "prompt": prompt, "max_tokens": 0, "echo": True, "logprobs": 2}
        choice = client.post("/v1/completions", json=body).json()["choices"][0]
    first, *scored = choice["logprobs"]["token_logprobs"]
    assert first is None
    assert len(scored) == len(prompt) - 1
    for row, token, logprob in zip(expected[:-1], prompt[1:], scored, strict=True):
        assert logprob == pytest.approx(row[token].item(), abs=1e-4)


def _check_logprobs(
    reference: Reference, prompts: list[list[int]], choices: list[dict[str, Any]]
) -> None:
    """The drawn token's and the five best log-probabilities are transformers' within 1e-4."""
    for prompt, choice in zip(prompts, choices, strict=True):
        expected = reference.logprobs(prompt, choice["token_ids"])
        drawn = choice["logprobs"]["token_logprobs"]
        best = choice["logprobs"]["top_logprobs"]
        assert len(drawn) == len(best) == OUTPUT_TOKENS
        for row, token, logprob, top in zip(
            expected, choice["token_ids"], drawn, best, strict=True
        ):
            assert logprob == pytest.approx(row[token].item(), abs=1e-4)
            # Tokens that decode to the same text share a key, so fewer than five may show.
            likeliest = sorted(top.values(), reverse=True)
            assert likeliest[0] == pytest.approx(row.max().item(), abs=1e-4)
            lowest = row.topk(5).values[-1].item()
            assert all(value >= lowest - 1e-4 for value in top.values())
