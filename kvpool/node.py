"""The pool node of one host: ledger, slab, disk and directory joined. One owner, on one event loop.

It does not know how large a block is before a worker has come: the first to attach decides the size of the slots, and later ones
with larger blocks are refused by the field's name.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from baton.clock import Clock
from baton.config.schema import PoolConfig
from baton.errors import ConfigError, IncompatibleError
from baton.ids import BlockKey, WorkerIdentity
from baton.layout import KvLayout
from baton.telemetry.logs import get_logger
from kvpool.accounts import Allowance
from kvpool.actions import Demote, Promote
from kvpool.ledger import NodeLedger
from kvpool.limits import NodeLimits
from kvpool.messages import (
    BlockLease,
    NodeState,
    NodeUsage,
    Owner,
    PutGrant,
    RefusalReason,
    Refused,
    Selection,
)
from kvpool.mover import Mover
from kvpool.ports import Directory, ExtentStore
from kvpool.registrar import Registrar
from kvpool.slab import Slab

_MAX_PREFIXES = 4096
_NOTHING = BlockLease(lease_id="")
_EMPTY = Refused(reason=RefusalReason.SICK, detail="no worker has attached yet")

OpenStore = Callable[[int], ExtentStore]
"""Opens the disk for blocks of so many bytes."""

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    """What a worker needs to map the slab.

    Attributes:
        path: Unix socket that gives the descriptor.
        token: Shown there, once.
        num_slots: Of the slab.
        slot_bytes: Of each.
    """

    path: str
    token: bytes
    num_slots: int
    slot_bytes: int


@dataclass(slots=True, eq=False)
class _Store:
    """What exists from the first worker on."""

    slab: Slab
    ledger: NodeLedger
    registrar: Registrar
    mover: Mover | None


class PoolNode:
    """Not thread-safe: methods are called on the event loop that made it.

    Args:
        config: Of the pool; `memory_bytes` is decided.
        identity: This start of the node.
        address: Where its service answers, as the directory is told.
        region_path: Unix socket for the slab's descriptor.
        directory: Of the whole pool.
        clock: Puts, leases and the node's own lease run on it.
        open_store: Opens the SSD tier; None without one.
    """

    def __init__(
        self,
        config: PoolConfig,
        identity: WorkerIdentity,
        *,
        address: str,
        region_path: str,
        directory: Directory,
        clock: Clock,
        open_store: OpenStore | None = None,
    ) -> None:
        assert config.memory_bytes is not None, "decided by whoever starts the node"
        self.identity = identity
        self._config = config
        self._memory_bytes = config.memory_bytes
        self._address = address
        self._region_path = region_path
        self._directory = directory
        self._clock = clock
        self._open_store = open_store
        self._loop = asyncio.get_running_loop()
        self._store: _Store | None = None
        self._moved = asyncio.Event()
        self._hits: Counter[BlockKey] = Counter()

    def attach(self, worker: WorkerIdentity, layout: KvLayout) -> Welcome:
        """Lets a worker of this host map the slab, which is made for the first of them.

        Raises:
            IncompatibleError: Its blocks are larger than the slots.
            ConfigError: Not one block fits the memory.
            OutOfMemoryError: The machine has not got the memory.
        """
        store = self._store
        if store is None:
            store = self._store = self._open(layout.page_bytes)
        if layout.page_bytes > store.slab.slot_bytes:
            raise IncompatibleError(
                f"block_bytes: {layout.page_bytes} do not fit the pool's slots of"
                f" {store.slab.slot_bytes}",
                param="block_bytes",
            )
        slab = store.slab
        token = slab.invite(partial(self._on_gone, worker))
        return Welcome(
            path=slab.path, token=token, num_slots=slab.num_slots, slot_bytes=slab.slot_bytes
        )

    def _open(self, slot_bytes: int) -> _Store:
        config = self._config
        disk = self._open_disk(slot_bytes)
        slab = Slab(memory_bytes=self._memory_bytes, slot_bytes=slot_bytes, path=self._region_path)
        limits = NodeLimits(
            num_slots=slab.num_slots,
            slot_bytes=slot_bytes,
            num_extents=0 if disk is None else disk.num_extents,
            eviction=config.eviction,
            ssd_eviction=config.ssd_eviction,
            high_watermark=config.high_watermark,
            low_watermark=config.low_watermark,
            put_timeout_s=config.put_timeout_s,
            usual=Allowance(max_bytes=config.tenant_bytes),
        )
        found = () if disk is None else disk.recover()
        ledger = NodeLedger(limits, f"{self.identity.incarnation:x}", found)
        return _Store(
            slab=slab,
            ledger=ledger,
            registrar=Registrar(self._directory, ledger, lease_s=config.node_lease_s),
            mover=None if disk is None else Mover(disk, slab, self._on_moved),
        )

    def _open_disk(self, slot_bytes: int) -> ExtentStore | None:
        """The SSD tier; None without one, and where it cannot be opened: memory alone is worth having."""
        if self._open_store is None:
            return None
        try:
            return self._open_store(slot_bytes)
        except (OSError, ConfigError) as error:
            _log.error("the pool goes on without its disk", reason=str(error))
            return None

    def _on_gone(self, worker: WorkerIdentity) -> None:
        """On the gate's thread."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._worker_gone, worker)

    def _worker_gone(self, worker: WorkerIdentity) -> None:
        if self._store is not None:
            self._store.ledger.worker_gone(worker)

    def reserve(
        self,
        keys: Sequence[BlockKey],
        owner: Owner,
        *,
        first: int,
        size_bytes: int,
        writer: WorkerIdentity,
    ) -> PutGrant | Refused:
        """See `NodeLedger.reserve`."""
        if self._store is None:
            return _EMPTY
        granted = self._store.ledger.reserve(
            keys,
            owner,
            self._clock.now_s(),
            first=first,
            size_bytes=size_bytes,
            writer=writer,
        )
        self._carry_out()
        return granted

    def commit(self, put_id: str, checksums: Sequence[bytes]) -> int:
        """See `NodeLedger.commit`."""
        if self._store is None:
            return 0
        committed = self._store.ledger.commit(put_id, checksums, self._clock.now_s())
        self._carry_out()
        return committed

    async def lease(
        self, keys: Sequence[BlockKey], lease_s: float, wait_s: float, reader: WorkerIdentity
    ) -> BlockLease:
        """Keeps the leading blocks of a chain; what is on the disk is waited for, for at most `wait_s`."""
        store = self._store
        if store is None:
            return _NOTHING
        lease_s = min(lease_s, self._config.lease_s)
        lease = store.ledger.lease(keys, lease_s, self._clock.now_s(), reader=reader)
        self._carry_out()
        if lease.blocks:
            self._note_hit(keys[0])
        if store.ledger.loading(lease.lease_id):
            await self._await_disk(store, lease.lease_id, wait_s)
            return store.ledger.leased(lease.lease_id)
        return lease

    async def _await_disk(self, store: _Store, lease_id: str, wait_s: float) -> None:
        try:
            async with asyncio.timeout(wait_s):
                while store.ledger.loading(lease_id):
                    self._moved.clear()
                    await self._moved.wait()
        except TimeoutError:
            return  # what has arrived by now is worth having

    def _note_hit(self, root: BlockKey) -> None:
        """Counts texts by their first block. When there are too many, those that were asked for least are forgotten."""
        self._hits[root] += 1
        if len(self._hits) > 2 * _MAX_PREFIXES:
            self._hits = Counter(dict(self._hits.most_common(_MAX_PREFIXES)))

    def renew(self, lease_ids: Sequence[str], lease_s: float) -> list[str]:
        """Prolongs leases; returns those that are over."""
        if self._store is None:
            return list(lease_ids)
        ledger, now_s = self._store.ledger, self._clock.now_s()
        lease_s = min(lease_s, self._config.lease_s)
        return [name for name in lease_ids if not ledger.renew(name, lease_s, now_s)]

    def release(self, lease_ids: Sequence[str]) -> None:
        """Readers are done."""
        if self._store is not None:
            for lease_id in lease_ids:
                self._store.ledger.release(lease_id)

    def corrupt(self, keys: Sequence[BlockKey]) -> None:
        """A reader found other bytes than were put."""
        if self._store is not None:
            dropped = self._store.ledger.drop(keys)
            _log.error("blocks of the pool were corrupt and are dropped", blocks=dropped)

    async def flush(self, selection: Selection) -> int:
        """Gives up what `selection` covers, here at once and on other nodes with their next renewal."""
        if self._store is None:
            return 0
        await self._store.registrar.flush(selection)
        return self._store.ledger.flush(selection)

    def sweep(self) -> None:
        """Ends what is over; several times per second."""
        if self._store is not None:
            self._store.ledger.sweep(self._clock.now_s())
            self._carry_out()

    async def publish(self) -> None:
        """Tells the directory what has changed."""
        if self._store is not None:
            await self._store.registrar.publish(self.state())

    async def renew_lease(self) -> None:
        """Says to the directory that this node lives; three times per lease."""
        if self._store is not None:
            await self._store.registrar.renew(self.state())

    def state(self) -> NodeState:
        """As the directory is told."""
        usage = self.usage()
        slot_bytes = 0 if self._store is None else self._store.slab.slot_bytes
        return NodeState(
            node=self.identity,
            address=self._config.advertise_address or self._address,
            failure_domain=self._config.failure_domain,
            free_bytes=usage.slots_free * slot_bytes,
            capacity_bytes=usage.slots_total * slot_bytes,
            sick=self._store is not None and self._store.ledger.refuses is not None,
        )

    def usage(self) -> NodeUsage:
        """Counts so far."""
        return (
            NodeUsage(slots_total=0, slots_free=0)
            if self._store is None
            else self._store.ledger.usage()
        )

    @property
    def slot_bytes(self) -> int:
        """Of a slot; 0 before a worker came."""
        return 0 if self._store is None else self._store.slab.slot_bytes

    @property
    def directory_reachable(self) -> bool:
        """Whether the directory answered when it was last asked."""
        return self._store is not None and self._store.registrar.reachable

    def hottest(self, most: int) -> list[tuple[BlockKey, int]]:
        """First blocks of the texts that were asked for most often, with how often."""
        return self._hits.most_common(most)

    async def close(self) -> None:
        """Takes no new blocks, says good-bye to the directory, lets go of memory and disk."""
        store = self._store
        if store is None:
            return
        store.ledger.refuse(RefusalReason.DRAINING)
        await store.registrar.retire(self.state())
        if store.mover is not None:
            await asyncio.to_thread(store.mover.close)
        await asyncio.to_thread(store.slab.close)

    def check_integrity(self) -> None:
        """Raises InvariantError if the ledger contradicts itself."""
        if self._store is not None:
            self._store.ledger.check_integrity()

    def _carry_out(self) -> None:
        store = self._store
        if store is not None and store.mover is not None:
            actions = store.ledger.take_actions()
            if actions:
                store.mover.carry_out(actions)

    def _on_moved(self, action: Demote | Promote, succeeded: bool) -> None:
        """On the mover's thread."""
        self._loop.call_soon_threadsafe(self._note_moved, action, succeeded)

    def _note_moved(self, action: Demote | Promote, succeeded: bool) -> None:
        assert self._store is not None
        ledger, now_s = self._store.ledger, self._clock.now_s()
        if not succeeded:
            ledger.io_failed(action, now_s)
        elif isinstance(action, Demote):
            ledger.written(action, now_s)
        else:
            ledger.loaded(action)
        self._carry_out()
        self._moved.set()
