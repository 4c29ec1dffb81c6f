"""The places of one tier of a node: which are free, and which one each block lies in."""

from collections.abc import Iterator, Sequence

from baton.errors import InvariantError
from baton.ids import BlockKey
from kvpool.accounts import Account, Holding, Stake
from kvpool.eviction.policy import MayGo
from kvpool.messages import Tier
from kvpool.places import Place, PlaceState

# Names of the module: they are looked up for every block, and a member of an enum takes ten times as long.
_DRAM = Tier.DRAM
_FREE = PlaceState.FREE
_FILLING = PlaceState.FILLING
_RESIDENT = PlaceState.RESIDENT


class Shelf:
    """Places of one tier. They are made when first taken, so that a large disk costs nothing before it is used.

    Args:
        tier: Which tier.
        num_places: How many there are.
        epochs: Where each use of a place gets its number; shared with the other tier.
    """

    def __init__(self, tier: Tier, num_places: int, epochs: Iterator[int]) -> None:
        self.tier = tier
        self.num_places = num_places
        self.named: dict[BlockKey, Place] = {}
        self._epochs = epochs
        self._made: list[Place] = []
        self._free: dict[int, Place] = {}

    @property
    def num_free(self) -> int:
        """Places that could be taken now."""
        return len(self._free) + self.num_places - len(self._made)

    @property
    def num_taken(self) -> int:
        """The others."""
        return len(self._made) - len(self._free)

    def stake(self, account: Account) -> Stake:
        """What `account` has in this tier."""
        return account.memory if self.tier is _DRAM else account.disk

    def readable(self, key: BlockKey) -> Place | None:
        """Where `key` can be read, if it can."""
        place = self.named.get(key)
        return place if place is not None and place.readable else None

    def take(self, key: BlockKey, holding: Holding, position: int, state: PlaceState) -> Place:
        """Takes a free place for a block that has none in this tier. The caller has seen to it that there is one."""
        stake = self.stake(holding.account)
        stake.taken += 1
        epoch = next(self._epochs)
        if self._free:
            _, place = self._free.popitem()
            place.epoch, place.key, place.position = epoch, key, position
            place.holding, place.stake = holding, stake
        else:
            place = Place(self.tier, len(self._made), epoch, key, holding, stake, position)
            self._made.append(place)
        place.move(state)
        self.named[key] = place
        return place

    def restore(
        self, index: int, epoch: int, key: BlockKey, holding: Holding, position: int
    ) -> Place:
        """Takes the place numbered `index` for a block that lay there before this start of the node; it has yet to move.

        Raises:
            InvariantError: There is no such place, or it is in use, or the block lies elsewhere.
        """
        stake = self.stake(holding.account)
        for made in range(len(self._made), min(index + 1, self.num_places)):
            self._free[made] = Place(self.tier, made, 0, key, holding, stake, position)
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

    def free(self, place: Place) -> None:
        """Gives a place back whose block is not named here any more."""
        place.move(_FREE)
        place.checksums = b""
        place.stake.taken -= 1
        self._free[place.index] = place

    def admit(self, places: Sequence[Place]) -> None:
        """Blocks of one text, in its order, have become resident: their eviction policies are told."""
        begin = 0
        for end, place in enumerate(places):
            first = places[begin]
            if place.holding is not first.holding or place.position - first.position != end - begin:
                self._admit_run(places[begin:end])
                begin = end
        self._admit_run(places[begin:])

    def touch(self, places: Sequence[Place]) -> None:
        """Blocks of one text, in its order, were asked for."""
        keys: dict[Stake, list[BlockKey]] = {}
        for place in places:
            if place.state is _RESIDENT:
                keys.setdefault(place.stake, []).append(place.key)
        for stake, its_keys in keys.items():
            stake.policy.used(its_keys)

    def untrack(self, place: Place) -> None:
        """A resident block is about to go for another reason than want of room."""
        place.stake.policy.removed(place.key)

    def victims(self, account: Account, count: int, may_go: MayGo) -> list[Place]:
        """Resident blocks of `account` that go first; its policy has given them up."""
        keys = self.stake(account).policy.victims(count, may_go)
        return [self.named[key] for key in keys]

    def rehouse(self, place: Place, holding: Holding) -> None:
        """The place's block turns out to be somebody else's."""
        place.stake.taken -= 1
        place.holding, place.stake = holding, self.stake(holding.account)
        place.stake.taken += 1

    def places(self) -> Iterator[Place]:
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

    def _admit_run(self, places: Sequence[Place]) -> None:
        if places:
            places[0].stake.policy.admitted([p.key for p in places], places[0].position)
