"""Where one block can lie on a node: a slot of its memory, an extent of its disk; and what may become of such a place.

             reserve                commit
    FREE ──────────────▶ RESERVED ─────────▶ RESIDENT ◀──────── DEMOTING     memory only: being copied to the disk
     │ ▲                  │ too late, flushed   │ │ ────────────▶ │
     │ │                  ▼                     │ │               │
     │ ├──────────── QUARANTINED                │ │ flushed, corrupt, and somebody reads it
     │ │ its writer has stopped, or must have   │ ▼               ▼
     │ ├───────────────────────────────────── CONDEMNED ◀── FILLING
     │ └──────────────────────────────────────  given up          │ ▲
     └────────────────────────────────────────────────────────────┼─┘ from the other tier
                                              RESIDENT ◀──────────┘ read or written

Each time a place is taken it gets another epoch, which no place of this node has had before.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import count, islice

from baton.blocks import ChangeLog
from baton.errors import InvariantError
from baton.ids import BlockKey
from kvpool.eviction.policy import MayGo
from kvpool.messages import DirectoryChanges, DiskBlock, Erase, NodeAction, Stored, Tier
from kvpool.node.accounts import Account, Billing, TierUsage


class SlotState(IntEnum):
    """What a place is there for at the moment. Integers, since they are looked up whenever a block comes or goes."""

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


@dataclass(slots=True, eq=False)
class Slot:
    """One place. While it is free, what it says of a block is what it held last.

    Attributes:
        tier: Of which tier.
        index: Which slot or extent.
        epoch: Of the block in it.
        key: The block.
        holding: Whose it is.
        stake: What its tenant has in this tier.
        position: How many blocks of its text are before it.
        state: Where the place stands.
        checksums: Of the block's layers, once it is resident.
        users: Leases that hold it, and reads and writes of the disk that are under way.
    """

    tier: Tier
    index: int
    epoch: int
    key: BlockKey
    holding: Billing
    stake: TierUsage
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

    def move(self, state: SlotState) -> None:
        """Enters `state`.

        Raises:
            InvariantError: The table has no such transition.
        """
        if state not in TRANSITIONS[self.state]:
            raise InvariantError(f"{self.tier} {self.index}: {self.state.name} to {state.name}")
        self.state = state

    def check_integrity(self) -> None:
        """Raises InvariantError if it contradicts itself."""
        unused = self.state in (_S.FREE, _S.RESERVED, _S.QUARANTINED)
        busy = self.state in (_S.DEMOTING, _S.FILLING, _S.CONDEMNED)
        if self.users < 0 or (self.users and unused) or (busy and not self.users):
            raise InvariantError(f"{self.tier} {self.index} is inconsistent: {self!r}")


# Names of the module: they are looked up for every block, and a member of an enum takes ten times as long.
_DRAM = Tier.DRAM
_FREE = SlotState.FREE
_FILLING = SlotState.FILLING
_RESIDENT = SlotState.RESIDENT


class SlotAllocator:
    """Places of one tier. They are made when first taken, so that a large disk costs nothing before it is used.

    Args:
        tier: Which tier.
        num_places: How many there are.
        epochs: Where each use of a place gets its number; shared with the other tier.
    """

    def __init__(self, tier: Tier, num_places: int, epochs: Iterator[int]) -> None:
        self.tier = tier
        self.num_places = num_places
        self.named: dict[BlockKey, Slot] = {}
        self._epochs = epochs
        self._made: list[Slot] = []
        self._free: dict[int, Slot] = {}

    @property
    def num_free(self) -> int:
        """Places that could be taken now."""
        return len(self._free) + self.num_places - len(self._made)

    @property
    def num_taken(self) -> int:
        """The others."""
        return len(self._made) - len(self._free)

    def stake(self, account: Account) -> TierUsage:
        """What `account` has in this tier."""
        return account.memory if self.tier is _DRAM else account.disk

    def readable(self, key: BlockKey) -> Slot | None:
        """Where `key` can be read, if it can."""
        place = self.named.get(key)
        return place if place is not None and place.readable else None

    def take(self, key: BlockKey, holding: Billing, position: int, state: SlotState) -> Slot:
        """Takes a free place for a block that has none in this tier. The caller has seen to it that there is one."""
        stake = self.stake(holding.account)
        stake.taken += 1
        epoch = next(self._epochs)
        if self._free:
            _, place = self._free.popitem()
            place.epoch, place.key, place.position = epoch, key, position
            place.holding, place.stake = holding, stake
        else:
            place = Slot(self.tier, len(self._made), epoch, key, holding, stake, position)
            self._made.append(place)
        place.move(state)
        self.named[key] = place
        return place

    def restore(
        self, index: int, epoch: int, key: BlockKey, holding: Billing, position: int
    ) -> Slot:
        """Takes the place numbered `index` for a block that lay there before this start of the node; it has yet to move.

        Raises:
            InvariantError: There is no such place, or it is in use, or the block lies elsewhere.
        """
        stake = self.stake(holding.account)
        for made in range(len(self._made), min(index + 1, self.num_places)):
            self._free[made] = Slot(self.tier, made, 0, key, holding, stake, position)
            self._made.append(self._free[made])
        place = self._free.pop(index, None)
        if place is None or key in self.named:
            raise InvariantError(
                f"{self.tier} {index} does not exist or is in use, or its block is"
            )
        place.epoch, place.key, place.position = epoch, key, position
        place.holding, place.stake = holding, stake
        place.move(_FILLING)
        self.named[key] = place
        stake.taken += 1
        return place

    def free(self, place: Slot) -> None:
        """Gives a place back whose block is not named here any more."""
        place.move(_FREE)
        place.checksums = b""
        place.stake.taken -= 1
        self._free[place.index] = place

    def admit(self, places: Sequence[Slot]) -> None:
        """Blocks of one text, in its order, have become resident: their eviction policies are told."""
        begin = 0
        for end, place in enumerate(places):
            first = places[begin]
            if place.holding is not first.holding or place.position - first.position != end - begin:
                self._admit_run(places[begin:end])
                begin = end
        self._admit_run(places[begin:])

    def touch(self, places: Sequence[Slot]) -> None:
        """Blocks of one text, in its order, were asked for."""
        keys: dict[TierUsage, list[BlockKey]] = {}
        for place in places:
            if place.state is _RESIDENT:
                keys.setdefault(place.stake, []).append(place.key)
        for stake, its_keys in keys.items():
            stake.policy.used(its_keys)

    def untrack(self, place: Slot) -> None:
        """A resident block is about to go for another reason than want of room."""
        place.stake.policy.removed(place.key)

    def victims(self, account: Account, count: int, may_go: MayGo) -> list[Slot]:
        """Resident blocks of `account` that go first; its policy has given them up."""
        keys = self.stake(account).policy.victims(count, may_go)
        return [self.named[key] for key in keys]

    def rehouse(self, place: Slot, holding: Billing) -> None:
        """The place's block turns out to be somebody else's."""
        place.stake.taken -= 1
        place.holding, place.stake = holding, self.stake(holding.account)
        place.stake.taken += 1

    def places(self) -> Iterator[Slot]:
        """All that were ever taken."""
        return iter(self._made)

    def check_integrity(self) -> None:
        """Raises InvariantError unless each place is either free or taken, and found by its block's key."""
        named = 0
        for index, place in enumerate(self._made):
            place.check_integrity()
            if (place.state is _FREE) != (self._free.get(index) is place) or place.index != index:
                raise InvariantError(f"{place!r} is free and taken")
            if place.named and self.named.get(place.key) is not place:
                raise InvariantError(f"{place!r} is not found by its key")
            named += place.named
        if named != len(self.named) or len(self._made) > self.num_places:
            raise InvariantError(f"keys of {self.tier} name places that they are not in")

    def _admit_run(self, places: Sequence[Slot]) -> None:
        if places:
            places[0].stake.policy.admitted([p.key for p in places], places[0].position)


