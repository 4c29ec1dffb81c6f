"""The memory of the prefix index's hash tables, as Python and C (`table.c`) both see it, and what its parts are called.

A block is known by its *print*, the first 8 bytes of its key, which are already uniformly random: that any two among a
million blocks have the same has odds of one in thirty million, and a wrong answer costs a wrong guess. A print lies in
one of two buckets of 8 (half of its bits name one, half the other), so that a lookup is two cache lines at most, and a
removal leaves no trace.
"""

import ctypes
from array import array
from typing import TYPE_CHECKING

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


class Memory(ctypes.Structure):
    """A bucket's prints, 0 where empty, stand before its sets: close together, for looking one up is waiting for memory.

    Its counts lie in a record as `table.c` has it, which stays where it is when the cells are replaced.

    Attributes:
        address: Of the record.
        cells: `[buckets + 1, WIDTH * (1 + words)]`; the last bucket stays empty, for blocks that nobody holds.
        prints: `[buckets + 1, WIDTH]`, a view.
        sets: `[buckets + 1, WIDTH, words]`, a view.
        used: Places that hold a print.
        limit: So many may be used before the table has to grow.
    """

    num_words: int
    used: int
    limit: int

    _fields_ = (
        ("cells_address", ctypes.c_void_p),
        ("last_bucket", ctypes.c_uint64),
        ("num_words", ctypes.c_int64),
        ("used", ctypes.c_int64),
        ("limit", ctypes.c_int64),
    )

    def __init__(self, *, num_buckets: int, num_words: int, limit: int) -> None:
        super().__init__()
        self.address = ctypes.addressof(self)
        self.reset(num_buckets=num_buckets, num_words=num_words, limit=limit)

    def reset(self, *, num_buckets: int, num_words: int, limit: int) -> None:
        """Takes new cells, all empty."""
        self.cells = np.zeros((num_buckets + 1, WIDTH * (1 + num_words)), np.uint64)
        self.prints = self.cells[:, :WIDTH]
        self.sets = self.cells[:, WIDTH:].reshape(num_buckets + 1, WIDTH, num_words)
        self.num_words, self.used, self.limit = num_words, 0, limit
        self.cells_address, self.last_bucket = self.cells.ctypes.data, num_buckets - 1

    @property
    def num_buckets(self) -> int:
        """A power of two."""
        return len(self.cells) - 1

    @property
    def mask(self) -> np.uint64:
        """What of a number names a bucket."""
        return np.uint64(self.num_buckets - 1)
