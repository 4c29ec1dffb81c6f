"""What happened to the pages of one arena lately: who took, shared, published and gave back which,
and what was evicted.

The story (`baton.story`) of the engine's cache. An entry is an operation and not a page: the pages of a prompt are
taken, published and freed together, and most steps of a decoding sequence change nothing here.
"""

from collections import deque
from collections.abc import Sequence

from baton.ids import BlockId, BlockKey, SeqId
from baton.story import StoryEntry

_MAX_OPERATIONS = 16_384
_MAX_IDS = 65_536
_SHOWN_PAGES = 8

_Operation = tuple[float, str, SeqId | None, tuple[BlockId, ...], tuple[BlockKey, ...]]


class PageStory:
    """The last operations on pages, told by sequence, by page, or by the key of the block that a page held.

    Bounded by operations, and by the pages and keys in them; the newest is always kept. Pure; one owner.

    Attributes:
        now_s: The latest time that the cache's owner was told; entries carry it.
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        self._operations: deque[_Operation] = deque()
        self._num_ids = 0

    def record(
        self,
        event: str,
        blocks: Sequence[BlockId],
        *,
        keys: Sequence[BlockKey] = (),
        seq_id: SeqId | None = None,
    ) -> None:
        """Something was done with `blocks`, which hold the blocks `keys`, for the sequence `seq_id`."""
        self._operations.append((self.now_s, event, seq_id, tuple(blocks), tuple(keys)))
        self._num_ids += len(blocks) + len(keys)
        while len(self._operations) > 1 and (
            self._num_ids > _MAX_IDS or len(self._operations) > _MAX_OPERATIONS
        ):
            _, _, _, old_blocks, old_keys = self._operations.popleft()
            self._num_ids -= len(old_blocks) + len(old_keys)

    def story(self, about: SeqId | BlockId | BlockKey) -> tuple[StoryEntry, ...]:
        """What is left of the operations on one sequence, page or block, oldest first.
        May be called from any thread.
        """
        return tuple(
            StoryEntry(
                core="cache", at_s=at_s, event=_told(event, seq_id, blocks, keys), actions=()
            )
            for at_s, event, seq_id, blocks, keys in list(
                self._operations
            )  # a copy: its owner may log meanwhile
            if about == seq_id or about in blocks or about in keys
        )


def _told(
    event: str, seq_id: SeqId | None, blocks: tuple[BlockId, ...], keys: tuple[BlockKey, ...]
) -> str:
    """An operation in words, with its first pages and the last block, which stands for all before it."""
    shown = " ".join(map(str, blocks[:_SHOWN_PAGES]))
    left = len(blocks) - _SHOWN_PAGES
    told = f"{event}: {len(blocks)} pages ({shown}{f' and {left} more' if left > 0 else ''})"
    if keys:
        told += f", last block {keys[-1].hex()}"
    return told if seq_id is None else f"{told}, {seq_id}"
