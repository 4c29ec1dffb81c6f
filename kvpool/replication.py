"""When the blocks of a node have earned another copy elsewhere. Pure.

Reads are counted where they happen (`kvpool.demand`), so it is the node with the readers that sees to the copies: two from
`replicate_reads` reads a minute on, one more with every doubling. Copies are lost again where they are: one that is not read goes
first when its node is short of memory (`kvpool.evictor`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from baton.ids import BlockKey
from kvpool.demand import Demand

_AGAIN_S = 10.0
"""A text is looked at this often at most: copies take time to come, and to be told of."""

_MAX_TEXTS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Blocks that should have more copies, if there are not as many yet.

    Attributes:
        keys: The beginning of a text.
        copies: How many nodes should hold it.
    """

    keys: tuple[BlockKey, ...]
    copies: int


class Replication:
    """Decides for one node.

    Args:
        demand: Of the node's blocks.
        reads: Of late that earn a second copy; 0: none ever.
        most: Copies of a block that are made.
    """

    def __init__(self, demand: Demand, *, reads: float, most: int) -> None:
        self._demand = demand
        self._reads = reads
        self._most = most
        self._looked_s: dict[BlockKey, float] = {}

    def due(self, keys: Sequence[BlockKey], now_s: float) -> Order | None:
        """What follows of a read of `keys`, the beginning of a text that is held here; None for nothing."""
        if not keys or self._reads <= 0 or self._most < 2:
            return None
        reads = self._demand.of(keys[0], now_s)
        if reads < self._reads or not self._may_look(keys[0], now_s):
            return None
        copies = 2 + int(math.log2(reads / self._reads))
        return Order(keys=tuple(keys[: self._depth(keys, now_s)]), copies=min(copies, self._most))

    def _depth(self, keys: Sequence[BlockKey], now_s: float) -> int:
        """Leading blocks that are hot; the first one is."""
        return next(
            (at for at, key in enumerate(keys) if self._demand.of(key, now_s) < self._reads),
            len(keys),
        )

    def _may_look(self, root: BlockKey, now_s: float) -> bool:
        looked_s = self._looked_s.pop(root, None)
        again = looked_s is None or now_s - looked_s >= _AGAIN_S
        self._looked_s[root] = now_s if looked_s is None or again else looked_s
        if len(self._looked_s) > _MAX_TEXTS:
            del self._looked_s[next(iter(self._looked_s))]
        return again
