"""Two tenants of a cluster with a pool, seen from outside: a quota that is written down holds while requests are
served, and an operator flushes one tenant and leaves the other alone.
"""

import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from router.tenants.keys import hash_key
from tests.baton_engine.tiny_models import make_model
from tests.e2e.served import Served, eventually, maps_pool, serve

FLAGS = ("--dtype", "float32", "--kv-cache-memory", "32MiB")
PROMPT_TOKENS = 400
BLOCKS = PROMPT_TOKENS // 16
DOCUMENT = """
tenants:
  - {{id: anna, keys: ["{anna}"], kv_bytes: {kv_bytes}, weight: 2}}
  - {{id: bert, keys: ["{bert}"]}}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    cluster: Served
    document: Path
    operator: httpx.Client

    def write(self, kv_bytes: int) -> None:
        """Says how much anna may keep."""
        write(self.document, kv_bytes)

    def ask(self, tenant: str, number: int) -> None:
        """A prompt that has no block in common with those of other numbers."""
        prompt = [10 + (number * 7 + place * 3) % 80 for place in range(PROMPT_TOKENS)]
        with self.cluster.client(headers={"Authorization": f"Bearer {tenant}"}) as http:
            model = http.get("/v1/models").json()["data"][0]["id"]
            body = {"model": model, "prompt": prompt, "max_tokens": 4, "ignore_eos": True}
            assert http.post("/v1/completions", json=body).status_code == 200

    def tenant(self, name: str) -> dict[str, Any]:
        """What the pool says of a tenant, with a place's bytes; nothing where it says nothing."""
        (node,) = self.operator.get("/admin/pool").json()
        found = [one for one in node["tenants"] or () if one["tenant"] == name]
        return found[0] if found else {}

    def blocks(self, name: str) -> int:
        return int(self.tenant(name).get("blocks", 0))


def write(document: Path, kv_bytes: int) -> None:
    document.write_text(
        DOCUMENT.format(anna=hash_key("anna"), bert=hash_key("bert"), kv_bytes=kv_bytes)
    )


@pytest.fixture
def world(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[World]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    document = tmp_path / "tenants.yaml"
    write(document, 1 << 30)
    settings = {
        "BATON_POOL_ENABLED": "true",
        "BATON_POOL_LOOKUP_TIMEOUT_S": "5",
        "BATON_ROUTER_LOCAL_PREFILL_TOKENS": "0",
        "BATON_TENANTS_FILE": str(document),
        "BATON_TENANTS_RELOAD_S": "0.1",
        "BATON_ADMIN_PORT": str(port),
        "BATON_ADMIN_API_KEYS": "operator",
    }
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    checkpoint = make_model(tmp_path_factory.mktemp("llama"), "llama")
    with (
        serve(str(checkpoint), *FLAGS) as cluster,
        httpx.Client(
            base_url=f"http://127.0.0.1:{port}",
            headers={"Authorization": "Bearer operator"},
            timeout=30.0,
        ) as operator,
    ):
        eventually(
            lambda: maps_pool(cluster, "prefill", "decode", "hybrid"), "workers map the pool", 60.0
        )
        yield World(cluster=cluster, document=document, operator=operator)


@pytest.mark.slow
def test_a_quota_holds_while_serving_and_a_flush_takes_one_tenants_blocks(world: World) -> None:
    world.ask("anna", 1)
    world.ask("bert", 1)
    eventually(lambda: world.blocks("anna") >= BLOCKS, "anna's are put", 60.0)
    eventually(lambda: world.blocks("bert") >= BLOCKS, "bert's are put", 60.0)
    anna = world.tenant("anna")
    assert (anna["weight"], anna["quota_bytes"]) == (2.0, 1 << 30)
    quota = 8 * anna["dram_bytes"] // anna["blocks"]
    world.write(quota)
    eventually(lambda: world.tenant("anna").get("quota_bytes") == quota, "the quota is known")
    for number in range(2, 5):
        world.ask("anna", number)
        world.ask("bert", number)
    eventually(lambda: world.blocks("bert") >= 4 * BLOCKS, "bert's are put", 60.0)
    eventually(lambda: 0 < world.blocks("anna") <= 8, "anna keeps to her quota", 60.0)
    flushed = world.operator.post("/admin/pool/flush", json={"tenant": "bert"}).json()
    assert flushed["blocks"] >= 4 * BLOCKS
    assert world.blocks("bert") == 0
    assert world.blocks("anna") > 0
    world.ask("bert", 9)
    eventually(lambda: world.blocks("bert") >= BLOCKS, "bert's are put again", 60.0)
