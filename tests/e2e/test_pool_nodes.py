"""A cluster whose workers stand on two hosts, as it were: each with a pool node of its own, and a directory that both share."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from baton.rpc.v1.pool_pb2 import PoolUsageReply, PoolUsageRequest
from cluster.pool_usage import ask
from tests.e2e.reference import Reference
from tests.e2e.served import Served, assert_gone, eventually, serve
from tests.engine.tiny_models import make_model
from tests.redis_servers import a_redis

FLAGS = ("--dtype", "float32", "--kv-cache-memory", "32MiB")
PROMPT_TOKENS = 400
PROMPT_BLOCKS = PROMPT_TOKENS // 16
MOST_PROMPTS = 24


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[str]:
    """Serves from a thread of its own."""
    opened = a_redis("fakeredis", tmp_path)
    loop = asyncio.new_event_loop()
    yield loop.run_until_complete(opened.__aenter__())
    loop.run_until_complete(opened.__aexit__(None, None, None))
    loop.close()


@pytest.fixture
def cluster(
    tmp_path_factory: pytest.TempPathFactory, redis: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Served, Path]]:
    checkpoint = make_model(tmp_path_factory.mktemp("llama"), "llama")
    settings = {
        "POOL_ENABLED": "true",
        "POOL_NODES": "2",
        "POOL_DIRECTORY": "redis",
        "POOL_REDIS_URL": redis,
        "POOL_REDIS_TIMEOUT_S": "5",
        "POOL_LOOKUP_TIMEOUT_S": "10",
        "CLUSTER_PREFILL_WORKERS": "2",
        "ROUTER_LOCAL_PREFILL_TOKENS": "0",
    }
    for name, value in settings.items():
        monkeypatch.setenv(f"BATON_{name}", value)
    with serve(str(checkpoint), *FLAGS) as served:
        yield served, checkpoint


def _usage(cluster: Served, node: int) -> PoolUsageReply:
    address = f"unix:{cluster.runtime_dir}/pool-{node}.sock"
    return asyncio.run(ask(address, lambda pool: pool.Usage(PoolUsageRequest(), timeout=10)))


def _ask(cluster: Served, prompt: list[int]) -> list[int]:
    with cluster.client() as http:
        model = http.get("/v1/models").json()["data"][0]["id"]
        body = {
            "model": model,
            "prompt": prompt,
            "max_tokens": 8,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        reply = http.post("/v1/completions", json=body)
    assert reply.status_code == 200, reply.text
    tokens: list[int] = reply.json()["choices"][0]["token_ids"]
    return tokens


def _named(cluster: Served, name: str) -> psutil.Process:
    return next(child for child in cluster.children() if name in child.cmdline())


def test_a_prompt_computed_on_one_host_is_fetched_on_another(cluster: tuple[Served, Path]) -> None:
    served, checkpoint = cluster
    for number in range(MOST_PROMPTS):
        prompt = [10 + (number * 7 + place * 3) % 80 for place in range(PROMPT_TOKENS)]
        before = sum(_usage(served, node).stored_blocks for node in (0, 1))
        at_first = _usage(served, 0).stored_blocks
        tokens = _ask(served, prompt)

        def stored(before: int = before) -> bool:
            now = sum(_usage(served, node).stored_blocks for node in (0, 1))
            return now >= before + PROMPT_BLOCKS

        eventually(stored, "the prompt is put", 60.0)
        if _usage(served, 0).stored_blocks >= at_first + PROMPT_BLOCKS:
            break
    else:
        pytest.fail("no prompt went to the first prefill worker")
    victim = _named(served, "prefill-0")
    victim.kill()
    assert_gone([victim])
    assert _ask(served, prompt) == tokens
    Reference(checkpoint).assert_greedy(prompt, tokens)
    assert _usage(served, 1).fetched_blocks >= PROMPT_BLOCKS - 1
    assert _usage(served, 0).sent_blocks >= PROMPT_BLOCKS - 1
