"""Copies scattered pages between two mapped regions, in C where there is a compiler and in numpy where there is none.

The C function is built once per machine and version, in about a tenth of a second, when the first peer is connected.
"""

import ctypes
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from baton.ids import BlockId
from baton.native import CannotBuildError, Library, build
from baton.telemetry.logs import get_logger
from kv_transfer.plan import runs

Pages = npt.NDArray[np.uint8]
"""One layer's arena as rows: `[num_blocks, page_layer_bytes]`."""

_log = get_logger(__name__)

_LIBRARY = Library(
    name="page-copy",
    compiler="cc",
    sources=(Path(__file__).with_name("page_copy.c"),),
    flags=("-O3", "-march=native"),
)
_LONG_BYTES = 256 * 1024


def copy_whole_pages(
    source: Pages, target: Pages, from_pages: tuple[BlockId, ...], to_pages: tuple[BlockId, ...]
) -> None:
    """Copies page by page; the caller has checked that all of them are there.

    Args:
        source: Rows of `page_bytes`, contiguous.
        target: The same, elsewhere.
        from_pages: Rows of `source`.
        to_pages: Rows of `target`, as many.
    """
    library = load_library()
    if library is None:
        _copy_runs(source, target, from_pages, to_pages)
        return
    sources = np.array(from_pages, dtype=np.int64)
    targets = np.array(to_pages, dtype=np.int64)
    library.baton_copy_pages(
        target.ctypes.data,
        source.ctypes.data,
        targets.ctypes.data,
        sources.ctypes.data,
        len(sources),
        source.shape[1],
    )


def _copy_runs(
    source: Pages, target: Pages, from_pages: tuple[BlockId, ...], to_pages: tuple[BlockId, ...]
) -> None:
    size = source.shape[1]
    here, there = source.reshape(-1).data, target.reshape(-1).data
    # Slices of runs: a fancy index would copy through a temporary, twice the traffic.
    for begin, to, count in runs(from_pages, to_pages):
        # A short copy takes less time than numpy's way to it. A long one lets other threads run meanwhile, as numpy does.
        if count * size < _LONG_BYTES:
            there[to * size : (to + count) * size] = here[begin * size : (begin + count) * size]
        else:
            target[to : to + count] = source[begin : begin + count]


@cache
def load_library(cache_dir: Path | None = None) -> ctypes.CDLL | None:
    """The C function's library, built now if need be; None where it cannot be, and the reason is logged, once."""
    try:
        library = ctypes.CDLL(str(build(_LIBRARY, cache_dir)))
    except (OSError, CannotBuildError) as error:
        _log.warning("pages are copied without the C function", reason=str(error))
        return None
    pointer = ctypes.c_void_p
    library.baton_copy_pages.argtypes = [*[pointer] * 4, ctypes.c_int64, ctypes.c_int64]
    library.baton_copy_pages.restype = None
    return library
