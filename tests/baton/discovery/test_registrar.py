import asyncio
from dataclasses import replace

import pytest

from baton.config.schema import BatonConfig, ClusterConfig
from baton.discovery import registrar
from baton.discovery.registrar import registered
from baton.discovery.registry import Registration, Registry
from baton.errors import ConfigError
from baton.redis_link import open_redis
from tests.baton.discovery.test_registry import SECRET, WORKER
from tests.redis_servers import REDIS_SERVER, fake_redis, real_redis

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(autouse=True)
def often(monkeypatch):
    monkeypatch.setattr(registrar, "RENEW_S", 0.01)


def config(url: str, **changes) -> BatonConfig:
    cluster = ClusterConfig(discovery="redis", redis_url=url, secret=SECRET.hex())
    return BatonConfig(cluster=replace(cluster, **changes))


async def until_held(url: str, *expected: Registration) -> None:
    redis = open_redis(url, 5.0)
    registry = Registry(redis, prefix="baton", secret=SECRET, lease_s=5.0)
    try:
        async with asyncio.timeout(20):
            while (await registry.registrations()).registrations != expected:  # noqa: ASYNC110  # in Redis
                await asyncio.sleep(0.01)
    finally:
        await redis.aclose()


async def test_a_process_is_registered_as_long_as_it_serves_and_tells_its_new_role():
    said = WORKER
    with fake_redis() as url:
        async with registered(config(url), lambda: said):
            await until_held(url, WORKER)
            said = replace(WORKER, role="hybrid")
            await until_held(url, said)
        await until_held(url)


async def test_what_others_cannot_reach_and_what_is_not_to_be_found_registers_nowhere():
    local = replace(WORKER, address="unix:/run/d.sock")
    with fake_redis() as url:
        async with (
            registered(config(url), lambda: local),
            registered(config("", discovery="static"), lambda: WORKER),
        ):
            await asyncio.sleep(0.05)  # five renewals, if there were any
            await until_held(url)


async def test_a_url_of_another_kind_is_refused_by_its_setting():
    with pytest.raises(ConfigError, match=r"cluster\.redis_url"):
        async with registered(config("http://redis"), lambda: WORKER):
            pass


async def test_a_registration_that_is_not_renewed_any_more_is_told_of(caplog):
    asked_for = 0

    def said() -> Registration:
        nonlocal asked_for
        asked_for += 1
        if asked_for == 2:
            raise ValueError
        return WORKER

    with fake_redis() as url:
        async with registered(config(url), said), asyncio.timeout(20):
            while "the registration is not renewed any more" not in caplog.messages:  # noqa: ASYNC110
                await asyncio.sleep(0.01)


@pytest.mark.redis
@pytest.mark.skipif(REDIS_SERVER is None, reason="redis-server is not installed")
async def test_a_redis_that_is_late_killed_or_emptied_has_the_process_again_soon(tmp_path, caplog):
    async with real_redis(tmp_path) as server:
        await server.kill()
        async with registered(config(server.url), lambda: WORKER):
            async with asyncio.timeout(20):
                while "not registered in Redis, trying on" not in caplog.messages:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            await server.start()
            await until_held(server.url, WORKER)
            redis = open_redis(server.url, 5.0)
            await redis.flushall()
            await redis.aclose()
            await until_held(server.url, WORKER)
    assert caplog.messages.count("not registered in Redis, trying on") == 1
