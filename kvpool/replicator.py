"""Sees to it that hot blocks of this node have copies on others: asks one of them to fetch what is read here often."""

import asyncio
from collections.abc import Sequence

from baton.clock import Clock
from baton.errors import BatonError
from baton.ids import BlockKey
from baton.rpc.v1 import pool_pb2 as pb
from baton.telemetry.logs import get_logger
from kvpool.convert import keys_to_bytes
from kvpool.neighbours import Neighbours
from kvpool.replication import Order, Replication

_ASK_TIMEOUT_S = 2.0
_MAX_AT_ONCE = 4

_log = get_logger(__name__)


class Replicator:
    """For one event loop. What fails is tried again when the blocks are next read, and due.

    Args:
        rule: Says what is due.
        neighbours: The other nodes.
        block_bytes: That a copy of a block takes.
        clock: Monotonic.
    """

    def __init__(
        self, rule: Replication, neighbours: Neighbours, *, block_bytes: int, clock: Clock
    ) -> None:
        self._rule = rule
        self._neighbours = neighbours
        self._block_bytes = block_bytes
        self._clock = clock
        self._tasks: set[asyncio.Task[None]] = set()

    def read(self, keys: Sequence[BlockKey]) -> None:
        """The beginning of a text, which is held here, was read; returns at once."""
        if len(self._tasks) >= _MAX_AT_ONCE:
            return
        order = self._rule.due(keys, self._clock.now_s())
        if order is not None:
            task = asyncio.create_task(self._carry_out(order), name="pool-replicate")
            self._tasks.add(task)
            task.add_done_callback(self._done)

    async def close(self) -> None:
        """Gives up what is under way."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _carry_out(self, order: Order) -> None:
        need_bytes = len(order.keys) * self._block_bytes
        target = None
        try:
            target = await self._neighbours.target(order.keys, order.copies, need_bytes)
            if target is not None:
                request = pb.PeerRequest(take=pb.TakeReplica(keys=keys_to_bytes(order.keys)))
                await self._neighbours.ask(target, request, _ASK_TIMEOUT_S)
        except BatonError as error:
            named = None if target is None else str(target.node)
            _log.info("hot blocks got no other copy", target=named, reason=error.message)

    def _done(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            _log.error("hot blocks got no other copy", cause=error)
