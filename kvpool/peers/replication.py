"""Copies of hot blocks on other nodes: when a text has earned one, and the request to another node to fetch it.

Reads are counted where they happen (`kvpool.node.read_frequency`), so the node with the readers asks for the copies:
two from `replicate_reads` reads a minute on, one more with every doubling. A copy that is not read goes first when its
own node is short of memory (`kvpool.node.evictor`).
"""

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass

from baton.clock import Clock
from baton.errors import BatonError
from baton.ids import BlockKey
from baton.rpc.v1 import pool_pb2 as pb
from baton.telemetry.logs import get_logger
from kvpool.convert import keys_to_bytes
from kvpool.node.read_frequency import ReadFrequency
from kvpool.peers.peer_table import PeerTable

_ASK_TIMEOUT_S = 2.0
_MAX_AT_ONCE = 4

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaOrder:
    """Blocks that should have more copies, if there are not as many yet.

    Attributes:
        keys: The beginning of a text.
        copies: How many nodes should hold it.
    """

    keys: tuple[BlockKey, ...]
    copies: int


class ReplicationPolicy:
    """Decides for one node.

    Args:
        demand: Of the node's blocks.
        reads: Of late that earn a second copy; 0: none ever.
        most: Copies of a block that are made.
    """

    def __init__(self, demand: ReadFrequency, *, reads: float, most: int) -> None:
        self._demand = demand
        self._reads = reads
        self._most = most
        self._looked_s: dict[BlockKey, float] = {}

    def due(self, keys: Sequence[BlockKey], now_s: float) -> ReplicaOrder | None:
        """What follows of a read of `keys`, the beginning of a text that is held here; None for nothing."""
        if not keys or self._reads <= 0 or self._most < 2:
            return None
        reads = self._demand.of(keys[0], now_s)
        if reads < self._reads or not self._may_look(keys[0], now_s):
            return None
        copies = 2 + int(math.log2(reads / self._reads))
        return ReplicaOrder(
            keys=tuple(keys[: self._depth(keys, now_s)]), copies=min(copies, self._most)
        )

    def _depth(self, keys: Sequence[BlockKey], now_s: float) -> int:
        """Leading blocks that are hot; the first one is."""
        return next(
            (at for at, key in enumerate(keys) if self._demand.of(key, now_s) < self._reads),
            len(keys),
        )

    def _may_look(self, root: BlockKey, now_s: float) -> bool:
        looked_s = self._looked_s.pop(root, None)
        again = looked_s is None or now_s - looked_s >= _AGAIN_S
        self._looked_s[root] = now_s if looked_s is None or again else looked_s
        if len(self._looked_s) > _MAX_TEXTS:
            del self._looked_s[next(iter(self._looked_s))]
        return again


class Replicator:
    """For one event loop. What fails is tried again when the blocks are next read, and due.

    Args:
        rule: Says what is due.
        neighbours: The other nodes.
        block_bytes: That a copy of a block takes.
        clock: Monotonic.
    """

    def __init__(
        self, rule: ReplicationPolicy, neighbours: PeerTable, *, block_bytes: int, clock: Clock
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

    async def _carry_out(self, order: ReplicaOrder) -> None:
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


_AGAIN_S = 10.0
"""A text is looked at this often at most: copies take time to come, and to be told of."""

_MAX_TEXTS = 4096
