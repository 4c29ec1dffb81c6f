"""Leases blocks of this host's node for the prompts of a worker: asks before a prompt is submitted, renews while it
waits, gives back once it has been admitted.

Stands between the event loop, where the node is talked to, and the engine's and the reader's threads, which only say
what they need.
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from functools import partial

from baton.clock import Clock
from baton.errors import PoolUnavailableError
from baton.ids import BlockKey, SeqId
from baton.rpc.mailbox import Mailbox
from baton.telemetry.logs import get_logger
from kvpool.client.metrics import Lookup, PoolMetrics
from kvpool.client.read_leases import ReadLeases
from kvpool.messages import BlockLease
from kvpool.ports import PoolClient

_log = get_logger(__name__)

_MAX_OVERDUE = 4
"""A node that owes this many answers is asked nothing more until one has come,
so that a slow one delays few prompts.
"""

_Call = Callable[[], Coroutine[None, None, None]]


class LeaseClient:
    """A `LeaseCallbacks`, whose methods may be called from any thread; all others belong to one event loop.

    Args:
        client: The way to the node.
        clock: Monotonic.
        metrics: Counts.
        lease_s: For how long blocks are leased at a time.
        lookup_timeout_s: How long a prompt waits for the node's answer.

    Attributes:
        leases: What may be read.
    """

    def __init__(
        self,
        client: PoolClient,
        clock: Clock,
        metrics: PoolMetrics,
        *,
        lease_s: float,
        lookup_timeout_s: float,
    ) -> None:
        self._client = client
        self._clock = clock
        self._metrics = metrics
        self._lease_s = lease_s
        self._lookup_timeout_s = lookup_timeout_s
        self._mailbox: Mailbox[_Call] | None = None
        self._calls: set[asyncio.Task[None]] = set()
        self._asked: set[asyncio.Task[BlockLease | None]] = set()
        self._overdue: set[asyncio.Task[BlockLease | None]] = set()
        self._returned: list[str] = []
        self._is_returning = False
        self._num_gone = 0
        self.leases = ReadLeases(clock, self.released)

    def start(self) -> None:
        """From now on carries out what other threads ask for, on the running loop, and renews the leases."""
        self._mailbox = Mailbox(asyncio.get_running_loop(), self._spawn)
        self._spawn(self._renew_forever)

    async def prepare(self, seq_id: SeqId, keys: Sequence[BlockKey], tenant: str = "") -> None:
        """Leases what the node has of a prompt's beginning; nothing, where it does not answer in time. Raises nothing.

        Cancelled, it leaves nothing leased.
        """
        if not keys or self._client.slab() is None or len(self._overdue) >= _MAX_OVERDUE:
            return
        asked_s, num_gone = self._clock.now_s(), self._num_gone
        asked = self._ask(keys, tenant)
        answered = False
        try:
            await asyncio.wait({asked}, timeout=self._lookup_timeout_s)
            answered = asked.done()
        finally:
            if not answered:
                self._overdue.add(asked)
                asked.add_done_callback(self._came_too_late)
        lease = _lease_of(asked) if answered and num_gone == self._num_gone else None
        if lease is not None:
            self.leases.add(seq_id, lease, asked_s=asked_s)
        self._metrics.looked_up(_outcome(asked, lease), self._clock.now_s() - asked_s)

    async def has(self, keys: Sequence[BlockKey]) -> bool:
        """Whether the node has all blocks of a text's beginning in its memory now. Raises nothing."""
        if self._client.slab() is None:
            return False
        asked = self._ask(keys)
        await asyncio.wait({asked})
        lease = _lease_of(asked)
        if lease is None or not lease.lease_id:
            return not keys
        self.released((lease.lease_id,))
        return len(lease.blocks) == len(keys)

    def node_gone(self) -> None:
        """Whatever the node has answered or will answer is void."""
        self._num_gone += 1
        for asked in self._asked:
            asked.cancel()
        self._returned.clear()

    def wanted(self, seq_id: SeqId, keys: Sequence[BlockKey]) -> None:
        """See LeaseCallbacks."""
        self._post(partial(self._lease_again, seq_id, tuple(keys)))

    def released(self, lease_ids: Sequence[str]) -> None:
        """See LeaseCallbacks."""
        self._post(partial(self._give_back, tuple(lease_ids)))

    def corrupt(self, keys: Sequence[BlockKey]) -> None:
        """See LeaseCallbacks."""
        self._post(partial(self._report, tuple(keys)))

    async def close(self) -> None:
        """Releases the leases, if the node answers soon, and ends every task."""
        if self._mailbox is not None:
            self._mailbox.close()
        for task in (*self._asked, *self._calls):
            task.cancel()
        await asyncio.gather(*self._asked, *self._calls, return_exceptions=True)
        left = [*self._returned, *self.leases.open()]
        self.leases.clear()
        if left and self._client.slab() is not None:
            await self._call(self._client.release(left))

    def _ask(self, keys: Sequence[BlockKey], tenant: str = "") -> "asyncio.Task[BlockLease | None]":
        asked = asyncio.create_task(self._lease(keys, tenant), name="pool-lease")
        self._asked.add(asked)
        asked.add_done_callback(self._asked.discard)
        return asked

    async def _lease(self, keys: Sequence[BlockKey], tenant: str) -> BlockLease | None:
        try:
            async with asyncio.timeout(self._lease_s):  # a later answer is of no use
                wait_s = self._lookup_timeout_s / 2
                return await self._client.lease(keys, self._lease_s, wait_s, tenant)
        except (PoolUnavailableError, TimeoutError):
            self._metrics.node_failed()
            return None

    def _came_too_late(self, asked: "asyncio.Task[BlockLease | None]") -> None:
        self._overdue.discard(asked)
        lease = _lease_of(asked)
        if lease is not None and lease.lease_id:
            self.released((lease.lease_id,))

    async def _lease_again(self, seq_id: SeqId, keys: Sequence[BlockKey]) -> None:
        if self._client.slab() is None:
            return
        asked_s, num_gone = self._clock.now_s(), self._num_gone
        asked = self._ask(keys)
        await asyncio.wait({asked})
        lease = _lease_of(asked)
        if lease is not None and num_gone == self._num_gone:
            self.leases.add(seq_id, lease, asked_s=asked_s, wanted=True)

    async def _give_back(self, lease_ids: Sequence[str]) -> None:
        self._returned += lease_ids
        if self._is_returning:
            return  # the call under way takes these along
        self._is_returning = True
        try:
            while self._returned:
                lease_ids, self._returned = self._returned, []
                await self._call(self._client.release(lease_ids))
        finally:
            self._is_returning = False

    async def _report(self, keys: Sequence[BlockKey]) -> None:
        await self._call(self._client.corrupt(keys))

    async def _renew_forever(self) -> None:
        while True:
            await asyncio.sleep(self._lease_s / 3)
            lease_ids = self.leases.open()
            if lease_ids:
                await self._call(self._renew(lease_ids))

    async def _renew(self, lease_ids: Sequence[str]) -> None:
        asked_s = self._clock.now_s()
        over = set(await self._client.renew(lease_ids, self._lease_s))
        still = [lease_id for lease_id in lease_ids if lease_id not in over]
        self.leases.renewed(still, asked_s=asked_s, lease_s=self._lease_s)
        self.leases.ended(over)

    async def _call(self, call: Coroutine[None, None, None]) -> None:
        """What a node that is away does not hear, it finds out when leases end."""
        try:
            async with asyncio.timeout(self._lease_s / 3):
                await call
        except (PoolUnavailableError, TimeoutError):
            self._metrics.node_failed()

    def _post(self, call: _Call) -> None:
        if self._mailbox is not None:
            self._mailbox.post(call)

    def _spawn(self, call: _Call) -> None:
        task = asyncio.create_task(call(), name="pool-call")
        self._calls.add(task)
        task.add_done_callback(self._call_done)

    def _call_done(self, task: "asyncio.Task[None]") -> None:
        self._calls.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            _log.error("a call to the pool node failed", cause=error)


def _lease_of(asked: "asyncio.Task[BlockLease | None]") -> BlockLease | None:
    return None if asked.cancelled() else asked.result()


def _outcome(asked: "asyncio.Task[BlockLease | None]", lease: BlockLease | None) -> Lookup:
    if lease is not None:
        return Lookup.HIT if lease.blocks else Lookup.MISS
    return Lookup.FAILED if asked.done() else Lookup.LATE
