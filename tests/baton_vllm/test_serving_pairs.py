"""`baton serve --engine vllm` with a prefill and a decode worker:
what the pair answers is what vLLM answers by itself.
"""

import json
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import httpx
import pytest

from baton_vllm.settings import missing
from kv_transfer.backends.registry import BACKENDS
from tests.baton_engine.tiny_models import make_model
from tests.baton_vllm.engine_run import prompt_tokens
from tests.baton_vllm.vllm_alone import Asked, tokens_of_vllm
from tests.e2e.reference import Reference
from tests.e2e.served import Served, assert_at_rest, assert_gone, eventually, serve

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(600),
    pytest.mark.skipif(missing() is not None, reason=missing() or ""),
]

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
    return make_model(tmp_path_factory.mktemp("model"), request.param, head_dim=32)


@pytest.fixture(scope="module")
def cluster(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """At its end every page of both workers has to be free."""
    file = tmp_path_factory.mktemp("pair") / "cluster.yaml"
    # Messages of UCX for one of the two models, where it is installed.
    uses_ucx = BACKENDS["ucx"].installed and "qwen3" in (model / "config.json").read_text()
    file.write_text(SETTINGS + f"transfer: {{backends: [{'ucx' if uses_ucx else 'shm'}]}}\n")
    with serve(str(model), "-f", str(file), *FLAGS, *PAIR, "--served-model-name", "tiny") as served:
        yield served


class Reached(Protocol):
    """A cluster, however it was started."""

    def client(self) -> httpx.Client: ...


def ask(cluster: Reached, prompt: list[int], **fields: object) -> dict[str, Any]:
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
    """Chunked prompts, several at once, pages that end with the prompt; asked again,
    both workers have prefixes in their caches.
    """
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


def test_an_answer_is_held_to_its_grammar_from_its_first_token(cluster):
    pattern = "(yes|no)-[0-9]{3}"
    computed = loads(cluster)["prefill"]["prefix_query_tokens"]

    answer = ask(
        cluster,
        prompt_tokens(70),
        max_tokens=40,
        ignore_eos=False,
        n=2,
        structured_outputs={"regex": pattern},
    )

    assert all(re.fullmatch(pattern, choice["text"]) for choice in answer["choices"])
    workers = loads(cluster)
    assert workers["prefill"]["prefix_query_tokens"] == computed + 70
    assert workers["decode"]["prefix_query_tokens"] == 0


def test_a_seeds_draws_are_the_same_in_whatever_chunks_its_prompt_is_computed(cluster):
    """vLLM draws behind every chunk, and throws away all draws but the last one's; asked again, the prompt's first
    chunks are in the cache.
    """
    before = [worker["incarnation"] for worker in cluster.workers()]
    seeded = {"temperature": 1, "seed": 7}
    first, again, other = (
        tokens(ask(cluster, prompt_tokens(230), **asked))
        for asked in (seeded, seeded, seeded | {"seed": 8})
    )
    assert first == again != other
    assert [worker["incarnation"] for worker in cluster.workers()] == before


def test_an_answer_of_one_token_needs_no_decode_worker(cluster):
    steps = loads(cluster)["decode"]["steps"]
    whole = tokens(ask(cluster, prompt_tokens(40)))

    assert tokens(ask(cluster, prompt_tokens(40), max_tokens=1)) == whole[:1]
    assert loads(cluster)["decode"]["steps"] >= steps


class Stream(threading.Thread):
    """A streamed completion that is read in the background."""

    def __init__(self, cluster: Served, prompt: list[int], max_tokens: int) -> None:
        super().__init__(daemon=True)
        self._cluster = cluster
        self.prompt = prompt
        self._asked = {"model": "tiny", "prompt": prompt, "temperature": 0, "stream": True}
        self._asked |= {"max_tokens": max_tokens, "ignore_eos": True, "return_token_ids": True}
        self.begun = threading.Event()
        self.tokens: list[int] = []
        self.ended = ""

    def run(self) -> None:
        url = f"{self._cluster.url}/v1/completions"
        with httpx.stream("POST", url, json=self._asked, timeout=60.0) as response:
            for line in filter(None, response.iter_lines()):
                self.ended = line
                if line.startswith("data: {"):
                    for choice in json.loads(line[6:]).get("choices", ()):
                        self.tokens += choice["token_ids"]
                if len(self.tokens) > 8:
                    self.begun.set()


def test_greedy_streams_go_on_without_a_wrong_token_when_workers_are_killed(tmp_path):
    """A decode worker's on the other one. Without a prefill worker the decode worker computes a prompt."""
    model = make_model(tmp_path / "model", "llama", head_dim=32)
    (tmp_path / "cluster.yaml").write_text(SETTINGS)
    flags = (*FLAGS, "--prefill-workers", "1", "--decode-workers", "2", "--block-size", "32")
    reference = Reference(model)
    with serve(
        str(model), "-f", str(tmp_path / "cluster.yaml"), *flags, "--served-model-name", "tiny"
    ) as served:
        streams = [Stream(served, prompt_tokens(length), 400) for length in (40, 60, 75, 130)]
        for stream in streams:
            stream.start()
        assert all(stream.begun.wait(30) for stream in streams)
        for name in ("decode-0", "prefill-0"):
            (victim,) = [child for child in served.children() if name in child.cmdline()]
            victim.kill()
            assert_gone([victim])
        meanwhile = Stream(served, prompt_tokens(90), 20)
        meanwhile.start()
        for stream, length in zip([*streams, meanwhile], (400, 400, 400, 400, 20), strict=True):
            stream.join(120)
            assert stream.ended == "data: [DONE]"
            assert len(stream.tokens) == length
            reference.assert_greedy(stream.prompt, stream.tokens)
        eventually(
            lambda: all(worker["worker_id"] for worker in served.workers()),
            "every worker is back",
            timeout_s=90.0,
        )


def test_a_client_that_leaves_in_the_middle_of_a_prompt_leaves_no_page_behind(cluster):
    for prompt in (prompt_tokens(length) for length in range(280, 300)):
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 100, "stream": True}
        with suppress(httpx.ReadTimeout):
            httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=0.02)
    assert_at_rest(cluster)
