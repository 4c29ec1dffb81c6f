"""The table's hot part in C."""

import ctypes
from functools import cache

from baton import native
from baton.telemetry.logs import get_logger
from router.routing.held import HeldBySlot
from router.routing.memory import Memory, Places, Prints, Split
from router.routing.plain_table import PlainHotPart
from router.routing.sources import Sources
from router.routing.table import HotPart

_log = get_logger(__name__)


class NativeHotPart:
    """See `table.c` (a `HotPart`)."""

    def __init__(self, library: ctypes.CDLL) -> None:
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        self._held, self._add = library.baton_held, library.baton_table_add
        self._discard, self._split = library.baton_table_discard, library.baton_table_split
        self._held.argtypes = [pointer, pointer, number, pointer, number, number, pointer]
        self._held.restype = None
        self._add.argtypes = [pointer, pointer, pointer, number, number, number]
        self._add.restype = number
        self._discard.argtypes = [pointer, pointer, number, number]
        self._discard.restype = None
        self._split.argtypes = [pointer, number, number, number]
        self._split.restype = None

    def held(
        self, sources: Sources, prints: Prints, noted: Places | None, unit: int, held: HeldBySlot
    ) -> None:
        """See HotPart."""
        places, num_places = (None, 0) if noted is None else noted.buffer_info()
        self._held(sources.address, *prints.buffer_info(), places, num_places, unit, held.numbers)

    def add(
        self, memory: Memory, prints: Prints, noted: Places | None, begin: int, column: int
    ) -> int:
        """See HotPart."""
        at, count = prints.buffer_info()
        places, count = (None, count) if noted is None else noted.buffer_info()
        return int(self._add(memory.address, at, places, begin, count, column))

    def discard(self, memory: Memory, prints: Prints, column: int) -> None:
        """See HotPart."""
        self._discard(memory.address, *prints.buffer_info(), column)

    def split(self, memory: Memory, split: Split) -> None:
        """See HotPart."""
        self._split(memory.address, *split)


@cache
def hot_part() -> HotPart:
    """In C where it is built; elsewhere in Python, and the reason is logged, once."""
    try:
        return NativeHotPart(native.load(native.BLOCK_TABLE))
    except native.NotBuiltError as error:
        _log.warning("the prefix index does without its C functions", reason=str(error))
        return PlainHotPart()
