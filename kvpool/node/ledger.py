"""A pool node's book of blocks: what lies where, who may write and read it, whose it is, and what goes when room is short.

    writer   reserve ──▶ places to write to ──▶ commit ──▶ held          in memory, then on the disk, then gone
    reader   lease   ──▶ blocks that stay where they are ──▶ release
    shell    take_actions ──▶ copies between memory and disk ──▶ written, loaded, io_failed
             take_changes, take_replica_changes ──▶ routers, the directory

Nothing here touches a byte of a block. A slot or extent is used again only once nobody can be reading or writing it any more, and
then under another epoch (`kvpool.node.block_store` has the states).
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from baton.blocks import BlockChanges
from baton.errors import InvariantError
from baton.ids import BlockKey, WorkerIdentity
from kvpool.eviction.select import POLICIES
from kvpool.messages import (
    Allowance,
    BlockLease,
    Demote,
    DirectoryChanges,
    DiskBlock,
    NodeAction,
    NodeUsage,
    Owner,
    OwnerUsage,
    Promote,
    PutGrant,
    RefusalReason,
    Refused,
    Selection,
    Stored,
)
from kvpool.node.accounts import Accounts
from kvpool.node.block_store import BlockStore
from kvpool.node.counts import Counts
from kvpool.node.disk_health import DiskHealth
from kvpool.node.evictor import Evictor
from kvpool.node.intake import Intake
from kvpool.node.leases import LeaseBook
from kvpool.node.lending import Lending
from kvpool.node.moves import Moves
from kvpool.node.puts import PutBook
from kvpool.node.read_frequency import ReadFrequency
from kvpool.node.stock import Stock


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLimits:
    """Sizes and durations; see `PoolConfig`.

    Attributes:
        num_slots: Places in memory.
        slot_bytes: Of each; larger blocks are not taken.
        num_extents: Places on the disk, each as large as a slot; 0 without a disk.
        eviction: Name of the policy of the memory (`kvpool.eviction.select`).
        ssd_eviction: And of the disk.
        high_watermark: Share of the slots above which blocks are moved to the disk before anybody asks for room.
        low_watermark: Share at which that stops.
        put_timeout_s: What a writer may take.
        idle_s: A tenant that has neither put nor read for this long has no share that others must leave it.
        usual: What a tenant may take of whom nothing else is said.
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


