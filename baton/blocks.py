"""What is said about full KV blocks that come to be held and are given up,
from a worker's prefix cache to every router.

An engine notes each block in a `ChangeLog` and tells the net change once per step; the worker numbers what it sends
to a router, so that the router knows when it has missed something (`baton.rpc.block_feed`, `router.routing.index`).
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

from baton.hashing import KEY_BYTES
from baton.ids import BlockKey


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockChanges:
    """A net change: no key is in both.

    Attributes:
        stored: Now held, each after the block before it in its text.
        removed: Held no longer, each before the block before it in its text.
    """

    stored: tuple[BlockKey, ...] = ()
    removed: tuple[BlockKey, ...] = ()


class ChangeLog:
    """Collects changes until they are taken. What was stored and removed again, or the reverse, leaves no trace, so the
    log never holds more keys than there are blocks.

    The caller notes a block as stored after the block before it in its text, and as removed before that block. Then the
    changes taken up to any moment describe texts without gaps.
    """

    def __init__(self) -> None:
        self._held: dict[BlockKey, bool] = {}

    def __len__(self) -> int:
        return len(self._held)

    def stored(self, key: BlockKey) -> None:
        """`key` is held from now on."""
        if self._held.pop(key, None) is None:
            self._held[key] = True

    def removed(self, key: BlockKey) -> None:
        """`key` is held no longer."""
        if self._held.pop(key, None) is None:
            self._held[key] = False

    def add(self, changes: BlockChanges) -> None:
        """Notes a net change after those that are here."""
        for key in changes.removed:
            self.removed(key)
        for key in changes.stored:
            self.stored(key)

    def take(self, limit: int | None = None) -> BlockChanges:
        """Takes the oldest changes, at most `limit` of them."""
        keys = list(islice(self._held, limit))
        taken = [(key, self._held.pop(key)) for key in keys]
        return BlockChanges(
            stored=tuple(key for key, held in taken if held),
            removed=tuple(key for key, held in taken if not held),
        )

    def clear(self) -> None:
        """Forgets all."""
        self._held.clear()


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockReport:
    """A message of a worker to one router about its blocks; keys stand one after the other, 16 bytes each.

    Attributes:
        seq: Number of this message on its stream, from 1.
        stored: Blocks held from now on.
        removed: Blocks held no longer; to be taken into account first.
        snapshot: This is a part of a complete list.
        first: Of a snapshot: its first part. Whatever was known of this worker's blocks before is void.
        last: Of a snapshot: nothing of it is missing now.
    """

    seq: int
    stored: bytes = b""
    removed: bytes = b""
    snapshot: bool = False
    first: bool = False
    last: bool = False

    def fault(self) -> str | None:
        """What is wrong with its form, if anything."""
        if len(self.stored) % KEY_BYTES or len(self.removed) % KEY_BYTES:
            return f"keys are {KEY_BYTES} bytes each"
        return None


def joined(keys: Iterable[BlockKey]) -> bytes:
    """Keys one after the other."""
    return b"".join(keys)


def split(keys: bytes) -> Iterator[BlockKey]:
    """The keys that stand in `keys`."""
    return (BlockKey(keys[at : at + KEY_BYTES]) for at in range(0, len(keys), KEY_BYTES))
