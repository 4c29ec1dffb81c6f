"""Cost-aware: what is cheap to compute again, or seldom read, goes first (GreedyDual-Size with frequency: Cherkasova,
1998).

A block's worth is `age + reads x cost`. Its cost is what computing it again would take, and grows with its place in the
text: each token attends to all before it. The age is the worth of the last block that went, so that what is not read
any more falls behind whatever comes, however dear it was. Blocks of a node are of one size,
so worth is not divided by it.
"""

import heapq
from collections.abc import Sequence
from itertools import count as counter

from baton.ids import BlockKey
from kvpool.eviction.policy import MayGo

_BLOCKS_TO_DOUBLE = 512.0
"""About how deep in a text attending costs as much as all else: some 30,000 tokens for a model of 8B,
in blocks of 64.
"""


class _Valued:
    """A block that is here. Its entry in the heap counts only while it carries the latest number."""

    __slots__ = ("cost", "number", "reads", "worth")

    def __init__(self, cost: float) -> None:
        self.cost = cost
        self.reads = 0
        self.worth = 0.0
        self.number = 0


class CostAware:
    """Keeps what would be dear to compute again.

    Promises: told together, a block is worth at least what those behind it are, and of equals the last one goes first;
    so from the first time that a text was read to its end a block goes before those ahead of it. A text that was put in
    pieces goes by worth before that: the beginning, which is cheap, first.
    """

    def __init__(self, blocks_to_double: float = _BLOCKS_TO_DOUBLE) -> None:
        self._blocks_to_double = blocks_to_double
        self._blocks: dict[BlockKey, _Valued] = {}
        self._heap: list[tuple[float, int, BlockKey]] = []
        self._numbers = counter(1)
        self._age = 0.0

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, key: object) -> bool:
        return key in self._blocks

    def admitted(self, keys: Sequence[BlockKey], first: int) -> None:
        """See `EvictionPolicy`."""
        for index, key in enumerate(keys, first):
            self._blocks[key] = _Valued(1.0 + index / self._blocks_to_double)
        self.used(keys)

    def used(self, keys: Sequence[BlockKey]) -> None:
        """See `EvictionPolicy`."""
        blocks, heap, age, numbers = self._blocks, self._heap, self._age, self._numbers
        worth = 0.0
        for key in reversed(keys):
            block = blocks[key]
            block.reads += 1
            worth = max(worth, block.worth, age + block.reads * block.cost)
            block.worth, block.number = worth, next(numbers)
            heapq.heappush(heap, (worth, block.number, key))
        if len(heap) > 2 * len(blocks) + 64:
            self._compact()

    def removed(self, key: BlockKey) -> None:
        """See `EvictionPolicy`."""
        del self._blocks[key]

    def victims(self, count: int, may_go: MayGo) -> list[BlockKey]:
        """See `EvictionPolicy`."""
        chosen: list[BlockKey] = []
        staying: list[tuple[float, int, BlockKey]] = []
        while self._heap and len(chosen) < count:
            entry = heapq.heappop(self._heap)
            worth, number, key = entry
            block = self._blocks.get(key)
            if block is None or block.number != number:
                continue
            if may_go(key):
                self._age = worth
                del self._blocks[key]
                chosen.append(key)
            else:
                staying.append(entry)
        for entry in staying:
            heapq.heappush(self._heap, entry)
        return chosen

    def _compact(self) -> None:
        self._heap = [(block.worth, block.number, key) for key, block in self._blocks.items()]
        heapq.heapify(self._heap)
