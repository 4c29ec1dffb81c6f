"""A worker's half of the prefix index: which full blocks it holds, and what each router has been told of it.

The engine's changes come once per step. A router's feed begins with a snapshot, goes on with changes, and starts over
when the router asks for it or has fallen too far behind.
"""

from baton.blocks import BlockChanges, BlockReport, ChangeLog, joined
from baton.errors import InvariantError
from baton.hashing import KEY_BYTES
from baton.ids import BlockKey

MAX_KEYS_PER_REPORT = 2048
"""32 KiB: a long snapshot never stands in the way of a token for long, nor near gRPC's bound on a message."""

HEARTBEAT_S = 0.5
"""A worker or pool node reports to each router at least this often, whether or not anything has changed."""

MAX_KEYS_WAITING = 65_536
"""Changes that wait for one router; with more it is sent a snapshot instead."""


class BlockFeed:
    """What one router is still to be told. Made by `HeldBlocks.open_feed`."""

    def __init__(self, held: dict[BlockKey, None], *, max_waiting: int) -> None:
        self._held = held
        self._max_waiting = max_waiting
        self._changes = ChangeLog()
        self._seq = 0
        self._snapshot: bytes | None = None
        self._offset = 0
        self._stale = False
        self.restart()

    @property
    def waits(self) -> bool:
        """Whether there is something to tell."""
        return self._snapshot is not None or self._stale or len(self._changes) > 0

    def restart(self) -> None:
        """Begins anew with a snapshot: what the router knows is void."""
        self._changes.clear()
        self._snapshot, self._offset, self._stale = joined(self._held), 0, False

    def note(self, changes: BlockChanges) -> None:
        """The worker's blocks have changed."""
        if self._stale:
            return
        self._changes.add(changes)
        if len(self._changes) > self._max_waiting:
            # A snapshot that is under way is finished first: one that always started over would never end.
            self._changes.clear()
            self._stale = True

    def next(self) -> BlockReport | None:
        """The next report, None when the router knows everything."""
        if self._snapshot is None and self._stale:
            self.restart()
        if self._snapshot is not None:
            return self._next_part(self._snapshot)
        if not self._changes:
            return None
        changes = self._changes.take(MAX_KEYS_PER_REPORT)
        return BlockReport(
            seq=self._next_seq(), stored=joined(changes.stored), removed=joined(changes.removed)
        )

    def _next_part(self, snapshot: bytes) -> BlockReport:
        begin, self._offset = self._offset, self._offset + MAX_KEYS_PER_REPORT * KEY_BYTES
        last = self._offset >= len(snapshot)
        if last:
            self._snapshot = None
        return BlockReport(
            seq=self._next_seq(),
            stored=snapshot[begin : self._offset],
            snapshot=True,
            first=begin == 0,
            last=last,
        )

    def _next_seq(self) -> int:
        self._seq += 1
        return self._seq


class HeldBlocks:
    """Every full block that a worker holds, in the order in which they came: each after the one before it in its text.

    Pure, one owner.

    Args:
        max_waiting: Changes that may wait for one router.
    """

    def __init__(self, *, max_waiting: int = MAX_KEYS_WAITING) -> None:
        self._max_waiting = max_waiting
        self._held: dict[BlockKey, None] = {}
        self._feeds: list[BlockFeed] = []

    def __len__(self) -> int:
        return len(self._held)

    def open_feed(self) -> BlockFeed:
        """For a router that has just connected; close it when it is gone."""
        feed = BlockFeed(self._held, max_waiting=self._max_waiting)
        self._feeds.append(feed)
        return feed

    def close_feed(self, feed: BlockFeed) -> None:
        """Its router is gone."""
        self._feeds.remove(feed)

    def apply(self, changes: BlockChanges) -> None:
        """Takes the engine's net change of one step.

        Raises:
            InvariantError: It removes what is not held, or stores what is.
        """
        for key in changes.removed:
            if key not in self._held:
                raise InvariantError(f"block {key.hex()} was removed but not held")
            del self._held[key]
        for key in changes.stored:
            if key in self._held:
                raise InvariantError(f"block {key.hex()} was stored twice")
            self._held[key] = None
        for feed in self._feeds:
            feed.note(changes)
