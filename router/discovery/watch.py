"""Looks again and again for workers and pool nodes, and has them asked: as `cluster.discovery` says,
beside those that are listed.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from prometheus_client import CollectorRegistry, Counter, Gauge

from baton.background import in_background
from baton.config.schema import BatonConfig
from baton.discovery.registrar import LEASE_S
from baton.discovery.registry import Registry
from baton.redis_link import RefusedValues, open_redis
from baton.telemetry.logs import get_logger
from router.discovery.ports import Discovery, Followers
from router.discovery.redis import RedisDiscovery

_log = get_logger(__name__)


class DiscoveryWatch:
    """One router's.

    Args:
        discovery: Is asked.
        workers: Told where workers may be.
        pool_nodes: Told where pool nodes may be.
        registry: Of metrics.

    Attributes:
        faults: What gave no answer at the last look.
    """

    def __init__(
        self,
        discovery: Discovery,
        *,
        workers: Followers,
        pool_nodes: Followers,
        registry: CollectorRegistry,
    ) -> None:
        self.faults: tuple[str, ...] = ()
        self._discovery = discovery
        self._workers = workers
        self._pool_nodes = pool_nodes
        self._sighted = Gauge(
            "baton_discovery_addresses",
            "Addresses that discovery named at its last look.",
            ["kind"],
            registry=registry,
        )
        self._failed = Counter(
            "baton_discovery_failures",
            "Questions of discovery that got no answer; what was known before holds on.",
            registry=registry,
        )

    async def run(self) -> None:
        """Looks until cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(self._discovery.period_s)

    async def look(self) -> None:
        """Once."""
        found = await self._discovery.look()
        self._workers.follow(found.workers)
        self._pool_nodes.follow(found.pool_nodes)
        self._sighted.labels("worker").set(len(found.workers))
        self._sighted.labels("pool").set(len(found.pool_nodes))
        self._failed.inc(len(found.faults))
        if found.faults and not self.faults:
            _log.warning("discovery gets no answer: what was known holds on", why=found.faults[0])
        elif self.faults and not found.faults:
            _log.info("discovery gets answers again")
        self.faults = found.faults


@asynccontextmanager
async def discovering(
    config: BatonConfig,
    *,
    workers: Followers,
    pool_nodes: Followers,
    registry: CollectorRegistry,
    refused: RefusedValues,
) -> AsyncIterator[DiscoveryWatch | None]:
    """Looks in the background while inside, where `cluster.discovery` is dns or redis.

    Raises:
        ConfigError: What it needs is not installed or not in order.
    """
    cluster = config.cluster
    if cluster.discovery == "static":
        yield None
        return
    redis = None
    discovery: Discovery
    if cluster.discovery == "redis":
        redis = open_redis(cluster.redis_url, cluster.redis_timeout_s, setting="cluster.redis_url")
        secret = bytes.fromhex(cluster.secret)
        registrations = Registry(redis, prefix=cluster.redis_prefix, secret=secret, lease_s=LEASE_S)
        discovery = RedisDiscovery(registrations, refused)
    else:
        from router.discovery.dns import DnsDiscovery  # nobody else needs dnspython

        discovery = DnsDiscovery(
            cluster.worker_names, cluster.pool_node_names, servers=cluster.dns_servers
        )
    watch = DiscoveryWatch(discovery, workers=workers, pool_nodes=pool_nodes, registry=registry)
    try:
        async with in_background(watch.run(), "discovery", "discovery died"):
            yield watch
    finally:
        if redis is not None:
            await redis.aclose()
