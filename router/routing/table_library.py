"""The table's hot part in C: built at first use, once per machine and version, in about a tenth of a second."""

import ctypes
from functools import cache
from pathlib import Path

from baton.native import CannotBuildError, Library, build
from baton.telemetry.logs import get_logger
from router.routing.table import Depths, HotPart, Memory, PlainHotPart, Prints, Words

_log = get_logger(__name__)

_LIBRARY = Library(
    name="block-table",
    compiler="cc",
    sources=(Path(__file__).with_name("table.c"),),
    flags=("-O3", "-march=native"),
)


class NativeHotPart:
    """See `table.c`."""

    def __init__(self, library: ctypes.CDLL) -> None:
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        self._whole, self._ragged = library.baton_table_whole, library.baton_table_ragged
        self._add, self._discard = library.baton_table_add, library.baton_table_discard
        for depths in (self._whole, self._ragged):
            depths.argtypes = [pointer, pointer, number, pointer, pointer]
            depths.restype = None
        self._add.argtypes = [pointer, pointer, number, number, number]
        self._add.restype = number
        self._discard.argtypes = [pointer, pointer, number, number]
        self._discard.restype = None

    def whole(self, memory: Memory, prints: Prints, live: Words, depths: Depths) -> None:
        """See HotPart."""
        self._whole(
            ctypes.byref(memory),
            prints.ctypes.data,
            len(prints),
            live.ctypes.data,
            depths.ctypes.data,
        )

    def ragged(self, memory: Memory, prints: Prints, live: Words, depths: Depths) -> None:
        """See HotPart."""
        self._ragged(
            ctypes.byref(memory),
            prints.ctypes.data,
            len(prints),
            live.ctypes.data,
            depths.ctypes.data,
        )

    def add(self, memory: Memory, prints: Prints, begin: int, column: int) -> int:
        """See HotPart."""
        address = prints.ctypes.data
        return int(self._add(ctypes.byref(memory), address, begin, len(prints), column))

    def discard(self, memory: Memory, prints: Prints, column: int) -> None:
        """See HotPart."""
        self._discard(ctypes.byref(memory), prints.ctypes.data, len(prints), column)


@cache
def hot_part() -> HotPart:
    """In C where it can be built; elsewhere in Python, and the reason is logged, once."""
    try:
        return NativeHotPart(ctypes.CDLL(str(build(_LIBRARY))))
    except (OSError, CannotBuildError) as error:
        _log.warning("the prefix index does without its C functions", reason=str(error))
        return PlainHotPart()
