"""How blocks come to a node: places are reserved, written to by somebody else, and then held or free again."""

from collections.abc import Iterable, Sequence
from itertools import repeat

from baton.ids import BlockKey, WorkerIdentity
from kvpool.messages import Owner, PutGrant, PutItem, RefusalReason, Refused
from kvpool.node.accounts import Account, Accounts, Billing
from kvpool.node.block_store import BlockStore, Slot, SlotState
from kvpool.node.counts import Counts
from kvpool.node.evictor import Evictor
from kvpool.node.puts import PutBook

# Names of the module: they are looked up for every block, and a member of an enum takes ten times as long.
_RESERVED = SlotState.RESERVED
_NOTHING_TO_WRITE = PutGrant(put_id="", items=())


class Intake:
    """Puts from beginning to end. Its methods are those of `NodeLedger`, which says what they promise.

    Attributes:
        refuses: Why nothing is taken at all; None where it is.
    """

    def __init__(
        self,
        *,
        book: BlockStore,
        accounts: Accounts,
        puts: PutBook,
        evictor: Evictor,
        counts: Counts,
        slot_bytes: int,
    ) -> None:
        self._book = book
        self._accounts = accounts
        self._puts = puts
        self._evictor = evictor
        self._counts = counts
        self._slot_bytes = slot_bytes
        self.refuses: RefusalReason | None = None

    def reserve(
        self,
        keys: Sequence[BlockKey],
        owner: Owner,
        size_bytes: int,
        first: int,
        writer: WorkerIdentity | None,
        now_s: float,
        *,
        fetched: bool = False,
    ) -> PutGrant | Refused:
        """Gives places for those of `keys` that nobody has."""
        refused = self._refusal(size_bytes)
        if refused is not None:
            return refused
        holding = self._accounts.holding(owner, size_bytes)
        holding.account.active_s = now_s
        wanted, held = self._split(keys, first)
        if not wanted:
            return _NOTHING_TO_WRITE
        room = self._make_room(len(wanted), holding.account, held, now_s)
        if isinstance(room, Refused):
            return room
        places = self._take(wanted[:room], holding)
        put = self._puts.open_fetch(places) if fetched else self._puts.open(places, writer, now_s)
        items = [PutItem(key=place.key, slot=place.index, epoch=place.epoch) for place in places]
        return PutGrant(put_id=put.put_id, items=tuple(items))

    def commit(
        self,
        put_id: str,
        checksums: Sequence[bytes],
        owners: Sequence[Owner] | None,
        size_bytes: int | None,
        now_s: float,
    ) -> int:
        """Settles what was written, and frees the rest."""
        self.expire(now_s)
        put = self._puts.close(put_id)
        if put is None:
            return 0
        written, void = [], put.places[len(checksums) :]
        for place, sums, owner in zip(put.places, checksums, owners or repeat(None), strict=False):
            if sums and place.state is _RESERVED and self._belongs(place, owner, size_bytes):
                place.checksums = sums
                written.append(place)
            else:
                void.append(place)
        self._stop_writing(void)
        self._book.settle(written)
        if put.fetched:
            # The end of a text goes before its beginning.
            self._book.copies.update(dict.fromkeys(place.key for place in reversed(written)))
            self._counts.fetched_blocks += len(written)
        self._counts.stored_blocks += len(written)
        return len(written)

    def abandon(self, put_id: str) -> None:
        """Frees all places of a put."""
        put = self._puts.close(put_id)
        if put is not None:
            self._stop_writing(put.places)

    def writer_gone(self, writer: WorkerIdentity) -> None:
        """Abandons what it was writing."""
        for put in self._puts.by(writer):
            self.abandon(put.put_id)

    def expire(self, now_s: float) -> None:
        """Puts that are too late become zombies, and those that have been it for long enough are over."""
        late = self._puts.take_late(now_s)
        self._counts.zombie_puts += len(late)
        for put in late:
            for place in put.places:
                if place.state is _RESERVED:
                    self._book.give_up(place)
        for put in self._puts.take_dead(now_s):
            self._stop_writing(put.places)

    def _refusal(self, size_bytes: int) -> Refused | None:
        if self.refuses is not None:
            return Refused(reason=self.refuses)
        if size_bytes > self._slot_bytes:
            detail = f"block_bytes: {size_bytes} do not fit the pool's slots of {self._slot_bytes}"
            return Refused(reason=RefusalReason.TOO_LARGE, detail=detail)
        return None

    def _split(
        self, keys: Sequence[BlockKey], first: int
    ) -> tuple[list[tuple[BlockKey, int]], list[Slot]]:
        """Blocks that nobody has, with their positions; and the places of those that are held."""
        memory, disk = self._book.memory.named, self._book.disk.named
        wanted: dict[BlockKey, int] = {}
        held = []
        for position, key in enumerate(keys, first):
            place = memory.get(key) or disk.get(key)
            if place is None:
                wanted.setdefault(key, position)
            elif place.readable:
                held.append(place)
        return list(wanted.items()), held

    def _make_room(
        self, count: int, account: Account, held: list[Slot], now_s: float
    ) -> int | Refused:
        """Room for at most `count` blocks, without giving up any of `held`."""
        for place in held:
            place.users += 1
        try:
            room = self._within_quota(count, account)
            if not room:
                detail = f"tenant {account.tenant} may hold {account.max_blocks} blocks here"
                return Refused(reason=RefusalReason.OVER_QUOTA, detail=detail)
            room = self._evictor.make_slots(room, account, now_s)
            return room or Refused(reason=RefusalReason.FULL, detail="all blocks are in use")
        finally:
            for place in held:
                self._book.release(place)

    def _within_quota(self, count: int, account: Account) -> int:
        if account.max_blocks is None:
            return count
        excess = account.blocks + min(count, account.max_blocks) - account.max_blocks
        if excess > 0:
            self._evictor.trim(account, excess)
        return max(0, min(count, account.max_blocks - account.blocks))

    def _take(self, wanted: Iterable[tuple[BlockKey, int]], holding: Billing) -> list[Slot]:
        book, memory = self._book, self._book.memory
        return [book.take(memory, key, holding, position, _RESERVED) for key, position in wanted]

    def _belongs(self, place: Slot, owner: Owner | None, size_bytes: int | None) -> bool:
        """Whether a block may be held for whom it turns out to belong to; None for whom it was reserved for."""
        was = place.holding
        holding = self._accounts.holding(owner or was.owner, size_bytes or was.size_bytes)
        if holding is was:
            return True
        self._book.rehouse(place, holding)
        self._evictor.trim(holding.account, holding.account.over)
        return not holding.account.over

    def _stop_writing(self, places: Iterable[Slot]) -> None:
        """Nobody writes to these places any more; blocks that were to lie there are not held."""
        for place in places:
            if place.state is _RESERVED:
                self._book.give_up(place)
            self._book.free(place)
