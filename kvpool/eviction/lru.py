"""Least recently used first."""

from collections import OrderedDict
from collections.abc import Sequence

from baton.ids import BlockKey
from kvpool.eviction.policy import MayGo


class LeastRecentlyUsed:
    """The block that was neither read nor put for the longest time goes first.

    Promises: of blocks told together the last one of the text goes first, and a reader of a block reads those ahead of
    it; so from the first time that a text was read to its end a block goes before those ahead of it. Before that a text
    that was put in pieces goes by pieces, the oldest first.
    """

    def __init__(self) -> None:
        self._order: OrderedDict[BlockKey, None] = OrderedDict()  # the oldest first

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, key: object) -> bool:
        return key in self._order

    def admitted(self, keys: Sequence[BlockKey], first: int) -> None:  # noqa: ARG002
        """See `EvictionPolicy`."""
        self._order.update(dict.fromkeys(reversed(keys)))

    def used(self, keys: Sequence[BlockKey]) -> None:
        """See `EvictionPolicy`."""
        for key in reversed(keys):
            self._order.move_to_end(key)

    def removed(self, key: BlockKey) -> None:
        """See `EvictionPolicy`."""
        del self._order[key]

    def victims(self, count: int, may_go: MayGo) -> list[BlockKey]:
        """See `EvictionPolicy`."""
        chosen: list[BlockKey] = []
        for key in self._order:
            if len(chosen) >= count:
                break
            if may_go(key):
                chosen.append(key)
        for key in chosen:
            del self._order[key]
        return chosen
