"""The memory of the prefix index's hash tables, as Python and C (`table.c`) both see it, and what its parts are called.

A block is known by its *print*, the first 8 bytes of its key, which are already uniformly random: that any two among a
million blocks have the same has odds of one in thirty million, and a wrong answer costs a wrong guess. A print lies in
one of two buckets of 8 (half of its bits name one, half the other), so that a lookup is two cache lines at most, and a
removal leaves no trace.
"""

import ctypes
from array import array
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from baton.hashing import KEY_BYTES

if TYPE_CHECKING:
    _Numbers = array[int]
else:
    _Numbers = array  # takes no argument before Python 3.12

Prints = _Numbers
"""Prints of a chain's blocks, in order, as 64-bit numbers: an array, because that tells its address quickly."""

Places = _Numbers
"""Positions in a chain, ascending, as 64-bit numbers."""

Words = NDArray[np.uint64]
"""A set of columns, 64 per word, lowest first."""

WIDTH = 8
WORD_BITS = 64


def prints_of(keys: bytes) -> Prints:
    """Prints of keys that stand one after the other."""
    words = np.frombuffer(keys, dtype="<u8").reshape(-1, KEY_BYTES // 8)
    prints = np.maximum(words[:, 0], np.uint64(1))  # 0 marks an empty place
    return array("Q", prints.tobytes())


class Split(NamedTuple):
    """Buckets `first` to `last` share their entries with those that stand `before` places further on: so many there were."""

    before: int
    first: int
    last: int


class Memory(ctypes.Structure):
    """A bucket's prints, 0 where empty, stand before its sets: close together, for looking one up is waiting for memory.

    Buckets are split one by one, in order, until there are twice as many (linear hashing): half of their names then say so by
    one bit more. They lie in one array with room for as many as there may ever be; the system gives memory only for
    those that were written to, so that a table neither moves when it grows nor leaves an old one behind.

    Its counts lie in a record as `table.c` has it.

    Attributes:
        address: Of the record.
        cells: `[buckets + 1, WIDTH * (1 + words)]`; the last bucket stays empty, for blocks that nobody holds.
        prints: `[buckets + 1, WIDTH]`, a view.
        sets: `[buckets + 1, WIDTH, words]`, a view.
        used: Places that hold a print.
        limit: So many may be used before the table has to grow.
    """

    num_buckets: int
    num_words: int
    used: int
    limit: int

    _fields_ = (
        ("cells_address", ctypes.c_void_p),
        ("num_buckets", ctypes.c_uint64),
        ("last_narrow", ctypes.c_uint64),
        ("num_words", ctypes.c_int64),
        ("used", ctypes.c_int64),
        ("limit", ctypes.c_int64),
    )

    def __init__(self, *, num_buckets: int, most_buckets: int, num_words: int) -> None:
        super().__init__()
        self.address = ctypes.addressof(self)
        self._most_buckets = most_buckets
        self.reset(num_buckets=num_buckets, num_words=num_words)

    def reset(self, *, num_buckets: int, num_words: int) -> None:
        """Takes new cells, all empty. How many may be used is for the caller to say."""
        self._room = np.zeros((self._most_buckets + 1, WIDTH * (1 + num_words)), np.uint64)
        self.cells_address = self._room.ctypes.data
        self.num_words, self.used, self.limit = num_words, 0, 0
        self._open(num_buckets)

    @property
    def num_unsplit(self) -> int:
        """So many buckets there were before the splitting that is under way: a power of two."""
        return int(self.last_narrow) + 1

    @property
    def may_split(self) -> bool:
        """Whether there is room for more buckets."""
        return self.num_buckets < self._most_buckets

    def buckets_of(self, names: Words) -> Words:
        """The buckets that these halves of prints name."""
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

    def _open(self, num_buckets: int) -> None:
        """Counts the first so many buckets as in use."""
        self.num_buckets = num_buckets
        self.last_narrow = (1 << num_buckets.bit_length() - 1) - 1
        self.cells = self._room[: num_buckets + 1]
        self.prints = self.cells[:, :WIDTH]
        self.sets = self.cells[:, WIDTH:].reshape(num_buckets + 1, WIDTH, self.num_words)
