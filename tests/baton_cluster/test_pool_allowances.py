"""What a pool node makes of the routers' tenants document."""

import os
from pathlib import Path

import pytest

from baton.config.schema import BatonConfig, PoolConfig, TenantsConfig
from baton.errors import ConfigError
from baton_cluster.pool_allowances import open_allowances
from kvpool.messages import Allowance
from tests.redis_servers import no_refusals
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


async def test_without_a_document_there_is_nothing_to_follow():
    async with open_allowances(BatonConfig(), no_refusals()) as source:
        assert source is None
