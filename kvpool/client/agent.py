"""A worker process's part in the pool: what it reads from the slab of this host's node, and what it puts there.

    prompt ─▶ PooledEngine ─▶ LeaseClient ─ lease ─▶ node          before the engine has the prompt
    engine ─▶ PoolReader ◀─ slab                                while it computes the rest
    engine ─▶ PublishQueue ─▶ Publisher ─ reserve, commit ─▶ node    whenever a page is full

With a node or without, the worker serves; the pool only ever makes it quicker.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

from baton.clock import Clock
from baton.config.schema import PoolConfig
from baton.errors import TransferError
from baton.generation import WorkerLoad
from baton.ids import BlockKey, SeqId
from baton.pages import FetchOutcome, PublishedPage
from baton.telemetry.logs import get_logger
from kv_transfer.memory.pages import Pages
from kvpool.client.lease_client import LeaseClient
from kvpool.client.metrics import PoolMetrics
from kvpool.client.publisher import Generation, PoolWriter, Publisher, PublishQueue
from kvpool.client.reader import PoolReader
from kvpool.ports import ArenaPages, AttachedClient

_FAREWELL_S = 2.0
"""A worker that leaves takes this long at most to put what it has still in line."""

OpenClient = Callable[[Callable[[list[Pages] | None], None]], AttachedClient]

_log = get_logger(__name__)


class PoolAgent:
    """Owns everything of the pool that lives in a worker's process, its threads included.

    Close it after the engine: the engine's thread waits for the reader's.

    Args:
        open_client: Makes the client of the node, given the callback for slabs that come and go.
        arena: The engine's pages.
        generation: How often a page of it has been handed out.
        config: Durations and bounds.
        model: Fingerprint of the model.
        metrics: Counts.
        clock: Monotonic.

    Attributes:
        source: For the engine (`baton_engine.ports.KvSource`).
    """

    def __init__(
        self,
        open_client: OpenClient,
        arena: ArenaPages,
        generation: Generation,
        *,
        config: PoolConfig,
        model: str,
        metrics: PoolMetrics,
        clock: Clock,
    ) -> None:
        client = self._client = open_client(self._slab_changed)
        self._metrics = metrics
        self._told = WorkerLoad()
        self._leases = LeaseClient(
            client,
            clock,
            metrics,
            lease_s=config.lease_s,
            lookup_timeout_s=config.lookup_timeout_s,
        )
        self._publisher = Publisher(
            client,
            PoolWriter(arena, generation),
            capacity=config.publish_queue_blocks,
            model=model,
            put_timeout_s=config.put_timeout_s,
            clock=clock,
            metrics=metrics,
        )
        self.source = PoolReader(
            arena, self._leases.leases, self._leases, clock, finished=self._fetched
        )

    @property
    def block_sink(self) -> PublishQueue:
        """For the engine (`baton_engine.ports.BlockSink`)."""
        return self._publisher.queue

    async def start(self) -> None:
        """Looks for the node from now on; does not wait for it."""
        self._leases.start()
        self._publisher.start()
        await self._client.start()

    def report(self, load: WorkerLoad) -> WorkerLoad:
        """`load` with the node that this worker maps, and what it has fetched from there."""
        node, told = self._client.node(), self._told
        return replace(
            load,
            pool_node="" if node is None else node.worker_id,
            pool_incarnation=0 if node is None else node.incarnation,
            pool_fetches=told.pool_fetches,
            pool_fetched_blocks=told.pool_fetched_blocks,
            pool_fetch_s=told.pool_fetch_s,
        )

    async def prepare(self, seq_id: SeqId, keys: Sequence[BlockKey], tenant: str = "") -> None:
        """Leases what the pool has of a prompt that is about to be submitted. See `LeaseClient.prepare`."""
        await self._leases.prepare(seq_id, keys, tenant)

    async def put_now(self, pages: Sequence[PublishedPage]) -> bool:
        """Puts a text's leading pages ahead of all that waits; whether the pool has every one of them then."""
        await self._publisher.put_now(pages)
        return await self._leases.has([page.key for page in pages])

    async def published(self) -> None:
        """Waits until every page that was offered is in the pool, or dropped."""
        await self._publisher.idle()

    async def close(self) -> None:
        """Puts what is still in line, for a moment; releases the leases; ends the threads."""
        try:
            async with asyncio.timeout(_FAREWELL_S):
                await self._publisher.idle()
        except TimeoutError:
            _log.info("left without publishing", pages=len(self.block_sink))
        await self._publisher.close()
        await self._leases.close()
        await self._client.close()
        self.source.close()

    def _fetched(self, outcome: FetchOutcome) -> None:
        """On the engine's thread. What failed in part says nothing of how long fetching takes."""
        self._metrics.fetched(outcome)
        if outcome.num_blocks and not outcome.failed:
            told = self._told
            self._told = WorkerLoad(
                pool_fetches=told.pool_fetches + 1,
                pool_fetched_blocks=told.pool_fetched_blocks + outcome.num_blocks,
                pool_fetch_s=told.pool_fetch_s + outcome.seconds,
            )

    def _slab_changed(self, slab: Sequence[Pages] | None) -> None:
        self.source.disconnect()
        self._leases.node_gone()
        if slab is not None:
            try:
                self.source.connect(slab)
            except TransferError as error:
                _log.error("the pool's blocks are not this model's", cause=error)
                slab = None
        self._publisher.connect(slab)
