import pytest
from prometheus_client import CollectorRegistry

from baton.discovery.registry import Registry
from baton.redis_link import RefusedValues, open_redis
from router.discovery.ports import Sighting
from router.discovery.redis import RedisDiscovery
from tests.baton.discovery.test_registry import HASH, SECRET, WORKER
from tests.redis_servers import REDIS_SERVER, a_redis, real_redis

pytestmark = pytest.mark.timeout(60)

SIGHTED = Sighting(
    address="10.0.0.3:7001",
    source="redis",
    registered_as="decode decode-3@ab layout 1f",
    labels={"zone": "a"},
)


def refusals(metrics: CollectorRegistry) -> float:
    labels = {"reader": "discovery"}
    return metrics.get_sample_value("baton_redis_refused_values_total", labels) or 0.0


def of(redis, secret=SECRET) -> Registry:
    return Registry(redis, prefix="baton", secret=secret, lease_s=5.0)


async def test_registered_workers_and_pool_nodes_are_sighted(tmp_path):
    async with a_redis("fakeredis", tmp_path) as url:
        redis, metrics = open_redis(url, 5.0), CollectorRegistry()
        await of(redis).register(WORKER)
        look = await RedisDiscovery(of(redis), RefusedValues(metrics)).look()
        assert (look.workers, look.pool_nodes, look.faults) == ((SIGHTED,), (), ())
        assert refusals(metrics) == 0
        await redis.aclose()


async def test_a_forged_registration_is_refused_and_counted(tmp_path):
    async with a_redis("fakeredis", tmp_path) as url:
        redis, metrics = open_redis(url, 5.0), CollectorRegistry()
        await of(redis, secret=b"x" * 32).register(WORKER)
        discovery = RedisDiscovery(of(redis), RefusedValues(metrics))
        assert (await discovery.look()).workers == ()
        assert refusals(metrics) == 1
        assert not await redis.hexists(HASH, "worker/decode-3@ab")
        await redis.aclose()


@pytest.mark.redis
@pytest.mark.skipif(REDIS_SERVER is None, reason="redis-server is not installed")
async def test_while_redis_is_away_what_it_named_last_stays(tmp_path):
    async with real_redis(tmp_path) as server:
        redis = open_redis(server.url, 5.0)
        discovery = RedisDiscovery(of(redis), RefusedValues(CollectorRegistry()))
        await of(redis).register(WORKER)
        await discovery.look()
        await server.kill()
        look = await discovery.look()
        assert look.workers == (SIGHTED,)
        assert look.faults == ("Redis gave no answer: ConnectionError",)
        await server.start()
        assert (
            await discovery.look()
            == await RedisDiscovery(of(redis), RefusedValues(CollectorRegistry())).look()
        )
        await redis.aclose()
