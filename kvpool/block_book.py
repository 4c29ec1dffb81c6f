"""Which block lies where on a node, in memory or on its disk, and what others have yet to be told of it."""

from collections.abc import Iterable, Sequence
from itertools import count

from baton.blocks import ChangeLog
from baton.errors import InvariantError
from baton.ids import BlockKey
from kvpool.accounts import Account, Holding
from kvpool.actions import DiskBlock, Erase, NodeAction
from kvpool.changes import ReplicaLog
from kvpool.messages import Stored, Tier
from kvpool.places import Place, PlaceState
from kvpool.shelf import Shelf

# Names of the module: they are looked up for every block, and a member of an enum takes ten times as long.
_DRAM, _SSD = Tier.DRAM, Tier.SSD
_FREE = PlaceState.FREE
_RESERVED = PlaceState.RESERVED
_RESIDENT = PlaceState.RESIDENT
_QUARANTINED = PlaceState.QUARANTINED
_CONDEMNED = PlaceState.CONDEMNED


class BlockBook:
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
        self.memory = Shelf(Tier.DRAM, num_slots, epochs)
        self.disk = Shelf(Tier.SSD, num_extents, epochs)
        self.pinned: set[BlockKey] = set()
        self.copies: dict[BlockKey, None] = {}
        self.changes = ChangeLog()
        self.replicas = ReplicaLog()
        self.actions: list[NodeAction] = []

    def readable(self, key: BlockKey) -> Place | None:
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

    def may_go(self, place: Place) -> bool:
        """Whether a resident block may be evicted."""
        return not place.users and place.key not in self.pinned

    def take(
        self, shelf: Shelf, key: BlockKey, holding: Holding, position: int, state: PlaceState
    ) -> Place:
        """Takes a free place of `shelf` for a block that it does not have."""
        if key not in self._other(shelf).named:
            holding.account.blocks += 1
        return shelf.take(key, holding, position, state)

    def restore(self, block: DiskBlock, holding: Holding) -> Place:
        """A block that was on the disk before this start of the node.

        Raises:
            InvariantError: Its extent does not exist, or two blocks claim to be in it, or it is in two.
        """
        place = self.disk.restore(block.extent, block.epoch, block.key, holding, block.position)
        holding.account.blocks += 1
        place.checksums = block.checksums
        self.settle((place,))
        return place

    def settle(self, places: Sequence[Place]) -> None:
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

    def stay(self, slot: Place) -> None:
        """A block that was being demoted stays in memory."""
        slot.move(_RESIDENT)
        self.memory.admit((slot,))

    def give_up(self, place: Place, *, victim: bool = False) -> bool:
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

    def free(self, place: Place) -> None:
        """A place that nobody uses any more."""
        if place.tier is _SSD:
            self.actions.append(Erase(extent=place.index, epoch=place.epoch, key=place.key))
        self._shelf(place).free(place)

    def release(self, place: Place) -> None:
        """Somebody has stopped using a place."""
        place.users -= 1
        if not place.users and place.state is _CONDEMNED:
            self.free(place)

    def rehouse(self, place: Place, holding: Holding) -> None:
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

    def _shelf(self, place: Place) -> Shelf:
        return self.memory if place.tier is _DRAM else self.disk

    def _other(self, shelf: Shelf) -> Shelf:
        return self.disk if shelf is self.memory else self.memory
