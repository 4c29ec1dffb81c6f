"""Leases of a node: what readers may read, and until when."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from baton.ids import WorkerIdentity
from kvpool.node.block_store import Slot


@dataclass(slots=True, eq=False)
class Lease:
    """One lease.

    Attributes:
        lease_id: Its name.
        places: That it holds, in chain order; those that are still read from the disk too.
        until_s: When it ends.
        lease_s: How long it was given for.
        reader: Who reads, if that is known.
        grows: The rest of its chain is being brought.
    """

    lease_id: str
    places: list[Slot]
    until_s: float
    lease_s: float
    reader: WorkerIdentity | None = None
    grows: bool = False


class LeaseBook:
    """All leases that are not over.

    Args:
        name: Begins every lease's id; no other start of any node has it.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._number = 0
        self._leases: dict[str, Lease] = {}

    def __len__(self) -> int:
        return len(self._leases)

    def __iter__(self) -> Iterator[Lease]:
        return iter(self._leases.values())

    def open(
        self, places: Sequence[Slot], lease_s: float, now_s: float, reader: WorkerIdentity | None
    ) -> Lease:
        """Gives a lease on places whose users count it already."""
        self._number += 1
        lease_id = f"{self._name}-l{self._number:x}"
        lease = Lease(lease_id, list(places), now_s + lease_s, lease_s, reader)
        self._leases[lease_id] = lease
        return lease

    def find(self, lease_id: str) -> Lease | None:
        """A lease that is not over."""
        return self._leases.get(lease_id)

    def close(self, lease_id: str) -> Lease | None:
        """Ends a lease."""
        return self._leases.pop(lease_id, None)

    def take_ended(self, now_s: float) -> list[Lease]:
        """Leases whose time is over. All are looked at: they were given for different times."""
        ended = [lease for lease in self if lease.until_s <= now_s]
        for lease in ended:
            del self._leases[lease.lease_id]
        return ended

    def by(self, reader: WorkerIdentity) -> list[Lease]:
        """The leases of one reader."""
        return [lease for lease in self if lease.reader == reader]
