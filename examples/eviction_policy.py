"""An eviction policy: blocks that are deep in their text are evicted first,
so that the beginnings that texts share stay.

The configuration names only the policies that Baton ships; another one is added in code, before a node is made:

    from examples.eviction_policy import DeepestFirst
    from kvpool.eviction.select import POLICIES

    POLICIES["deepest"] = DeepestFirst
    ledger = NodeLedger(NodeLimits(num_slots=..., slot_bytes=..., eviction="deepest"), "a")

The contract is `kvpool/eviction/policy.py`; docs/guides/add-an-eviction-policy.md says what else it takes.
"""

from collections.abc import Sequence

from baton.ids import BlockKey
from kvpool.eviction.policy import MayGo


class DeepestFirst:
    """Evicts the block with most blocks of its text before it; of equals, the one that was put first."""

    def __init__(self) -> None:
        self._depths: dict[BlockKey, int] = {}

    def __len__(self) -> int:
        return len(self._depths)

    def __contains__(self, key: object) -> bool:
        return key in self._depths

    def admitted(self, keys: Sequence[BlockKey], first: int) -> None:
        """Notes how deep in their text the blocks are."""
        self._depths.update((key, depth) for depth, key in enumerate(keys, first))

    def used(self, keys: Sequence[BlockKey]) -> None:
        """Reads change nothing."""

    def removed(self, key: BlockKey) -> None:
        """A block has gone for another reason than want of room."""
        del self._depths[key]

    def victims(self, count: int, may_go: MayGo) -> list[BlockKey]:
        """The deepest blocks that may go; their order is made anew each time, which is dear for a large tier."""
        deepest = sorted(self._depths, key=self._depths.__getitem__, reverse=True)
        chosen = list(filter(may_go, deepest))[:count]
        for key in chosen:
            del self._depths[key]
        return chosen
