"""`baton serve --engine vllm --lora-modules …`: what a hybrid worker and a pair answer under an adapter's name is what
vLLM answers with that adapter, and no page of one is another's.
"""

from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from baton_vllm.settings import missing
from tests.baton_engine.tiny_models import make_model
from tests.baton_vllm.engine_run import prompt_tokens
from tests.baton_vllm.lora import make_adapter
from tests.baton_vllm.vllm_alone import tokens_of_vllm
from tests.e2e.served import (
    Served,
    assert_at_rest,
    assert_gone,
    eventually,
    maps_pool,
    serve,
)

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(600),
    pytest.mark.skipif(missing() is not None, reason=missing() or ""),
]

BLOCK = 32
LENGTHS = (130, 199, 300)
NEW_TOKENS = 24
NAMES = ("tiny", "sql", "code")
"""The model itself, and its adapters."""
CACHED = sum((length - 1) // BLOCK * BLOCK for length in LENGTHS)
SETTINGS = """
engine:
  max_num_batched_tokens: 64
  max_num_seqs: 16
  vllm: {enforce_eager: true, enable_lora: true, max_loras: 1}
router: {local_prefill_tokens: 0}
"""
POOL = "pool: {enabled: true, memory_bytes: 64MiB, lookup_timeout_s: 5}\n"
FLAGS = ("--engine", "vllm", "--dtype", "float32", "--kv-cache-memory", "64MiB")
WORKERS = {
    "hybrid": ("--hybrid-workers", "1"),
    "pair": ("--prefill-workers", "1", "--decode-workers", "1"),
}
Tokens = Mapping[tuple[str, int], list[int]]
"""By name and length of the prompt."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), "llama", head_dim=32)


@pytest.fixture(scope="module")
def adapters(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return {
        name: make_adapter(folder / name, model, seed=seed) for seed, name in enumerate(NAMES[1:])
    }


@pytest.fixture(scope="module")
def wanted(model: Path, adapters: Mapping[str, Path]) -> Tokens:
    asked = [(name, length) for name in NAMES for length in LENGTHS]
    told = tokens_of_vllm(
        model, [(prompt_tokens(length), {"adapter": name}) for name, length in asked], adapters
    )
    tokens = dict(zip(asked, told, strict=True))
    assert len({tuple(tokens[name, 199]) for name in NAMES}) == len(NAMES), (
        "adapters change nothing"
    )
    return tokens


@pytest.fixture(params=WORKERS)
def cluster(
    request: pytest.FixtureRequest,
    model: Path,
    adapters: Mapping[str, Path],
    wanted: Tokens,  # computed before a cluster has the processors
    tmp_path: Path,
) -> Iterator[Served]:
    (tmp_path / "cluster.yaml").write_text(SETTINGS + POOL)
    modules = [f"{name}={path}" for name, path in adapters.items()]
    flags = ("-f", str(tmp_path / "cluster.yaml"), *FLAGS, *WORKERS[request.param])
    named = ("--served-model-name", "tiny", "--lora-modules", *modules)
    with serve(str(model), *flags, "--block-size", str(BLOCK), *named) as served:
        yield served


def tokens(cluster: Served, name: str, length: int) -> list[int]:
    asked = {"model": name, "prompt": prompt_tokens(length), "temperature": 0}
    asked |= {"max_tokens": NEW_TOKENS, "ignore_eos": True, "return_token_ids": True}
    with cluster.client() as client:
        answer = client.post("/v1/completions", json=asked)
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == name
    found: list[int] = answer.json()["choices"][0]["token_ids"]
    return found


def computing(cluster: Served) -> dict[str, Any]:
    """The worker that computes prompts; nothing while there is none."""
    found = (worker for worker in cluster.workers() if worker["role"] != "decode")
    return next(found, {})


def test_an_adapters_tokens_are_those_of_vllm_alone_and_its_pages_are_nobody_elses(
    cluster: Served, wanted: Tokens, adapters: Mapping[str, Path]
) -> None:
    """One prompt under every name, one name after the other; then all at once, while the adapters' files are gone; then,
    on a worker that was started again, out of the pool.
    """
    eventually(lambda: maps_pool(cluster, computing(cluster)["role"]), "the pool is mapped", 90.0)
    for name in NAMES:
        for length in LENGTHS:
            assert tokens(cluster, name, length) == wanted[name, length], (name, length)
    with away(adapters.values()), ThreadPoolExecutor(len(wanted)) as pool:
        again = [*pool.map(lambda asked: tokens(cluster, *asked), wanted)]
    assert again == [*wanted.values()]
    eventually(
        lambda: computing(cluster)["load"]["prefix_hit_tokens"] == len(NAMES) * CACHED,
        "each name has found its own blocks, the second time and not before",
    )
    assert_at_rest(cluster)

    restart(cluster)
    assert {asked: tokens(cluster, *asked) for asked in wanted} == wanted
    eventually(
        lambda: computing(cluster)["load"]["pool_hit_tokens"] > 0,
        "blocks came out of the pool, where that was quicker than computing them",
    )
    assert_at_rest(cluster)


@contextmanager
def away(folders: Iterable[Path]) -> Iterator[None]:
    """Nothing is there inside."""
    moved = {folder: folder.rename(folder.with_suffix(".away")) for folder in folders}
    yield
    for folder, elsewhere in moved.items():
        elsewhere.rename(folder)


def restart(cluster: Served) -> None:
    """The worker that computes prompts, once the pool has what it computed."""
    full = sum((length + NEW_TOKENS - 1) // BLOCK for length in LENGTHS) * len(NAMES)
    eventually(
        lambda: cluster.told("pool", "top").get("stored_blocks", 0) >= full,
        "all full blocks are in the pool, each name's by themselves",
        60.0,
    )
    before = computing(cluster)
    victim = cluster.child(before["role"])
    victim.kill()
    assert_gone([victim])
    eventually(
        lambda: (
            computing(cluster).get("incarnation", before["incarnation"]) != before["incarnation"]
            and maps_pool(cluster, before["role"])
        ),
        "the worker is back",
        120.0,
    )
