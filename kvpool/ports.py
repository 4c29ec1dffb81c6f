"""What a pool node needs from outside: the directory of the whole pool, and a disk below its memory."""

from collections.abc import Sequence
from typing import Protocol

from baton.ids import BlockKey, WorkerIdentity
from kvpool.messages import DirectoryChanges, NodeState, Renewal, Replica, Selection


class Directory(Protocol):
    """Which node holds which block. A hint: the nodes themselves are the truth, and a reader verifies what it gets.

    Every method may raise `PoolUnavailableError` when the directory cannot be reached; callers then do without.
    """

    async def publish(self, node: WorkerIdentity, changes: DirectoryChanges) -> None:
        """Takes one node's changes, in the order in which the node says them. Those of a node without a lease are passed over."""

    async def lookup(self, keys: Sequence[BlockKey]) -> list[tuple[Replica, ...]]:
        """Replicas of the leading blocks of a chain that some living node holds: one entry per block, none of them empty.

        One round trip, whatever the chain's length. Grants nothing and leaves no trace.
        """

    async def renew(self, state: NodeState, lease_s: float, flushes: int) -> Renewal:
        """Says that a node lives, for `lease_s` from now; what its lease covers is void once it has ended.

        Args:
            state: Of the node.
            lease_s: For how long.
            flushes: How many flushes the node has carried out.

        Returns:
            The later ones, for the node to carry out in its own memory, and whether the node has to publish all it holds.
        """

    async def nodes(self) -> tuple[NodeState, ...]:
        """The nodes that live."""

    async def retire(self, node: WorkerIdentity) -> None:
        """All replicas of this start of a node are void, at once."""

    async def flush(self, selection: Selection) -> int:
        """Voids every replica that `selection` covers, on all nodes. Returns the number of flushes so far."""
