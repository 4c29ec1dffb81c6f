"""Which addresses are asked: those that are sighted, and those at which somebody answers."""

from collections.abc import Collection
from dataclasses import dataclass

from baton.discovery.registry import MOST_REGISTRATIONS

LINGER_S = 10.0
MOST_ADDRESSES = MOST_REGISTRATIONS
"""Whoever may register may be asked: also every worker of an update that starts the new ones before the old ones end.
The bound is there for what DNS may name.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RosterChange:
    """What follows from a look.

    Attributes:
        opened: Addresses to ask from now on.
        closed: Addresses not to ask any more.
        left_out: How many were sighted beyond the most that are asked.
    """

    opened: tuple[str, ...]
    closed: tuple[str, ...]
    left_out: int


class Roster:
    """The addresses that are asked. Pure: time comes as `now_s`; one owner.

    An address is asked from the look that names it. It is given up once no look has named it, and nobody has answered
    there, for `linger_s`: so an empty answer of a directory that lost its memory takes nobody out who is there.

    Args:
        fixed: Asked always.
        linger_s: See above.
        most: Addresses that looks may add.
    """

    def __init__(
        self,
        fixed: Collection[str] = (),
        *,
        linger_s: float = LINGER_S,
        most: int = MOST_ADDRESSES,
    ) -> None:
        self._fixed = frozenset(fixed)
        self._linger_s = linger_s
        self._most = most
        self._sighted: frozenset[str] = frozenset()
        self._wanted_s: dict[str, float] = {}
        """Of each address that a look added: when it was last sighted or answering."""

    @property
    def asked(self) -> frozenset[str]:
        """All that are asked."""
        return self._fixed.union(self._wanted_s)

    def is_sighted(self, address: str) -> bool:
        """Whether the last look named it."""
        return address in self._sighted or address in self._fixed

    def give_up(self, address: str) -> None:
        """It is not asked any more, unless it is one that is asked always, until a look names it anew."""
        self._wanted_s.pop(address, None)

    def relist(self, fixed: Collection[str]) -> RosterChange:
        """From now on these are asked always, and those that were until now only if a later look names them."""
        before = self.asked
        self._fixed = frozenset(fixed)
        self._wanted_s = {
            address: wanted_s
            for address, wanted_s in self._wanted_s.items()
            if address not in self._fixed
        }
        return RosterChange(
            opened=tuple(sorted(self._fixed - before)),
            closed=tuple(sorted(before - self.asked)),
            left_out=0,
        )

    def look(
        self, sighted: Collection[str], answering: Collection[str], now_s: float
    ) -> RosterChange:
        """A look named `sighted`; at `answering` somebody is connected."""
        self._sighted = frozenset(sighted)
        for address in self._wanted_s:
            if address in self._sighted or address in answering:
                self._wanted_s[address] = now_s
        closed = sorted(
            address
            for address, wanted_s in self._wanted_s.items()
            if now_s - wanted_s >= self._linger_s
        )
        for address in closed:
            del self._wanted_s[address]
        new = sorted(self._sighted - self._fixed - self._wanted_s.keys())
        opened = new[: max(0, self._most - len(self._wanted_s))]
        self._wanted_s |= dict.fromkeys(opened, now_s)
        return RosterChange(
            opened=tuple(opened), closed=tuple(closed), left_out=len(new) - len(opened)
        )
