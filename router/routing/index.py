"""Who holds which KV blocks, as far as this router knows: routing asks it how deep each worker holds a prompt.

It is fed by the router's own memory of where it sent which prompt, so it is a hint: a worker that evicted a block costs
a wrong guess, never a wrong answer.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from baton.errors import InvariantError
from baton.ids import BlockKey, Incarnation, WorkerId, WorkerIdentity

_DEAD_SLOTS_KEPT = 64


class PrefixIndex:
    """Block key to the set of its holders, one bit per worker, bounded by dropping what was used longest ago.

    Pure and single-threaded. Along a chain the holders only ever get fewer: `record` always marks a chain from its
    root, and touches the leaf first, so that a block is dropped before its parent. Depths are therefore found by
    bisection, in time that grows with the logarithm of the prompt's length.

    Args:
        max_blocks: Blocks remembered at most.
    """

    def __init__(self, *, max_blocks: int = 262_144) -> None:
        self._max_blocks = max_blocks
        self._holders: OrderedDict[BlockKey, int] = OrderedDict()
        self._slots: dict[WorkerId, tuple[Incarnation, int]] = {}
        self._live = 0
        self._num_slots = 0
        self._free_slots: list[int] = []

    def __len__(self) -> int:
        return len(self._holders)

    def admit(self, worker: WorkerIdentity) -> int:
        """The worker's slot: its bit in every set. What an older incarnation of it held is forgotten."""
        known = self._slots.get(worker.worker_id)
        if known is not None and known[0] == worker.incarnation:
            return known[1]
        if known is not None:
            self._live &= ~(1 << known[1])
        slot = self._new_slot()
        self._slots[worker.worker_id] = (worker.incarnation, slot)
        self._live |= 1 << slot
        return slot

    def record(self, keys: Sequence[BlockKey], slots: Iterable[int]) -> None:
        """Remembers that the workers at `slots` hold, or are about to hold, the whole chain `keys`."""
        mask = 0
        for slot in slots:
            mask |= 1 << slot
        holders = self._holders
        for key in reversed(keys[: self._max_blocks]):
            holders[key] = holders.get(key, 0) | mask
            holders.move_to_end(key)
        while len(holders) > self._max_blocks:
            holders.popitem(last=False)

    def held_blocks(self, keys: Sequence[BlockKey]) -> dict[int, int]:
        """How many leading blocks of the chain each worker holds, by slot; workers that hold none are left out."""
        depths: dict[int, int] = {}
        # Spans (low, high] of positions with the holders at both ends; position -1 stands for the empty chain.
        spans = [(-1, len(keys), self._live, 0)]
        while spans:
            low, high, at_low, at_high = spans.pop()
            lost = at_low & ~at_high
            if not lost or high == 0:
                continue
            if high - low == 1:
                depths.update(dict.fromkeys(_bits(lost), low + 1))
                continue
            middle = (low + high) // 2
            at_middle = self._holders.get(keys[middle], 0) & self._live
            spans.append((low, middle, at_low, at_middle))
            spans.append((middle, high, at_middle, at_high))
        return depths

    def check_integrity(self) -> None:
        """Raises `InvariantError` when a bound or the bookkeeping of slots is broken."""
        if len(self._holders) > self._max_blocks:
            raise InvariantError(f"{len(self._holders)} blocks over {self._max_blocks}")
        live = sum(1 << slot for _, slot in self._slots.values())
        if live != self._live:
            raise InvariantError("live slots do not match the known workers")

    def _new_slot(self) -> int:
        dead = self._num_slots - self._live.bit_count()
        if not self._free_slots and dead >= _DEAD_SLOTS_KEPT:
            self._clear_dead_slots()
        if self._free_slots:
            return self._free_slots.pop()
        self._num_slots += 1
        return self._num_slots - 1

    def _clear_dead_slots(self) -> None:
        """Clears the bits of incarnations that are gone, so that their slots can be given again.

        Looks at every block, so it waits until many slots are dead.
        """
        live = self._live
        self._holders = OrderedDict(
            (key, mask & live) for key, mask in self._holders.items() if mask & live
        )
        self._free_slots = [slot for slot in range(self._num_slots) if not live >> slot & 1]


def _bits(mask: int) -> Iterable[int]:
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest
