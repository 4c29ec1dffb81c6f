"""What a router process puts together from its configuration, and two of them on one Redis."""

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import pytest

from baton.config.schema import AuditConfig, BatonConfig, RouterConfig, TenantsConfig
from baton.errors import AuthenticationError
from baton.telemetry.metrics import new_registry
from router.limits.degrading import DegradingLimiter
from router.limits.local import LocalLimiter
from router.tenancy import open_tenancy
from router.tenants.directory import TenantDirectory
from router.tenants.document import TenantsDocument
from router.tenants.keys import hash_key
from tests.redis_servers import KINDS, a_redis, no_refusals
from tests.router.served import serve

DOCUMENT = f"""
tenants:
  - {{id: flood, keys: ["{hash_key("flood")}"], requests_per_minute: 1, request_burst: 6}}
  - {{id: calm, keys: ["{hash_key("calm")}"]}}
"""


def configured(path: Path, **tenants: Any) -> BatonConfig:
    path.write_text(DOCUMENT)
    return BatonConfig(
        router=RouterConfig(guardrails=("tests.router.guardrails.test_guardrails:Censor",)),
        tenants=TenantsConfig(file=str(path), reload_s=0.01, **tenants),
        audit=AuditConfig(file=str(path.parent / "audit.log")),
    )


async def test_all_that_is_configured_is_at_work(tmp_path):
    config = configured(tmp_path / "t.yaml")
    async with open_tenancy(config, new_registry(), no_refusals()) as tenancy:
        assert isinstance(tenancy.limiter, LocalLimiter)
        assert tenancy.guards.active
        assert tenancy.audit is not None
        assert tenancy.directory.identify("calm").tenant.tenant_id == "calm"
        (tmp_path / "t.yaml").write_text(DOCUMENT.replace("id: calm", "id: renamed"))
        async with asyncio.timeout(30):
            while tenancy.directory.identify("calm").tenant.tenant_id != "renamed":  # noqa: ASYNC110
                await asyncio.sleep(0.01)


async def test_until_redis_answers_no_tenant_is_let_in_and_none_is_told_that_its_key_is_wrong(
    tmp_path,
):
    config = BatonConfig(
        router=RouterConfig(api_keys=("plain",)),
        tenants=TenantsConfig(source="redis", redis_url=f"unix://{tmp_path / 'no.sock'}"),
    )
    registry = new_registry()
    async with open_tenancy(config, registry, no_refusals()) as tenancy:
        assert isinstance(tenancy.limiter, DegradingLimiter)
        assert registry.get_sample_value("baton_limits_degraded") == 1
        with pytest.raises(AuthenticationError):
            tenancy.directory.identify(None)
        async with serve(parts={"directory": tenancy.directory}) as served:
            ready = await served.http.get("/ready")
            replies = [await served.chat({"x-api-key": key}) for key in ("k", "plain")]
    assert [reply.status_code for reply in (ready, *replies)] == [503, 503, 200], (
        "plain keys are let in, and a router that knows tenants is not replaced by this one"
    )
    assert "has not been read yet" in ready.text
    assert "has not been read yet" in replies[0].text


@pytest.mark.parametrize("keys", [(), ("plain",)])
async def test_a_router_is_ready_once_it_has_read_the_tenants_whatever_plain_keys_it_has(keys):
    directory = TenantDirectory(keys, described=True)
    async with serve(directory=directory) as served:
        before = await served.http.get("/ready")
        directory.replace(directory.register_of(TenantsDocument(), lambda _: ""))
        after = await served.http.get("/ready")
    assert [before.status_code, after.status_code] == [503, 200]
    assert "has not been read yet" in before.text


@pytest.mark.parametrize("kind", KINDS)
async def test_two_routers_give_out_one_tenants_limits_together(tmp_path, kind: str):
    async with a_redis(kind, tmp_path) as url, contextlib.AsyncExitStack() as stack:
        config = configured(tmp_path / "t.yaml", redis_url=url, redis_timeout_s=30.0)
        routers = []
        for _ in range(2):
            tenancy = await stack.enter_async_context(
                open_tenancy(config, new_registry(), no_refusals())
            )
            made = {"directory": tenancy.directory, "limiter": tenancy.limiter}
            routers.append(await stack.enter_async_context(serve(parts=made)))
        flooding = [routers[n % 2].chat({"x-api-key": "flood"}) for n in range(20)]
        replies = await asyncio.gather(*flooding)
        assert sorted(reply.status_code for reply in replies) == [200] * 6 + [429] * 14
        for router in routers:
            assert (await router.chat({"x-api-key": "calm"})).status_code == 200
