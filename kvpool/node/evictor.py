"""Chooses what a node evicts: whose blocks go, and which of them.

Room that a put or lease waits for is made at once: what is on the disk too leaves memory, the rest is given up. Room
ahead of need is made by copying blocks to the disk once memory is fuller than the high watermark
(`kvpool.node.tier_moves`); without a disk there is no use in it.

Before any other block go cold copies: what came from another node, and is not read any more.
"""

from collections.abc import Iterable
from itertools import groupby, islice

from baton.ids import BlockKey
from kvpool.eviction.fairness import Claim, share_out
from kvpool.eviction.policy import MayGo
from kvpool.messages import Tier
from kvpool.node.accounts import Account, Accounts, Counts
from kvpool.node.block_store import BlockStore, Slot, SlotAllocator, SlotState
from kvpool.node.read_frequency import ReadFrequency

_MORE_LOOKS = 64


class Evictor:
    """Chooses tenants by fairness (`kvpool.eviction.fairness`) and their blocks by policy (`kvpool.eviction`).

    Never touched: what is leased, pinned, being written, or being copied between the tiers.
    """

    def __init__(
        self,
        *,
        blocks: BlockStore,
        accounts: Accounts,
        counts: Counts,
        read_frequency: ReadFrequency,
        high_watermark: float,
        low_watermark: float,
        idle_s: float,
    ) -> None:
        self._blocks = blocks
        self._accounts = accounts
        self._counts = counts
        self._read_frequency = read_frequency
        self._high_watermark = high_watermark
        self._low_watermark = low_watermark
        self._idle_s = idle_s

    def make_slots(
        self, wanted: int, account: Account, now_s: float, *, only_cold: bool = False
    ) -> int:
        """Frees slots of memory for `account` until `wanted` are free. Returns how many of these there are.
        With `only_cold` nothing goes that was read of late.
        """
        memory = self._blocks.memory
        short = wanted - memory.num_free
        if short > 0:
            short -= self._evict_copies(short, now_s)
        if short > 0:
            chosen = self._choose(memory, short, now_s, account, wanted, only_cold=only_cold)
            self._evict(chosen)
        return min(wanted, memory.num_free)

    def make_extents(self, wanted: int, account: Account, now_s: float) -> None:
        """Frees extents of the disk for `account`, as far as possible, until `wanted` are free."""
        disk = self._blocks.disk
        short = wanted - disk.num_free
        if short > 0:
            self._evict(self._choose(disk, short, now_s, account, wanted))

    def trim(self, account: Account, excess: int) -> None:
        """Gives up `excess` blocks of one tenant: those that the disk alone has, then those in memory, with their copies
        on the disk, in the order of memory's policy, which alone knows what was read since.
        """
        blocks, target = self._blocks, account.blocks - excess
        # Where most blocks are in both tiers, looking for one that the disk alone has may take a look at all of them: no
        # more are looked for than there must be. There are more where slots of memory hold no block any more, as those in
        # quarantine: these go last.
        on_disk_alone = account.blocks - account.memory.taken
        without_block = blocks.memory.num_taken - len(blocks.memory.named)
        for tier, may_go, most in (
            (blocks.disk, self._may_go_from_disk_alone, on_disk_alone),
            (blocks.memory, self._may_go_everywhere, excess),
            (blocks.disk, self._may_go_from_disk_alone, without_block),
        ):
            count = min(account.blocks - target, most)
            slots = tier.victims(account, count, may_go) if count > 0 else []
            for slot in slots:
                copy = blocks.disk.named.get(slot.key)
                if copy is not None and copy is not slot:
                    blocks.give_up(copy)
            self._evict(slots)

    def choose_demotions(
        self, num_leaving: int, now_s: float
    ) -> Iterable[tuple[Account, list[Slot]]]:
        """What is to be copied to the disk, by tenant, if memory is fuller than the high watermark;
        its policies have given it up.

        What is on the disk already leaves memory at once.

        Args:
            num_leaving: Slots that will be free once the copies under way are done.
            now_s: The time.
        """
        memory = self._blocks.memory
        used = memory.num_taken - num_leaving
        if used <= self._high_watermark * memory.num_slots:
            return ()
        excess = used - int(self._low_watermark * memory.num_slots)
        excess -= self._evict_copies(excess, now_s)
        slots = self._choose(memory, excess, now_s, None, 0)
        self._evict([slot for slot in slots if self._blocks.disk.readable(slot.key)])
        fresh = [slot for slot in slots if slot.state is SlotState.RESIDENT]
        return [
            (account, list(its))
            for account, its in groupby(fresh, key=lambda slot: slot.billing.account)
        ]

    def _evict_copies(self, most: int, now_s: float) -> int:
        """Gives up blocks that came from other nodes and were not read for a while. Returns how many.

        None of them is copied to the disk, and no tenant's share is asked for: nothing is lost by it.
        """
        blocks, frequency, copies = self._blocks, self._read_frequency, self._blocks.copies
        dropped: list[Slot] = []
        for key in list(islice(copies, 2 * most + _MORE_LOOKS)):
            if len(dropped) == most:
                break
            slot = blocks.memory.named[key]
            idle = slot.state is SlotState.RESIDENT and blocks.may_go(slot)
            if idle and frequency.is_cold(key, now_s):
                blocks.give_up(slot)
                dropped.append(slot)
            else:
                copies[key] = copies.pop(key)  # not again before all others
        self._counts.evicted_blocks += len(dropped)
        blocks.story.record("cold copies evicted", dropped)
        return len(dropped)

    def _choose(
        self,
        tier: SlotAllocator,
        need: int,
        now_s: float,
        asking: Account | None,
        incoming: int,
        *,
        only_cold: bool = False,
    ) -> list[Slot]:
        """At most `need` resident blocks, which their policies have given up."""
        chosen: list[Slot] = []
        gate = self._gate(tier)
        claims = self._claims(tier, now_s, asking, incoming)
        while len(chosen) < need and claims:
            gives = share_out([claim for _, claim in claims], need - len(chosen))
            able = []
            for (account, claim), give in zip(claims, gives, strict=True):
                slots = tier.victims(account, give, gate) if give else []
                if only_cold:
                    slots = self._cold(tier, slots, now_s)
                chosen += slots
                claim.taken -= len(slots)
                if len(slots) == give:
                    able.append((account, claim))
            if not any(gives):
                break
            claims = able
        return chosen

    def _cold(self, tier: SlotAllocator, slots: list[Slot], now_s: float) -> list[Slot]:
        """Those of a policy's victims that were not read of late; the others stay, as if they had just come. Not left to
        the policy: it might look at all that was read, one by one.
        """
        cold = []
        for slot in slots:
            if self._read_frequency.is_cold(slot.key, now_s):
                cold.append(slot)
            else:
                tier.admit((slot,))
        return cold

    def _claims(
        self, tier: SlotAllocator, now_s: float, asking: Account | None, incoming: int
    ) -> list[tuple[Account, Claim]]:
        """What each tenant has in a tier, and what it must be left because of the tenant that asks for room."""
        claims = []
        share = self._share(tier, now_s, asking)
        for account in self._accounts:
            taken = tier.usage(account).taken
            if account is asking:
                claims.append((account, Claim(taken + incoming, account.weight, incoming)))
            elif taken:
                floor = 0 if self._idle(account, now_s) else int(share * account.weight)
                claims.append((account, Claim(taken, account.weight, floor)))
        return claims

    def _share(self, tier: SlotAllocator, now_s: float, asking: Account | None) -> float:
        """Slots per weight that no tenant need give; 0 where no tenant in particular asks."""
        if asking is None:
            return 0.0
        weights = [
            account.weight
            for account in self._accounts
            if account is asking or (tier.usage(account).taken and not self._idle(account, now_s))
        ]
        return tier.num_slots / sum(weights)

    def _idle(self, account: Account, now_s: float) -> bool:
        return now_s - account.active_s > self._idle_s

    def _gate(self, tier: SlotAllocator) -> MayGo:
        named, may_go = tier.named, self._blocks.may_go
        return lambda key: may_go(named[key])

    def _may_go_from_disk_alone(self, key: BlockKey) -> bool:
        return key not in self._blocks.memory.named and self._may_go_everywhere(key)

    def _may_go_everywhere(self, key: BlockKey) -> bool:
        tiers = (self._blocks.memory, self._blocks.disk)
        slots = [slot for tier in tiers if (slot := tier.named.get(key)) is not None]
        return all(map(self._blocks.may_go, slots))

    def _evict(self, slots: list[Slot]) -> None:
        """Blocks whose policies have given them up leave their tier."""
        for slot in slots:
            is_held = self._blocks.give_up(slot, victim=True)
            if not is_held:
                self._counts.evicted_blocks += 1
            elif slot.tier is Tier.DRAM:
                self._counts.demoted_blocks += 1
        self._blocks.story.record("evicted", slots)