class NodeLedger:
    """Pure: no sockets, no clock, no bytes. Time comes in as `now_s` (monotonic seconds). Not thread-safe: one owner.

    What names a put, a lease or a copy that is over has no effect.

    Args:
        limits: Sizes and durations.
        name: Begins the ids of puts and leases; no other start of any node has it.
        on_disk: What the disk held when the node started.

    Attributes:
        counts: Of what happened; the shell adds what only it sees.
        demand: How often blocks were read of late.

    Raises:
        InvariantError: `on_disk` has an extent or a block twice, or an extent that does not exist.
    """

    def __init__(self, limits: NodeLimits, name: str, on_disk: Sequence[DiskBlock] = ()) -> None:
        self._slot_bytes = limits.slot_bytes
        self.counts = counts = Counts()
        self.demand = ReadFrequency()
        self._accounts = Accounts(
            block_bytes=limits.slot_bytes,
            usual=limits.usual,
            policies=(POLICIES[limits.eviction], POLICIES[limits.ssd_eviction]),
        )
        first_epoch = 1 + max((block.epoch for block in on_disk), default=0)
        self._book = BlockStore(limits.num_slots, limits.num_extents, first_epoch)
        health = self._health = DiskHealth(present=limits.num_extents > 0)
        self._moves = Moves(self._book, health, counts)
        self._puts, self._leases = PutBook(name, limits.put_timeout_s), LeaseBook(name)
        self._evictor = Evictor(
            book=self._book,
            accounts=self._accounts,
            moves=self._moves,
            health=health,
            high_watermark=limits.high_watermark,
            low_watermark=limits.low_watermark,
            idle_s=limits.idle_s,
            counts=counts,
            demand=self.demand,
        )
        self._intake = Intake(
            book=self._book,
            accounts=self._accounts,
            puts=self._puts,
            evictor=self._evictor,
            counts=counts,
            slot_bytes=limits.slot_bytes,
        )
        self._lending = Lending(
            book=self._book,
            leases=self._leases,
            moves=self._moves,
            evictor=self._evictor,
            counts=counts,
            demand=self.demand,
        )
        self._stock = Stock(book=self._book, accounts=self._accounts, counts=counts)
        for block in on_disk:
            self._book.restore(block, self._accounts.holding(block.owner, block.size_bytes))

    @property
    def refuses(self) -> RefusalReason | None:
        """Why the node takes no new blocks, if it does not."""
        return self._intake.refuses

    def refuse(self, reason: RefusalReason | None) -> None:
        """From now on the node takes no new blocks, because it is sick or will stop; None: it takes them again.

        What it holds it serves all the same. A disk that fails needs no word: `io_failed` says enough.
        """
        self._intake.refuses = reason

    def allow(self, tenant: str, allowance: Allowance | None) -> None:
        """Sets what a tenant may take; None for what is usual. What it has too much goes now, unless it is in use."""
        self._evictor.hold_to_quota(self._accounts.allow(tenant, allowance))

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
    ) -> PutGrant | Refused:
        """Gives places to write to for blocks that nobody holds or is writing, for `put_timeout_s`.

        Evicts as needed, but none of `keys`, nor what other tenants have within their share. Where there is room for a part,
        the beginning of `keys` is granted.

        Args:
            keys: Consecutive blocks of one text.
            owner: Whose they are.
            now_s: The time.
            first: So many blocks of the text come before them.
            size_bytes: Of each; a whole slot where it is not said.
            writer: Who will write; its puts end with it (`worker_gone`).
            fetched: Another node will write. Such a put is never too late: the caller commits or abandons it, but not before
                that node has stopped writing.

        Returns:
            The places, none of them where everything is held already; or why nothing is taken.
        """
        size_bytes = self._slot_bytes if size_bytes is None else size_bytes
        return self._intake.reserve(keys, owner, size_bytes, first, writer, now_s, fetched=fetched)

    def commit(
        self,
        put_id: str,
        checksums: Sequence[bytes],
        now_s: float,
        owners: Sequence[Owner] | None = None,
        size_bytes: int | None = None,
    ) -> int:
        """The writer is done: its blocks are held from now on.

        Args:
            put_id: The put.
            checksums: One per place of the grant, each with a 64-bit number per layer; empty where nothing was written.
            now_s: The time.
            owners: Whose the blocks turned out to be, where that was not known when they were reserved.
            size_bytes: Of each block, likewise.

        Returns:
            How many blocks are held now; 0 for a put that is over, or was too late.
        """
        committed = self._intake.commit(put_id, checksums, owners, size_bytes, now_s)
        self._evictor.make_headroom(now_s)
        return committed

    def abandon(self, put_id: str) -> None:
        """The writer has stopped, and what it wrote is void."""
        self._intake.abandon(put_id)

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

        Those on the disk are read into memory as far as there is room, and belong to the lease: `leased` has them once they
        are there, `loading` says how many are on their way.

        Args:
            keys: Blocks of a text, from its beginning.
            lease_s: For how long.
            now_s: The time.
            reader: Who reads; its leases end with it (`worker_gone`).
            more: The rest is being brought, and `extend` will follow: what is missing then is a miss.
        """
        return self._lending.lease(keys, lease_s, reader, now_s, more=more)

    def extend(self, lease_id: str, keys: Sequence[BlockKey], now_s: float) -> BlockLease:
        """Adds to a lease what has come to be held of the rest of its chain; all that can be read by now.

        Args:
            lease_id: The lease.
            keys: The whole chain, as it was asked for.
            now_s: The time.
        """
        return self._lending.extend(lease_id, keys, now_s)

    def leased(self, lease_id: str) -> BlockLease:
        """What a lease holds that can be read by now."""
        return self._lending.leased(lease_id)

    def loading(self, lease_id: str) -> int:
        """Blocks of a lease that are still read from the disk."""
        return self._lending.loading(lease_id)

    def renew(self, lease_id: str, lease_s: float, now_s: float) -> bool:
        """Has a lease end `lease_s` from now. Returns False if it is over."""
        return self._lending.renew(lease_id, lease_s, now_s)

    def release(self, lease_id: str) -> None:
        """The reader is done."""
        self._lending.release(lease_id)

    def held(self, keys: Iterable[BlockKey]) -> int:
        """How many of the leading blocks of a chain are held, in whichever tier. Grants nothing and leaves no trace."""
        return self._stock.held(keys)

    def find(self, key: BlockKey) -> Stored | None:
        """What is known of a block; None where it is not held."""
        return self._stock.find(key)

    def drop(self, keys: Iterable[BlockKey]) -> int:
        """A reader found other bytes than were put: the blocks are held no longer. Returns how many were."""
        return self._stock.drop(keys)

    def flush(self, selection: Selection) -> int:
        """Gives up all blocks that `selection` covers, pinned ones and those being put too. Returns how many were held.

        Who reads one may finish; its place is free after that.
        """
        return self._stock.flush(selection)

    def pin(self, keys: Iterable[BlockKey]) -> int:
        """Has those of the blocks that are held stay until they are unpinned or flushed. Returns how many these are."""
        return self._stock.pin(keys)

    def unpin(self, keys: Iterable[BlockKey]) -> None:
        """Blocks may be evicted again."""
        self._stock.unpin(keys)

    def worker_gone(self, worker: WorkerIdentity) -> None:
        """A worker neither reads nor writes any more: its process is over, or its access was taken away."""
        self._intake.writer_gone(worker)
        self._lending.reader_gone(worker)

    def sweep(self, now_s: float) -> None:
        """Ends what is over; call it a few times per second, whether or not there is new work."""
        self._intake.expire(now_s)
        self._lending.expire(now_s)
        self._evictor.make_headroom(now_s)
        self._accounts.forget_empty()

    def written(self, action: Demote, now_s: float) -> None:
        """A block was copied to the disk."""
        self._moves.written(action)
        self._evictor.make_headroom(now_s)

    def loaded(self, action: Promote) -> None:
        """A block was read from the disk, and its checksums are right."""
        self._moves.loaded(action)

    def io_failed(self, action: Demote | Promote, now_s: float) -> None:
        """A block could not be written, or not be read; nothing is under way in its slot and extent any more."""
        self._moves.failed(action, now_s)

    def take_actions(self) -> list[NodeAction]:
        """What the shell has to do now, in this order where it touches the same extent."""
        actions, self._book.actions = self._book.actions, []
        return actions

    def take_changes(self) -> BlockChanges | None:
        """Which blocks came to be held and which were given up since the last call, for routers; None for none."""
        return self._book.changes.take() if self._book.changes else None

    def take_replica_changes(self, limit: int = 4096) -> DirectoryChanges | None:
        """What the directory has yet to be told, at most `limit` blocks; None for nothing."""
        replicas = self._book.replicas
        return replicas.take(self._book.stored, limit) if replicas else None

    def stored(self) -> Iterator[Stored]:
        """Everything that is held, for a directory that has forgotten this node."""
        return self._stock.stored()

    def usage(self) -> NodeUsage:
        """Counts for metrics and `baton pool top`."""
        return self._stock.usage(
            leases=len(self._leases), puts=len(self._puts), ssd_works=self._health.works
        )

    def owners(self) -> tuple[OwnerUsage, ...]:
        """What each tenant takes."""
        return self._accounts.usage()

    def check_integrity(self) -> None:
        """Raises InvariantError if the book contradicts itself."""
        self._accounts.check_integrity()
        self._book.check_integrity(self._accounts)
        self._moves.check_integrity()
        self._puts.check_integrity()
        users = sum(len(lease.places) for lease in self._leases) + 2 * len(self._moves)
        shelves = (self._book.memory, self._book.disk)
        if users != sum(place.users for shelf in shelves for place in shelf.places()):
            raise InvariantError("places are in use for other reasons than leases and moves")
