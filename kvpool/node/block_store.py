"""Where a node's blocks lie: slots of two tiers, memory and disk, with their states,
and what others have yet to be told.

             reserve                commit
    FREE ──────────────▶ RESERVED ─────────▶ RESIDENT ◀──────── DEMOTING     memory only: being copied to the disk
     │ ▲                  │ too late, flushed   │ │ ────────────▶ │
     │ │                  ▼                     │ │               │
     │ ├──────────── QUARANTINED                │ │ flushed or corrupt while it is read
     │ │ its writer has stopped, or must have   │ ▼               ▼
     │ ├───────────────────────────────────── CONDEMNED ◀── FILLING
     │ └──────────────────────────────────────  given up          │ ▲
     └────────────────────────────────────────────────────────────┼─┘ from the other tier
                                              RESIDENT ◀──────────┘ read or written

A slot of the disk is an *extent*. Each time a slot is taken it gets another epoch, which no slot of this node has had
before. `kvpool.node.ledger` decides which transitions happen; here they are carried out, so that tenants' usage,
eviction policies and the logs for routers and the directory agree with them.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import count, islice

from baton.blocks import ChangeLog
from baton.errors import InvariantError
from baton.ids import BlockKey
from baton.story import StoryEntry
from kvpool.eviction.policy import MayGo
from kvpool.messages import (
    DirectoryChanges,
    DiskBlock,
    Erase,
    NodeAction,
    Selection,
    Stored,
    Tier,
)
from kvpool.node.accounts import Account, Accounts, Billing, TierUsage


class SlotState(IntEnum):
    """What a slot is used for. Integers, since they are looked up whenever a block comes or goes."""

    FREE = 0
    RESERVED = 1
    FILLING = 2
    RESIDENT = 3
    DEMOTING = 4
    QUARANTINED = 5
    CONDEMNED = 6


_S = SlotState
TRANSITIONS: dict[SlotState, frozenset[SlotState]] = {
    _S.FREE: frozenset({_S.RESERVED, _S.FILLING}),
    _S.RESERVED: frozenset({_S.RESIDENT, _S.QUARANTINED, _S.FREE}),
    _S.FILLING: frozenset({_S.RESIDENT, _S.CONDEMNED, _S.FREE}),
    _S.RESIDENT: frozenset({_S.DEMOTING, _S.CONDEMNED, _S.FREE}),
    _S.DEMOTING: frozenset({_S.RESIDENT, _S.CONDEMNED, _S.FREE}),
    _S.QUARANTINED: frozenset({_S.FREE}),
    _S.CONDEMNED: frozenset({_S.FREE}),
}
_READABLE = (_S.RESIDENT, _S.DEMOTING)
_NAMED = frozenset({_S.RESERVED, _S.FILLING, _S.RESIDENT, _S.DEMOTING})

# Module constants: they are looked up for every block, and reading a member of an enum takes ten times as long.
_DRAM, _SSD = Tier.DRAM, Tier.SSD
_FREE, _RESERVED, _FILLING, _RESIDENT = _S.FREE, _S.RESERVED, _S.FILLING, _S.RESIDENT
_QUARANTINED, _CONDEMNED = _S.QUARANTINED, _S.CONDEMNED

_STORY_OPERATIONS = 4096
_STORY_KEYS = 65_536


@dataclass(slots=True, eq=False)
class Slot:
    """A slot of memory or an extent of the disk. While it is free, what it says of a block is what it held last.

    Attributes:
        tier: Of which tier.
        index: Its number in the tier.
        epoch: Of the block in it.
        key: The block.
        billing: Whose it is.
        usage: What its tenant has in this tier.
        position: How many blocks of its text are before it.
        state: What the slot is used for.
        checksums: Of the block's layers, once it is resident.
        users: Leases that hold it, and reads and writes of the disk that are under way.
    """

    tier: Tier
    index: int
    epoch: int
    key: BlockKey
    billing: Billing
    usage: TierUsage
    position: int
    state: SlotState = SlotState.FREE
    checksums: bytes = b""
    users: int = 0

    @property
    def readable(self) -> bool:
        """Whether the block in it can be read."""
        return self.state in _READABLE

    @property
    def named(self) -> bool:
        """Whether its block is to be found here, now or soon."""
        return self.state in _NAMED

    @property
    def consistent(self) -> bool:
        """Whether its users agree with its state."""
        unused = self.state in (_S.FREE, _S.RESERVED, _S.QUARANTINED)
        busy = self.state in (_S.DEMOTING, _S.FILLING, _S.CONDEMNED)
        return self.users >= 0 and not (self.users and unused) and not (busy and not self.users)


class BlockStory:
    """The last operations that changed the state of blocks,
    told by block key in hexadecimal (as `baton.story.StoryLog`).

    One entry per operation and not per block: `StoryLog` would describe each of a put's 2,000 blocks. Bounded by
    operations and by keys.

    Attributes:
        now_s: The latest time that the ledger was told; entries carry it.
    """

    def __init__(self) -> None:
        self._operations: deque[tuple[float, str, tuple[BlockKey, ...]]] = deque()
        self._num_keys = 0
        self.now_s = 0.0

    def record(self, event: str, slots: Iterable[Slot]) -> None:
        """An operation changed the state of these slots, at `now_s`."""
        keys = tuple([slot.key for slot in slots])
        if not keys:
            return
        self._operations.append((self.now_s, event, keys))
        self._num_keys += len(keys)
        while self._num_keys > _STORY_KEYS or len(self._operations) > _STORY_OPERATIONS:
            self._num_keys -= len(self._operations.popleft()[2])

    def story(self, key: str) -> tuple[StoryEntry, ...]:
        """What is left of the operations on one block, oldest first. May be called from any thread."""
        try:
            wanted = bytes.fromhex(key)
        except ValueError:
            return ()
        return tuple(
            StoryEntry(core="pool", at_s=at_s, event=event, actions=())
            for at_s, event, keys in list(self._operations)  # a copy: its owner may log meanwhile
            if wanted in keys
        )


class SlotAllocator:
    """The slots of one tier: which are free, and which one each block lies in. Slots are made when they are first
    taken, so that a large disk costs nothing before it is used.

    Args:
        tier: Which tier.
        num_slots: How many there are.
        epochs: Gives each use of a slot its number; shared with the other tier.
        story: Of the blocks; an InvariantError carries what it tells.

    Attributes:
        named: Where each block lies that is here, or will be soon.
    """

    def __init__(
        self, tier: Tier, num_slots: int, epochs: Iterator[int], story: BlockStory
    ) -> None:
        self.tier = tier
        self.num_slots = num_slots
        self.named: dict[BlockKey, Slot] = {}
        self._epochs = epochs
        self._story = story
        self._made: list[Slot] = []
        self._free: dict[int, Slot] = {}

    @property
    def num_free(self) -> int:
        """Slots that could be taken now."""
        return len(self._free) + self.num_slots - len(self._made)

    @property
    def num_taken(self) -> int:
        """The others."""
        return len(self._made) - len(self._free)

    def usage(self, account: Account) -> TierUsage:
        """What `account` has in this tier."""
        return account.memory if self.tier is _DRAM else account.disk

    def readable(self, key: BlockKey) -> Slot | None:
        """Where `key` can be read, if it can."""
        slot = self.named.get(key)
        return slot if slot is not None and slot.readable else None

    def move(self, slot: Slot, state: SlotState) -> None:
        """A slot enters `state`.

        Raises:
            InvariantError: The table has no such transition.
        """
        if state not in TRANSITIONS[slot.state]:
            what = f"{slot.tier} {slot.index}: {slot.state.name} to {state.name}"
            raise self._broken(slot.key, what)
        slot.state = state

    def take(self, key: BlockKey, billing: Billing, position: int, state: SlotState) -> Slot:
        """Takes a free slot for a block that has none in this tier. The caller has made sure that there is one."""
        usage = self.usage(billing.account)
        usage.taken += 1
        billing.slots += 1
        epoch = next(self._epochs)
        if self._free:
            _, slot = self._free.popitem()
            slot.epoch, slot.key, slot.position = epoch, key, position
            slot.billing, slot.usage = billing, usage
        else:
            slot = Slot(self.tier, len(self._made), epoch, key, billing, usage, position)
            self._made.append(slot)
        self.move(slot, state)
        self.named[key] = slot
        return slot

    def restore(self, block: DiskBlock, billing: Billing) -> Slot:
        """Takes the extent of a block that lay there before this start of the node; it has yet to move.

        Raises:
            InvariantError: There is no such extent, or it is in use, or the block lies elsewhere.
        """
        usage = self.usage(billing.account)
        for made in range(len(self._made), min(block.extent + 1, self.num_slots)):
            self._free[made] = Slot(self.tier, made, 0, block.key, billing, usage, block.position)
            self._made.append(self._free[made])
        slot = self._free.pop(block.extent, None)
        if slot is None or block.key in self.named:
            what = f"{self.tier} {block.extent} does not exist or is in use, or its block is"
            raise self._broken(block.key, what)
        slot.epoch, slot.key, slot.position = block.epoch, block.key, block.position
        slot.billing, slot.usage = billing, usage
        self.move(slot, _FILLING)
        self.named[block.key] = slot
        usage.taken += 1
        billing.slots += 1
        return slot

    def free(self, slot: Slot) -> None:
        """Gives a slot back whose block is not named here any more."""
        self.move(slot, _FREE)
        slot.checksums = b""
        slot.usage.taken -= 1
        slot.billing.slots -= 1
        self._free[slot.index] = slot

    def admit(self, slots: Sequence[Slot]) -> None:
        """Blocks of one text, in its order, have become resident: their eviction policies are told."""
        begin = 0
        for end, slot in enumerate(slots):
            first = slots[begin]
            if slot.billing is not first.billing or slot.position - first.position != end - begin:
                self._admit_run(slots[begin:end])
                begin = end
        self._admit_run(slots[begin:])

    def touch(self, slots: Sequence[Slot]) -> None:
        """Blocks of one text, in its order, were asked for."""
        keys: dict[TierUsage, list[BlockKey]] = {}
        for slot in slots:
            if slot.state is _RESIDENT:
                keys.setdefault(slot.usage, []).append(slot.key)
        for usage, its_keys in keys.items():
            usage.policy.used(its_keys)

    def victims(self, account: Account, count: int, may_go: MayGo) -> list[Slot]:
        """Resident blocks of `account` that are evicted first; its policy has given them up."""
        keys = self.usage(account).policy.victims(count, may_go)
        return [self.named[key] for key in keys]

    def rebill(self, slot: Slot, billing: Billing) -> None:
        """The slot's block turns out to belong to another owner."""
        slot.usage.taken -= 1
        slot.billing.slots -= 1
        slot.billing, slot.usage = billing, self.usage(billing.account)
        slot.usage.taken += 1
        billing.slots += 1

    def slots(self) -> Iterator[Slot]:
        """All that were ever taken."""
        return iter(self._made)

    def check_integrity(self) -> None:
        """Raises InvariantError unless each slot is either free or taken, and found by its block's key."""
        named = 0
        for index, slot in enumerate(self._made):
            if not slot.consistent:
                raise self._broken(slot.key, f"{slot!r} is inconsistent")
            if (slot.state is _FREE) != (self._free.get(index) is slot) or slot.index != index:
                raise self._broken(slot.key, f"{slot!r} is free and taken")
            if slot.named and self.named.get(slot.key) is not slot:
                raise self._broken(slot.key, f"{slot!r} is not found by its key")
            named += slot.named
        if named != len(self.named) or len(self._made) > self.num_slots:
            raise InvariantError(f"keys of {self.tier} name slots that they are not in")

    def _broken(self, key: BlockKey, what: str) -> InvariantError:
        return InvariantError(what, story=self._story.story(key.hex()))

    def _admit_run(self, slots: Sequence[Slot]) -> None:
        if slots:
            slots[0].usage.policy.admitted([slot.key for slot in slots], slots[0].position)


