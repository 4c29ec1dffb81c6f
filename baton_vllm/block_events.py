"""vLLM's events of its prefix cache, as changes of blocks under Baton's keys.

vLLM names a block by a hash of its own. Its events carry token ids, the block before, and the salt of a text's first
block, which is the tenant's scope, and the adapter: that is enough to name the block as router and `baton explain` do
(`baton.hashing`).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from baton.blocks import BlockChanges, ChangeLog
from baton.hashing import chain_keys, root_key
from baton.ids import BlockKey
from baton.layout import KvLayout


@dataclass(slots=True, eq=False)
class _Held:
    """A block's key, and how many pages hold it: vLLM may compute one block twice."""

    key: BlockKey
    pages: int = 1


class BlockNames:
    """Renames blocks. Stands where vLLM's scheduler has the publisher of its events. Not thread-safe:
    the engine's thread.

    Args:
        secret: The cluster secret, 32 bytes.
        layout: Layout of the pages.
    """

    def __init__(self, secret: bytes, layout: KvLayout) -> None:
        self._secret = secret
        self._layout = layout
        self._group = layout.windows.index(0) if 0 in layout.windows else 0
        self._held: dict[object, _Held] = {}
        self._changes = ChangeLog()

    def publish(self, batch: Any) -> None:  # vLLM's KVEventBatch
        """Takes the events of one step."""
        self.add(batch.events)

    def shutdown(self) -> None:
        """vLLM closes its publisher at its end; there is nothing to close."""

    def get_publisher_config(self) -> None:
        """vLLM asks where others can listen: nowhere."""

    def add(self, events: Iterable[Any]) -> None:
        """Takes events, in order. Of several groups of layers one is followed, the first that attends to everything: a
        text is found as far as all groups have it, of which that is an estimate. Blocks that have left a window are
        vLLM's to hand out again, as those of ended requests are, and no prefix ends there once they are.
        """
        for event in events:
            if getattr(event, "group_idx", None) not in (None, self._group):
                continue
            match type(event).__name__:
                case "BlockStored":
                    self._stored(event)
                case "BlockRemoved":
                    for name in event.block_hashes:
                        self._removed(name)
                case "AllBlocksCleared":
                    for held in reversed(self._held.values()):
                        self._changes.removed(held.key)
                    self._held.clear()

    def take(self) -> BlockChanges | None:
        """The net change since the last call; None for none."""
        return self._changes.take() if len(self._changes) else None

    def _stored(self, event: Any) -> None:
        size = event.block_size
        if len(event.token_ids) != size * len(event.block_hashes):
            return  # the first ones have left a window: no text is found from its beginning by the others
        parent = self._parent(event)
        if parent is None or size != self._layout.block_tokens:
            return
        keys = chain_keys(self._secret, parent, event.token_ids, size)
        for name, key in zip(event.block_hashes, keys, strict=True):
            if (held := self._held.get(name)) is not None:
                held.pages += 1
                continue
            self._held[name] = _Held(key=key)
            self._changes.stored(key)

    def _parent(self, event: Any) -> BlockKey | None:
        """None where it has been given up: what comes behind it cannot be found by a text."""
        if event.parent_block_hash is not None:
            held = self._held.get(event.parent_block_hash)
            return None if held is None else held.key
        adapter = event.lora_name or ""
        extra = (event.extra_keys[0] if event.extra_keys else None) or ()
        salt = extra[bool(adapter) :]  # the adapter's name stands before it
        return root_key(
            self._secret,
            scope=str(salt[-1]) if salt else "",
            layout=self._layout,
            adapter=adapter,
        )

    def _removed(self, name: object) -> None:
        held = self._held.get(name)
        if held is None:
            return
        held.pages -= 1
        if not held.pages:
            del self._held[name]
            self._changes.removed(held.key)
