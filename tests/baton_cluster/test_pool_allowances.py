"""What a pool node makes of the routers' tenants document."""

import os
from pathlib import Path

import pytest

from baton.config.schema import BatonConfig, ClusterConfig, PoolConfig, TenantsConfig
from baton.errors import ConfigError
from baton.redis_link import open_redis
from baton_cluster.pool_allowances import open_allowances
from kvpool.messages import Allowance
from router.tenants.sources import publish
from tests.redis_servers import a_redis, no_refusals
from tests.waits import soon

DOCUMENT = """
tenants:
  - {id: anna, kv_bytes: 64MiB, weight: 2}
  - {id: bert}
"""


async def test_quotas_and_weights_come_from_the_document_and_follow_it(tmp_path: Path):
    file = tmp_path / "tenants.yaml"
    file.write_text(DOCUMENT)
    tenants, pool = TenantsConfig(file=str(file)), PoolConfig(tenant_bytes=1000)
    config = BatonConfig(tenants=tenants, pool=pool)
    async with open_allowances(config, no_refusals()) as source:
        assert source is not None
        assert await soon(source.next()) == {
            "anna": Allowance(max_bytes=64 << 20, weight=2.0),
            "bert": Allowance(max_bytes=1000),
        }
        assert await soon(source.next()) is None
        file.write_text("tenants: [{id: anna}]")
        os.utime(file, ns=(1, 1))
        assert await soon(source.next()) == {"anna": Allowance(max_bytes=1000)}
        file.write_text("tenants: [{id: anna, kv_bytes: -1}]")
        with pytest.raises(ConfigError, match="kv_bytes"):
            await soon(source.next())


@pytest.mark.parametrize("source", ["file", "redis"])
async def test_key_files_are_on_the_hosts_of_routers_alone(source: str, tmp_path: Path):
    file = tmp_path / "tenants.yaml"
    file.write_text(f"{DOCUMENT}jwt: [{{issuer: i, audience: b, jwks_file: on-routers.json}}]")
    secret = bytes(32)
    async with a_redis("fakeredis", tmp_path) as url:
        redis = open_redis(url, 30.0)
        await soon(publish(redis, "baton", secret, file.read_text()))
        await redis.aclose()
        tenants = TenantsConfig(source=source, file=str(file), redis_url=url, redis_timeout_s=30.0)
        cluster = ClusterConfig(secret=secret.hex())
        config = BatonConfig(tenants=tenants, cluster=cluster)
        async with open_allowances(config, no_refusals()) as allowances:
            assert allowances is not None
            assert await soon(allowances.next()) == {
                "anna": Allowance(max_bytes=64 << 20, weight=2.0),
                "bert": Allowance(max_bytes=None),
            }


async def test_without_a_document_there_is_nothing_to_follow():
    async with open_allowances(BatonConfig(), no_refusals()) as source:
        assert source is None
