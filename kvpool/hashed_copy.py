"""Copies rows between slab and arena and says the hash of each, as it stands at its destination.
The pool's innermost loop.

In C the two are one pass over memory; where there is no compiler, rows are copied and then hashed in small turns.
"""

import ctypes
import time
from functools import cache

import numpy as np
import numpy.typing as npt
import xxhash

from baton import native
from baton.block_ids import Numbers
from baton.telemetry.logs import get_logger
from kv_transfer.memory.pages import Pages, copy_rows

Hashes = npt.NDArray[np.uint64]
"""The xxh3 (64 bits) of rows."""

_SHORTEST_IN_C = 241
"""XXH3 treats shorter inputs in other ways, which only the library knows."""

_TURN_BYTES = 256 * 1024

_log = get_logger(__name__)


def copy_hashed(source: Pages, target: Pages, from_rows: Numbers, to_rows: Numbers) -> Hashes:
    """Copies row by row; the caller has checked that all of them are there. Lets other threads run meanwhile.

    Args:
        source: Rows of as many bytes as `target`'s; neighbouring rows may lie apart, the bytes of one do not.
        target: The same, elsewhere.
        from_rows: Rows of `source`.
        to_rows: Rows of `target`, as many, each once.

    Returns:
        The hash of what stands in each of the target's rows, `[len(to_rows)]`.
    """
    library = load_library()
    if library is None or source.shape[1] < _SHORTEST_IN_C:
        return _copy_then_hash(source, target, from_rows, to_rows)
    hashes = np.empty(len(to_rows), dtype=np.uint64)
    library.baton_copy_rows_hashed(
        target.ctypes.data,
        source.ctypes.data,
        to_rows.ctypes.data,
        from_rows.ctypes.data,
        len(from_rows),
        target.strides[0],
        source.strides[0],
        source.shape[1],
        hashes.ctypes.data,
    )
    return hashes


def _copy_then_hash(source: Pages, target: Pages, from_rows: Numbers, to_rows: Numbers) -> Hashes:
    hashes = np.empty(len(to_rows), dtype=np.uint64)
    rows_per_turn = max(1, _TURN_BYTES // source.shape[1])
    for begin in range(0, len(to_rows), rows_per_turn):
        turn = slice(begin, begin + rows_per_turn)
        copy_rows(source, target, from_rows[turn], to_rows[turn])
        hashes[turn] = [xxhash.xxh3_64_intdigest(target[row]) for row in to_rows[turn].tolist()]
        time.sleep(0)  # hashing a short row keeps the interpreter's lock
    return hashes


@cache
def load_library() -> ctypes.CDLL | None:
    """The C function's library; None where it is not built, and the reason is logged, once."""
    try:
        library = native.load(native.HASHED_COPY)
    except native.NotBuiltError as error:
        _log.warning("blocks are copied and hashed without the C function", reason=str(error))
        return None
    pointer = ctypes.c_void_p
    library.baton_copy_rows_hashed.argtypes = [*[pointer] * 4, *[ctypes.c_int64] * 4, pointer]
    library.baton_copy_rows_hashed.restype = None
    return library
