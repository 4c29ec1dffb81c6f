"""Where a lookup finds who holds what: the table of reports, the notes of what was sent, and whose columns are whose."""

import ctypes
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from router.routing.memory import Memory, Words


class Sources(ctypes.Structure):
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
        reports: Memory,
        notes: Sequence[Memory],
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
