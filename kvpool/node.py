"""The pool node of one host: ledger, slab, disk and directory joined. One owner, on one event loop.

It does not know how large a block is before a worker has come: the first to attach decides the size of the slots, and later ones
with larger blocks are refused by the field's name.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from baton.blocks import BlockChanges
from baton.clock import Clock
from baton.config.schema import PoolConfig
from baton.errors import IncompatibleError
from baton.ids import BlockKey, WorkerIdentity
from baton.layout import KvLayout
from baton.telemetry.logs import get_logger
from kvpool.accounts import Allowance
from kvpool.hot_prefixes import HotPrefixes
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
from kvpool.ports import Directory
from kvpool.registrar import Registrar
from kvpool.store import NodeStore, OpenDisk, StorePlan
from kvpool.tenant_book import TenantBook

_NOTHING = BlockLease(lease_id="")
_EMPTY = Refused(reason=RefusalReason.SICK, detail="no worker has attached yet")

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


class PoolNode:
    """Not thread-safe: methods are called on the event loop that made it.

    Args:
        config: Of the pool; `memory_bytes` is decided.
        identity: This start of the node.
        address: Where its service answers, as the directory is told.
        region_path: Unix socket for the slab's descriptor.
        directory: Of the whole pool.
        clock: Puts, leases and the node's own lease run on it.
        open_disk: Opens the SSD tier; None without one.

    Attributes:
        tenants: What is known of them besides their blocks.
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
        open_disk: OpenDisk | None = None,
    ) -> None:
        assert config.memory_bytes is not None, "decided by whoever starts the node"
        self.identity = identity
        self._config = config
        self._address = address
        self._directory = directory
        self._clock = clock
        self._plan = StorePlan(
            config=config,
            memory_bytes=config.memory_bytes,
            region_path=region_path,
            identity=identity,
            open_disk=open_disk,
        )
        self._loop = asyncio.get_running_loop()
        self._store: NodeStore | None = None
        self._registrar: Registrar | None = None
        self._prefixes = HotPrefixes()
        self.tenants = TenantBook(Allowance(max_bytes=config.tenant_bytes))

    def attach(self, worker: WorkerIdentity, layout: KvLayout) -> Welcome:
        """Lets a worker of this host map the slab, which is made for the first of them.

        Raises:
            IncompatibleError: Its blocks are larger than the slots.
            ConfigError: Not one block fits the memory.
            OutOfMemoryError: The machine has not got the memory.
        """
        store = self._store
        if store is None:
            store = self._open(layout.page_bytes)
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

    def _open(self, slot_bytes: int) -> NodeStore:
        store = self._store = NodeStore(self._plan, slot_bytes, self._clock)
        for tenant, allowance in self.tenants.allowances.items():
            store.ledger.allow(tenant, allowance)
        self._registrar = Registrar(
            self._directory, store.ledger, lease_s=self._config.node_lease_s
        )
        return store

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
        store = self._store
        if store is None:
            return _EMPTY
        granted = store.ledger.reserve(
            keys,
            owner,
            self._clock.now_s(),
            first=first,
            size_bytes=size_bytes,
            writer=writer,
        )
        store.carry_out()
        return granted

    def commit(self, put_id: str, checksums: Sequence[bytes]) -> int:
        """See `NodeLedger.commit`."""
        store = self._store
        if store is None:
            return 0
        committed = store.ledger.commit(put_id, checksums, self._clock.now_s())
        store.carry_out()
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
        store.carry_out()
        if lease.blocks:
            self._prefixes.note(keys[0])
        if store.ledger.loading(lease.lease_id):
            await store.loaded(lease.lease_id, wait_s)
            return store.ledger.leased(lease.lease_id)
        return lease

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

    def allow(self, allowances: Mapping[str, Allowance]) -> None:
        """From now on tenants may take this; who is not named, what is usual. What one has too much goes when it next puts."""
        changed = self.tenants.allow(allowances)
        if self._store is not None:
            for tenant, allowance in changed.items():
                self._store.ledger.allow(tenant, allowance)

    async def flush(self, selection: Selection) -> int:
        """Gives up what `selection` covers, here at once and on other nodes with their next renewal."""
        if self._store is None or self._registrar is None:
            return 0
        await self._registrar.flush(selection)
        return self._store.ledger.flush(selection)

    def sweep(self) -> None:
        """Ends what is over; several times per second."""
        if self._store is not None:
            self._store.ledger.sweep(self._clock.now_s())
            self._store.carry_out()

    def take_changes(self) -> BlockChanges | None:
        """Which blocks came to be held and which were given up since the last call; None for none."""
        return None if self._store is None else self._store.ledger.take_changes()

    async def publish(self) -> None:
        """Tells the directory what has changed."""
        if self._registrar is not None:
            await self._registrar.publish(self.state())

    async def renew_lease(self) -> None:
        """Says to the directory that this node lives; three times per lease."""
        if self._registrar is not None:
            await self._registrar.renew(self.state())

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
        if self._store is None:
            return NodeUsage(slots_total=0, slots_free=0)
        usage = self._store.ledger.usage()
        return replace(usage, owners=self.tenants.complete(usage.owners))

    @property
    def slot_bytes(self) -> int:
        """Of a slot; 0 before a worker came."""
        return 0 if self._store is None else self._store.slab.slot_bytes

    @property
    def directory_reachable(self) -> bool:
        """Whether the directory answered when it was last asked."""
        return self._registrar is not None and self._registrar.reachable

    def hottest(self, most: int) -> list[tuple[BlockKey, int]]:
        """First blocks of the texts that were asked for most often, with how often."""
        return self._prefixes.hottest(most)

    async def close(self) -> None:
        """Takes no new blocks, says good-bye to the directory, lets go of memory and disk."""
        if self._store is None or self._registrar is None:
            return
        self._store.ledger.refuse(RefusalReason.DRAINING)
        await self._registrar.retire(self.state())
        await self._store.close()

    def check_integrity(self) -> None:
        """Raises InvariantError if the ledger contradicts itself."""
        if self._store is not None:
            self._store.ledger.check_integrity()
