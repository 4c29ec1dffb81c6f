"""The pool node of one host: joins ledger, slab, disk, directory and other nodes, on one event loop.

It does not know how large a block is before a worker has come: the first to attach decides the size of the slots, and
later ones with larger blocks are refused by the field's name.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from baton.blocks import BlockChanges
from baton.clock import Clock
from baton.config.schema import PoolConfig
from baton.errors import (
    IncompatibleError,
    OverloadedError,
    PoolUnavailableError,
    UnavailableError,
)
from baton.ids import BlockKey, WorkerIdentity
from baton.layout import KvLayout
from baton.story import StoryEntry
from baton.telemetry.logs import get_logger
from kvpool.messages import (
    Allowance,
    BlockLease,
    NodeState,
    NodeStatus,
    NodeUsage,
    Owner,
    OwnerUsage,
    PutGrant,
    PutRefusalReason,
    PutRefused,
    Selection,
)
from kvpool.node.membership import DirectoryClient, Membership
from kvpool.node.quotas import QuotaShares, TenantRecords
from kvpool.node.read_frequency import HotPrefixes
from kvpool.node.slab import SlabOffer
from kvpool.node.storage import NodeStorage, OpenDisk, StorageConfig
from kvpool.ports import Directory, Peers

_NOTHING = BlockLease(lease_id="")
_EMPTY = PutRefused(reason=PutRefusalReason.SICK, detail="no worker has attached yet")
_UNTOLD = "the pool's directory did not take the flush: other nodes have not been told of it"
_UNREMEMBERED = (
    "no worker has attached since the node started: what its disk holds is flushed when one does,"
    " but not if the node starts again before that"
)

JoinPeers = Callable[[NodeStorage], Peers | None]
"""Joins the other nodes of the pool; None where no transfer backend to them works."""

_log = get_logger(__name__)


class PoolNode:
    """Not thread-safe: methods are called on the event loop that made it.

    Args:
        config: Of the pool; `memory_bytes` is decided.
        identity: This start of the node.
        address: Where other nodes reach it, as the directory is told.
        region_path: Unix socket for the slab's descriptor.
        directory: Of the whole pool.
        clock: Puts, leases and the node's own lease run on it.
        open_disk: Opens the SSD tier; None without one.
        join_peers: Joins the other nodes, once there are blocks to share; None for a node alone.

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
        join_peers: JoinPeers | None = None,
    ) -> None:
        assert config.memory_bytes is not None, "decided where the node is started"
        self.identity = identity
        self._config = config
        self._address = address
        self._directory = directory
        self._clock = clock
        self._storage_config = StorageConfig(
            pool=config,
            memory_bytes=config.memory_bytes,
            region_path=region_path,
            identity=identity,
            open_disk=open_disk,
        )
        self._loop = asyncio.get_running_loop()
        self._store: NodeStorage | None = None
        self._member: Membership | None = None
        self._flushed_before: list[Selection] = []  # there was a store
        self._health = MemoryHealth()
        self._reading: Reading | None = None
        self._prefixes = HotPrefixes()
        self._join_peers = join_peers
        self._peers: Peers | None = None
        self.tenants = TenantRecords(Allowance(max_bytes=config.tenant_bytes))

    def attach(self, worker: WorkerIdentity, layout: KvLayout) -> SlabOffer:
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
        return store.slab.offer(partial(self._on_gone, worker))

    def _open(self, slot_bytes: int) -> NodeStorage:
        store = self._store = NodeStorage(self._storage_config, slot_bytes, self._clock)
        self._member = Membership(
            store.ledger,
            DirectoryClient(
                self._directory, store.ledger, store, lease_s=self._config.node_lease_s
            ),
            QuotaShares(self.identity, self.tenants, slot_bytes),
            lease_s=self._config.node_lease_s,
            clock=self._clock,
        )
        self._member.share_quotas()
        if self._flushed_before:
            store.carry_out_flushes(self._flushed_before, store.flushes_carried_out)
        self._peers = None if self._join_peers is None else self._join_peers(store)
        self._reading = Reading(store, self._peers, self._prefixes, self._clock)
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
    ) -> PutGrant | PutRefused:
        """See `NodeLedger.reserve`."""
        store = self._store
        if store is None:
            return _EMPTY
        now_s = self._clock.now_s()
        granted = store.ledger.reserve(
            keys, owner, now_s, first=first, size_bytes=size_bytes, writer=writer
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
        """Keeps the leading blocks of a chain; what is on the disk, or on another node, is waited for,
        for at most `wait_s`.
        """
        if self._reading is None:
            return _NOTHING
        return await self._reading.lease(keys, min(lease_s, self._config.lease_s), wait_s, reader)

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
            self._health.corrupt(dropped, self._clock.now_s())
            _log.error("blocks of the pool were corrupt and are dropped", blocks=dropped)

    def allow(self, allowances: Mapping[str, Allowance]) -> None:
        """From now on tenants may take this on all nodes; a tenant that is not named, what is usual.
        What one has too much goes.
        """
        self.tenants.allow(allowances)
        if self._store is not None and self._member is not None:
            self._member.share_quotas()
            self._store.carry_out()

    async def flush(self, selection: Selection) -> int:
        """Gives up what `selection` covers, here at once and on other nodes with their next renewal. Returns how many
        blocks were held here, once none of them can come back from the disk.

        Raises:
            UnavailableError: The disk has not recorded it, so that a restart may bring blocks back; or other nodes have
                not been told. Says which of it, or both; the blocks are given up here all the same.
        """
        if self._store is None or self._member is None:
            return await self._flush_unopened(selection)
        faults = [] if await self._member.flush(selection) else [_UNTOLD]
        num_held = 0
        try:
            num_held = await self._store.flush(selection)
        except OSError as error:
            faults.append(
                f"the blocks are flushed until the node starts again: its disk fails ({error})"
            )
        if faults:
            raise UnavailableError("; ".join(faults))
        return num_held

    async def _flush_unopened(self, selection: Selection) -> int:
        """A disk without a worker is not open: what it holds goes when it is, or with the first renewal of a later
        start, if the directory remembers.
        """
        self._flushed_before.append(selection)
        faults, remembers = [], self._config.directory != "memory"
        try:
            await self._directory.flush(selection)
        except (PoolUnavailableError, OverloadedError):
            faults, remembers = [_UNTOLD], False
        if self._storage_config.open_disk is not None and not remembers:
            faults.append(_UNREMEMBERED)
        if faults:
            raise UnavailableError("; ".join(faults))
        return 0

    def sweep(self) -> None:
        """Ends what is over; several times per second."""
        if self._store is not None:
            now_s = self._clock.now_s()
            self._judge(self._store, now_s)
            self._store.ledger.sweep(now_s)
            self._store.carry_out()
        if self._peers is not None:
            self._peers.tick()

    def _judge(self, store: NodeStorage, now_s: float) -> None:
        """A node whose memory cannot be trusted takes no new blocks, its own workers' or others';
        what it holds is verified anyway.
        """
        sick, refuses = self._health.sick(now_s), store.ledger.refuses
        if sick and refuses is None:
            _log.error("too many blocks were altered in memory: the node takes no new ones")
            store.ledger.refuses = PutRefusalReason.SICK
        elif not sick and refuses is PutRefusalReason.SICK:
            store.ledger.refuses = None

    def take_changes(self) -> BlockChanges | None:
        """Which blocks came to be held and which were given up since the last call; None for none."""
        return None if self._store is None else self._store.ledger.take_changes()

    async def register(self) -> None:
        """Keeps the directory true of this node: its lease, where that is due, and what has changed.
        Several times per second.
        """
        if self._store is not None and self._member is not None:
            await self._member.renew(self.state())
            self._store.carry_out()
            await self._member.publish(self.state())

    def state(self) -> NodeState:
        """As the directory is told."""
        usage, store = self.usage(), self._store
        slot_bytes = 0 if store is None else store.slab.slot_bytes
        spare = 0 if store is None else store.ledger.spare_slots(self._clock.now_s())
        return NodeState(
            node=self.identity,
            address=self._address,
            failure_domain=self._config.failure_domain,
            free_bytes=spare * slot_bytes,
            capacity_bytes=usage.slots_total * slot_bytes,
            sick=store is not None and store.ledger.refuses is not None,
        )

    def usage(self) -> NodeUsage:
        """Counts so far."""
        if self._store is None:
            return NodeUsage(slots_total=0, slots_free=0)
        return self._store.ledger.usage()

    def owners(self) -> tuple[OwnerUsage, ...]:
        """What each tenant takes, may take, and found of what it asked for. There may be thousands:
        not for every tick.
        """
        held = () if self._store is None else self._store.ledger.owners()
        return self.tenants.complete(held)

    def story(self, key: BlockKey) -> tuple[Sequence[StoryEntry], float]:
        """What is remembered of a block, oldest first, and the time now on the same clock."""
        told = () if self._store is None else self._store.ledger.story(key.hex())
        return told, self._clock.now_s()

    def status(self, hottest: int) -> NodeStatus:
        """All that operators are told, with at most `hottest` of the first blocks that were asked for most often."""
        return NodeStatus(
            state=self.state(),
            usage=self.usage(),
            slot_bytes=self.slot_bytes,
            directory_reachable=self.directory_reachable,
            owners=self.owners(),
            hottest=tuple(self._prefixes.hottest(hottest)),
        )

    @property
    def slot_bytes(self) -> int:
        """Of a slot; 0 before a worker came."""
        return 0 if self._store is None else self._store.slab.slot_bytes

    @property
    def directory_reachable(self) -> bool:
        """Whether the directory answered when it was last asked."""
        return self._member is not None and self._member.reachable

    async def close(self) -> None:
        """Takes no new blocks, retires from the directory, closes memory and disk."""
        if self._store is None or self._member is None:
            return
        self._store.ledger.refuses = PutRefusalReason.DRAINING
        await self._member.retire(self.state())
        if self._peers is not None:
            await self._peers.close()
        await self._store.close()

    def check_integrity(self) -> None:
        """Raises InvariantError if the ledger contradicts itself."""
        if self._store is not None:
            self._store.ledger.check_integrity()
        if self._peers is not None:
            self._peers.check_integrity()


class Reading:
    """For one event loop.

    Args:
        store: The node's blocks.
        peers: Bring those of other nodes; None for a node alone.
        prefixes: Counts what is asked for.
        clock: Monotonic.
    """

    def __init__(
        self, store: NodeStorage, peers: Peers | None, prefixes: HotPrefixes, clock: Clock
    ) -> None:
        self._store = store
        self._peers = peers
        self._prefixes = prefixes
        self._clock = clock

    async def lease(
        self, keys: Sequence[BlockKey], lease_s: float, wait_s: float, reader: WorkerIdentity
    ) -> BlockLease:
        """See `PoolNode.lease`. What is held here is leased before anything is waited for."""
        store, until_s = self._store, self._clock.now_s() + wait_s
        held = store.ledger.held(keys)
        if keys and not held:
            await self._bring(keys, held, until_s)
        more = self._peers is not None and 0 < held < len(keys)
        lease = store.ledger.lease(keys, lease_s, self._clock.now_s(), reader=reader, more=more)
        store.carry_out()
        if more:
            await self._bring(keys, held, until_s)
            lease = store.ledger.extend(lease.lease_id, keys, self._clock.now_s())
        if store.ledger.loading(lease.lease_id):
            await store.loaded(lease.lease_id, until_s - self._clock.now_s())
            lease = store.ledger.leased(lease.lease_id)
        if lease.blocks:
            self._prefixes.note(keys[0])
            if self._peers is not None:
                self._peers.read(keys[: len(lease.blocks)])
        return lease

    async def _bring(self, keys: Sequence[BlockKey], held: int, until_s: float) -> None:
        """Has other nodes send what comes after the first `held` blocks, until `until_s`."""
        if self._peers is not None:
            await self._peers.bring(keys, held, max(0.0, until_s - self._clock.now_s()))


_MOST_BLOCKS = 16
_WINDOW_S = 600.0


class MemoryHealth:
    """Counts blocks that readers found altered. Pure, one owner.

    A block now and then is a miss; many of them mean faulty memory, or a process that writes where it should not.
    """

    def __init__(self) -> None:
        self._found_s: deque[float] = deque(maxlen=_MOST_BLOCKS)

    def corrupt(self, blocks: int, now_s: float) -> None:
        """So many blocks were found to have other bytes than were put."""
        self._found_s.extend([now_s] * min(blocks, _MOST_BLOCKS))

    def sick(self, now_s: float) -> bool:
        """Whether there were too many of late."""
        return len(self._found_s) == _MOST_BLOCKS and now_s - self._found_s[0] < _WINDOW_S