class ReplicaLog:
    """Keys whose entry in the directory is out of date. What came and went again unseen leaves no trace, so that the
    log is never longer than twice what the node holds, however long the directory is away.
    """

    def __init__(self) -> None:
        self._known: dict[BlockKey, bool] = {}  # whether the directory has an entry of it

    def __len__(self) -> int:
        return len(self._known)

    def __contains__(self, key: object) -> bool:
        return key in self._known

    def clear(self) -> None:
        """The directory has forgotten the node: everything that is held is told anew."""
        self._known.clear()

    def stored(self, key: BlockKey) -> None:
        """The node holds `key`, which it did not."""
        self._known.setdefault(key, False)

    def moved(self, key: BlockKey) -> None:
        """The node holds `key` in another slot."""
        self._known.setdefault(key, True)

    def removed(self, key: BlockKey) -> None:
        """The node holds `key` no longer."""
        if self._known.setdefault(key, True) is False:
            del self._known[key]

    def take(self, find: Callable[[BlockKey], Stored | None], limit: int) -> DirectoryChanges:
        """Takes the oldest changes, at most `limit` of them; `find` says where a block is now."""
        keys = list(islice(self._known, limit))
        found = [(key, find(key)) for key in keys]
        for key in keys:
            del self._known[key]
        return DirectoryChanges(
            stored=tuple(stored for _, stored in found if stored is not None),
            removed=tuple(key for key, stored in found if stored is None),
        )


