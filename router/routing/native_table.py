"""The table's hot part in C."""

import ctypes
from functools import cache

from baton import native
from baton.telemetry.logs import get_logger
from router.routing.plain_table import PlainTable
from router.routing.table import (
    Fingerprints,
    HeldBySlot,
    LookupSources,
    Places,
    Split,
    TableMemory,
    TableOperations,
    Words,
)

_log = get_logger(__name__)


class NativeTable:
    """See `table.c` (a `TableOperations`)."""

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
        self._clear = library.baton_table_clear
        self._clear.argtypes = [pointer, pointer, number, number]
        self._clear.restype = None

    def held(
        self,
        sources: LookupSources,
        fingerprints: Fingerprints,
        noted: Places | None,
        unit: int,
        held: HeldBySlot,
    ) -> None:
        """See TableOperations."""
        places, num_places = (None, 0) if noted is None else noted.buffer_info()
        self._held(
            sources.address, *fingerprints.buffer_info(), places, num_places, unit, held.numbers
        )

    def add(
        self,
        memory: TableMemory,
        fingerprints: Fingerprints,
        noted: Places | None,
        begin: int,
        column: int,
    ) -> int:
        """See TableOperations."""
        at, count = fingerprints.buffer_info()
        places, count = (None, count) if noted is None else noted.buffer_info()
        return int(self._add(memory.address, at, places, begin, count, column))

    def discard(self, memory: TableMemory, fingerprints: Fingerprints, column: int) -> None:
        """See TableOperations."""
        self._discard(memory.address, *fingerprints.buffer_info(), column)

    def clear(self, memory: TableMemory, gone: Words, first: int, last: int) -> None:
        """See TableOperations."""
        self._clear(memory.address, gone.ctypes.data, first, last)

    def split(self, memory: TableMemory, split: Split) -> None:
        """See TableOperations."""
        self._split(memory.address, *split)


@cache
def fastest_operations() -> TableOperations:
    """In C where it is built; elsewhere in Python, and the reason is logged, once."""
    try:
        return NativeTable(native.load(native.BLOCK_TABLE))
    except native.NotBuiltError as error:
        _log.warning("the prefix index does without its C functions", reason=str(error))
        return PlainTable()
