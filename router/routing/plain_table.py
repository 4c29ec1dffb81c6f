"""The hot part of the prefix index in Python, for machines without a compiler; `table.c` does the same.

Chains are looked up by numpy, single blocks without it, as each is several times faster its own way.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from router.routing.held import HeldBySlot
from router.routing.memory import WIDTH, WORD_BITS, Memory, Places, Prints, Split, Words
from router.routing.sources import Sources

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
    """The same where that does not follow, so that every block is looked at; `depths` of `live` are 0."""
    chain = np.frombuffer(prints, np.uint64)
    common = np.bitwise_and.accumulate(_rows(memory, chain) & live, axis=0)
    # Sets only shrink along the chain: count each distinct one for as many blocks as it lasts.
    (ends,) = np.any(common[1:] != common[:-1], axis=1).nonzero()
    ends = np.append(ends, len(common) - 1)
    lasted = np.diff(ends, prepend=-1).astype(np.int32)
    members = np.unpackbits(common[ends].view(np.uint8), axis=1, bitorder="little")
    depths += lasted @ members.astype(np.int32)


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


def _rows(memory: Memory, prints: Words) -> NDArray[np.uint64]:
    """The sets of `prints`; all zero where nobody holds it."""
    buckets, places = np.full(len(prints), memory.num_buckets), np.zeros(len(prints), np.intp)
    for half in (np.uint64(0), np.uint64(32)):
        (rest,) = (buckets == memory.num_buckets).nonzero()
        bucket = memory.buckets_of(prints[rest] >> half)
        row, at = (memory.prints[bucket] == prints[rest, None]).nonzero()
        buckets[rest[row]], places[rest[row]] = bucket[row], at
    sets: NDArray[np.uint64] = memory.sets[buckets, places]
    return sets


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
