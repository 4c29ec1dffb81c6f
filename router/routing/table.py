"""The prefix index's memory: which holders have each block, one bit per holder,
in 40 to 80 bytes per block for 128 holders.

A hash table that grows, a little with each report that needs it so that nothing waits for it. Its sets lie in columns
of 64 holders each, so that room for more is one more array and nothing moves. What is done to it for every report
and every decision is written twice: in C (`table.c`, `router.routing.native_table`), and for machines without a
compiler in Python (`router.routing.plain_table`).

A block is known by its *fingerprint*, the first 8 bytes of its key, which are already uniformly random: that any two
among a million blocks have the same has odds of one in thirty million, and a wrong answer costs a wrong guess. A
fingerprint lies in one of two buckets of 8 (half of its bits name one, half the other), so that a lookup is two cache
lines at most, and a removal leaves no trace.
"""

import contextlib
import ctypes
import mmap
from array import array
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from baton.errors import InvariantError
from baton.hashing import KEY_BYTES

if TYPE_CHECKING:
    _Numbers = array[int]
else:
    _Numbers = array  # takes no argument before Python 3.12

Fingerprints = _Numbers
"""Fingerprints of a chain's blocks, in order, as 64-bit numbers: an array, because that tells its address quickly."""

Places = _Numbers
"""Positions in a chain, ascending, as 64-bit numbers."""

Words = NDArray[np.uint64]
"""A set of columns, 64 per word, lowest first."""

WIDTH = 8
WORD_BITS = 64

_LINES = 3
"""Cache lines that a bucket has in one place: its fingerprints and two words of its sets, or three words."""

_MAX_FILL = 0.6
"""Once so much of it is filled a table begins to grow."""

_FIRST_BUCKETS = 512

_STRIDE = 1024
"""Buckets that are split at a time."""

_PACE = 2
"""Buckets that are split per block that comes meanwhile: then those that wait for it fill up by a tenth."""


