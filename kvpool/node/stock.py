"""What a node holds, block by block: asked about, kept on purpose, and given up for other reasons than want of room."""

from collections.abc import Iterable, Iterator

from baton.ids import BlockKey
from kvpool.messages import NodeUsage, Selection, Stored
from kvpool.node.accounts import Accounts
from kvpool.node.block_store import BlockStore
from kvpool.node.counts import Counts


class Stock:
    """Both tiers as one. Its methods are those of `NodeLedger`, which says what they promise."""

    def __init__(self, *, book: BlockStore, accounts: Accounts, counts: Counts) -> None:
        self._book = book
        self._accounts = accounts
        self._counts = counts

    def held(self, keys: Iterable[BlockKey]) -> int:
        """Counts leading blocks."""
        count = 0
        for key in keys:
            if self._book.readable(key) is None:
                break
            count += 1
        return count

    def stored(self) -> Iterator[Stored]:
        """Everything that is held."""
        for key in dict.fromkeys((*self._book.memory.named, *self._book.disk.named)):
            stored = self._book.stored(key)
            if stored is not None:
                yield stored

    def find(self, key: BlockKey) -> Stored | None:
        """What is known of one block."""
        return self._book.stored(key)

    def usage(self, *, leases: int, puts: int, ssd_works: bool) -> NodeUsage:
        """Counts, with what stands in other books."""
        counts, memory = self._counts, self._book.memory
        return NodeUsage(
            slots_total=memory.num_places,
            slots_free=memory.num_free,
            ssd_blocks=self._book.disk.num_taken,
            ssd_works=ssd_works,
            leases=leases,
            puts=puts,
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
            copies=len(self._book.copies),
            tenants=sum(account.blocks > 0 for account in self._accounts),
        )

    def drop(self, keys: Iterable[BlockKey]) -> int:
        """Gives up what is corrupt."""
        dropped = [key for key in dict.fromkeys(keys) if self._book.readable(key) is not None]
        for key in dropped:
            self._give_up(key)
        self._counts.corrupt_blocks += len(dropped)
        return len(dropped)

    def flush(self, selection: Selection) -> int:
        """Gives up what a flush means."""
        covered = self._accounts.covered(selection)
        held = 0
        for shelf in (self._book.memory, self._book.disk):
            for place in [p for p in shelf.named.values() if p.holding in covered]:
                held += self._book.readable(place.key) is not None
                self._give_up(place.key)
        return held

    def pin(self, keys: Iterable[BlockKey]) -> int:
        """Keeps blocks."""
        held = [key for key in keys if self._book.readable(key) is not None]
        self._book.pinned.update(held)
        return len(held)

    def unpin(self, keys: Iterable[BlockKey]) -> None:
        """Lets them go."""
        self._book.pinned.difference_update(keys)

    def _give_up(self, key: BlockKey) -> None:
        for shelf in (self._book.memory, self._book.disk):
            place = shelf.named.get(key)
            if place is not None:
                self._book.give_up(place)