class BlockStore:
    """Both tiers of a node. A block may lie in both: then it is read from memory,
    and leaves memory without being copied.

    Args:
        num_slots: Of the memory.
        num_extents: Of the disk.
        first_epoch: That no slot has had before.

    Attributes:
        memory: The slots.
        disk: The extents.
        pinned: Blocks that stay.
        copies: Blocks in memory that came from another node, which most likely has them still; those to be looked at
            first come first.
        changes: For routers.
        replicas: For the directory.
        actions: For the shell.
        story: What happened to blocks.
    """

    def __init__(self, num_slots: int, num_extents: int, first_epoch: int) -> None:
        epochs = count(first_epoch)
        self.story = BlockStory()
        self.memory = SlotAllocator(Tier.DRAM, num_slots, epochs, self.story)
        self.disk = SlotAllocator(Tier.SSD, num_extents, epochs, self.story)
        self.pinned: set[BlockKey] = set()
        self.copies: dict[BlockKey, None] = {}
        self.changes = ChangeLog()
        self.replicas = ReplicaLog()
        self.actions: list[NodeAction] = []

    def readable(self, key: BlockKey) -> Slot | None:
        """Where `key` is read, if it is held."""
        slot = self.memory.named.get(key)
        if slot is not None and slot.readable:
            return slot
        return self.disk.readable(key)

    def find(self, key: BlockKey) -> Stored | None:
        """What the directory should say of `key`; None where it is not held."""
        slot = self.readable(key)
        if slot is None:
            return None
        billing = slot.billing
        return Stored(
            key=key,
            owner=billing.owner,
            size_bytes=billing.size_bytes,
            tier=slot.tier,
            epoch=slot.epoch,
        )

    def may_go(self, slot: Slot) -> bool:
        """Whether a resident block may be evicted."""
        return not slot.users and slot.key not in self.pinned

    def take(
        self, tier: SlotAllocator, key: BlockKey, billing: Billing, position: int, state: SlotState
    ) -> Slot:
        """Takes a free slot of `tier` for a block that it does not have."""
        if key not in self._other(tier).named:
            billing.account.blocks += 1
        return tier.take(key, billing, position, state)

    def restore(self, block: DiskBlock, billing: Billing) -> None:
        """A block that was on the disk before this start of the node.

        Raises:
            InvariantError: Its extent does not exist, or two blocks claim to be in it, or it is in two.
        """
        slot = self.disk.restore(block, billing)
        billing.account.blocks += 1
        slot.checksums = block.checksums
        self.make_resident((slot,))

    def make_resident(self, slots: Sequence[Slot]) -> None:
        """Blocks of one text, in its order, are where they should be."""
        if not slots:
            return
        tier = self._tier(slots[0])
        other, in_memory = self._other(tier), tier is self.memory
        changes, replicas = self.changes, self.replicas
        for slot in slots:
            tier.move(slot, _RESIDENT)
            key = slot.key
            if key not in other.named or other.readable(key) is None:
                changes.stored(key)
                replicas.stored(key)
            elif in_memory:
                replicas.moved(key)
        tier.admit(slots)

    def stay(self, slot: Slot) -> None:
        """A block that was being demoted stays in memory."""
        self.memory.move(slot, _RESIDENT)
        self.memory.admit((slot,))

    def give_up(self, slot: Slot, *, victim: bool = False) -> bool:
        """A block leaves a tier. Its slot is free once nothing uses it, or writes to it.

        Args:
            slot: Where it lies, or was going to.
            victim: Its eviction policy knows.

        Returns:
            Whether the block can be read in the other tier.
        """
        in_memory, key = slot.tier is _DRAM, slot.key
        tier, other_tier = (self.memory, self.disk) if in_memory else (self.disk, self.memory)
        if slot.state is _RESIDENT and not victim:
            slot.usage.policy.removed(key)
        del tier.named[key]
        other = other_tier.named.get(key)
        if other is None:
            slot.billing.account.blocks -= 1
        is_held = other is not None and other.readable
        if slot.readable:
            self._left(key, in_memory=in_memory, is_held=is_held)
        if slot.state is _RESERVED:
            tier.move(slot, _QUARANTINED)
        elif slot.users:
            tier.move(slot, _CONDEMNED)
        else:
            self.free(slot)
        return is_held

    def free(self, slot: Slot) -> None:
        """A slot that nothing uses any more."""
        if slot.tier is _SSD:
            self.actions.append(Erase(extent=slot.index, epoch=slot.epoch, key=slot.key))
        self._tier(slot).free(slot)

    def release(self, slot: Slot) -> None:
        """One user of a slot is done."""
        slot.users -= 1
        if not slot.users and slot.state is _CONDEMNED:
            self.free(slot)

    def rebill(self, slot: Slot, billing: Billing) -> None:
        """A block that is being put turns out to belong to another owner."""
        slot.billing.account.blocks -= 1
        billing.account.blocks += 1
        self.memory.rebill(slot, billing)

    def check_integrity(self, accounts: Accounts) -> None:
        """Raises InvariantError if tiers, accounts and eviction policies disagree."""
        self.memory.check_integrity()
        self.disk.check_integrity()
        for account in accounts:
            self._check_account(account)
        tiers = (self.memory, self.disk)
        taken = Counter(s.billing for tier in tiers for s in tier.slots() if s.state is not _FREE)
        if any(billing.slots != count for billing, count in taken.items()):
            raise InvariantError("a billing has other slots than its blocks take")
        if not taken.keys() <= accounts.covered(Selection()):
            raise InvariantError("a block's billing was forgotten: a flush would miss it")
        if not all(self.readable(key) for key in self.pinned):
            raise InvariantError("a block is pinned that is not held")
        if not all(self.memory.readable(key) for key in self.copies):
            raise InvariantError("a copy of another node's block is not in memory")

    def _check_account(self, account: Account) -> None:
        billed = set()
        for tier in (self.memory, self.disk):
            usage = tier.usage(account)
            mine = [slot for slot in tier.slots() if slot.billing.account is account]
            taken = [slot for slot in mine if slot.state is not _FREE]
            resident = [slot for slot in taken if slot.state is _RESIDENT]
            billed |= {slot.key for slot in taken if slot.named}
            known = all(slot.key in usage.policy for slot in resident)
            if len(usage.policy) != len(resident) or not known or usage.taken != len(taken):
                raise InvariantError(f"{account.tenant!r} has other blocks in {tier.tier}")
        if account.blocks != len(billed):
            raise InvariantError(f"{account.tenant!r} is billed {account.blocks} of {len(billed)}")

    def _left(self, key: BlockKey, *, in_memory: bool, is_held: bool) -> None:
        if in_memory:
            self.copies.pop(key, None)
        if not is_held:
            self.changes.removed(key)
            self.replicas.removed(key)
            self.pinned.discard(key)
        elif in_memory:
            self.replicas.moved(key)

    def _tier(self, slot: Slot) -> SlotAllocator:
        return self.memory if slot.tier is _DRAM else self.disk

    def _other(self, tier: SlotAllocator) -> SlotAllocator:
        return self.disk if tier is self.memory else self.memory
