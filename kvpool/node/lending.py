"""How blocks of a node are read: they stay where they are while a lease holds; those on the disk are read into memory first."""

from collections.abc import Sequence

from baton.ids import BlockKey, WorkerIdentity
from kvpool.messages import BlockLease, HeldBlock, Tier
from kvpool.node.block_store import BlockStore, Slot, SlotState
from kvpool.node.counts import Counts
from kvpool.node.evictor import Evictor
from kvpool.node.leases import Lease, LeaseBook
from kvpool.node.moves import Moves
from kvpool.node.read_frequency import ReadFrequency

_S = SlotState
_NOTHING = BlockLease(lease_id="")


class Lending:
    """Leases from beginning to end. Its methods are those of `NodeLedger`, which says what they promise."""

    def __init__(
        self,
        *,
        book: BlockStore,
        leases: LeaseBook,
        moves: Moves,
        evictor: Evictor,
        counts: Counts,
        demand: ReadFrequency,
    ) -> None:
        self._book = book
        self._leases = leases
        self._moves = moves
        self._evictor = evictor
        self._counts = counts
        self._demand = demand

    def lease(
        self,
        keys: Sequence[BlockKey],
        lease_s: float,
        reader: WorkerIdentity | None,
        now_s: float,
        *,
        more: bool,
    ) -> BlockLease:
        """Lends what is held of the beginning of a chain."""
        places = self._lend(keys, now_s)
        num_ready = _num_readable(places)
        self._counts.hit_blocks += num_ready
        self._demand.read(keys[: len(places)], now_s)
        if not (places and more):
            self._counts.missed_blocks += len(keys) - len(places)
        if not places:
            return _NOTHING
        self._book.memory.touch(places)
        lease = self._leases.open(places, lease_s, now_s, reader)
        lease.grows = more
        return _told(lease, num_ready)

    def extend(self, lease_id: str, keys: Sequence[BlockKey], now_s: float) -> BlockLease:
        """Adds to a lease what is held by now of the rest of its chain."""
        lease = self._leases.find(lease_id)
        if lease is None:
            return _NOTHING
        rest = keys[len(lease.places) :]
        places = self._lend(rest, now_s)
        num_ready = _num_readable(places)
        self._counts.hit_blocks += num_ready
        if lease.grows:
            self._counts.missed_blocks += len(rest) - len(places)
            lease.grows = False
        self._demand.read(rest[: len(places)], now_s)
        self._book.memory.touch(places)
        lease.places += places
        return _told(lease, _num_readable(lease.places))

    def leased(self, lease_id: str) -> BlockLease:
        """What a lease holds that can be read by now."""
        lease = self._leases.find(lease_id)
        return _NOTHING if lease is None else _told(lease, _num_readable(lease.places))

    def loading(self, lease_id: str) -> int:
        """Blocks of a lease that are still read from the disk."""
        lease = self._leases.find(lease_id)
        places = lease.places if lease is not None else ()
        return sum(place.state is _S.FILLING for place in places)

    def renew(self, lease_id: str, lease_s: float, now_s: float) -> bool:
        """Gives a lease more time, unless it is over."""
        self.expire(now_s)
        lease = self._leases.find(lease_id)
        if lease is None:
            return False
        lease.until_s, lease.lease_s = now_s + lease_s, lease_s
        return True

    def release(self, lease_id: str) -> None:
        """Ends a lease."""
        lease = self._leases.close(lease_id)
        if lease is not None:
            self._end(lease)

    def reader_gone(self, reader: WorkerIdentity) -> None:
        """Ends what it was lent."""
        for lease in self._leases.by(reader):
            self.release(lease.lease_id)

    def expire(self, now_s: float) -> None:
        """Ends leases whose time is over."""
        for lease in self._leases.take_ended(now_s):
            self._end(lease)

    def _lend(self, keys: Sequence[BlockKey], now_s: float) -> list[Slot]:
        """Where the leading blocks are read, or will soon be; each of the places is in use once more."""
        chain = self._leading(keys)
        for place in chain:
            place.users += 1
            place.holding.account.active_s = now_s
        return self._in_memory(chain, now_s)

    def _leading(self, keys: Sequence[BlockKey]) -> list[Slot]:
        """Where the leading blocks are read, or will soon be."""
        memory, disk = self._book.memory, self._book.disk
        chain = []
        for key in keys:
            place = memory.named.get(key) or disk.readable(key)
            if place is None or place.state is _S.RESERVED:
                break
            chain.append(place)
        return chain

    def _in_memory(self, chain: list[Slot], now_s: float) -> list[Slot]:
        """The chain with slots in the place of extents, as far as there is room; each place of it is in use once."""
        on_disk = [place for place in chain if place.tier is Tier.SSD]
        if not on_disk:
            return chain
        room = self._evictor.make_slots(len(on_disk), on_disk[0].holding.account, now_s)
        self._book.disk.touch(on_disk[:room])
        beyond = on_disk[room:]
        end = chain.index(beyond[0]) if beyond else len(chain)
        for place in chain[end:]:
            self._book.release(place)
        return [self._load(p) if p.tier is Tier.SSD else p for p in chain[:end]]

    def _load(self, extent: Slot) -> Slot:
        """Begins to read a block; whoever used its extent uses its slot instead."""
        book = self._book
        slot = book.take(book.memory, extent.key, extent.holding, extent.position, _S.FILLING)
        slot.users += 1
        self._moves.promote(extent, slot)
        book.release(extent)
        return slot

    def _end(self, lease: Lease) -> None:
        for place in lease.places:
            self._book.release(place)


def _num_readable(places: Sequence[Slot]) -> int:
    """How many leading blocks can be read."""
    return next((at for at, place in enumerate(places) if not place.readable), len(places))


def _told(lease: Lease, count: int) -> BlockLease:
    blocks = [
        HeldBlock(key=place.key, slot=place.index, epoch=place.epoch, checksums=place.checksums)
        for place in lease.places[:count]
    ]
    return BlockLease(lease_id=lease.lease_id, blocks=tuple(blocks), lease_s=lease.lease_s)
