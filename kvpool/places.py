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

from dataclasses import dataclass
from enum import IntEnum

from baton.errors import InvariantError
from baton.ids import BlockKey
from kvpool.accounts import Holding, Stake
from kvpool.messages import Tier


class PlaceState(IntEnum):
    """What a place is there for at the moment. Integers, since they are looked up whenever a block comes or goes."""

    FREE = 0
    RESERVED = 1
    FILLING = 2
    RESIDENT = 3
    DEMOTING = 4
    QUARANTINED = 5
    CONDEMNED = 6


_S = PlaceState
TRANSITIONS: dict[PlaceState, frozenset[PlaceState]] = {
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
class Place:
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
    holding: Holding
    stake: Stake
    position: int
    state: PlaceState = PlaceState.FREE
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

    def move(self, state: PlaceState) -> None:
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
