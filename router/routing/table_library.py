"""The table's hot part in C: built at first use, once per machine and version, in about a tenth of a second."""

import ctypes
from functools import cache
from pathlib import Path

from baton.native import CannotBuildError, Library, build
from baton.telemetry.logs import get_logger
from router.routing.table import Depths, HotPart, Memory, Places, PlainHotPart, Prints, Words

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
        self._whole.argtypes = [pointer, pointer, number, pointer, pointer, pointer]
        self._ragged.argtypes = [pointer, pointer, number, pointer, pointer]
        self._whole.restype = self._ragged.restype = None
        self._add.argtypes = [pointer, pointer, number, number, number]
        self._add.restype = number
        self._discard.argtypes = [pointer, pointer, number, number]
        self._discard.restype = None

    def whole(
        self, memory: Memory, prints: Prints, live: Words, depths: Depths, places: Places | None
    ) -> None:
        """See HotPart."""
        count, at = (len(prints), None) if places is None else (len(places), _address(places))
        self._whole(
            ctypes.byref(memory), _address(prints), count, _address(live), _address(depths), at
        )

    def ragged(self, memory: Memory, prints: Prints, live: Words, depths: Depths) -> None:
        """See HotPart."""
        at = _address(prints)
        self._ragged(ctypes.byref(memory), at, len(prints), _address(live), _address(depths))

    def add(self, memory: Memory, prints: Prints, begin: int, column: int) -> int:
        """See HotPart."""
        at = _address(prints)
        return int(self._add(ctypes.byref(memory), at, begin, len(prints), column))

    def discard(self, memory: Memory, prints: Prints, column: int) -> None:
        """See HotPart."""
        self._discard(ctypes.byref(memory), _address(prints), len(prints), column)


@cache
def hot_part() -> HotPart:
    """In C where it can be built; elsewhere in Python, and the reason is logged, once."""
    try:
        return NativeHotPart(ctypes.CDLL(str(build(_LIBRARY))))
    except (OSError, CannotBuildError) as error:
        _log.warning("the prefix index does without its C functions", reason=str(error))
        return PlainHotPart()


def _address(array: Prints | Depths | Places) -> int:
    # `array.ctypes` runs some Python of its own, which a decision has no time for.
    return int(array.__array_interface__["data"][0])
