"""What each sequence of a worker may read in the slab, and until when: between the client, which leases,
and the reader.

A sequence's blocks are leased before its prompt is submitted, and again when it has been preempted (`want`). They are
given back when it has been admitted or is gone (`forget`).
"""

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from operator import eq

import numpy as np

from baton.block_ids import Numbers
from baton.clock import Clock
from baton.ids import BlockKey, SeqId
from kvpool.messages import BlockLease

MARGIN_S = 0.05
"""A lease that ends this soon is not begun to be read: the copy would outlive it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Readable:
    """Neighbouring blocks of a chain in the slab.

    Laid out in columns when they are leased, so that the engine's thread has nothing to do per block.

    Attributes:
        lease_id: By which leave they are read.
        keys: In chain order.
        slots: Where they lie, `[num_blocks]`.
        checksums: Of each, as `HeldBlock` has them.
    """

    lease_id: str
    keys: tuple[BlockKey, ...]
    slots: Numbers
    checksums: tuple[bytes, ...]

    @staticmethod
    def of(lease: BlockLease) -> "Readable":
        """All blocks of a lease."""
        return Readable(
            lease_id=lease.lease_id,
            keys=tuple(held.key for held in lease.blocks),
            slots=np.array([held.slot for held in lease.blocks], dtype=np.int64),
            checksums=tuple(held.checksums for held in lease.blocks),
        )

    def num_common(self, keys: tuple[BlockKey, ...], first_block: int) -> int:
        """How many leading ones of `keys`, which begin at block `first_block` of the text, are here."""
        here = self.keys[first_block : first_block + len(keys)]
        if here == keys[: len(here)]:
            return len(here)
        return sum(1 for _ in takewhile(bool, map(eq, here, keys)))

    def part(self, first_block: int, num_blocks: int) -> "Readable":
        """Some of them."""
        part = slice(first_block, first_block + num_blocks)
        return Readable(
            lease_id=self.lease_id,
            keys=self.keys[part],
            slots=self.slots[part],
            checksums=self.checksums[part],
        )


class ReadLeases:
    """Thread-safe: the client adds and renews on its event loop, the engine's thread asks and forgets,
    the reader checks.

    Args:
        clock: Of this machine; a lease is counted from before it was asked for,
            so it ends here before it ends at the node.
        released: Called, from whatever thread, with leases that are not needed any more.
    """

    def __init__(self, clock: Clock, released: Callable[[Sequence[str]], None]) -> None:
        self._clock = clock
        self._released = released
        self._lock = threading.Lock()
        self._entries: dict[SeqId, list[Readable]] = {}
        self._expires_s: dict[str, float] = {}
        self._granted_s: dict[str, float] = {}
        self._wanted: set[SeqId] = set()

    def add(
        self, seq_id: SeqId, lease: BlockLease, *, asked_s: float, wanted: bool = False
    ) -> None:
        """`seq_id` may read the blocks of `lease`.

        Args:
            seq_id: The sequence.
            lease: What the node granted, from the text's first block on; one without blocks is nothing.
            asked_s: When it was asked for.
            wanted: This answers `LeaseCallbacks.wanted`: it is given back at once if the sequence needs it no more.
        """
        if not lease.lease_id:
            return
        readable = Readable.of(lease)
        with self._lock:
            late = wanted and seq_id not in self._wanted
            if not late:
                self._wanted.discard(seq_id)
                self._entries.setdefault(seq_id, []).append(readable)
                self._expires_s[lease.lease_id] = asked_s + lease.lease_s
                self._granted_s[lease.lease_id] = lease.lease_s
        if late:
            self._released((lease.lease_id,))

    def want(self, seq_id: SeqId) -> None:
        """A lease for `seq_id` is being asked for."""
        with self._lock:
            self._wanted.add(seq_id)

    def offer(self, seq_id: SeqId, keys: Sequence[BlockKey]) -> int:
        """How many leading blocks of `keys` may be read for a while yet."""
        found = self.find(seq_id, tuple(keys))
        return 0 if found is None else len(found.keys)

    def find(
        self, seq_id: SeqId, keys: tuple[BlockKey, ...], *, first_block: int = 0
    ) -> Readable | None:
        """The longest readable beginning of `keys`, which begin at block `first_block` of the text;
        None for nothing.
        """
        latest_s = self._clock.now_s() + MARGIN_S
        with self._lock:
            good = [
                readable
                for readable in self._entries.get(seq_id, ())
                if self._expires_s.get(readable.lease_id, 0.0) >= latest_s
            ]
        counts = [readable.num_common(keys, first_block) for readable in good]
        longest = max(counts, default=0)
        return good[counts.index(longest)].part(first_block, longest) if longest else None

    def holds(self, lease_id: str) -> bool:
        """Whether blocks may still be read under this lease."""
        with self._lock:
            return self._expires_s.get(lease_id, 0.0) > self._clock.now_s()

    def open(self) -> list[str]:
        """Leases under which blocks may still be read: those to renew."""
        with self._lock:
            return list(self._expires_s)

    def renewed(self, lease_ids: Iterable[str], *, asked_s: float, lease_s: float) -> None:
        """The node prolonged these: by `lease_s`, or by what it granted first, where it gives less at a time."""
        with self._lock:
            for lease_id in lease_ids:
                if lease_id in self._expires_s:
                    self._expires_s[lease_id] = asked_s + min(lease_s, self._granted_s[lease_id])

    def ended(self, lease_ids: Iterable[str]) -> None:
        """The node knows nothing of these: nothing reads under them any more."""
        with self._lock:
            for lease_id in lease_ids:
                self._drop(lease_id)

    def forget(self, seq_id: SeqId) -> None:
        """`seq_id` reads nothing more; its leases are given back."""
        with self._lock:
            self._wanted.discard(seq_id)
            lease_ids = [readable.lease_id for readable in self._entries.pop(seq_id, ())]
            for lease_id in lease_ids:
                self._drop(lease_id)
        if lease_ids:
            self._released(lease_ids)

    def clear(self) -> None:
        """The node is gone, and all leases with it."""
        with self._lock:
            self._entries.clear()
            self._expires_s.clear()
            self._granted_s.clear()
            self._wanted.clear()

    def _drop(self, lease_id: str) -> None:
        self._expires_s.pop(lease_id, None)
        self._granted_s.pop(lease_id, None)
