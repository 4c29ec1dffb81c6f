"""Makes room on a node: whose blocks go, which of them, and whether to the disk or for good.

Room that somebody waits for is made at once: what is on the disk too leaves memory, the rest is given up. Room ahead of need is
made by copying blocks to the disk once memory is fuller than the high watermark; without a disk there is no use in it.

Before any other block go cold copies: what came from another node, and is not read any more.
"""

from itertools import groupby, islice

from kvpool.eviction.fairness import Claim, share_out
from kvpool.eviction.policy import MayGo
from kvpool.messages import Tier
from kvpool.node.accounts import Account, Accounts
from kvpool.node.block_store import BlockStore, Slot, SlotAllocator, SlotState
from kvpool.node.counts import Counts
from kvpool.node.disk_health import DiskHealth
from kvpool.node.moves import Moves
from kvpool.node.read_frequency import ReadFrequency

_COLD_READS = 0.5
"""A copy of another node's block that was read less than this of late, once a minute ago, is cold."""

_MORE_LOOKS = 64


class Evictor:
    """Chooses tenants by fairness (`kvpool.eviction.fairness`) and their blocks by policy (`kvpool.eviction`).

    Never touched: what is leased, pinned, being written, or on its way between the tiers.
    """

    def __init__(
        self,
        *,
        book: BlockStore,
        accounts: Accounts,
        moves: Moves,
        health: DiskHealth,
        high_watermark: float,
        low_watermark: float,
        idle_s: float,
        counts: Counts,
        demand: ReadFrequency,
    ) -> None:
        self._book = book
        self._accounts = accounts
        self._moves = moves
        self._health = health
        self._high_watermark = high_watermark
        self._low_watermark = low_watermark
        self._idle_s = idle_s
        self._counts = counts
        self._demand = demand

    def make_slots(self, wanted: int, account: Account, now_s: float) -> int:
        """Frees slots for `account` until `wanted` are free. Returns how many of these there are."""
        memory = self._book.memory
        short = wanted - memory.num_free
        if short > 0:
            short -= self._drop_copies(short, now_s)
        if short > 0:
            for slot in self._choose(memory, short, now_s, account, wanted):
                self._drop(slot)
        return min(wanted, memory.num_free)

    def hold_to_quota(self, account: Account | None) -> None:
        """Gives up what a tenant has too much; None for one that has nothing."""
        if account is not None:
            self.trim(account, account.over)

    def trim(self, account: Account, excess: int) -> None:
        """Gives up `excess` blocks of one tenant, in all tiers, those that are on the disk alone first."""
        book, target = self._book, account.blocks - excess
        for shelf in (book.disk, book.memory):
            while account.blocks > target:
                places = shelf.victims(account, account.blocks - target, self._gate(shelf))
                if not places:
                    break
                for place in places:
                    self._drop(place)

    def make_headroom(self, now_s: float) -> None:
        """Begins to move blocks to the disk if memory is fuller than the high watermark."""
        if not self._health.usable(now_s):
            return
        memory = self._book.memory
        used = memory.num_taken - self._moves.num_leaving
        if used <= self._high_watermark * memory.num_places:
            return
        excess = used - int(self._low_watermark * memory.num_places)
        excess -= self._drop_copies(excess, now_s)
        slots = self._choose(memory, excess, now_s, None, 0)
        copied = [slot for slot in slots if self._book.disk.readable(slot.key)]
        for slot in copied:
            self._drop(slot)
        fresh = [slot for slot in slots if slot.state is SlotState.RESIDENT]
        for account, its_slots in groupby(fresh, key=lambda slot: slot.holding.account):
            self._demote(list(its_slots), account, now_s)

    def _drop_copies(self, most: int, now_s: float) -> int:
        """Gives up blocks that came from other nodes and that nobody has read for a while. Returns how many.

        None of them is copied to the disk, and no tenant's share is asked for: nothing is lost by it.
        """
        book, demand, copies = self._book, self._demand, self._book.copies
        dropped = 0
        for key in list(islice(copies, 2 * most + _MORE_LOOKS)):
            if dropped == most:
                break
            place = book.memory.named[key]
            idle = place.state is SlotState.RESIDENT and book.may_go(place)
            if idle and demand.of(key, now_s) < _COLD_READS:
                book.give_up(place)
                dropped += 1
            else:
                copies[key] = copies.pop(key)  # not again before all others
        self._counts.evicted_blocks += dropped
        return dropped

    def _demote(self, slots: list[Slot], account: Account, now_s: float) -> None:
        book = self._book
        short = len(slots) - book.disk.num_free
        if short > 0:
            for extent in self._choose(book.disk, short, now_s, account, len(slots)):
                self._drop(extent)
        for slot in slots:
            if not book.disk.num_free:
                book.memory.admit((slot,))  # all of the disk is in use: it stays
                continue
            extent = book.take(book.disk, slot.key, slot.holding, slot.position, SlotState.FILLING)
            self._moves.demote(slot, extent)

    def _choose(
        self, shelf: SlotAllocator, need: int, now_s: float, asking: Account | None, incoming: int
    ) -> list[Slot]:
        """At most `need` resident blocks, which their policies have given up."""
        chosen: list[Slot] = []
        gate = self._gate(shelf)
        claims = self._claims(shelf, now_s, asking, incoming)
        while len(chosen) < need and claims:
            gives = share_out([claim for _, claim in claims], need - len(chosen))
            able = []
            for (account, claim), give in zip(claims, gives, strict=True):
                places = shelf.victims(account, give, gate) if give else []
                chosen += places
                claim.taken -= len(places)
                if len(places) == give:
                    able.append((account, claim))
            if not any(gives):
                break
            claims = able
        return chosen

    def _claims(
        self, shelf: SlotAllocator, now_s: float, asking: Account | None, incoming: int
    ) -> list[tuple[Account, Claim]]:
        """What each tenant has in a tier, and what it must be left because of who is asking for room."""
        claims = []
        share = self._share(shelf, now_s, asking)
        for account in self._accounts:
            taken = shelf.stake(account).taken
            if account is asking:
                claims.append((account, Claim(taken + incoming, account.weight, incoming)))
            elif taken:
                floor = 0 if self._idle(account, now_s) else int(share * account.weight)
                claims.append((account, Claim(taken, account.weight, floor)))
        return claims

    def _share(self, shelf: SlotAllocator, now_s: float, asking: Account | None) -> float:
        """Places per weight that nobody need give; 0 where nobody in particular asks."""
        if asking is None:
            return 0.0
        weights = [
            account.weight
            for account in self._accounts
            if account is asking or (shelf.stake(account).taken and not self._idle(account, now_s))
        ]
        return shelf.num_places / sum(weights)

    def _idle(self, account: Account, now_s: float) -> bool:
        return now_s - account.active_s > self._idle_s

    def _gate(self, shelf: SlotAllocator) -> MayGo:
        named, may_go = shelf.named, self._book.may_go
        return lambda key: may_go(named[key])

    def _drop(self, place: Slot) -> None:
        """A block whose policy has given it up leaves its tier."""
        is_held = self._book.give_up(place, victim=True)
        if not is_held:
            self._counts.evicted_blocks += 1
        elif place.tier is Tier.DRAM:
            self._counts.demoted_blocks += 1
