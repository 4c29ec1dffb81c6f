"""What decides the order in which blocks leave one tier: the port, and the table of those that are there.

A node asks one policy per tenant and tier (`kvpool.node.accounts`); whose block goes is settled before
(`kvpool.eviction.fairness`). Blocks of a chain are told together and in chain order. A block is useless without those
before it, so within what each policy promises the later block of a chain goes first; that every reader of a block reads
those before it too makes this cheap.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from baton.ids import BlockKey

MayGo = Callable[[BlockKey], bool]
"""Whether a block may be given up now: it is neither being read nor pinned."""


class EvictionPolicy(Protocol):
    """The order of the blocks of one tenant in one tier. Pure; each block is of one size."""

    def admitted(self, keys: Sequence[BlockKey], first: int) -> None:
        """Blocks have come, none of which is here.

        Args:
            keys: Blocks of one text, in its order.
            first: How many blocks of the text are before `keys[0]`.
        """

    def used(self, keys: Sequence[BlockKey]) -> None:
        """Blocks that are here were read: the beginning of a text, in its order."""

    def removed(self, key: BlockKey) -> None:
        """A block has gone for another reason than want of room."""

    def victims(self, count: int, may_go: MayGo) -> list[BlockKey]:
        """Gives up at most `count` blocks; fewer only where no more may go."""

    def __len__(self) -> int:
        """Blocks that are here."""

    def __contains__(self, key: object) -> bool:
        """Whether a block is here."""