def fingerprints_of(keys: bytes) -> Fingerprints:
    """Fingerprints of keys that stand one after the other."""
    words = np.frombuffer(keys, dtype="<u8").reshape(-1, KEY_BYTES // 8)
    fingerprints = np.maximum(words[:, 0], np.uint64(1))  # 0 marks an empty place
    return array("Q", fingerprints.tobytes())


class Split(NamedTuple):
    """Buckets `first` to `last` share their entries with those that stand `before` places further on:
    so many there were.
    """

    before: int
    first: int
    last: int


class TableMemory(ctypes.Structure):
    """A bucket's fingerprints, 0 where empty, are one cache line, and each word of its sets is another: a report
    touches one of these, a lookup those of the holders that it still asks about. The first two words stand beside the
    fingerprints, for looking one up is waiting for memory.

    Buckets are split one by one, in order, until there are twice as many (linear hashing): half of their names then say
    so by one bit more. Each array has room for as many as there may ever be; the system gives memory only for those
    that were written to, so that a table neither moves when it grows or widens nor leaves an old one behind.

    Its counts lie in a record as `table.c` has it.

    Attributes:
        address: Of the record.
        fingerprints: `[buckets, WIDTH]`, a view.
        sets: `[buckets, WIDTH]` for each 64 columns, views.
        used: Places that hold a print.
        limit: So many may be used before the table has to grow.
        most: So many may be used at all; beyond that, blocks make room for others.
        displaced: Blocks that did, and those for which none could, since the start.
    """

    num_buckets: int
    num_words: int
    used: int
    limit: int
    most: int
    displaced: int

    _fields_ = (
        ("fingerprints_address", ctypes.c_void_p),
        ("sets_addresses", ctypes.c_void_p),
        ("num_buckets", ctypes.c_uint64),
        ("last_narrow", ctypes.c_uint64),
        ("num_words", ctypes.c_int64),
        ("used", ctypes.c_int64),
        ("limit", ctypes.c_int64),
        ("most", ctypes.c_int64),
        ("displaced", ctypes.c_int64),
    )

    def __init__(self, *, num_buckets: int, most_buckets: int, most: int) -> None:
        super().__init__()
        self.address = ctypes.addressof(self)
        self.most = most
        self._most_buckets = most_buckets
        self._hold([self._room()], num_buckets)

    def reset(self, *, num_buckets: int) -> None:
        """Takes new arrays, as many as before, all empty. How many may be used is for the caller to say."""
        self.used = self.limit = 0
        self._hold([self._room() for _ in self._rooms], num_buckets)

    def widen(self) -> None:
        """Makes room for 192 more columns."""
        self._hold([*self._rooms, self._room()], self.num_buckets)

    @property
    def num_unsplit(self) -> int:
        """So many buckets there were before the splitting that is under way: a power of two."""
        return int(self.last_narrow) + 1

    def buckets_of(self, names: Words) -> Words:
        """The buckets that these halves of fingerprints name."""
        narrow = np.uint64(self.last_narrow)
        wide = names & (2 * narrow + np.uint64(1))
        return np.where(wide < np.uint64(self.num_buckets), wide, names & narrow)

    def extend(self, count: int) -> Split:
        """Opens `count` more buckets, or fewer where the splitting that is under way ends with them. Their share of the
        entries is still to be moved there.
        """
        before = self.num_unsplit
        first = self.num_buckets - before
        last = min(first + count, before)
        self._open(before + last)
        return Split(before=before, first=first, last=last)

    def _room(self) -> Words:
        # Of the system, not of the C library: that takes arrays of some megabytes from what was freed, and clears all
        # of it at once.
        size_bytes = self._most_buckets * _LINES * WIDTH * 8
        pages = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel without them
                pages.madvise(mmap.MADV_HUGEPAGE)
        return np.frombuffer(pages, np.uint64).reshape(self._most_buckets, _LINES, WIDTH)

    def _hold(self, rooms: list[Words], num_buckets: int) -> None:
        """Has its lines in these arrays, the fingerprints first."""
        self._rooms = rooms
        addresses = [room[:, line].ctypes.data for room in rooms for line in range(_LINES)]
        self.fingerprints_address, self.num_words = addresses[0], len(addresses) - 1
        self._sets_addresses = (ctypes.c_void_p * self.num_words)(*addresses[1:])
        self.sets_addresses = ctypes.addressof(self._sets_addresses)
        self._open(num_buckets)

    def _open(self, num_buckets: int) -> None:
        """Counts the first so many buckets as in use."""
        self.num_buckets = num_buckets
        self.last_narrow = (1 << num_buckets.bit_length() - 1) - 1
        self.fingerprints, *self.sets = (
            room[:num_buckets, line] for room in self._rooms for line in range(_LINES)
        )


class HeldBySlot(Mapping[int, int]):
    """Leading blocks or tokens of one prompt by slot of the prefix index; slots that hold none are not in it.

    Args:
        slots: So many there are.

    Attributes:
        numbers: The same for C.
        slots: As many as there are.
    """

    __slots__ = ("numbers", "slots")

    def __init__(self, slots: int) -> None:
        self.numbers = _numbers(slots)()
        self.slots = slots

    @classmethod
    def covering(cls, held: Mapping[int, int], slots: int) -> "HeldBySlot":
        """`held` with at least that many slots: itself if it has them, a copy if not."""
        if isinstance(held, cls) and held.slots >= slots:
            return held
        copy = cls(max(slots, 1 + max(held, default=-1)))
        for slot, count in held.items():
            copy.put(slot, count)
        return copy

    def put(self, slot: int, count: int) -> None:
        """Sets what the worker at `slot` holds."""
        self.numbers[slot] = count

    def __getitem__(self, slot: int) -> int:
        count = self.numbers[slot] if 0 <= slot < self.slots else 0
        if not count:
            raise KeyError(slot)
        return count

    def get(self, slot: int, default: int = 0) -> int:  # type: ignore[override]  # nothing held is 0
        """What the worker at `slot` holds, or `default`."""
        count = self.numbers[slot] if 0 <= slot < self.slots else 0
        return count or default

    def __iter__(self) -> Iterator[int]:
        return (slot for slot, count in enumerate(self.numbers) if count)

    def __len__(self) -> int:
        return sum(1 for _ in self)


class LookupSources(ctypes.Structure):
    """Good until a column is given to another holder. A record as `table.c` has it; it keeps alive what it points to.

    Args:
        reports: What holders report.
        notes: What the router sent lately, in two tables.
        live: Columns in use.
        whole: Those of which it is known that to hold a block is to hold those before it.
        ragged: The others, if there are any.
        slots: Slots of the holders, by column.
    """

    _fields_ = (
        ("reports_address", ctypes.c_void_p),
        ("notes_addresses", ctypes.c_void_p * 2),
        ("live_address", ctypes.c_void_p),
        ("whole_address", ctypes.c_void_p),
        ("ragged_address", ctypes.c_void_p),
        ("slots_address", ctypes.c_void_p),
    )

    def __init__(
        self,
        *,
        reports: TableMemory,
        notes: Sequence[TableMemory],
        live: Words,
        whole: Words,
        ragged: Words | None,
        slots: NDArray[np.int64],
    ) -> None:
        super().__init__()
        self.reports, self.notes = reports, notes
        self.live, self.whole, self.ragged, self.slots = live, whole, ragged, slots
        self.address = ctypes.addressof(self)
        self.reports_address = reports.address
        self.notes_addresses = (ctypes.c_void_p * 2)(*(table.address for table in notes))
        self.live_address, self.whole_address = live.ctypes.data, whole.ctypes.data
        self.ragged_address = None if ragged is None else ragged.ctypes.data
        self.slots_address = slots.ctypes.data


class TableOperations(Protocol):
    """What is done for every report and every decision."""

    def held(
        self,
        sources: LookupSources,
        fingerprints: Fingerprints,
        noted: Places | None,
        unit: int,
        held: HeldBySlot,
    ) -> None:
        """Writes to `held` how many leading blocks of a chain, not empty, each holder has reported, or is expected to
        have by the notes that stand at the places `noted`; a block counts for `unit`. A holder of none is left out.

        Takes time with the logarithm of the chain, for each different depth; where columns are ragged,
        with a 16th of the chain.
        """

    def add(
        self,
        memory: TableMemory,
        fingerprints: Fingerprints,
        noted: Places | None,
        begin: int,
        column: int,
    ) -> int:
        """Adds `column` to the sets of the fingerprints, or of those at the places `noted`, from the one numbered
        `begin` on; returns the first one for which the table has to grow. Where it is as large as it may be, each new
        block displaces one in its bucket: of those with the fewest holders one as good as drawn.
        """

    def discard(self, memory: TableMemory, fingerprints: Fingerprints, column: int) -> None:
        """Takes `column` out of the sets of all fingerprints; empty sets are forgotten."""

    def clear(self, memory: TableMemory, gone: Words, first: int, last: int) -> None:
        """Takes the columns `gone` out of all sets in the buckets `first` to `last`; empty sets are forgotten."""

    def split(self, memory: TableMemory, split: Split) -> None:
        """Moves what one more bit of its name says to the new buckets; each entry keeps its place within the bucket."""


class BlockTable:
    """Sets of columns (holders) by print.

    Args:
        max_blocks: Fingerprints held at most.
        operations: Implementation of the hot part.
    """

    def __init__(self, *, max_blocks: int, operations: TableOperations) -> None:
        self._max_blocks = max_blocks
        self._operations = operations
        most_buckets = _FIRST_BUCKETS
        while _roomy(most_buckets) < max_blocks:
            most_buckets *= 2
        self.memory = TableMemory(
            num_buckets=_FIRST_BUCKETS,
            most_buckets=most_buckets,
            most=max_blocks,
        )
        self._allow(_roomy(_FIRST_BUCKETS))

    def __len__(self) -> int:
        return self.memory.used

    @property
    def num_columns(self) -> int:
        """Columns there is room for: 128 at the beginning."""
        return int(self.memory.num_words * WORD_BITS)

    @property
    def size_bytes(self) -> int:
        """Memory taken."""
        memory = self.memory
        return int(memory.fingerprints.nbytes * (1 + memory.num_words))

    @property
    def num_buckets(self) -> int:
        """Buckets in use."""
        return int(self.memory.num_buckets)

    def clear(self) -> None:
        """Forgets everything."""
        self.memory.reset(num_buckets=_FIRST_BUCKETS)
        self._allow(_roomy(_FIRST_BUCKETS))

    def widen(self) -> None:
        """Makes room for 192 more columns."""
        self.memory.widen()

    def add(self, fingerprints: Fingerprints, column: int, noted: Places | None = None) -> int:
        """Adds `column` to the sets of all `fingerprints`, or of those at the places `noted`;
        returns how many blocks were given up for want of room.
        """
        count = len(fingerprints if noted is None else noted)
        done, before = 0, self.memory.displaced
        while (
            done := self._operations.add(self.memory, fingerprints, noted, done, column)
        ) < count:
            self._grow()
        return int(self.memory.displaced - before)

    def discard(self, fingerprints: Fingerprints, column: int) -> None:
        """Takes `column` out of the sets of all `fingerprints`; empty sets are forgotten."""
        self._operations.discard(self.memory, fingerprints, column)

    def clear_columns(self, gone: Words, first: int, last: int) -> None:
        """Takes the columns `gone` out of all sets in the buckets `first` to `last`; empty sets are forgotten."""
        self._operations.clear(self.memory, gone, first, last)

    def check_integrity(self) -> None:
        """Raises `InvariantError` when a print is not where it belongs or an empty place holds bits."""
        memory = self.memory
        buckets, places = memory.fingerprints.nonzero()
        fingerprints = memory.fingerprints[buckets, places]
        first, second = (
            memory.buckets_of(fingerprints),
            memory.buckets_of(fingerprints >> np.uint64(32)),
        )
        if not ((buckets == first) | (buckets == second)).all():
            raise InvariantError("a block lies in a bucket that is not its own")
        if len(fingerprints) != memory.used or len(np.unique(fingerprints)) != memory.used:
            raise InvariantError(f"{len(fingerprints)} blocks, counted {memory.used}")
        held = np.logical_or.reduce([words != 0 for words in memory.sets])
        if not np.array_equal(held, memory.fingerprints != 0):
            raise InvariantError("a block without holder, or a holder without block")

    def _allow(self, limit: int) -> None:
        self.memory.limit = min(limit, self._max_blocks)

    def _grow(self) -> None:
        """Splits the next few buckets."""
        memory = self.memory
        self._operations.split(memory, memory.extend(_STRIDE))
        is_done = memory.num_buckets == memory.num_unsplit
        self._allow(_roomy(memory.num_buckets) if is_done else memory.used + _STRIDE // _PACE)


def _roomy(num_buckets: int) -> int:
    """Blocks that so many buckets hold without being crowded."""
    return int(num_buckets * WIDTH * _MAX_FILL)


@lru_cache(maxsize=64)
def _numbers(slots: int) -> type[ctypes.Array[ctypes.c_int64]]:
    return ctypes.c_int64 * slots
