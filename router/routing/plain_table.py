"""The hot part of the prefix index in Python, for machines without a compiler; `table.c` does the same."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from router.routing.held import HeldBySlot
from router.routing.memory import WIDTH, WORD_BITS, Memory, Places, Prints, Split, Words
from router.routing.sources import Sources

_STRIDE = 16

_CROWDED = 5
"""With so many entries in a print's first bucket its second one is considered."""

_Depths = NDArray[np.int32]
"""How many leading blocks each column holds, by column."""


class PlainHotPart:
    """See `router.routing.table.HotPart`."""

    def held(
        self, sources: Sources, prints: Prints, noted: Places | None, unit: int, held: HeldBySlot
    ) -> None:
        """See HotPart."""
        depths = np.zeros(len(sources.slots), np.int32)
        _whole(sources.reports, prints, sources.whole, depths, range(len(prints)))
        if sources.ragged is not None:
            _ragged(sources.reports, prints, sources.ragged, depths)
        if noted is not None:
            for notes in sources.notes:
                _whole(notes, prints, sources.live, depths, noted)
        for column in depths.nonzero()[0]:
            held.put(int(sources.slots[column]), int(depths[column]) * unit)

    def add(
        self, memory: Memory, prints: Prints, noted: Places | None, begin: int, column: int
    ) -> int:
        """See HotPart."""
        blocks = prints if noted is None else [prints[place] for place in noted]
        word, bit = divmod(column, WORD_BITS)
        for at, block in enumerate(blocks[begin:], begin):
            place = _find(memory, block)
            if place is None:
                place = _empty_place(memory, block) if memory.used < memory.limit else None
                if place is None:
                    return at
                memory.prints[place] = block
                memory.used += 1
            memory.sets[(*place, word)] |= np.uint64(1 << bit)
        return len(blocks)

    def discard(self, memory: Memory, prints: Prints, column: int) -> None:
        """See HotPart."""
        word, bit = divmod(column, WORD_BITS)
        for block in prints:
            place = _find(memory, block)
            if place is None:
                continue
            memory.sets[(*place, word)] &= ~np.uint64(1 << bit)
            if not memory.sets[place].any():
                memory.prints[place] = 0
                memory.used -= 1

    def split(self, memory: Memory, split: Split) -> None:
        """See HotPart."""
        before, first, last = split
        here, there = slice(first, last), slice(before + first, before + last)
        prints, sets = memory.prints[here], memory.sets[here]
        numbers = np.arange(first, last, dtype=np.uint64)[:, None]
        named_first = prints & np.uint64(before - 1) == numbers
        names = np.where(named_first, prints, prints >> np.uint64(32))
        moves = names & np.uint64(before) != 0
        memory.prints[there][moves], prints[moves] = prints[moves], 0
        memory.sets[there][moves], sets[moves] = sets[moves], 0


def _whole(
    memory: Memory, prints: Prints, live: Words, depths: _Depths, places: Sequence[int]
) -> None:
    """Raises `depths` to how many leading prints each column of `live` holds, where holding one means to hold those
    before it. Only the prints at `places` are looked at, by halves.
    """
    # Spans (low, high] of positions with the sets at both ends; -1 stands for the empty chain.
    spans = [(-1, len(places), _number(live), 0)]
    while spans:
        low, high, at_low, at_high = spans.pop()
        if not at_low & ~at_high:
            continue
        if high - low == 1:
            columns = bits_of(at_low & ~at_high)
            depth = 0 if high == 0 else places[high - 1] + 1
            depths[columns] = np.maximum(depths[columns], depth)
            continue
        middle = low + (high - low) // 2
        place = _find(memory, prints[places[middle]])
        here = 0 if place is None else at_low & _number(memory.sets[place])
        spans.append((middle, high, here, at_high))
        spans.append((low, middle, at_low, here))


def _ragged(memory: Memory, prints: Prints, live: Words, depths: _Depths) -> None:
    """The same where that does not follow: looks at every 16th block, and at each where columns end. A hole between two that are
    looked at may be passed over.
    """
    low, at_low = -1, _number(live)
    while at_low:
        high = min(low + _STRIDE, len(prints))
        here = at_low & _set_of(memory, prints[high]) if high < len(prints) else 0
        _follow(memory, prints[low + 1 : high], low + 1, at_low & ~here, depths)
        low, at_low = high, here


def _follow(memory: Memory, prints: Prints, at: int, ends: int, depths: _Depths) -> None:
    """The columns `ends` hold the block before `prints`, which begin at position `at`, and not the one after them."""
    for depth, block in enumerate(prints, at):
        if not ends:
            return
        here = ends & _set_of(memory, block)
        depths[bits_of(ends & ~here)] = depth
        ends = here
    depths[bits_of(ends)] = at + len(prints)


def bits_of(columns: int) -> list[int]:
    """The members of a set of columns."""
    found: list[int] = []
    while columns:
        lowest = columns & -columns
        found.append(lowest.bit_length() - 1)
        columns ^= lowest
    return found


def _number(columns: Words) -> int:
    return int.from_bytes(columns.tobytes(), "little")


def _set_of(memory: Memory, block: int) -> int:
    """The columns that hold `block`."""
    place = _find(memory, block)
    return 0 if place is None else _number(memory.sets[place])


def _buckets(memory: Memory, block: int) -> tuple[int, int]:
    return _bucket(memory, block), _bucket(memory, block >> 32)


def _bucket(memory: Memory, name: int) -> int:
    number = name & 2 * memory.num_unsplit - 1
    return number if number < memory.num_buckets else name & memory.num_unsplit - 1


def _find(memory: Memory, block: int) -> tuple[int, int] | None:
    for bucket in _buckets(memory, block):
        prints = memory.prints[bucket].tolist()
        if block in prints:
            return bucket, prints.index(block)
    return None


def _empty_place(memory: Memory, block: int) -> tuple[int, int] | None:
    """In the first of its buckets, or in the second if the first is crowded and the second is emptier."""
    bucket, other = _buckets(memory, block)
    prints, others = memory.prints[bucket].tolist(), memory.prints[other].tolist()
    if prints.count(0) <= WIDTH - _CROWDED and others.count(0) > prints.count(0):
        bucket, prints = other, others
    return (bucket, prints.index(0)) if 0 in prints else None
