"""A cluster whose pool loses its disk, or its directory, while it serves: fewer hits, never a wrong token."""

import os
import resource
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from tests.baton_engine.tiny_models import make_model
from tests.e2e.reference import Reference
from tests.e2e.served import Served, eventually, maps_pool, serve

PROMPT_TOKENS = 400
NUM_PROMPTS = 8
PAGE_BYTES = 8 << 10
# Workers hold five prompts each, so that what they need again they need from the pool.
FLAGS = ("--dtype", "float32", "--kv-cache-memory", "1MiB")
COMMON = {
    "BATON_POOL_ENABLED": "true",
    "BATON_POOL_LOOKUP_TIMEOUT_S": "5",
    "BATON_ROUTER_LOCAL_PREFILL_TOKENS": "0",
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("llama"), "llama")


@contextmanager
def pooled(checkpoint: Path, **settings: str) -> Iterator[Served]:
    with pytest.MonkeyPatch.context() as patched:
        for name, value in (COMMON | settings).items():
            patched.setenv(name, value)
        with serve(str(checkpoint), *FLAGS) as served:
            eventually(lambda: bool(usage(served)), "the node answers")
            eventually(
                lambda: maps_pool(served, "prefill", "decode", "hybrid"),
                "workers map the pool",
                60.0,
            )
            yield served


def usage(cluster: Served) -> dict[str, Any]:
    """What `baton pool top --json` says; nothing while there is no node."""
    return cluster.told("pool", "top")


def pooled_tokens(cluster: Served) -> float:
    with cluster.client() as http:
        lines = http.get("/metrics").text.splitlines()
    name = "baton_prompt_tokens_pooled_total"
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


def _prompt(number: int) -> list[int]:
    """Different ones have no block in common."""
    return [10 + (number * 7 + place * (3 + number // 80)) % 80 for place in range(PROMPT_TOKENS)]


def ask_all(
    cluster: Served, checkpoint: Path, *, first: int = 0, count: int = NUM_PROMPTS
) -> float:
    """Asks prompts after each other; every token must be right. Returns how many tokens the pool gave."""
    reference, before = Reference(checkpoint), pooled_tokens(cluster)
    with cluster.client() as http:
        model = http.get("/v1/models").json()["data"][0]["id"]
        for number in range(first, first + count):
            body = {
                "model": model,
                "prompt": _prompt(number),
                "max_tokens": 8,
                "temperature": 0,
                "ignore_eos": True,
                "return_token_ids": True,
            }
            reply = http.post("/v1/completions", json=body)
            assert reply.status_code == 200, reply.text
            reference.assert_greedy(_prompt(number), reply.json()["choices"][0]["token_ids"])
    return pooled_tokens(cluster) - before


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    folder = tmp_path / "ssd"
    folder.mkdir(mode=0o700)
    return folder


def with_disk(checkpoint: Path, disk: Path):
    """A slab for ten prompts, most of which goes on to the disk at once."""
    return pooled(
        checkpoint,
        BATON_POOL_MEMORY_BYTES=str(256 * PAGE_BYTES),
        BATON_POOL_HIGH_WATERMARK="0.2",
        BATON_POOL_LOW_WATERMARK="0.1",
        BATON_POOL_SSD_DIR=str(disk),
        BATON_POOL_SSD_BYTES=str(64 << 20),
    )


def _settled_on_disk(cluster: Served) -> bool:
    on_disk: int = usage(cluster).get("ssd_bytes", 0)
    return on_disk >= 100 * PAGE_BYTES


@pytest.mark.slow
def test_blocks_that_rot_on_the_disk_are_misses(checkpoint: Path, disk: Path) -> None:
    with with_disk(checkpoint, disk) as cluster:
        ask_all(cluster, checkpoint)
        eventually(lambda: _settled_on_disk(cluster), "blocks are on the disk")
        healthy = ask_all(cluster, checkpoint)
        assert usage(cluster)["promoted_blocks"] > 0, "the disk gave something"
        extents = [path for path in disk.iterdir() if "extent" in path.name]
        assert extents, [path.name for path in disk.iterdir()]
        for path in extents:
            _flip(path)
        rotten = ask_all(cluster, checkpoint)
        assert usage(cluster)["corrupt_blocks"] > 0, "the fault was there to be seen"
        assert rotten < healthy


def _flip(path: Path) -> None:
    with path.open("r+b") as file:
        whole = np.frombuffer(file.read(), np.uint8)
        file.seek(0)
        file.write((whole ^ 0x55).tobytes())


@pytest.mark.slow
def test_a_disk_whose_files_are_cut_gives_nothing_and_stops_nobody(
    checkpoint: Path, disk: Path
) -> None:
    with with_disk(checkpoint, disk) as cluster:
        ask_all(cluster, checkpoint)
        eventually(lambda: _settled_on_disk(cluster), "blocks are on the disk")
        healthy = ask_all(cluster, checkpoint)
        for path in disk.iterdir():
            if "extent" in path.name:
                os.truncate(path, 0)
        assert ask_all(cluster, checkpoint) < healthy


@pytest.mark.slow
def test_a_disk_that_takes_nothing_more_is_left_alone(checkpoint: Path, disk: Path) -> None:
    with with_disk(checkpoint, disk) as cluster:
        node = cluster.child("pool")
        # The kernel refuses every write to a file from here on, as a full disk does: EFBIG is all that differs.
        psutil.Process(node.pid).rlimit(resource.RLIMIT_FSIZE, (0, 0))
        ask_all(cluster, checkpoint, count=12)
        now = usage(cluster)
        assert now["evicted_blocks"] > 0, "what had to go to the disk went nowhere"
        assert now["ssd_bytes"] == now["demoted_blocks"] == 0
        assert node.is_running()
        assert ask_all(cluster, checkpoint, first=4) > 0, "memory serves on"


@pytest.mark.redis
@pytest.mark.skipif(shutil.which("redis-server") is None, reason="redis-server is not installed")
def test_nobody_misses_a_directory_that_is_killed(checkpoint: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    redis = _redis(port, tmp_path)
    try:
        url = f"redis://127.0.0.1:{port}"
        settings = {"BATON_POOL_DIRECTORY": "redis", "BATON_POOL_REDIS_URL": url}
        with pooled(checkpoint, BATON_POOL_NODE_LEASE_S="2", **settings) as cluster:
            eventually(lambda: usage(cluster)["directory_reachable"], "the directory is reached")
            ask_all(cluster, checkpoint)
            redis.kill()
            redis.wait(timeout=30)
            eventually(lambda: not usage(cluster)["directory_reachable"], "its loss is seen")
            # The node of this host knows by itself what it holds.
            assert ask_all(cluster, checkpoint) > 0
            ask_all(cluster, checkpoint, first=NUM_PROMPTS)
            redis = _redis(port, tmp_path)
            eventually(lambda: usage(cluster)["directory_reachable"], "it is found again")
            assert ask_all(cluster, checkpoint, first=NUM_PROMPTS) > 0
    finally:
        redis.kill()
        redis.wait(timeout=30)


def _redis(port: int, folder: Path) -> "subprocess.Popen[bytes]":
    command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder)]
    command += ["--save", "", "--appendonly", "no", "--daemonize", "no"]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL)
