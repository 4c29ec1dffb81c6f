"""A node's ledger with a shell around it that has real bytes: what is in each slot and extent, who reads it,
who writes it.
"""

import math
from dataclasses import dataclass, field, replace

from baton.ids import BlockKey, Incarnation, WorkerId, WorkerIdentity
from baton.rpc.block_feed import HeldBlocks
from kvpool.messages import (
    BlockLease,
    Demote,
    DiskBlock,
    Erase,
    Owner,
    Promote,
    PutGrant,
    Selection,
    Stored,
)
from kvpool.node.ledger import NodeLedger, NodeLimits

SLOT_BYTES = 1000


def key(text: str, position: int) -> BlockKey:
    """The block at `position` of a text; texts share the blocks of the beginning that they share."""
    return BlockKey(text[: position + 1].encode().ljust(16, b"."))


def chain(text: str, first: int = 0) -> list[BlockKey]:
    """The blocks of a text, one per letter."""
    return [key(text, position) for position in range(first, len(text))]


def owner(tenant: str = "t", *, scope: str = "", model: str = "m") -> Owner:
    return Owner(tenant=tenant, scope=scope or tenant, model=model)


def worker(name: str) -> WorkerIdentity:
    return WorkerIdentity(worker_id=WorkerId(name), incarnation=Incarnation(1))


@dataclass
class Writer:
    """A put as its writer knows it."""

    grant: PutGrant
    gives_up_s: float
    worker: WorkerIdentity


@dataclass
class Reader:
    """A lease as its reader knows it, and those of its blocks that were flushed or found corrupt meanwhile."""

    lease: BlockLease
    until_s: float
    worker: WorkerIdentity
    text: str
    gone: set[BlockKey] = field(default_factory=set)


