"""A pool node without a process: the real ledger over plain memory,
and clients whose calls can be held up and cut off.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence

from baton.clock import Clock
from baton.errors import PoolUnavailableError
from baton.ids import BlockKey, Incarnation, WorkerId, WorkerIdentity
from baton.layout import KvLayout
from kv_transfer.memory.pages import Pages
from kvpool.client.arena_pages import slab_layers
from kvpool.messages import BlockLease, Owner, PutGrant, PutRefused
from kvpool.node.ledger import NodeLedger, NodeLimits

OnSlab = Callable[[list[Pages] | None], None]


class FakePool:
    """A node. Every client of it lives on one event loop.

    Args:
        layout: Of the blocks.
        clock: For leases and puts.
        num_slots: Of the slab.

    Attributes:
        ledger: What lies where.
        rows: Its memory, as `PoolClient.slab` has it.
        calls: How often each method of a client was called.
        leases_given: Every lease that was given.
        asked_places: The keys that slots were asked for, in order.
    """

    def __init__(self, layout: KvLayout, clock: Clock, *, num_slots: int = 64) -> None:
        self.clock = clock
        self._layout = layout
        self._num_slots = num_slots
        self._clients: list[FakeClient] = []
        self._open = asyncio.Event()
        self._open.set()
        self._called = asyncio.Event()
        self._starts = 0
        self.calls: Counter[str] = Counter()
        self.leases_given: list[str] = []
        self.asked_places: list[BlockKey] = []
        self.is_there = False
        self.come()

    def client(self, on_slab: OnSlab = lambda _: None) -> "FakeClient":
        """A worker's client; `on_slab` is called with slabs that come and go."""
        client = FakeClient(self, on_slab)
        self._clients.append(client)
        return client

    @property
    def identity(self) -> WorkerIdentity:
        """Its name and its last start."""
        return WorkerIdentity(worker_id=WorkerId("fake"), incarnation=Incarnation(self._starts))

    def come(self) -> None:
        """The node starts, with nothing in its memory."""
        size = self._layout.page_bytes
        self._starts += 1
        limits = NodeLimits(num_slots=self._num_slots, slot_bytes=size)
        self.ledger = NodeLedger(limits, f"fake-{self._starts}")
        memory = memoryview(bytearray(self._num_slots * size))
        self.rows: list[Pages] = slab_layers(
            memory, self._layout, num_slots=self._num_slots, slot_bytes=size
        )
        self.is_there = True
        self._tell()

    def leave(self) -> None:
        """The node is gone, whatever was being asked; so are its blocks."""
        self.is_there = False
        self._tell()

    def hold(self) -> None:
        """Nothing is answered until `let_go`."""
        self._open.clear()

    def let_go(self) -> None:
        """What was asked is answered now."""
        self._open.set()

    async def asked(self, method: str, times: int = 1) -> None:
        """Waits until a method has been called so often, answered or not."""
        while self.calls[method] < times:
            self._called.clear()
            await self._called.wait()

    async def answer(self, method: str) -> NodeLedger:
        """The ledger, once calls are answered.

        Raises:
            PoolUnavailableError: The node is away.
        """
        self.calls[method] += 1
        self._called.set()
        await self._open.wait()
        if not self.is_there:
            raise PoolUnavailableError("the pool's node is away")
        return self.ledger

    def _tell(self) -> None:
        for client in self._clients:
            client.node_changed()


class FakeClient:
    """An `AttachedClient`."""

    def __init__(self, pool: FakePool, on_slab: OnSlab) -> None:
        self._pool = pool
        self._on_slab = on_slab
        self._is_started = False

    async def start(self) -> None:
        """See AttachedClient."""
        self._is_started = True
        self.node_changed()

    async def close(self) -> None:
        """See AttachedClient."""
        self._is_started = False

    def node_changed(self) -> None:
        """The node has come or gone."""
        if self._is_started:
            self._on_slab(self.slab())

    def slab(self) -> list[Pages] | None:
        """See PoolClient."""
        return self._pool.rows if self._pool.is_there and self._is_started else None

    def node(self) -> WorkerIdentity | None:
        """See AttachedClient."""
        return None if self.slab() is None else self._pool.identity

    async def lease(
        self,
        keys: Sequence[BlockKey],
        lease_s: float,
        wait_s: float,  # noqa: ARG002
        tenant: str = "",  # noqa: ARG002
    ) -> BlockLease:
        """See PoolClient. There is no disk to wait for."""
        ledger = await self._pool.answer("lease")
        lease = ledger.lease(keys, lease_s, self._pool.clock.now_s())
        self._pool.leases_given.append(lease.lease_id)
        return lease

    async def renew(self, lease_ids: Sequence[str], lease_s: float) -> tuple[str, ...]:
        """See PoolClient."""
        ledger = await self._pool.answer("renew")
        now_s = self._pool.clock.now_s()
        ledger.sweep(now_s)
        return tuple(one for one in lease_ids if not ledger.renew(one, lease_s, now_s))

    async def release(self, lease_ids: Sequence[str]) -> None:
        """See PoolClient."""
        ledger = await self._pool.answer("release")
        for lease_id in lease_ids:
            ledger.release(lease_id)

    async def reserve(
        self, keys: Sequence[BlockKey], owner: Owner, first: int
    ) -> PutGrant | PutRefused:
        """See PoolClient."""
        ledger = await self._pool.answer("reserve")
        self._pool.asked_places += keys
        return ledger.reserve(keys, owner, self._pool.clock.now_s(), first=first)

    async def commit(self, put_id: str, checksums: Sequence[bytes]) -> int:
        """See PoolClient."""
        ledger = await self._pool.answer("commit")
        return ledger.commit(put_id, checksums, self._pool.clock.now_s())

    async def corrupt(self, keys: Sequence[BlockKey]) -> None:
        """See PoolClient."""
        ledger = await self._pool.answer("corrupt")
        ledger.drop(keys)
