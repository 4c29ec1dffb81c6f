"""A cluster whose workers stand on two hosts, as it were: each with a pool node of its own,
and a directory that both share.
"""

import asyncio
import contextlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import psutil
import pytest
from redis import Redis

from baton.errors import UnavailableError
from baton.rpc.v1.pool_pb2 import PoolUsageReply, PoolUsageRequest
from baton_cluster.cli.pool_usage import ask
from kv_transfer.backends.registry import BACKENDS
from tests.baton_engine.tiny_models import make_model
from tests.e2e.reference import Reference
from tests.e2e.served import Served, assert_gone, eventually, serve
from tests.redis_servers import REDIS_SERVER, a_redis

FLAGS = ("--dtype", "float32", "--kv-cache-memory", "32MiB")
PROMPT_TOKENS = 400
PROMPT_BLOCKS = PROMPT_TOKENS // 16
MOST_PROMPTS = 24
SETTINGS = {
    "POOL_ENABLED": "true",
    "POOL_NODES": "2",
    "POOL_DIRECTORY": "redis",
    "POOL_REDIS_TIMEOUT_S": "5",
    "POOL_LOOKUP_TIMEOUT_S": "10",
    "CLUSTER_PREFILL_WORKERS": "2",
    "ROUTER_LOCAL_PREFILL_TOKENS": "0",
}
AWAY = {"CLUSTER_RESTART_BACKOFF_S": "8"}
"""Whoever is killed is away for long enough to be missed."""

# How blocks come from another node by ucx and nixl is tested in tests/kvpool/peers too.
WAYS = ("shm", *(pytest.param(way, marks=pytest.mark.slow) for way in ("ucx", "nixl")))


@contextlib.contextmanager
def redis(kind: str, folder: Path) -> Iterator[str]:
    """Serves from a thread, or a process, of its own."""
    opened = a_redis(kind, folder)
    loop = asyncio.new_event_loop()
    try:
        yield loop.run_until_complete(opened.__aenter__())
    finally:
        loop.run_until_complete(opened.__aexit__(None, None, None))
        loop.close()


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return make_model(tmp_path / "llama", "llama")


@contextlib.contextmanager
def two_hosts(checkpoint: Path, redis_url: str, **settings: str) -> Iterator[Served]:
    """A prefill worker beside each node; the decode worker beside the first."""
    settings = SETTINGS | {"POOL_REDIS_URL": redis_url} | settings
    with pytest.MonkeyPatch.context() as patch:
        for name, value in settings.items():
            patch.setenv(f"BATON_{name}", value)
        with serve(str(checkpoint), *FLAGS) as served:
            for node in (0, 1):
                eventually(partial(_is_used, served, node), "workers find their node", 60.0)
            yield served


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


def _kill(cluster: Served, name: str) -> None:
    victim = _named(cluster, name)
    victim.kill()
    assert_gone([victim])


def _knows(redis_url: str, num_blocks: int) -> bool:
    """Whether other nodes can find so many."""
    with Redis.from_url(redis_url) as redis:
        known: int = redis.hlen("baton:pool2:blocks")
        return known >= num_blocks


def _computed_beside(cluster: Served, node: int, redis_url: str) -> tuple[list[int], list[int]]:
    """A prompt that the prefill worker of that node's host computed and put there, and what was answered."""
    for number in range(MOST_PROMPTS):
        prompt = [10 + (number * 7 + place * 3) % 80 for place in range(PROMPT_TOKENS)]
        before = [_usage(cluster, each).stored_blocks for each in (0, 1)]
        tokens = _ask(cluster, prompt)

        def stored(before: list[int] = before) -> bool:
            now = [_usage(cluster, each).stored_blocks for each in (0, 1)]
            return sum(now) >= sum(before) + PROMPT_BLOCKS

        eventually(stored, "the prompt is put", 60.0)
        known = partial(_knows, redis_url, PROMPT_BLOCKS * (number + 1))
        eventually(known, "the directory is told", 60.0)
        if _usage(cluster, node).stored_blocks >= before[node] + PROMPT_BLOCKS:
            return prompt, tokens
    pytest.fail(f"no prompt went to the prefill worker beside node {node}")


def test_a_prompt_computed_on_one_host_is_fetched_on_another(
    checkpoint: Path, tmp_path: Path
) -> None:
    with redis("fakeredis", tmp_path) as url, two_hosts(checkpoint, url) as served:
        prompt, tokens = _computed_beside(served, 0, url)
        _kill(served, "prefill-0")
        assert _ask(served, prompt) == tokens
        Reference(checkpoint).assert_greedy(prompt, tokens)

        def fetched() -> bool:
            taken, given = _usage(served, 1).fetched_blocks, _usage(served, 0).sent_blocks
            return min(taken, given) >= PROMPT_BLOCKS - 1

        eventually(fetched, "the blocks are fetched", 60.0)  # also where nobody could wait for them


@pytest.mark.redis
@pytest.mark.skipif(REDIS_SERVER is None, reason="redis-server is not installed")
@pytest.mark.parametrize("way", WAYS)
def test_a_node_that_is_killed_comes_back_empty_and_fetches_what_the_other_has(
    checkpoint: Path, tmp_path: Path, way: str
) -> None:
    if not BACKENDS[way].installed:
        pytest.skip(f"{way} is not installed: {BACKENDS[way].remedy}")
    with (
        redis("redis", tmp_path) as url,
        two_hosts(checkpoint, url, TRANSFER_BACKENDS=way, **AWAY) as served,
    ):
        prompt, tokens = _computed_beside(served, 1, url)
        before = _usage(served, 0).node.incarnation
        _kill(served, "pool-0")
        other = prompt[::-1]
        Reference(checkpoint).assert_greedy(other, _ask(served, other))
        eventually(lambda: _attached(served, 0) not in (None, before), "it starts again", 60.0)
        _kill(served, "prefill-1")

        def fetched() -> bool:
            assert _ask(served, prompt) == tokens
            return _usage(served, 0).fetched_blocks >= PROMPT_BLOCKS - 1

        eventually(fetched, "the blocks come", 60.0)
        _kill(served, "pool-1")
        assert _ask(served, prompt) == tokens


def _is_used(cluster: Served, node: int) -> bool:
    return _attached(cluster, node) is not None


def _attached(cluster: Served, node: int) -> int | None:
    """The start of a node that workers have attached to; None while there is none."""
    try:
        said = _usage(cluster, node)
    except UnavailableError:
        return None
    return said.node.incarnation if said.slots_total else None
