"""The pool node's process: what it is composed of, and what it does periodically."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path

from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from prometheus_client import CollectorRegistry

from baton.clock import MonotonicClock
from baton.config.schema import BatonConfig, PoolConfig
from baton.ids import WorkerIdentity
from baton.redis_link import RefusedValues, open_redis
from baton.rpc.bounds import POOL
from baton.rpc.channel import bind, new_server
from baton.rpc.credentials import ClusterCredentials
from baton.rpc.identity import PeerRole
from baton.rpc.v1 import pool_pb2_grpc
from baton.telemetry.scrape import ScrapeServer
from kvpool.directory.memory import MemoryDirectory
from kvpool.directory.redis import RedisDirectory
from kvpool.node.metrics import NodeMetrics
from kvpool.node.pool_node import PoolNode
from kvpool.node.quotas import QuotaKeeper
from kvpool.node.server import PoolService, WatchStreams
from kvpool.peers.peering import PeeringConfig, serve_peers
from kvpool.ports import AllowanceSource, Directory
from kvpool.ssd.store import SsdStore

TICK_S = 0.1
_STOP_GRACE_S = 0.5


async def run(
    config: BatonConfig,
    *,
    identity: WorkerIdentity,
    address: str,
    peer_address: str,
    region_path: str,
    peer_region_path: str,
    allowances: AllowanceSource | None = None,
    registry: CollectorRegistry,
    refused: RefusedValues,
    ready: Callable[[], None],
    stop: asyncio.Event,
) -> None:
    """Serves the pool node of this host until `stop` is set.

    Args:
        config: The whole configuration, resolved.
        identity: This start of the node.
        address: Where workers of this host and operators reach it.
        peer_address: Where other nodes do; bound only with a directory that several nodes share.
        region_path: Unix socket that gives the slab's descriptor to workers.
        peer_region_path: The same for other nodes of this host.
        allowances: What tenants may keep; all the same where that is not said.
        registry: For the node's metrics.
        refused: Is told of what is not believed of Redis.
        ready: Called once it answers.
        stop: Set from outside.

    Raises:
        ConfigError: The address cannot be bound, or the directory or the disk cannot be used as configured.
    """
    pool, secret = config.pool, bytes.fromhex(config.cluster.secret)
    metrics = NodeMetrics(registry)
    credentials = ClusterCredentials.from_config(config.cluster, PeerRole.POOL, identity.worker_id)
    registry.register(credentials.counts)
    async with AsyncExitStack() as stack:
        directory = await stack.enter_async_context(_directory(pool, secret, refused))
        plan = PeeringConfig(
            identity=identity,
            address=peer_address,
            gate_path=Path(peer_region_path),
            secret=secret,
            pool=pool,
            transfer=config.transfer,
            credentials=credentials,
            refused=lambda reason: metrics.connection_refused(reason.value),
        )
        join_peers = None
        if pool.directory != "memory":
            plan, join_peers = await stack.enter_async_context(serve_peers(plan, directory))
        node = PoolNode(
            pool,
            identity,
            address=plan.advertised,
            region_path=region_path,
            directory=directory,
            clock=MonotonicClock(),
            open_disk=partial(SsdStore, Path(pool.ssd_dir), pool.ssd_bytes)
            if pool.ssd_dir
            else None,
            join_peers=join_peers,
        )
        await _serve(
            node,
            config,
            address,
            metrics,
            credentials=credentials,
            allowances=allowances,
            ready=ready,
            stop=stop,
        )


async def _serve(
    node: PoolNode,
    config: BatonConfig,
    address: str,
    metrics: NodeMetrics,
    *,
    credentials: ClusterCredentials,
    allowances: AllowanceSource | None,
    ready: Callable[[], None],
    stop: asyncio.Event,
) -> None:
    """Answers workers and operators until `stop` is set, then closes the node."""
    pool = config.pool
    watchers = WatchStreams(node.identity)
    beats: list[Callable[[], Awaitable[None]]] = [
        partial(_sweep, node, watchers, metrics),
        partial(_register, node),
    ]
    if allowances is not None:
        keeper = QuotaKeeper(allowances, node.allow, pause_s=config.tenants.reload_s)
        await keeper.look()  # before the first put
        beats.append(keeper.run)
    server = new_server(credentials, POOL)
    pool_pb2_grpc.add_PoolServicer_to_server(PoolService(node, watchers), server)
    wellness = health.aio.HealthServicer()  # type: ignore[attr-defined]  # missing in the stubs
    health_pb2_grpc.add_HealthServicer_to_server(wellness, server)
    bind(server, address, credentials)
    scraped = ScrapeServer(pool.metrics_address, metrics.registry) if pool.metrics_address else None
    await wellness.set("", health_pb2.HealthCheckResponse.SERVING)
    await server.start()
    beating = [asyncio.ensure_future(beat()) for beat in beats]
    stopped = asyncio.ensure_future(stop.wait())
    ready()
    await asyncio.wait({*beating, stopped}, return_when=asyncio.FIRST_COMPLETED)
    await wellness.enter_graceful_shutdown()
    await server.stop(_STOP_GRACE_S)
    for task in (*beating, stopped):
        task.cancel()
    await asyncio.wait({*beating, stopped})
    await node.close()
    if scraped is not None:
        await asyncio.to_thread(scraped.close)
    for beat in beating:
        if not beat.cancelled():
            beat.result()  # a node that cannot sweep must not go on: its process ends, and another is started


async def _sweep(node: PoolNode, watchers: WatchStreams, metrics: NodeMetrics) -> None:
    """Ends what is over and tells routers what has changed,
    whether or not there is new work or the directory answers.
    """
    while True:
        node.sweep()
        watchers.changed(node.take_changes())
        metrics.observe(
            node.usage(),
            slot_bytes=node.slot_bytes,
            sick=node.state().sick,
            degraded=node.slot_bytes > 0 and not node.directory_reachable,
            routers=len(watchers),
        )
        await asyncio.sleep(TICK_S)


async def _register(node: PoolNode) -> None:
    """Keeps the directory true of the node."""
    while True:
        await node.register()
        await asyncio.sleep(TICK_S)


@asynccontextmanager
async def _directory(
    pool: PoolConfig, secret: bytes, refused: RefusedValues
) -> AsyncIterator[Directory]:
    if pool.directory == "memory":
        yield MemoryDirectory(MonotonicClock())
        return
    redis = open_redis(pool.redis_url, pool.redis_timeout_s, setting="pool.redis_url")
    try:
        yield RedisDirectory(redis, prefix=pool.redis_prefix, secret=secret, refused=refused)
    finally:
        await redis.aclose()
