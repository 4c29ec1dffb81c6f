"""What each sequence of a worker may read in the slab, and until when: between the client, which leases, and the reader.

A sequence's blocks are leased before its prompt is submitted, and again when it has been preempted (`want`). They are given
back when it has been admitted or is gone (`forget`).
"""

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from baton.clock import Clock
from baton.ids import BlockKey, SeqId
from kvpool.messages import BlockLease, HeldBlock

MARGIN_S = 0.05
"""A lease that ends this soon is not begun to be read: the copy would outlive it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Readable:
    """One block in the slab.

    Attributes:
        held: Where it lies, and its checksums.
        lease_id: By which leave it is read.
    """

    held: HeldBlock
    lease_id: str


@dataclass(slots=True, eq=False)
class _Entry:
    blocks: dict[BlockKey, Readable] = field(default_factory=dict)
    lease_ids: set[str] = field(default_factory=set)


class ReadLeases:
    """Thread-safe: the client adds and renews on its event loop, the engine's thread asks and forgets, the reader checks.

    Args:
        clock: Of this machine; a lease is counted from before it was asked for, so it ends here before it ends at the node.
        released: Called, from whatever thread, with leases that nobody needs any more.
    """

    def __init__(self, clock: Clock, released: Callable[[Sequence[str]], None]) -> None:
        self._clock = clock
        self._released = released
        self._lock = threading.Lock()
        self._entries: dict[SeqId, _Entry] = {}
        self._expires_s: dict[str, float] = {}
        self._wanted: set[SeqId] = set()

    def add(
        self, seq_id: SeqId, lease: BlockLease, *, asked_s: float, wanted: bool = False
    ) -> None:
        """`seq_id` may read the blocks of `lease`.

        Args:
            seq_id: The sequence.
            lease: What the node granted; one without blocks is nothing.
            asked_s: When it was asked for.
            wanted: This answers `NodeDesk.wanted`: it is given back at once if the sequence needs it no more.
        """
        if not lease.lease_id:
            return
        with self._lock:
            late = wanted and seq_id not in self._wanted
            if not late:
                self._wanted.discard(seq_id)
                self._enter(seq_id, lease, asked_s + lease.lease_s)
        if late:
            self._released((lease.lease_id,))

    def _enter(self, seq_id: SeqId, lease: BlockLease, expires_s: float) -> None:
        entry = self._entries.setdefault(seq_id, _Entry())
        entry.lease_ids.add(lease.lease_id)
        self._expires_s[lease.lease_id] = expires_s
        for held in lease.blocks:
            entry.blocks[held.key] = Readable(held=held, lease_id=lease.lease_id)

    def want(self, seq_id: SeqId) -> None:
        """A lease for `seq_id` is being asked for."""
        with self._lock:
            self._wanted.add(seq_id)

    def offer(self, seq_id: SeqId, keys: Sequence[BlockKey]) -> int:
        """How many leading blocks of `keys` may be read for a while yet."""
        return len(self.find(seq_id, keys))

    def find(self, seq_id: SeqId, keys: Iterable[BlockKey]) -> list[Readable]:
        """Those blocks."""
        latest_s = self._clock.now_s() + MARGIN_S
        found: list[Readable] = []
        with self._lock:
            entry = self._entries.get(seq_id)
            for key in keys if entry is not None else ():
                assert entry is not None
                readable = entry.blocks.get(key)
                if readable is None or self._expires_s.get(readable.lease_id, 0.0) < latest_s:
                    break
                found.append(readable)
        return found

    def hold(self, lease_ids: Iterable[str]) -> bool:
        """Whether all of these leases still let anybody read."""
        now_s = self._clock.now_s()
        with self._lock:
            return all(self._expires_s.get(lease_id, 0.0) > now_s for lease_id in lease_ids)

    def open(self) -> list[str]:
        """Leases under which somebody may still want to read: those to renew."""
        with self._lock:
            return list(self._expires_s)

    def renewed(self, lease_ids: Iterable[str], *, asked_s: float, lease_s: float) -> None:
        """The node prolonged these."""
        with self._lock:
            for lease_id in lease_ids:
                if lease_id in self._expires_s:
                    self._expires_s[lease_id] = asked_s + lease_s

    def forget(self, seq_id: SeqId) -> None:
        """`seq_id` reads nothing more; its leases are given back."""
        with self._lock:
            self._wanted.discard(seq_id)
            entry = self._entries.pop(seq_id, None)
            lease_ids = sorted(entry.lease_ids) if entry is not None else []
            for lease_id in lease_ids:
                self._expires_s.pop(lease_id, None)
        if lease_ids:
            self._released(lease_ids)

    def clear(self) -> None:
        """The node is gone, and all leases with it."""
        with self._lock:
            self._entries.clear()
            self._expires_s.clear()
            self._wanted.clear()
