"""Copies scattered pages between two mapped regions,
in C where there is a compiler and in numpy where there is none.
"""

import ctypes
from functools import cache

import numpy as np
import numpy.typing as npt

from baton import native
from baton.block_ids import Numbers
from baton.cpu_features import largest_cache_bytes
from baton.errors import TransferError
from baton.layout import KvLayout
from baton.telemetry.logs import get_logger
from kv_transfer.plan import runs

Pages = npt.NDArray[np.uint8]
"""One layer's arena, or a part of each of its pages, as rows: `[num_blocks, page_layer_bytes]`."""

_log = get_logger(__name__)


def layer_pages(memory: memoryview, layout: KvLayout, num_blocks: int) -> list[Pages]:
    """A region's bytes as one `[num_blocks, page_layer_bytes]` array per layer, without copying.

    Raises:
        TransferError: The region is smaller than the layout says.
    """
    if len(memory) < layout.region_bytes(num_blocks):
        raise TransferError(f"a region of {len(memory)} bytes cannot hold {num_blocks} pages")
    flat = np.frombuffer(memory, dtype=np.uint8)
    size = layout.page_layer_bytes * num_blocks
    starts = [layout.layer_offset(index, num_blocks) for index in range(len(layout.layers))]
    return [flat[at : at + size].reshape(num_blocks, layout.page_layer_bytes) for at in starts]


def copy_rows(source: Pages, target: Pages, from_pages: Numbers, to_pages: Numbers) -> None:
    """Copies row by row; the caller has checked that all of them are there. Lets other threads run meanwhile. What does
    not fit into the caches, read and written, is written past them.

    Args:
        source: Rows of as many bytes as `target`'s; neighbouring rows may lie apart, the bytes of one do not.
        target: The same, elsewhere.
        from_pages: Rows of `source`.
        to_pages: Rows of `target`, as many.
    """
    library = load_library()
    if library is None:
        _copy_runs(source, target, from_pages, to_pages)
        return
    library.baton_copy_rows(
        target.ctypes.data,
        source.ctypes.data,
        to_pages.ctypes.data,
        from_pages.ctypes.data,
        len(from_pages),
        target.strides[0],
        source.strides[0],
        source.shape[1],
        2 * len(from_pages) * source.shape[1] > largest_cache_bytes(),
    )


def _copy_runs(source: Pages, target: Pages, from_pages: Numbers, to_pages: Numbers) -> None:
    # Slices of runs: a fancy index would copy through a temporary, twice the traffic.
    for begin, to, count in runs(from_pages.tolist(), to_pages.tolist()):
        target[to : to + count] = source[begin : begin + count]


@cache
def load_library() -> ctypes.CDLL | None:
    """The C function's library; None where it is not built, and the reason is logged, once."""
    try:
        library = native.load(native.PAGE_COPY)
    except native.NotBuiltError as error:
        _log.warning("pages are copied without the C function", reason=str(error))
        return None
    pointer = ctypes.c_void_p
    library.baton_copy_rows.argtypes = [*[pointer] * 4, *[ctypes.c_int64] * 5]
    library.baton_copy_rows.restype = None
    return library
