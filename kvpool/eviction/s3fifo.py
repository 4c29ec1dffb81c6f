"""S3-FIFO: three queues, first in first out (Yang, Zhang, Qiu, Yue, Rashmi: FIFO queues are all you need for cache
eviction, SOSP '23).

New blocks enter a small queue. Those that were read twice while they passed through it move on to the main queue; the
others leave, and only their keys are remembered. A block that comes back while its key is remembered goes straight to
the main queue, where a block that was read is put at the back again instead of leaving. So what is read once, which
most prompts are, passes through a tenth of the memory only.
"""

from collections import OrderedDict
from collections.abc import Sequence
from itertools import islice

from baton.ids import BlockKey
from kvpool.eviction.policy import MayGo

_SMALL_SHARE = 0.1
_MAX_READS = 3
_READS_TO_STAY = 2


class S3Fifo:
    """Keeps what is read again and again; needs no capacity: the queues' shares are taken of what is here.

    Differs from the paper in two things: a block that may not go is sent round, as if it had been read; and where
    nothing else may go the small queue gives up what it has, however small it is.

    Promises: of blocks that were told together, and read equally often, the last one of the text goes first. A block
    that was read is not safe from leaving after those behind it: the queues know when a block came,
    not what it belongs to.
    """

    def __init__(self) -> None:
        # Each the oldest first, with how often the block was read since it came or was last put back.
        self._small: OrderedDict[BlockKey, int] = OrderedDict()
        self._main: OrderedDict[BlockKey, int] = OrderedDict()
        self._ghosts: OrderedDict[BlockKey, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._small) + len(self._main)

    def __contains__(self, key: object) -> bool:
        return key in self._small or key in self._main

    def admitted(self, keys: Sequence[BlockKey], first: int) -> None:  # noqa: ARG002
        """See `EvictionPolicy`."""
        ghosts, small, main = self._ghosts, self._small, self._main
        for key in reversed(keys):
            if key in ghosts:
                del ghosts[key]
                main[key] = 0
            else:
                small[key] = 0

    def used(self, keys: Sequence[BlockKey]) -> None:
        """See `EvictionPolicy`."""
        small, main = self._small, self._main
        for key in keys:
            queue = small if key in small else main
            reads = queue[key]
            if reads < _MAX_READS:
                queue[key] = reads + 1

    def removed(self, key: BlockKey) -> None:
        """See `EvictionPolicy`."""
        del (self._small if key in self._small else self._main)[key]

    def victims(self, count: int, may_go: MayGo) -> list[BlockKey]:
        """See `EvictionPolicy`."""
        small, main = self._small, self._main
        chosen: list[BlockKey] = []
        # Each block is looked at until its reads are used up, and once more to find that it may not go.
        for _ in range(len(self) * (_MAX_READS + 2)):
            total = len(small) + len(main)
            if len(chosen) >= count or not total:
                break
            is_small = not main or len(small) >= _SMALL_SHARE * total
            key = self._look_small(may_go) if is_small else self._look_main(may_go)
            if key is not None:
                chosen.append(key)
        # Where these are too few, the main queue has nothing left that may go, and the small one is below its share.
        rest = list(islice(filter(may_go, small), count - len(chosen)))
        for key in rest:
            del small[key]
        return chosen + rest

    def _look_small(self, may_go: MayGo) -> BlockKey | None:
        key, reads = self._small.popitem(last=False)
        if reads >= _READS_TO_STAY or not may_go(key):
            self._main[key] = 0
            return None
        self._ghosts[key] = None
        while len(self._ghosts) > max(len(self._main), 1):
            self._ghosts.popitem(last=False)
        return key

    def _look_main(self, may_go: MayGo) -> BlockKey | None:
        key, reads = self._main.popitem(last=False)
        if reads > 0 or not may_go(key):
            self._main[key] = max(reads - 1, 0)
            return None
        return key