@dataclass
class World:
    """What the ledger says is tried out on bytes. Each `check` compares everything that can be seen."""

    limits: NodeLimits
    on_disk: tuple[DiskBlock, ...] = ()
    now_s: float = 100.0
    slots: dict[int, bytes] = field(default_factory=dict)
    extents: dict[int, bytes] = field(default_factory=dict)
    writers: dict[str, Writer] = field(default_factory=dict)
    readers: dict[str, Reader] = field(default_factory=dict)
    moves: list[Demote | Promote] = field(default_factory=list)
    epochs: dict[tuple[str, int], int] = field(default_factory=dict)
    pinned: set[BlockKey] = field(default_factory=set)
    directory: dict[BlockKey, Stored] = field(default_factory=dict)

    def __post_init__(self):
        self.ledger = NodeLedger(self.limits, "n", self.on_disk)
        self.router = HeldBlocks()
        for block in self.on_disk:
            self.extents[block.extent] = bytes_of(block.key)
            self.epochs["extent", block.extent] = block.epoch

    def reserve(
        self, text: str, tenant: str = "t", *, first: int = 0, by: str = "w", fetched: bool = False
    ):
        outcome = self.ledger.reserve(
            chain(text, first),
            owner(tenant),
            self.now_s,
            first=first,
            writer=worker(by),
            fetched=fetched,
        )
        if isinstance(outcome, PutGrant) and outcome.items:
            for item in outcome.items:
                self._taken("slot", item.slot, item.epoch)
            gives_up_s = math.inf if fetched else self.now_s + 2 * self.limits.put_timeout_s
            writer = worker("another node") if fetched else worker(by)
            self.writers[outcome.put_id] = Writer(outcome, gives_up_s, writer)
        self.run()
        return outcome

    def write(self, put_id: str):
        """The writer writes, perhaps too late."""
        for item in self.writers[put_id].grant.items:
            self.slots[item.slot] = bytes_of(item.key)

    def commit(self, put_id: str, *, skip: int | None = None, owners=None, before=()) -> int:
        self.write(put_id)
        items = self.writers.pop(put_id).grant.items
        sums = [b"" if at == skip else bytes_of(item.key) for at, item in enumerate(items)]
        count = self.ledger.commit(put_id, sums, self.now_s, owners, before=before)
        self.run()
        return count

    def put(self, text: str, tenant: str = "t", *, first: int = 0) -> int:
        """Reserves, writes and commits. Returns how many blocks."""
        outcome = self.reserve(text, tenant, first=first)
        if not isinstance(outcome, PutGrant) or not outcome.items:
            return 0
        return self.commit(outcome.put_id)

    def abandon(self, put_id: str):
        del self.writers[put_id]
        self.ledger.abandon(put_id)
        self.run()

    def forget(self, put_id: str):
        """Another node's writes are not waited for any more, and go on."""
        self.ledger.forget(put_id)
        self.run()

    def lease(
        self, text: str, lease_s: float = 30.0, *, by: str = "r", more: bool = False
    ) -> BlockLease:
        lease = self.ledger.lease(chain(text), lease_s, self.now_s, reader=worker(by), more=more)
        if lease.lease_id:
            self.readers[lease.lease_id] = Reader(lease, self.now_s + lease_s, worker(by), text)
        self.run()
        return lease

    def extend(self, lease_id: str) -> BlockLease:
        lease = self.ledger.extend(lease_id, chain(self.readers[lease_id].text), self.now_s)
        self.run()
        return lease

    def release(self, lease_id: str):
        del self.readers[lease_id]
        self.ledger.release(lease_id)
        self.run()

    def gone(self, name: str):
        """A worker dies."""
        self.writers = {i: w for i, w in self.writers.items() if w.worker != worker(name)}
        self.readers = {i: r for i, r in self.readers.items() if r.worker != worker(name)}
        self.ledger.worker_gone(worker(name))
        self.run()

    def sweep(self, after_s: float = 0.0):
        self.now_s += after_s
        self.writers = {i: w for i, w in self.writers.items() if w.gives_up_s > self.now_s}
        self.readers = {i: r for i, r in self.readers.items() if r.until_s > self.now_s}
        self.ledger.sweep(self.now_s)
        self.run()

    def answer(self, index: int = 0, *, fails: bool = False):
        """The shell has copied, or could not."""
        action = self.moves.pop(index % len(self.moves))
        if fails:
            self.ledger.tier_moves.io_failed(action, self.now_s)
            if isinstance(action, Promote):
                self.pinned.discard(action.block.key)
        elif isinstance(action, Demote):
            assert self.slots[action.slot] == bytes_of(action.block.key)
            self.extents[action.block.extent] = self.slots[action.slot]
            self.ledger.tier_moves.written(action, self.now_s)
        else:
            assert self.extents[action.block.extent] == bytes_of(action.block.key)
            self.slots[action.slot] = self.extents[action.block.extent]
            self.ledger.tier_moves.loaded(action)
        self.run()

    def answer_all(self):
        for _ in range(10_000):
            if not self.moves:
                return
            self.answer()

    def run(self):
        """Takes the ledger's actions and tells routers and directory."""
        for action in self.ledger.take_actions():
            block = action if isinstance(action, Erase) else action.block
            if isinstance(action, Erase):
                self.extents.pop(action.extent, None)
                assert block.extent not in self._extents_in_use()
            elif isinstance(action, Demote):
                self._taken("extent", block.extent, block.epoch)
                self.moves.append(action)
            else:
                assert self.extents[block.extent] == bytes_of(block.key)
                assert action.slot not in self._slots_in_use()
                self.moves.append(action)
        self.check()

    def check(self):
        self.ledger.check_integrity()
        changes = self.ledger.take_changes()
        if changes is not None:
            self.router.apply(changes)
        told = self.ledger.take_replica_changes()
        if told is not None:
            assert not {stored.key for stored in told.stored} & set(told.removed)
            self.directory.update({stored.key: stored for stored in told.stored})
            for gone in told.removed:
                self.directory.pop(gone, None)
        self._check_seen()
        self._check_readers()

    def empty(self):
        """Everybody leaves: afterwards every place is free."""
        for put_id in list(self.writers):
            self.abandon(put_id)
        for lease_id in list(self.readers):
            self.release(lease_id)
        self.answer_all()
        self.flush()
        self.sweep(10 * self.limits.put_timeout_s)
        self.sweep(10 * self.limits.put_timeout_s)
        self.answer_all()
        usage = self.ledger.usage()
        assert (usage.slots_free, usage.ssd_blocks) == (usage.slots_total, 0)
        assert (usage.leases, usage.puts, usage.tenants) == (0, 0, 0)
        assert self.ledger.owners() == ()
        assert not self.directory

    def flush(self, **selection: str) -> int:
        before = set(self.directory)
        count = self.ledger.flush(Selection(**selection)).num_held
        after = {held for held in before if self.ledger.find(held) is not None}
        assert count == len(before - after)
        self.pinned &= after
        self._lost(before - after)
        self.run()
        return count

    def drop(self, dropped: list[BlockKey]):
        self.pinned -= set(dropped)
        self._lost(set(dropped))
        self.ledger.drop(dropped)
        self.run()

    def pin(self, text: str):
        held = [k for k in chain(text) if self.ledger.held([k])]
        assert self.ledger.pin(chain(text)) == len(held)
        self.pinned |= set(held)

    def unpin(self, text: str):
        self.pinned -= set(chain(text))
        self.ledger.unpin(chain(text))

    def _lost(self, keys: set[BlockKey]):
        for reader in self.readers.values():
            reader.gone |= keys

    def _check_seen(self):
        entries = list(self.ledger.take_stored())
        stored = {entry.key: entry for entry in entries}
        assert len(stored) == len(entries)
        assert stored == self.directory
        assert set(self.router._held) == set(stored)
        assert all(self.ledger.held([name]) == 1 for name in stored)
        assert self.pinned <= set(stored)

    def _check_readers(self):
        for lease_id, reader in self.readers.items():
            now = self.ledger.leased(lease_id)
            reader.lease = max(reader.lease, now, key=lambda lease: len(lease.blocks))
            for block in reader.lease.blocks:
                assert self.slots[block.slot] == bytes_of(block.key) == block.checksums
                assert block.key in reader.gone or block.key in self.directory
                assert self.epochs.get(("slot", block.slot), 0) <= block.epoch
                self.epochs["slot", block.slot] = block.epoch
        usage = self.ledger.usage()
        assert usage.slots_total - usage.slots_free <= self.limits.num_slots
        assert usage.ssd_blocks <= self.limits.num_extents

    def _taken(self, kind: str, index: int, epoch: int):
        """A place gets another block: nobody may be using it, and the epoch is new."""
        in_use = self._slots_in_use() if kind == "slot" else self._extents_in_use()
        assert index not in in_use
        assert epoch > self.epochs.get((kind, index), 0)
        self.epochs[kind, index] = epoch

    def _slots_in_use(self) -> set[int]:
        in_use = {item.slot for writer in self.writers.values() for item in writer.grant.items}
        in_use |= {b.slot for reader in self.readers.values() for b in reader.lease.blocks}
        return in_use | {move.slot for move in self.moves}

    def _extents_in_use(self) -> set[int]:
        return {move.block.extent for move in self.moves}


def bytes_of(block: BlockKey) -> bytes:
    """What a block's bytes are; its checksum too."""
    return b"bytes of " + block


def limits(num_slots: int = 8, num_extents: int = 0, **others) -> NodeLimits:
    small = NodeLimits(
        num_slots=num_slots,
        num_extents=num_extents,
        slot_bytes=SLOT_BYTES,
        eviction="lru",
        ssd_eviction="lru",
        put_timeout_s=10.0,
    )
    return replace(small, **others)


def world(num_slots: int = 8, num_extents: int = 0, **others) -> World:
    return World(limits(num_slots, num_extents, **others))


def two_tiers(**others) -> World:
    """Four slots, of which two are to be free, and a disk."""
    return world(4, 8, high_watermark=0.5, low_watermark=0.5, **others)
