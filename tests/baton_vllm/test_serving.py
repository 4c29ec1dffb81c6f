"""`baton serve --engine vllm`, with the real vLLM: what it answers is what vLLM's own `LLM` answers."""

import json
import os
import subprocess
import sys

import pytest

from baton_vllm.settings import missing
from tests.e2e.served import serve

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(600),
    pytest.mark.skipif(missing() is not None, reason=missing() or ""),
]

PROMPT = list(range(20, 60))
ALONE = """
import json, sys
from vllm import LLM, SamplingParams
if __name__ == "__main__":
    llm = LLM(sys.argv[1], dtype="float32", enforce_eager=True, skip_tokenizer_init=True, kv_cache_memory_bytes=64 << 20)
    wanted = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, detokenize=False)
    (told,) = llm.generate([{"prompt_token_ids": json.loads(sys.argv[2])}], wanted)
    print("TOKENS", json.dumps(list(told.outputs[0].token_ids)))
"""
"""vLLM without Baton, in a process of its own."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    file = tmp_path_factory.mktemp("vllm") / "cluster.yaml"
    file.write_text("engine:\n  vllm:\n    enforce_eager: true\n")
    flags = ["-f", str(file), "--engine", "vllm", "--hybrid-workers", "1"]
    with serve(
        None, *flags, "--dtype", "float32", "--kv-cache-memory", "64MiB", "--block-size", "32"
    ) as served:
        yield served


def greedy(cluster, **fields):
    asked = {"model": "baton-demo", "prompt": PROMPT, "temperature": 0, "max_tokens": 24}
    with cluster.client() as client:
        answer = client.post("/v1/completions", json=asked | fields)
    assert answer.status_code == 200, answer.text
    return answer


def test_greedy_tokens_are_those_of_vllm_alone(cluster):
    from baton_cluster.launch.plan import _demo_model

    environment = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1"}
    alone = subprocess.run(
        [sys.executable, "-c", ALONE, _demo_model(), json.dumps(PROMPT)],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=280,
    )
    (line,) = [line for line in alone.stdout.splitlines() if line.startswith("TOKENS")]
    answer = greedy(cluster, ignore_eos=True, return_token_ids=True).json()
    assert answer["choices"][0]["token_ids"] == json.loads(line.removeprefix("TOKENS"))


def test_a_stream_is_the_answer_in_pieces(cluster):
    whole = greedy(cluster).json()["choices"][0]["text"]
    lines = greedy(cluster, stream=True).text.splitlines()
    pieces = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert "".join(piece["choices"][0]["text"] for piece in pieces) == whole


def test_a_second_request_finds_the_first_ones_prefix(cluster):
    greedy(cluster)
    assert greedy(cluster).json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def test_samples_logprobs_bias_and_bounds_reach_vllm(cluster):
    answer = greedy(cluster, temperature=1.0, n=3, seed=4, logprobs=2, max_tokens=4).json()
    assert len(answer["choices"]) == 3
    for choice in answer["choices"]:
        assert len(choice["logprobs"]["top_logprobs"][0]) >= 2
    biased = greedy(cluster, logit_bias={"40": 100}, max_tokens=3, logprobs=1).json()
    assert len(set(biased["choices"][0]["logprobs"]["tokens"])) == 1
