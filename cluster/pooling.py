"""A worker process's part in the pool, put together: what reads from it, what writes to it, and the engine that profits."""

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from baton.clock import MonotonicClock
from baton.ids import WorkerIdentity
from baton.layout import SPARE_BLOCKS
from baton.telemetry.worker import WorkerMetrics
from cluster.assignment import Assignment
from kv_transfer.regions import SharedRegion
from kvpool.agent import PoolAgent
from kvpool.client import GrpcPoolClient
from kvpool.host_pages import HostPages
from kvpool.worker_metrics import PoolMetrics

if TYPE_CHECKING:
    from engine.build import BuiltEngine
    from kvpool.pooled_engine import PooledEngine
    from kvpool.prompt_store import PooledPrompts


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPool:
    """What a worker has of the pool.

    Attributes:
        agent: Talks to the node; start it before the services, close it after the engine.
        engine: The worker's engine, for which prompts' blocks are borrowed.
        prompts: Where prompts are left that no decode worker has room for.
    """

    agent: PoolAgent
    engine: "PooledEngine"
    prompts: "PooledPrompts"


def join_pool(
    assignment: Assignment,
    built: "BuiltEngine",
    identity: WorkerIdentity,
    region: SharedRegion,
    metrics: WorkerMetrics,
) -> WorkerPool | None:
    """None where there is no pool, or where the engine shares no blocks. `region` is the engine's arena."""
    # These know the engine's messages; a router that imports this module for its siblings never pays for the engine.
    from kvpool.pooled_engine import PooledEngine, PromptKeys
    from kvpool.prompt_store import PooledPrompts

    config, address = assignment.config, assignment.part.pool_address
    if not (config.pool.enabled and address and config.engine.enable_prefix_caching):
        return None
    agent = PoolAgent(
        partial(GrpcPoolClient, address, identity, built.layout),
        HostPages(
            region.memoryview, built.layout, num_blocks=built.limits.num_blocks + SPARE_BLOCKS
        ),
        built.host.generation,
        config=config.pool,
        model=built.layout.model_fingerprint,
        metrics=PoolMetrics(metrics.registry),
        clock=MonotonicClock(),
    )
    built.host.connect_pool(agent.source, agent.outlet)
    keys = PromptKeys(bytes.fromhex(config.cluster.secret), built.layout)
    return WorkerPool(
        agent=agent,
        engine=PooledEngine(built.host, agent, keys),
        prompts=PooledPrompts(agent, keys, built.host.generation),
    )
