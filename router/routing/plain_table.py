"""The hot part of the prefix index in Python, for machines without a compiler; `table.c` does the same."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from router.routing.table import (
    WIDTH,
    WORD_BITS,
    Fingerprints,
    HeldBySlot,
    LookupSources,
    Places,
    Split,
    TableMemory,
    Words,
)

_STRIDE = 16

_CROWDED = 5
"""With so many entries in a print's first bucket its second one is considered."""

_DRAWN = 61
"""Bits of a fingerprint from here on name no bucket."""

_Place = tuple[int, int]
"""A bucket, and where in it."""

_Depths = NDArray[np.int32]
"""How many leading blocks each column holds, by column."""


class PlainTable:
    """See `router.routing.table.TableOperations`."""

    def held(
        self,
        sources: LookupSources,
        fingerprints: Fingerprints,
        noted: Places | None,
        unit: int,
        held: HeldBySlot,
    ) -> None:
        """See TableOperations."""
        depths = np.zeros(len(sources.slots), np.int32)
        _whole(sources.reports, fingerprints, sources.whole, depths, range(len(fingerprints)))
        if sources.ragged is not None:
            _ragged(sources.reports, fingerprints, sources.ragged, depths)
        if noted is not None:
            for notes in sources.notes:
                _whole(notes, fingerprints, sources.live, depths, noted)
        for column in depths.nonzero()[0]:
            held.put(int(sources.slots[column]), int(depths[column]) * unit)

    def add(
        self,
        memory: TableMemory,
        fingerprints: Fingerprints,
        noted: Places | None,
        begin: int,
        column: int,
    ) -> int:
        """See TableOperations."""
        blocks = fingerprints if noted is None else [fingerprints[place] for place in noted]
        word, bit = divmod(column, WORD_BITS)
        for at, block in enumerate(blocks[begin:], begin):
            place = _find(memory, block)
            if place is None:
                if memory.limit <= memory.used and memory.limit < memory.most:
                    return at
                place = _empty_place(memory, block) if memory.used < memory.limit else None
                if place is None:
                    memory.displaced += 1
                    place = _displaced_place(memory, block)
                if place is None:
                    continue
                memory.fingerprints[place] = block
                memory.used += 1
            memory.sets[word][place] |= np.uint64(1 << bit)
        return len(blocks)

    def discard(self, memory: TableMemory, fingerprints: Fingerprints, column: int) -> None:
        """See TableOperations."""
        word, bit = divmod(column, WORD_BITS)
        for block in fingerprints:
            place = _find(memory, block)
            if place is None:
                continue
            memory.sets[word][place] &= ~np.uint64(1 << bit)
            if not any(words[place] for words in memory.sets):
                memory.fingerprints[place] = 0
                memory.used -= 1

    def clear(self, memory: TableMemory, gone: Words, first: int, last: int) -> None:
        """See TableOperations."""
        fingerprints, held = memory.fingerprints[first:last], np.zeros((last - first, WIDTH), bool)
        for words, columns in zip(memory.sets, gone, strict=True):
            words[first:last] &= ~columns
            held |= words[first:last] != 0
        memory.used -= int(np.count_nonzero(fingerprints[~held]))
        fingerprints[~held] = 0

    def split(self, memory: TableMemory, split: Split) -> None:
        """See TableOperations."""
        before, first, last = split
        here, there = slice(first, last), slice(before + first, before + last)
        fingerprints = memory.fingerprints[here]
        buckets = np.arange(first, last, dtype=np.uint64)[:, None]
        named_first = fingerprints & np.uint64(before - 1) == buckets
        names = np.where(named_first, fingerprints, fingerprints >> np.uint64(32))
        moves = names & np.uint64(before) != 0
        for numbers in (memory.fingerprints, *memory.sets):
            numbers[there][moves], numbers[here][moves] = numbers[here][moves], 0


def _whole(
    memory: TableMemory,
    fingerprints: Fingerprints,
    live: Words,
    depths: _Depths,
    places: Sequence[int],
) -> None:
    """Raises `depths` to how many leading fingerprints each column of `live` holds, where holding one means to hold
    those before it. Only the fingerprints at `places` are looked at, by halves.
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
        place = _find(memory, fingerprints[places[middle]])
        here = 0 if place is None else at_low & _set_at(memory, place)
        spans.append((middle, high, here, at_high))
        spans.append((low, middle, at_low, here))


def _ragged(memory: TableMemory, fingerprints: Fingerprints, live: Words, depths: _Depths) -> None:
    """The same where that does not follow: looks at every 16th block, and at each where columns end. A hole between two
    that are looked at may be passed over.
    """
    low, at_low = -1, _number(live)
    while at_low:
        high = min(low + _STRIDE, len(fingerprints))
        here = at_low & _set_of(memory, fingerprints[high]) if high < len(fingerprints) else 0
        _follow(memory, fingerprints[low + 1 : high], low + 1, at_low & ~here, depths)
        low, at_low = high, here


def _follow(
    memory: TableMemory, fingerprints: Fingerprints, at: int, ends: int, depths: _Depths
) -> None:
    """The columns `ends` hold the block before `fingerprints`, which begin at position `at`,
    and not the one after them.
    """
    for depth, block in enumerate(fingerprints, at):
        if not ends:
            return
        here = ends & _set_of(memory, block)
        depths[bits_of(ends & ~here)] = depth
        ends = here
    depths[bits_of(ends)] = at + len(fingerprints)


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


def _set_of(memory: TableMemory, block: int) -> int:
    """The columns that hold `block`."""
    place = _find(memory, block)
    return 0 if place is None else _set_at(memory, place)


def _set_at(memory: TableMemory, place: _Place) -> int:
    return sum(int(words[place]) << WORD_BITS * at for at, words in enumerate(memory.sets))


def _buckets(memory: TableMemory, block: int) -> tuple[int, int]:
    return _bucket(memory, block), _bucket(memory, block >> 32)


def _bucket(memory: TableMemory, name: int) -> int:
    number = name & 2 * memory.num_unsplit - 1
    return number if number < memory.num_buckets else name & memory.num_unsplit - 1


def _find(memory: TableMemory, block: int) -> _Place | None:
    for bucket in _buckets(memory, block):
        fingerprints = memory.fingerprints[bucket].tolist()
        if block in fingerprints:
            return bucket, fingerprints.index(block)
    return None


def _empty_place(memory: TableMemory, block: int) -> _Place | None:
    """In the first of its buckets, or in the second if the first is crowded and the second is emptier."""
    bucket, other = _buckets(memory, block)
    fingerprints, others = memory.fingerprints[bucket].tolist(), memory.fingerprints[other].tolist()
    if fingerprints.count(0) <= WIDTH - _CROWDED and others.count(0) > fingerprints.count(0):
        bucket, fingerprints = other, others
    return (bucket, fingerprints.index(0)) if 0 in fingerprints else None


def _displaced_place(memory: TableMemory, block: int) -> _Place | None:
    """The place in a block's first bucket whose block has the fewest holders, emptied for it; of several with as few,
    one as good as drawn. None if that bucket is empty.
    """
    bucket, _ = _buckets(memory, block)
    turns = [((block >> _DRAWN) + turn) % WIDTH for turn in range(WIDTH)]
    taken = [(bucket, at) for at in turns if memory.fingerprints[bucket, at]]
    if not taken:
        return None
    place = min(taken, key=lambda taken_place: _set_at(memory, taken_place).bit_count())
    for numbers in (memory.fingerprints, *memory.sets):
        numbers[place] = 0
    memory.used -= 1
    return place