class ReplicaLog:
    """Keys whose entry in the directory is out of date. What came and went again unseen leaves no trace, so that the log is
    never longer than twice what the node holds, however long the directory is away.
    """

    def __init__(self) -> None:
        self._known: dict[BlockKey, bool] = {}  # whether the directory has an entry of it

    def __len__(self) -> int:
        return len(self._known)

    def stored(self, key: BlockKey) -> None:
        """The node holds `key`, which it did not."""
        self._known.setdefault(key, False)

    def moved(self, key: BlockKey) -> None:
        """The node holds `key` in another place."""
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


# Names of the module: they are looked up for every block, and a member of an enum takes ten times as long.
_DRAM, _SSD = Tier.DRAM, Tier.SSD
_FREE = SlotState.FREE
_RESERVED = SlotState.RESERVED
_RESIDENT = SlotState.RESIDENT
_QUARANTINED = SlotState.QUARANTINED
_CONDEMNED = SlotState.CONDEMNED


class BlockStore:
    """Both tiers of a node. A block may lie in both: then it is read from memory, and leaves memory without being copied.

    Every place enters and leaves its states here, so that bills, logs and eviction policies agree with them.

    Attributes:
        memory: The slots.
        disk: The extents.
        pinned: Blocks that stay.
        copies: Blocks in memory that came from another node, which most likely has them still; those to be looked at first
            come first.
        changes: For routers.
        replicas: For the directory.
        actions: For the shell.

    Args:
        num_slots: Of the memory.
        num_extents: Of the disk.
        first_epoch: That no place has had before.
    """

    def __init__(self, num_slots: int, num_extents: int, first_epoch: int) -> None:
        epochs = count(first_epoch)
        self.memory = SlotAllocator(Tier.DRAM, num_slots, epochs)
        self.disk = SlotAllocator(Tier.SSD, num_extents, epochs)
        self.pinned: set[BlockKey] = set()
        self.copies: dict[BlockKey, None] = {}
        self.changes = ChangeLog()
        self.replicas = ReplicaLog()
        self.actions: list[NodeAction] = []

    def readable(self, key: BlockKey) -> Slot | None:
        """Where `key` is read, if it is held."""
        place = self.memory.named.get(key)
        if place is not None and place.readable:
            return place
        return self.disk.readable(key)

    def stored(self, key: BlockKey) -> Stored | None:
        """What the directory should say of `key`; None where it is not held."""
        place = self.readable(key)
        if place is None:
            return None
        holding = place.holding
        return Stored(
            key=key,
            owner=holding.owner,
            size_bytes=holding.size_bytes,
            tier=place.tier,
            epoch=place.epoch,
        )

    def may_go(self, place: Slot) -> bool:
        """Whether a resident block may be evicted."""
        return not place.users and place.key not in self.pinned

    def take(
        self, shelf: SlotAllocator, key: BlockKey, holding: Billing, position: int, state: SlotState
    ) -> Slot:
        """Takes a free place of `shelf` for a block that it does not have."""
        if key not in self._other(shelf).named:
            holding.account.blocks += 1
        return shelf.take(key, holding, position, state)

    def restore(self, block: DiskBlock, holding: Billing) -> Slot:
        """A block that was on the disk before this start of the node.

        Raises:
            InvariantError: Its extent does not exist, or two blocks claim to be in it, or it is in two.
        """
        place = self.disk.restore(block.extent, block.epoch, block.key, holding, block.position)
        holding.account.blocks += 1
        place.checksums = block.checksums
        self.settle((place,))
        return place

    def settle(self, places: Sequence[Slot]) -> None:
        """Blocks of one text, in its order, are where they should be."""
        if not places:
            return
        shelf = self._shelf(places[0])
        others, in_memory = self._other(shelf), shelf is self.memory
        changes, replicas = self.changes, self.replicas
        for place in places:
            place.move(_RESIDENT)
            key = place.key
            if key not in others.named or others.readable(key) is None:
                changes.stored(key)
                replicas.stored(key)
            elif in_memory:
                replicas.moved(key)
        shelf.admit(places)

    def stay(self, slot: Slot) -> None:
        """A block that was being demoted stays in memory."""
        slot.move(_RESIDENT)
        self.memory.admit((slot,))

    def give_up(self, place: Slot, *, victim: bool = False) -> bool:
        """A block leaves a tier. Its place is free once nobody uses it, or writes to it.

        Args:
            place: Where it lies, or was going to.
            victim: Its eviction policy knows.

        Returns:
            Whether the block can be read in the other tier.
        """
        in_memory, key = place.tier is _DRAM, place.key
        shelf, others = (self.memory, self.disk) if in_memory else (self.disk, self.memory)
        if place.state is _RESIDENT and not victim:
            shelf.untrack(place)
        del shelf.named[key]
        other = others.named.get(key)
        if other is None:
            place.holding.account.blocks -= 1
        is_held = other is not None and other.readable
        if place.readable:
            self._left(key, in_memory=in_memory, is_held=is_held)
        if place.state is _RESERVED:
            place.move(_QUARANTINED)
        elif place.users:
            place.move(_CONDEMNED)
        else:
            self.free(place)
        return is_held

    def free(self, place: Slot) -> None:
        """A place that nobody uses any more."""
        if place.tier is _SSD:
            self.actions.append(Erase(extent=place.index, epoch=place.epoch, key=place.key))
        self._shelf(place).free(place)

    def release(self, place: Slot) -> None:
        """Somebody has stopped using a place."""
        place.users -= 1
        if not place.users and place.state is _CONDEMNED:
            self.free(place)

    def rehouse(self, place: Slot, holding: Billing) -> None:
        """A block that is being put turns out to be somebody else's."""
        place.holding.account.blocks -= 1
        holding.account.blocks += 1
        self.memory.rehouse(place, holding)

    def check_integrity(self, accounts: Iterable[Account]) -> None:
        """Raises InvariantError if tiers, bills and eviction policies disagree."""
        self.memory.check_integrity()
        self.disk.check_integrity()
        for account in accounts:
            self._check_account(account)
        if not all(self.readable(key) for key in self.pinned):
            raise InvariantError("a block is pinned that is not held")
        if not all(self.memory.readable(key) for key in self.copies):
            raise InvariantError("a copy of another node's block is not in memory")

    def _check_account(self, account: Account) -> None:
        billed = set()
        for shelf in (self.memory, self.disk):
            stake = shelf.stake(account)
            mine = [place for place in shelf.places() if place.holding.account is account]
            taken = [place for place in mine if place.state is not _FREE]
            resident = [place for place in taken if place.state is _RESIDENT]
            billed |= {place.key for place in taken if place.named}
            known = all(place.key in stake.policy for place in resident)
            if len(stake.policy) != len(resident) or not known or stake.taken != len(taken):
                raise InvariantError(f"{account.tenant!r} has other blocks in {shelf.tier}")
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

    def _shelf(self, place: Slot) -> SlotAllocator:
        return self.memory if place.tier is _DRAM else self.disk

    def _other(self, shelf: SlotAllocator) -> SlotAllocator:
        return self.disk if shelf is self.memory else self.memory
