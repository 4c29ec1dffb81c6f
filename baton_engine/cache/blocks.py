"""Which pages of one arena are in use: reference counts, copy on write, and the prefix cache over unused pages.

The scheduler asks here for every page a sequence writes to; the runner only ever sees page numbers.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

from baton.blocks import BlockChanges
from baton.errors import InvariantError
from baton.ids import BlockId, BlockKey
from baton_engine.cache.page_story import PageStory
from baton_engine.cache.prefix_tree import Node, PrefixTree


class BlockManager:
    """Reference-counted pages of one arena.

    A page is *used* (some sequence references it), *cached* (no sequence does, but its key is held in the prefix tree)
    or *free*; the three counts always sum to the total. A cached page is given away, longest unused first, when no free
    one is left, so `available` is free and cached together.

    Not thread-safe: one owner, but for `generation` and what `story` tells.

    Attributes:
        story: What happened to pages: here what was evicted, by those who take pages for sequences the rest.
    """

    def __init__(self, num_blocks: int) -> None:
        self._references = [0] * num_blocks
        self._generations = [0] * num_blocks
        self._free = [BlockId(block) for block in reversed(range(num_blocks))]
        self.story = PageStory()
        self._tree = PrefixTree(self.story)

    @property
    def num_total(self) -> int:
        """Pages of the arena."""
        return len(self._references)

    @property
    def num_free(self) -> int:
        """Pages that hold nothing."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Pages that no sequence uses but a later prompt may find."""
        return self._tree.num_idle

    @property
    def num_used(self) -> int:
        """Pages that sequences reference."""
        return self.num_total - self.num_available

    @property
    def num_available(self) -> int:
        """Pages that could be taken now."""
        return len(self._free) + self._tree.num_idle

    def generation(self, block: BlockId) -> int:
        """How often the page has been handed out. It is raised before the page may be written, so a reader that reads
        the same number before and after it reads the page, from any thread, has read what stood there at first.
        """
        return self._generations[block]

    def match(self, keys: Iterable[BlockKey]) -> list[BlockId]:
        """Pages of the longest held prefix of `keys`. Nothing is referenced: pass them to `take` at once."""
        return self._tree.match(keys)

    def take(
        self, held: Sequence[BlockId], num_fresh: int, *, headroom: int = 0
    ) -> list[BlockId] | None:
        """References the matched pages `held` and `num_fresh` new ones, all or nothing.

        Args:
            held: Pages just matched, in order.
            num_fresh: New pages wanted; their content is undefined.
            headroom: Pages that must stay available afterwards.

        Returns:
            The pages in order, or None when there is no room; nothing has changed then.
        """
        num_idle = sum(map(self._tree.is_idle, held))
        if num_idle + num_fresh + headroom > self.num_available:
            return None
        self.share(held)
        return [*held, *self._fresh(num_fresh)]

    def share(self, blocks: Iterable[BlockId]) -> None:
        """Adds one reference to each page."""
        for block in blocks:
            if self._tree.is_idle(block):
                self._tree.revive(block)
            self._references[block] += 1

    def writable(self, block: BlockId) -> BlockId | None:
        """A page that one reference of `block` may be written through: itself when it is not shared, else a fresh one.

        In the second case the reference has moved to the fresh page, into which the caller must have the content of
        `block` copied before it is written. None when there is no room; nothing has changed then.
        """
        if self._references[block] == 1:
            return block
        if not self.num_available:
            return None
        self._references[block] -= 1
        return self._fresh(1)[0]

    def publish(self, key: BlockKey, block: BlockId, parent: BlockId | None) -> BlockId:
        """Lets later prompts find the full page `block`, which its caller uses.

        When another page is held under `key` already, the caller gets a reference to that one and puts it in the place
        of its own, which stays referenced until the caller releases it. Thus equal text is held once, and a user of a
        held page uses all the held pages before it, on which eviction in the tree relies.

        Args:
            key: Key of the page.
            block: The page.
            parent: The published page before it; None for the first of a text.

        Returns:
            The page held under `key`.

        Raises:
            InvariantError: The page was shared before it was published:
                the others would keep it without what is before it.
        """
        if self._references[block] != 1 and block not in self._tree:
            raise self._broken(block, "is to be published after it was shared")
        held = self._tree.insert(key, block, parent)
        if held != block:
            self.share((held,))
        return held

    def release(self, blocks: Sequence[BlockId]) -> None:
        """Drops one reference from each page, last page first; unused pages become cached if published, else free."""
        for block in reversed(blocks):
            if self._references[block] <= 0:
                raise self._broken(block, "was released more often than taken")
            self._references[block] -= 1
            if self._references[block]:
                continue
            if block in self._tree:
                self._tree.retire(block)
            else:
                self._free.append(block)

    def discard(self, blocks: Sequence[BlockId]) -> None:
        """Frees those of the pages `blocks` of one text that are cached, last page first,
        as far as no other text needs them.
        """
        nodes = map(self._tree.discard, reversed(blocks))
        self._free += self._given_up("discarded", filter(None, nodes))

    def flush(self) -> int:
        """Frees every cached page; returns how many there were."""
        flushed = self._given_up("flushed", self._tree.evict(self._tree.num_idle))
        self._free += flushed
        return len(flushed)

    def take_changes(self) -> BlockChanges | None:
        """Which keys came to be held and which were given up since the last call; None for none."""
        return self._tree.changes.take() if self._tree.changes else None

    def _fresh(self, count: int) -> list[BlockId]:
        free = self._free
        blocks = [free.pop() for _ in range(min(count, len(free)))]
        if missing := count - len(blocks):
            blocks += self._given_up("evicted", self._tree.evict(missing))
        if len(blocks) < count:
            raise InvariantError("a page was taken where none was left")
        for block in blocks:
            self._references[block] = 1
            self._generations[block] += 1
        return blocks

    def _given_up(self, why: str, nodes: Iterable[Node]) -> list[BlockId]:
        """Pages that the prefix tree has given away."""
        blocks: list[BlockId] = []
        keys: list[BlockKey] = []
        for node in nodes:
            blocks.append(node.block)
            keys.append(node.key)
        if blocks:
            self.story.record(why, blocks, keys=keys)
        return blocks

    def _broken(self, block: BlockId, what: str) -> InvariantError:
        return InvariantError(f"page {block} {what}", story=self.story.story(block))

    def check_integrity(self, held: Iterable[BlockId]) -> None:
        """Raises InvariantError unless each page is exactly one of free, cached and used.

        Args:
            held: All that sequences hold: each page as often as it is referenced.
        """
        expected = Counter(held)
        self._tree.check_integrity()
        free = set(self._free)
        if len(free) != len(self._free):
            raise InvariantError("a page is free twice")
        for index, count in enumerate(self._references):
            block = BlockId(index)
            is_idle = self._tree.is_idle(block)
            if count != expected[block]:
                raise self._broken(block, f"counts {count} of {expected[block]} references")
            if (block in free) + is_idle + (count > 0) != 1:
                raise self._broken(block, f"with {count} references is in no or two states")
            if block in free and block in self._tree:
                raise self._broken(block, "is free and published")
