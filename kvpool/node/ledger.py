"""A pool node's ledger: what lies where, which worker may write and read it, whose it is, and what is evicted.

    writer   reserve ──▶ slots to write to ──▶ commit ──▶ held           in memory, then on the disk, then gone
    reader   lease   ──▶ blocks that stay where they are ──▶ release
    shell    take_actions ──▶ moves between memory and disk, answered to `tier_moves`
             take_changes, take_replica_changes ──▶ routers, the directory

Nothing here touches a byte of a block. The states of a slot, and the table of their transitions, are in
`kvpool.node.block_store`, what is moved between memory and disk in `kvpool.node.tier_moves`. What names slots,
and for how long:

    put      slots RESERVED until commit or abandon; too late, it is a *zombie*: its writer may be dead, or stopped and about to
             go on. Its blocks are forgotten at once, its slots are QUARANTINED until the writer says that it has
             stopped, is known to be gone, or as much time again has passed. What another node writes has no time of its
             own: the fetcher knows when that node has stopped (`kvpool.peers.receiver`), and ends the put then; where it
             gives up before, the put is a zombie until then.
    lease    slots in use until it is released, or its time is over
    move     between memory and disk: both slots in use until the shell has answered, whatever happens to the block meanwhile

A slot or extent is used again only once nothing can be reading or writing it any more, and then under another epoch.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain, count, repeat

from baton.blocks import BlockChanges
from baton.errors import InvariantError
from baton.ids import BlockKey, WorkerIdentity
from baton.story import StoryEntry
from kvpool.eviction.select import POLICIES
from kvpool.messages import (
    Allowance,
    BlockLease,
    DirectoryChanges,
    DiskBlock,
    Erase,
    HeldBlock,
    NodeAction,
    NodeUsage,
    Owner,
    OwnerUsage,
    PutGrant,
    PutItem,
    PutRefusalReason,
    PutRefused,
    Selection,
    Stored,
    Tier,
)
from kvpool.node.accounts import Account, Accounts, Billing, Counts
from kvpool.node.block_store import BlockStore, Slot, SlotState
from kvpool.node.evictor import Evictor
from kvpool.node.read_frequency import ReadFrequency
from kvpool.node.tier_moves import TierMoves

_S = SlotState
_RESERVED = SlotState.RESERVED  # a module constant: looked up for every block
_NOTHING_HELD = BlockLease(lease_id="")
_NOTHING_TO_WRITE = PutGrant(put_id="", items=())


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLimits:
    """Sizes and durations; see `PoolConfig`.

    Attributes:
        num_slots: Of the memory.
        slot_bytes: Of each; larger blocks are not taken.
        num_extents: Of the disk, each as large as a slot; 0 without a disk.
        eviction: Name of the policy of the memory (`kvpool.eviction.select`).
        ssd_eviction: And of the disk.
        high_watermark: Share of the slots above which blocks are moved to the disk before room is asked for.
        low_watermark: Share at which that stops.
        put_timeout_s: What a writer may take.
        idle_s: A tenant that has neither put nor read for this long has no share that others must leave it.
        usual: What a tenant may take for which nothing else is configured.
    """

    num_slots: int
    slot_bytes: int
    num_extents: int = 0
    eviction: str = "cost"
    ssd_eviction: str = "cost"
    high_watermark: float = 0.95
    low_watermark: float = 0.9
    put_timeout_s: float = 10.0
    idle_s: float = 600.0
    usual: Allowance = field(default_factory=Allowance)


@dataclass(frozen=True, slots=True, kw_only=True)
class FlushedBlocks:
    """What a flush has given up.

    Attributes:
        num_held: Blocks that were held, in whichever tier.
        erased: Of each that was on the disk or on its way there, and of all whose extents wait for the end of a move:
            the ledger has actions for those only then.
    """

    num_held: int
    erased: tuple[Erase, ...]


@dataclass(slots=True, eq=False)
class _Put:
    """Slots to be written, in the order of the grant; a flush takes some away: those are quarantined.

    `deadline_s` is when it becomes a zombie; of a zombie, when its slots are free. What another node writes has none.
    `flushed` came while that node wrote: whose the blocks are is known only once they are committed. With `only_cold` a
    quota that turns out to have no room for them has none.
    """

    put_id: str
    slots: list[Slot]
    deadline_s: float
    writer: WorkerIdentity | None = None
    zombie: bool = False
    fetched: bool = False
    only_cold: bool = False
    flushed: list[Selection] = field(default_factory=list)

    def is_flushed(self, owner: Owner) -> bool:
        """Whether blocks of `owner` were flushed since the put began."""
        return any(selection.covers(owner) for selection in self.flushed)


@dataclass(slots=True, eq=False)
class _Lease:
    """Slots that are read, in chain order, those too that are still filled from the disk. `grows`:
    the rest is being fetched.
    """

    lease_id: str
    slots: list[Slot]
    until_s: float
    lease_s: float
    reader: WorkerIdentity | None
    grows: bool


class NodeLedger:
    """Pure: no sockets, no clock, no bytes. Time comes in as `now_s` (monotonic seconds). Not thread-safe: one owner.

    What names a put or a lease that is over has no effect.

    Args:
        limits: Sizes and durations.
        name: Begins the ids of puts and leases; no other start of any node has it.
        on_disk: What the disk held when the node started.

    Attributes:
        counts: Of what happened; the shell adds what only it sees.
        read_frequency: How often blocks were read of late.
        tier_moves: What is on its way between memory and disk; the shell answers to it.
        num_flushes: That were carried out. What others held before one may be what it covers.
        refuses: Why the node takes no new blocks, because it is sick or will stop; None where it takes them. What it
            holds it serves all the same. A disk that fails does not belong here: `TierMoves.io_failed` says enough.

    Raises:
        InvariantError: `on_disk` has an extent or a block twice, or an extent that does not exist.
    """

    def __init__(self, limits: NodeLimits, name: str, on_disk: Sequence[DiskBlock] = ()) -> None:
        self._limits = limits
        self._name = name
        self.counts = Counts()
        self.read_frequency = ReadFrequency()
        self.num_flushes = 0
        self.refuses: PutRefusalReason | None = None
        self._accounts = Accounts(
            block_bytes=limits.slot_bytes,
            usual=limits.usual,
            policies=(POLICIES[limits.eviction], POLICIES[limits.ssd_eviction]),
        )
        first_epoch = 1 + max((block.epoch for block in on_disk), default=0)
        self._blocks = BlockStore(limits.num_slots, limits.num_extents, first_epoch)
        self._story = self._blocks.story
        self._evictor = Evictor(
            blocks=self._blocks,
            accounts=self._accounts,
            counts=self.counts,
            read_frequency=self.read_frequency,
            high_watermark=limits.high_watermark,
            low_watermark=limits.low_watermark,
            idle_s=limits.idle_s,
        )
        self.tier_moves = TierMoves(
            self._blocks, self._evictor, self.counts, has_disk=limits.num_extents > 0
        )
        self._put_numbers, self._lease_numbers = count(1), count(1)
        # All puts of workers have the same time, so of the open ones and of the zombies the oldest is due first.
        self._open_puts: dict[str, _Put] = {}
        self._zombies: dict[str, _Put] = {}
        self._fetched_puts: dict[str, _Put] = {}
        self._leases: dict[str, _Lease] = {}
        for block in on_disk:
            self._blocks.restore(block, self._accounts.billing(block.owner, block.size_bytes))

    def allow(self, tenant: str, allowance: Allowance | None) -> None:
        """Sets what a tenant may take; None for what is usual. What it has too much goes now, unless it is in use."""
        account = self._accounts.allow(tenant, allowance)
        if account is not None:
            self._evictor.trim(account, account.over)

    def reserve(
        self,
        keys: Sequence[BlockKey],
        owner: Owner,
        now_s: float,
        *,
        first: int = 0,
        size_bytes: int | None = None,
        writer: WorkerIdentity | None = None,
        fetched: bool = False,
        only_cold: bool = False,
        before: Sequence[BlockKey] = (),
    ) -> PutGrant | PutRefused:
        """Gives slots to write to for blocks that are neither held nor being written, for `put_timeout_s`.

        Evicts as needed, but none of `keys` and `before`, nor what other tenants have within their share. Where there is
        room for a part, the beginning of `keys` is granted.

        Args:
            keys: Consecutive blocks of one text.
            owner: Whose they are.
            now_s: The time.
            first: So many blocks of the text come before them.
            size_bytes: Of each; a whole slot where it is not given.
            writer: The worker that will write; its puts end with it (`worker_gone`).
            fetched: Another node will write. Such a put is never too late: the caller commits or abandons it, but not
                before that node has stopped writing (see `forget`). Where `owner` names no tenant, whose the blocks are is
                told with `commit`, and they count against no quota before.
            only_cold: Nothing that was read of late is evicted.
            before: Blocks of the text that come before them, without which they are of no use.

        Returns:
            The slots, none of them where everything is held already; or why nothing is taken.
        """
        self._story.now_s = now_s
        if self.refuses is not None:
            return PutRefused(reason=self.refuses)
        slot_bytes = self._limits.slot_bytes
        size_bytes = slot_bytes if size_bytes is None else size_bytes
        if size_bytes > slot_bytes:
            detail = f"block_bytes: {size_bytes} do not fit the pool's slots of {slot_bytes}"
            return PutRefused(reason=PutRefusalReason.TOO_LARGE, detail=detail)
        billing = self._accounts.billing(owner, size_bytes)
        billing.account.active_s = now_s
        wanted, held = self._split(keys, first)
        if not wanted:
            return _NOTHING_TO_WRITE
        if self._blocks.memory.num_free < len(wanted):
            held += self._readable(before)
        has_quota = bool(owner.tenant) or not fetched
        room = self._make_room(
            len(wanted), billing.account, held, now_s, has_quota=has_quota, only_cold=only_cold
        )
        if isinstance(room, PutRefused):
            return room
        blocks, memory = self._blocks, self._blocks.memory
        slots = [
            blocks.take(memory, key, billing, position, _RESERVED)
            for key, position in wanted[:room]
        ]
        put_id = f"{self._name}-p{next(self._put_numbers):x}"
        if fetched:
            self._fetched_puts[put_id] = _Put(
                put_id, slots, math.inf, fetched=True, only_cold=only_cold
            )
        else:
            deadline_s = now_s + self._limits.put_timeout_s
            self._open_puts[put_id] = _Put(put_id, slots, deadline_s, writer)
        self._story.record(f"reserved by {put_id}", slots)
        items = [PutItem(key=slot.key, slot=slot.index, epoch=slot.epoch) for slot in slots]
        return PutGrant(put_id=put_id, items=tuple(items))

    def commit(
        self,
        put_id: str,
        checksums: Sequence[bytes],
        now_s: float,
        owners: Sequence[Owner] | None = None,
        size_bytes: int | None = None,
        before: Sequence[BlockKey] = (),
    ) -> int:
        """The writer is done: its blocks are held from now on, unless that would leave no room in their owner's quota for
        those `before` them.

        Args:
            put_id: The put.
            checksums: One per slot of the grant, each with a 64-bit number per layer; empty where nothing was written.
            now_s: The time.
            owners: Whose the blocks turned out to be, where that was not known when they were reserved.
            size_bytes: Of each block, likewise.
            before: As for `reserve`.

        Returns:
            How many blocks are held now; 0 for a put that is over, or was too late.
        """
        self._expire_puts(now_s)
        put = self._close_put(put_id)
        num_written = 0
        if put is not None:
            with self._pinned(self._readable(before)):
                num_written = self._hold_written(put, checksums, owners, size_bytes)
        self.tier_moves.make_headroom(now_s)
        return num_written

    def abandon(self, put_id: str) -> None:
        """The writer has stopped, and what it wrote is void."""
        put = self._close_put(put_id)
        if put is not None:
            self._story.record(f"abandoned by {put_id}", put.slots)
            self._stop_writing(put.slots)

    def forget(self, put_id: str) -> None:
        """What another node writes is not wanted any more, and it may go on: the put is a zombie until it is abandoned.
        Its blocks may come by another way meanwhile.
        """
        put = self._fetched_puts.get(put_id)
        if put is not None and not put.zombie:
            self._make_zombie(put)

    def _split(
        self, keys: Sequence[BlockKey], first: int
    ) -> tuple[list[tuple[BlockKey, int]], list[Slot]]:
        """Blocks that are not here, with their positions; and the slots of those that are held."""
        memory, disk = self._blocks.memory.named, self._blocks.disk.named
        wanted: dict[BlockKey, int] = {}
        held = []
        for position, key in enumerate(keys, first):
            slot = memory.get(key) or disk.get(key)
            if slot is None:
                wanted.setdefault(key, position)
            elif slot.readable:
                held.append(slot)
        return list(wanted.items()), held

    def _make_room(
        self,
        wanted: int,
        account: Account,
        held: list[Slot],
        now_s: float,
        *,
        has_quota: bool,
        only_cold: bool,
    ) -> int | PutRefused:
        """Room for at most `wanted` blocks, without giving up any of `held`."""
        with self._pinned(held):
            room = self._within_quota(wanted, account) if has_quota else wanted
            if not room:
                detail = f"tenant {account.tenant} may hold {account.max_blocks} blocks here"
                return PutRefused(reason=PutRefusalReason.OVER_QUOTA, detail=detail)
            room = self._evictor.make_slots(room, account, now_s, only_cold=only_cold)
            return room or PutRefused(reason=PutRefusalReason.FULL, detail="all blocks are in use")

    def _readable(self, keys: Iterable[BlockKey]) -> list[Slot]:
        return [slot for key in keys if (slot := self._blocks.readable(key)) is not None]

    @contextmanager
    def _pinned(self, slots: Sequence[Slot]) -> Iterator[None]:
        """None of these is given up meanwhile."""
        for slot in slots:
            slot.users += 1
        try:
            yield
        finally:
            for slot in slots:
                self._blocks.release(slot)

    def _within_quota(self, wanted: int, account: Account) -> int:
        if account.max_blocks is None:
            return wanted
        excess = account.blocks + min(wanted, account.max_blocks) - account.max_blocks
        if excess > 0:
            self._evictor.trim(account, excess)
        return max(0, min(wanted, account.max_blocks - account.blocks))

    def _hold_written(
        self,
        put: _Put,
        checksums: Sequence[bytes],
        owners: Sequence[Owner] | None,
        size_bytes: int | None,
    ) -> int:
        """Blocks that were written are held, the other slots are free. Returns how many were written."""
        written, void = list[Slot](), put.slots[len(checksums) :]
        rebilled = list[Slot]()
        for slot, sums, owner in zip(put.slots, checksums, owners or repeat(None), strict=False):
            if sums and slot.state is _RESERVED and not put.is_flushed(owner or slot.billing.owner):
                slot.checksums = sums
                written.append(slot)
                if self._rebill(slot, owner, size_bytes):
                    rebilled.append(slot)
            else:
                void.append(slot)
        beyond = self._beyond_quota(rebilled, may_trim=not put.only_cold)
        void += beyond
        written = [slot for slot in written if slot not in beyond]
        self._story.record(f"void in {put.put_id}", void)
        self._stop_writing(void)
        self._blocks.make_resident(written)
        self._story.record(f"committed by {put.put_id}", written)
        if put.fetched:
            # The end of a text goes before its beginning.
            self._blocks.copies.update(dict.fromkeys(slot.key for slot in reversed(written)))
            self.counts.fetched_blocks += len(written)
        self.counts.stored_blocks += len(written)
        return len(written)

    def _rebill(self, slot: Slot, owner: Owner | None, size_bytes: int | None) -> bool:
        """Whether a block turns out to have another owner or size than it was reserved for; None is the same owner."""
        was: Billing = slot.billing
        billing = self._accounts.billing(owner or was.owner, size_bytes or was.size_bytes)
        if billing is was:
            return False
        self._blocks.rebill(slot, billing)
        return True

    def _beyond_quota(self, slots: Sequence[Slot], *, may_trim: bool) -> dict[Slot, None]:
        """Those of newly billed blocks, the last ones of each tenant, that its quota has no room for: with `may_trim`
        whatever else of it goes.
        """
        over = dict[Account, int]()
        for account in dict.fromkeys(slot.billing.account for slot in slots):
            if may_trim:
                self._evictor.trim(account, account.over)
            over[account] = account.over
        beyond = dict[Slot, None]()
        for slot in reversed(slots):
            account = slot.billing.account
            if over[account] > 0:
                over[account] -= 1
                beyond[slot] = None
        return beyond

    def _close_put(self, put_id: str) -> _Put | None:
        for puts in (self._open_puts, self._zombies, self._fetched_puts):
            if put_id in puts:
                return puts.pop(put_id)
        return None

    def _stop_writing(self, slots: Iterable[Slot]) -> None:
        """Nothing writes to these slots any more; blocks that were to lie there are not held."""
        for slot in slots:
            if slot.state is _RESERVED:
                self._blocks.give_up(slot)
            self._blocks.free(slot)

    def _expire_puts(self, now_s: float) -> None:
        """Puts that are too late become zombies, and those that have been it for long enough are over."""
        self._story.now_s = now_s
        while self._open_puts and (put := _first(self._open_puts)).deadline_s <= now_s:
            del self._open_puts[put.put_id]
            put.deadline_s = now_s + self._limits.put_timeout_s
            self._zombies[put.put_id] = put
            self._make_zombie(put)
        while self._zombies and (put := _first(self._zombies)).deadline_s <= now_s:
            del self._zombies[put.put_id]
            self._stop_writing(put.slots)

    def _make_zombie(self, put: _Put) -> None:
        put.zombie = True
        self.counts.zombie_puts += 1
        self._story.record(f"forgotten, {put.put_id} is too late", put.slots)
        for slot in put.slots:
            if slot.state is _RESERVED:
                self._blocks.give_up(slot)

    def lease(
        self,
        keys: Sequence[BlockKey],
        lease_s: float,
        now_s: float,
        *,
        reader: WorkerIdentity | None = None,
        more: bool = False,
    ) -> BlockLease:
        """Keeps the leading blocks of a chain where they are, for `lease_s`.

        Those on the disk are read into memory as far as there is room, and belong to the lease: `leased` has them once
        they are there, `loading` says how many are on their way.

        Args:
            keys: Blocks of a text, from its beginning.
            lease_s: For how long.
            now_s: The time.
            reader: The worker that reads; its leases end with it (`worker_gone`).
            more: The rest is being fetched, and `extend` will follow: what is missing then is a miss.
        """
        slots = self._use_leading(keys, now_s)
        num_ready = _num_readable(slots)
        self.counts.hit_blocks += num_ready
        self.read_frequency.read(keys[: len(slots)], now_s)
        if not (slots and more):
            self.counts.missed_blocks += len(keys) - len(slots)
        if not slots:
            return _NOTHING_HELD
        self._blocks.memory.touch(slots)
        lease_id = f"{self._name}-l{next(self._lease_numbers):x}"
        lease = _Lease(lease_id, slots, now_s + lease_s, lease_s, reader, more)
        self._leases[lease_id] = lease
        return _told(lease, num_ready)

    def extend(self, lease_id: str, keys: Sequence[BlockKey], now_s: float) -> BlockLease:
        """Adds to a lease what has come to be held of the rest of its chain; all that can be read by now.

        Args:
            lease_id: The lease.
            keys: The whole chain, as it was asked for.
            now_s: The time.
        """
        lease = self._leases.get(lease_id)
        if lease is None:
            return _NOTHING_HELD
        rest = keys[len(lease.slots) :]
        slots = self._use_leading(rest, now_s)
        self.counts.hit_blocks += _num_readable(slots)
        if lease.grows:
            self.counts.missed_blocks += len(rest) - len(slots)
            lease.grows = False
        self.read_frequency.read(rest[: len(slots)], now_s)
        self._blocks.memory.touch(slots)
        lease.slots += slots
        return _told(lease, _num_readable(lease.slots))

    def leased(self, lease_id: str) -> BlockLease:
        """What a lease holds that can be read by now."""
        lease = self._leases.get(lease_id)
        return _NOTHING_HELD if lease is None else _told(lease, _num_readable(lease.slots))

    def loading(self, lease_id: str) -> int:
        """Blocks of a lease that are still read from the disk."""
        lease = self._leases.get(lease_id)
        slots = lease.slots if lease is not None else ()
        return sum(slot.state is _S.FILLING for slot in slots)

    def renew(self, lease_id: str, lease_s: float, now_s: float) -> bool:
        """Has a lease end `lease_s` from now. Returns False if it is over."""
        lease = self._leases.get(lease_id)
        if lease is None:
            return False
        # The other leases are left to the next sweep: a worker renews hundreds at once.
        if lease.until_s <= now_s:
            self.release(lease_id)
            return False
        lease.until_s, lease.lease_s = now_s + lease_s, lease_s
        return True

    def release(self, lease_id: str) -> None:
        """The reader is done."""
        lease = self._leases.pop(lease_id, None)
        for slot in lease.slots if lease is not None else ():
            self._blocks.release(slot)

    def _expire_leases(self, now_s: float) -> None:
        """Ends leases whose time is over. All are looked at: they were given for different times."""
        for lease in [lease for lease in self._leases.values() if lease.until_s <= now_s]:
            self.release(lease.lease_id)

    def _use_leading(self, keys: Sequence[BlockKey], now_s: float) -> list[Slot]:
        """Where the leading blocks are read, or will soon be; each of the slots has one user more."""
        memory, disk = self._blocks.memory, self._blocks.disk
        chain = []
        for key in keys:
            slot = memory.named.get(key) or disk.readable(key)
            if slot is None or slot.state is _S.RESERVED:
                break
            chain.append(slot)
        for slot in chain:
            slot.users += 1
            slot.billing.account.active_s = now_s
        return self._load_missing(chain, now_s)

    def _load_missing(self, chain: list[Slot], now_s: float) -> list[Slot]:
        """The chain with slots of memory in the place of extents, as far as there is room;
        each has one user of the chain's.
        """
        on_disk = [slot for slot in chain if slot.tier is Tier.SSD]
        if not on_disk:
            return chain
        self._story.now_s = now_s
        room = self._evictor.make_slots(len(on_disk), on_disk[0].billing.account, now_s)
        self._blocks.disk.touch(on_disk[:room])
        beyond = on_disk[room:]
        end = chain.index(beyond[0]) if beyond else len(chain)
        for slot in chain[end:]:
            self._blocks.release(slot)
        return [
            self.tier_moves.load(slot) if slot.tier is Tier.SSD else slot for slot in chain[:end]
        ]

    def held(self, keys: Iterable[BlockKey]) -> int:
        """How many of the leading blocks of a chain are held, in whichever tier. Grants nothing and leaves no trace."""
        num_held = 0
        for key in keys:
            if self._blocks.readable(key) is None:
                break
            num_held += 1
        return num_held

    def find(self, key: BlockKey) -> Stored | None:
        """What is known of a block; None where it is not held."""
        return self._blocks.find(key)

    def take_stored(self) -> Iterator[Stored]:
        """Everything that is held now, for a directory that has forgotten this node; found bit by bit, since there may be
        millions of blocks. What changes before its turn is left out: `take_replica_changes` tells of it, and of nothing
        that was before.
        """
        blocks = self._blocks
        blocks.replicas.clear()
        held = [(tier.tier, list(tier.named)) for tier in (blocks.memory, blocks.disk)]
        return self._unchanged(held)

    def _unchanged(self, held: Sequence[tuple[Tier, list[BlockKey]]]) -> Iterator[Stored]:
        for tier, keys in held:
            for key in keys:
                stored = None if key in self._blocks.replicas else self._blocks.find(key)
                if stored is not None and stored.tier is tier:  # it may be in both
                    yield stored

    def drop(self, keys: Iterable[BlockKey]) -> int:
        """A reader found other bytes than were put: the blocks are held no longer. Returns how many were."""
        dropped = [key for key in dict.fromkeys(keys) if self._blocks.readable(key) is not None]
        for key in dropped:
            self._drop_from_tiers(key, "corrupt")
        self.counts.corrupt_blocks += len(dropped)
        return len(dropped)

    def flush(self, selection: Selection) -> FlushedBlocks:
        """Gives up all blocks that `selection` covers, pinned ones and those being put too.

        Readers of one may finish; its slot is free after that.
        """
        self.num_flushes += 1
        covered, disk = self._accounts.covered(selection), self._blocks.disk
        num_held, extents = 0, [slot for slot in disk.slots() if slot.state is _S.CONDEMNED]
        for tier in (self._blocks.memory, disk):
            for slot in [slot for slot in tier.named.values() if slot.billing in covered]:
                num_held += self._blocks.readable(slot.key) is not None
                extent = disk.named.get(slot.key)
                if extent is not None:
                    extents.append(extent)
                self._drop_from_tiers(slot.key, "flushed")
        for put in self._fetched_puts.values():
            put.flushed.append(selection)
        erased = [Erase(extent=slot.index, epoch=slot.epoch, key=slot.key) for slot in extents]
        return FlushedBlocks(num_held=num_held, erased=tuple(erased))

    def pin(self, keys: Iterable[BlockKey]) -> int:
        """Has those of the blocks that are held stay until they are unpinned or flushed. Returns how many these are."""
        held = [key for key in keys if self._blocks.readable(key) is not None]
        self._blocks.pinned.update(held)
        return len(held)

    def unpin(self, keys: Iterable[BlockKey]) -> None:
        """Blocks may be evicted again."""
        self._blocks.pinned.difference_update(keys)

    def _drop_from_tiers(self, key: BlockKey, why: str) -> None:
        for tier in (self._blocks.memory, self._blocks.disk):
            slot = tier.named.get(key)
            if slot is not None:
                self._story.record(why, (slot,))
                self._blocks.give_up(slot)

    def worker_gone(self, worker: WorkerIdentity) -> None:
        """A worker neither reads nor writes any more: its process is over, or its access was taken away."""
        for put in [put for put in self._puts() if put.writer == worker]:
            self.abandon(put.put_id)
        for lease in [lease for lease in self._leases.values() if lease.reader == worker]:
            self.release(lease.lease_id)

    def sweep(self, now_s: float) -> None:
        """Ends what is over; call it a few times per second, whether or not there is new work."""
        self._expire_puts(now_s)
        self._expire_leases(now_s)
        self.tier_moves.make_headroom(now_s)
        self._accounts.forget_empty()

    def take_actions(self) -> list[NodeAction]:
        """What the shell has to do now, in this order where it touches the same extent."""
        actions, self._blocks.actions = self._blocks.actions, []
        return actions

    def take_changes(self) -> BlockChanges | None:
        """Which blocks came to be held and which were given up since the last call, for routers; None for none."""
        return self._blocks.changes.take() if self._blocks.changes else None

    def take_replica_changes(self, limit: int = 4096) -> DirectoryChanges | None:
        """What the directory has yet to be told, at most `limit` blocks; None for nothing."""
        replicas = self._blocks.replicas
        return replicas.take(self._blocks.find, limit) if replicas else None

    def usage(self) -> NodeUsage:
        """Counts for metrics and `baton pool top`."""
        counts, memory = self.counts, self._blocks.memory
        return NodeUsage(
            slots_total=memory.num_slots,
            slots_free=memory.num_free,
            ssd_blocks=self._blocks.disk.num_taken,
            ssd_works=self.tier_moves.disk_works,
            leases=len(self._leases),
            puts=len(self._open_puts) + len(self._fetched_puts),
            hit_blocks=counts.hit_blocks,
            missed_blocks=counts.missed_blocks,
            stored_blocks=counts.stored_blocks,
            evicted_blocks=counts.evicted_blocks,
            demoted_blocks=counts.demoted_blocks,
            promoted_blocks=counts.promoted_blocks,
            zombie_puts=counts.zombie_puts,
            corrupt_blocks=counts.corrupt_blocks,
            fetched_blocks=counts.fetched_blocks,
            sent_blocks=counts.sent_blocks,
            failed_fetches=counts.failed_fetches,
            copies=len(self._blocks.copies),
            tenants=sum(account.blocks > 0 for account in self._accounts),
        )

    def spare_slots(self, now_s: float) -> int:
        """About how many slots of memory a copy of hot blocks may take: free ones and, where no disk makes room ahead of
        need, so that memory is full before long and stays so, those whose blocks were not read of late.
        """
        blocks, memory = self._blocks, self._blocks.memory
        if self.tier_moves.disk_works:
            return memory.num_free
        cold = memory.num_taken - len(blocks.pinned) - self.read_frequency.num_warm(now_s)
        return memory.num_free + max(0, cold)

    def owners(self) -> tuple[OwnerUsage, ...]:
        """What each tenant takes."""
        return self._accounts.usage()

    def story(self, key: str) -> tuple[StoryEntry, ...]:
        """What changed the state of a block lately, oldest first; `key` in hexadecimal. Reads are not told."""
        return self._story.story(key)

    def check_integrity(self) -> None:
        """Raises InvariantError if the ledger contradicts itself."""
        self._accounts.check_integrity()
        self._blocks.check_integrity(self._accounts)
        self.tier_moves.check_integrity()
        for put in self._puts():
            allowed = {_S.QUARANTINED} if put.zombie else {_S.QUARANTINED, _S.RESERVED}
            for slot in put.slots:
                if slot.state not in allowed:
                    raise InvariantError(
                        f"a slot of put {put.put_id} is {slot.state.name}",
                        story=self.story(slot.key.hex()),
                    )
        users = sum(len(lease.slots) for lease in self._leases.values())
        users += self.tier_moves.num_users
        tiers = (self._blocks.memory, self._blocks.disk)
        if users != sum(slot.users for tier in tiers for slot in tier.slots()):
            raise InvariantError("slots are in use for other reasons than leases and moves")

    def _puts(self) -> Iterator[_Put]:
        return chain(self._open_puts.values(), self._zombies.values(), self._fetched_puts.values())


def _first(puts: dict[str, _Put]) -> _Put:
    return next(iter(puts.values()))


def _num_readable(slots: Sequence[Slot]) -> int:
    """How many leading blocks can be read."""
    return next((at for at, slot in enumerate(slots) if not slot.readable), len(slots))


def _told(lease: _Lease, num_blocks: int) -> BlockLease:
    blocks = [
        HeldBlock(key=slot.key, slot=slot.index, epoch=slot.epoch, checksums=slot.checksums)
        for slot in lease.slots[:num_blocks]
    ]
    return BlockLease(lease_id=lease.lease_id, blocks=tuple(blocks), lease_s=lease.lease_s)
