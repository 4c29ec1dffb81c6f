"""`baton serve --engine vllm` with a prefill and a decode worker and a model whose layers keep only their windows: what
the pair answers is what vLLM answers by itself.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from baton.page_order import num_pages
from baton_vllm.settings import missing
from tests.baton_engine.tiny_models import make_tokenizer
from tests.baton_vllm.engine_run import prompt_tokens
from tests.baton_vllm.families import make_model
from tests.baton_vllm.test_serving_pairs import (
    COUNTED,
    FLAGS,
    PAIR,
    PLAIN,
    SETTINGS,
    Stream,
    ask,
    loads,
    tokens,
)
from tests.baton_vllm.vllm_alone import tokens_of_vllm
from tests.e2e.served import Served, assert_at_rest, serve

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(600),
    pytest.mark.skipif(missing() is not None, reason=missing() or ""),
]

WINDOWS = {"gemma3": (64, 64, 64, 64, 64, 0), "gpt-oss": (64, 64, 0)}


@pytest.fixture(scope="module", params=[*WINDOWS])
def family(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def model(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tokenizer = make_tokenizer()
    make_model(family, folder, vocab_size=320, eos_token_id=tokenizer.eos_token_id)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def cluster(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """With a pool, in which its workers have no part."""
    file = tmp_path_factory.mktemp("pair") / "cluster.yaml"
    file.write_text(SETTINGS + "pool: {enabled: true, memory_bytes: 64MiB}\n")
    with serve(str(model), "-f", str(file), *FLAGS, *PAIR, "--served-model-name", "tiny") as served:
        yield served


def test_a_pairs_greedy_tokens_are_those_of_vllm_alone(cluster, model):
    """Chunked prompts, several at once; asked again, both workers have prefixes in their caches. With penalties the
    decode worker computes the prompt's last token again.
    """
    edge = [(prompt_tokens(95), {"presence_penalty": 1.5})]
    wanted = tokens_of_vllm(model, [*PLAIN, *COUNTED, *edge])

    with ThreadPoolExecutor(len(PLAIN)) as pool:
        first = [*pool.map(lambda asked: tokens(ask(cluster, asked[0])), PLAIN)]
    again = [tokens(ask(cluster, prompt)) for prompt, _ in PLAIN]
    counted = [tokens(ask(cluster, prompt, **fields)) for prompt, fields in [*COUNTED, *edge]]

    assert first == again == wanted[: len(PLAIN)]
    assert counted == wanted[len(PLAIN) :]
    workers = loads(cluster)
    assert workers["decode"]["prefix_query_tokens"] == 0, "the decode worker computed a prompt"
    assert workers["prefill"]["prefix_hit_tokens"] > 0


@pytest.mark.parametrize("length", [96, 100])
def test_samples_of_one_prompt_come_from_both_workers(cluster, length):
    """The first goes on from what was handed off. The others find its blocks in the decode worker's prefix cache, or
    too few of them where the prompt ends with a block, and then compute it.
    """
    prompt = prompt_tokens(length)
    greedy = tokens(ask(cluster, prompt, max_tokens=6))

    several = ask(cluster, prompt, max_tokens=6, n=3)

    assert [choice["token_ids"] for choice in several["choices"]] == [greedy] * 3


def test_clients_that_leave_in_the_middle_of_a_prompt_leave_no_page_behind(cluster):
    for prompt in (prompt_tokens(length) for length in range(280, 290)):
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 100, "stream": True}
        with suppress(httpx.ReadTimeout):
            httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=0.02)
    assert_at_rest(cluster)


def test_a_long_text_has_only_the_pages_of_its_windows(cluster, family):
    stream = Stream(cluster, prompt_tokens(300), 200)
    stream.start()
    assert stream.begun.wait(60)
    length = 300 + len(stream.tokens)
    used = loads(cluster)["decode"]["blocks_used"]
    stream.join(120)
    assert len(stream.tokens) == 200

    windows = WINDOWS[family]
    assert num_pages(length, 32, windows) - len(windows) <= used
    assert used < num_pages(length, 32, (0,) * len(windows))
    assert_at_rest(cluster)
