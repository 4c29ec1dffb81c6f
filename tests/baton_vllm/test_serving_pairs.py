"""`baton serve --engine vllm` with a prefill and a decode worker: what the pair answers is what vLLM answers by itself."""

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from baton_vllm.settings import missing
from tests.baton_vllm.engine_run import prompt_tokens
from tests.baton_vllm.families import make_model
from tests.baton_vllm.vllm_alone import Asked, tokens_of_vllm
from tests.e2e.served import Served, serve

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(600),
    pytest.mark.skipif(missing() is not None, reason=missing() or ""),
]

DEMO = Path("baton_engine/demo/model").absolute()
SETTINGS = """
engine:
  max_num_batched_tokens: 64
  max_num_seqs: 16
  vllm:
    enforce_eager: true
router:
  local_prefill_tokens: 0
"""
FLAGS = ("--engine", "vllm", "--dtype", "float32", "--kv-cache-memory", "64MiB")
PAIR = ("--prefill-workers", "1", "--decode-workers", "1", "--block-size", "32")
PLAIN: list[Asked] = [(prompt_tokens(length), {}) for length in (1, 32, 33, 199, 300)]
COUNTED: list[Asked] = [
    (prompt_tokens(96), {"presence_penalty": 1.5}),
    (prompt_tokens(97), {"frequency_penalty": 1.5, "repetition_penalty": 1.1}),
    (prompt_tokens(98), {"min_tokens": 4, "logprobs": 2}),
]


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    make_model(request.param, folder, vocab_size=2048)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, folder)
    return folder


@pytest.fixture(scope="module")
def cluster(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """At its end every page of both workers has to be free."""
    file = tmp_path_factory.mktemp("pair") / "cluster.yaml"
    file.write_text(SETTINGS)
    with serve(str(model), "-f", str(file), *FLAGS, *PAIR, "--served-model-name", "tiny") as served:
        yield served


def ask(cluster: Served, prompt: list[int], **fields: object) -> dict[str, Any]:
    asked = {"model": "tiny", "prompt": prompt, "temperature": 0, "max_tokens": 24}
    asked |= {"ignore_eos": True, "return_token_ids": True}
    with cluster.client() as client:
        answer = client.post("/v1/completions", json=asked | fields)
    assert answer.status_code == 200, answer.text
    told: dict[str, Any] = answer.json()
    return told


def tokens(answer: dict[str, Any]) -> list[int]:
    found: list[int] = answer["choices"][0]["token_ids"]
    return found


def loads(cluster: Served) -> dict[str, dict[str, Any]]:
    return {worker["role"]: worker["load"] for worker in cluster.workers()}


def test_a_pairs_greedy_tokens_are_those_of_vllm_alone(cluster, model):
    """Chunked prompts, several at once, pages that end with the prompt; asked again, both workers have prefixes in their caches."""
    wanted = tokens_of_vllm(model, [*PLAIN, *COUNTED])

    with ThreadPoolExecutor(len(PLAIN)) as pool:
        first = [*pool.map(lambda asked: tokens(ask(cluster, asked[0])), PLAIN)]
    again = [tokens(ask(cluster, prompt)) for prompt, _ in PLAIN]
    counted = [tokens(ask(cluster, prompt, **fields)) for prompt, fields in COUNTED]

    assert first == again == wanted[: len(PLAIN)]
    assert counted == wanted[len(PLAIN) :]
    workers = loads(cluster)
    assert workers["decode"]["prefix_query_tokens"] == 0, "the decode worker computed a prompt"
    assert workers["prefill"]["prefix_hit_tokens"] > 0


def test_samples_of_one_prompt_and_its_logprobs_come_from_both_workers(cluster):
    prompt = prompt_tokens(70)
    greedy = tokens(ask(cluster, prompt, max_tokens=6))

    several = ask(cluster, prompt, max_tokens=6, n=3, logprobs=1, prompt_logprobs=1)

    assert [choice["token_ids"] for choice in several["choices"]] == [greedy] * 3
    for choice in several["choices"]:
        assert len(choice["logprobs"]["token_logprobs"]) == 6
    scores = several["choices"][0]["prompt_logprobs"]
    assert len(scores) == len(prompt)
    assert all(scores[1:])
    drawn = ask(cluster, prompt, max_tokens=6, n=3, temperature=1.0, seed=4)
    assert len({tuple(choice["token_ids"]) for choice in drawn["choices"]}) == 3


def test_an_answer_of_one_token_needs_no_decode_worker(cluster):
    steps = loads(cluster)["decode"]["steps"]
    whole = tokens(ask(cluster, prompt_tokens(40)))

    assert tokens(ask(cluster, prompt_tokens(40), max_tokens=1)) == whole[:1]
    assert loads(cluster)["decode"]["steps"] >= steps
