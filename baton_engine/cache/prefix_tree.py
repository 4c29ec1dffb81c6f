"""Which full KV pages can be found again, and in which order they are given up.

Stands between the scheduler, which matches every prompt against it before computing anything, and the pages' reference
counts (`baton_engine.cache.blocks`). A radix tree over block keys, as in SGLang's RadixAttention: a key stands for its
block and everything before it, so a dictionary of keys is the whole lookup structure and a node only knows its parent.
"""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

from baton.blocks import ChangeLog
from baton.errors import InvariantError
from baton.ids import BlockId, BlockKey
from baton_engine.cache.page_story import PageStory


@dataclass(slots=True, eq=False)
class Node:
    """One full page. `num_children` counts the nodes whose parent it is."""

    key: BlockKey
    block: BlockId
    parent: "Node | None"
    num_children: int = 0


class PrefixTree:
    """Full pages by key; those that no sequence uses are *idle*, kept until their page is wanted.

    A sequence that uses a page uses every page before it, and releases them last page first. Hence a page never becomes
    idle before its children do, the page that has been idle longest never has a child, and least-recently-used eviction
    from the leaves is one ordered dictionary: every operation below costs O(1) per page.

    Not thread-safe: one owner.

    Args:
        story: Of the pages; an InvariantError carries what it tells.

    Attributes:
        changes: Keys that came and went since they were last taken.
    """

    def __init__(self, story: PageStory) -> None:
        self._story = story
        self.changes = ChangeLog()
        self._by_key: dict[BlockKey, Node] = {}
        self._by_block: dict[BlockId, Node] = {}
        self._idle: OrderedDict[BlockId, Node] = OrderedDict()

    def __len__(self) -> int:
        return len(self._by_key)

    def __contains__(self, block: BlockId) -> bool:
        return block in self._by_block

    @property
    def num_idle(self) -> int:
        """Pages that no sequence uses."""
        return len(self._idle)

    def is_idle(self, block: BlockId) -> bool:
        """Whether `block` is held here and used by no sequence."""
        return block in self._idle

    def match(self, keys: Iterable[BlockKey]) -> list[BlockId]:
        """Pages of the longest held prefix of the chain `keys`. Takes nothing: the caller references them at once."""
        blocks: list[BlockId] = []
        for key in keys:
            node = self._by_key.get(key)
            if node is None:
                break
            blocks.append(node.block)
        return blocks

    def insert(self, key: BlockKey, block: BlockId, parent: BlockId | None) -> BlockId:
        """Holds `block`, which a sequence uses, under `key`, unless another page is held there already.

        Args:
            key: Key of the full page.
            block: The page.
            parent: The page before it, held here; None for the first of a text.

        Returns:
            The page that is held under `key`: `block`, or the one that was there first.
        """
        held = self._by_key.get(key)
        if held is not None:
            return held.block
        above = None if parent is None else self._by_block[parent]
        node = Node(key=key, block=block, parent=above)
        if above is not None:
            above.num_children += 1
        self._by_key[key] = self._by_block[block] = node
        self.changes.stored(key)
        return block

    def retire(self, block: BlockId) -> None:
        """The last sequence let go of `block`: it may be evicted, after everything that became idle before."""
        self._idle[block] = self._by_block[block]

    def revive(self, block: BlockId) -> None:
        """A sequence uses the idle `block` again."""
        del self._idle[block]

    def evict(self, count: int) -> list[Node]:
        """Forgets the `count` pages that have been idle longest, or all idle ones if they are fewer,
        and gives them away.
        """
        evicted = list(islice(self._idle.values(), count))
        for node in evicted:
            if node.num_children:
                raise self._broken(
                    node.block, f"was to be evicted under {node.num_children} children"
                )
            self._forget(node)
        return evicted

    def discard(self, block: BlockId) -> Node | None:
        """Forgets `block` and gives it away, if it is idle and nothing held here goes on from it; else None."""
        node = self._idle.get(block)
        if node is None or node.num_children:
            return None
        self._forget(node)
        return node

    def _forget(self, node: Node) -> None:
        if node.parent is not None:
            node.parent.num_children -= 1
        del self._idle[node.block], self._by_key[node.key], self._by_block[node.block]
        self.changes.removed(node.key)

    def _broken(self, block: BlockId, what: str) -> InvariantError:
        return InvariantError(f"page {block} {what}", story=self._story.story(block))

    def check_integrity(self) -> None:
        """Raises InvariantError unless the two directories agree,
        counts are right and no used page hangs on an idle one.
        """
        children: dict[BlockId, int] = dict.fromkeys(self._by_block, 0)
        for key, node in self._by_key.items():
            if node.key != key or self._by_block.get(node.block) is not node:
                raise self._broken(node.block, "is filed under another key or page")
            if node.parent is not None:
                children[node.parent.block] += 1
                if self._by_block.get(node.parent.block) is not node.parent:
                    raise self._broken(node.block, "hangs on a page that is gone")
                if node.parent.block in self._idle and node.block not in self._idle:
                    raise self._broken(node.block, "is used but its parent is idle")
        for block, node in self._by_block.items():
            if node.num_children != children[block]:
                raise self._broken(block, "counts its children wrongly")
        if (
            len(self._by_key) != len(self._by_block)
            or not self._idle.keys() <= self._by_block.keys()
        ):
            raise InvariantError("the prefix tree's directories differ")
