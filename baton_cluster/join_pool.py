"""A worker process's part in the pool, put together: what reads from it, what writes to it,
and the engine that profits.
"""

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from baton.clock import MonotonicClock
from baton.layout import SPARE_BLOCKS, KvLayout
from baton.rpc.credentials import ClusterCredentials
from baton.rpc.hello import WorkerHello
from baton_cluster.launch.assignment import Assignment
from baton_worker.metrics import WorkerMetrics
from kv_transfer.memory.arena import ArenaSpan, WorkerMemory
from kv_transfer.memory.cuda import Cuda
from kvpool.client.agent import PoolAgent
from kvpool.client.arena_pages import GpuPages, HostPages
from kvpool.client.metrics import PoolMetrics
from kvpool.client.node_client import GrpcPoolClient
from kvpool.ports import ArenaPages

if TYPE_CHECKING:
    from baton_engine.host import ThreadEngineHost
    from baton_vllm.host import VllmEngineHost
    from kvpool.client.pooled_engine import PooledEngine, PoolPromptStore


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
    prompts: "PoolPromptStore"


def join_pool(
    assignment: Assignment,
    host: "ThreadEngineHost | VllmEngineHost",
    hello: WorkerHello,
    memory: WorkerMemory,
    metrics: WorkerMetrics,
    credentials: ClusterCredentials,
) -> WorkerPool | None:
    """None where there is no pool, or where the engine shares no blocks. `memory` is the engine's arena."""
    from kvpool.client.pooled_engine import PooledEngine, PoolPromptStore, PromptKeys

    config, address, layout = assignment.config, assignment.part.pool_address, hello.layout
    if not (config.pool.enabled and address and config.engine.enable_prefix_caching):
        return None
    agent = PoolAgent(
        partial(GrpcPoolClient, address, hello.identity, layout, credentials=credentials),
        _pages(memory.span, layout, hello.num_blocks + SPARE_BLOCKS),
        host.generation,
        config=config.pool,
        model=layout.model_fingerprint,
        metrics=PoolMetrics(metrics.registry),
        clock=MonotonicClock(),
    )
    host.connect_pool(agent.source, agent.block_sink)
    keys = PromptKeys(bytes.fromhex(config.cluster.secret), layout)
    return WorkerPool(
        agent=agent,
        engine=PooledEngine(host, agent, keys),
        prompts=PoolPromptStore(agent, keys, host.generation),
    )


def _pages(arena: ArenaSpan, layout: KvLayout, num_blocks: int) -> ArenaPages:
    if arena.device is None:
        return HostPages(arena.host_view, layout, num_blocks=num_blocks)
    return GpuPages(arena, Cuda(arena.device), layout, num_blocks=num_blocks)
