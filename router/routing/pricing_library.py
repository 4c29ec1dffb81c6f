"""`pricing.c` as Python calls it."""

import ctypes
from collections.abc import Sequence
from functools import cache

from baton import native
from baton.telemetry.logs import get_logger
from router.routing.weighing import SHORTLIST

_log = get_logger(__name__)


class SideRecord(ctypes.Structure):
    """Some workers."""

    _fields_ = (("workers", ctypes.c_void_p), ("count", ctypes.c_int64))


class FieldRecord(ctypes.Structure):
    """The workers of one layout, and the bounds for doing both."""

    _fields_ = (
        ("prefillers", SideRecord),
        ("takers", SideRecord),
        ("decoders", SideRecord),
        ("max_tokens", ctypes.c_int64),
        ("max_stall_s", ctypes.c_double),
    )

    @property
    def address(self) -> int:
        """Of the record."""
        return ctypes.addressof(self)


class EntryRecord(ctypes.Structure):
    """One worker on a shortlist; `at` is its place in its side. As `router.routing.costs.Entry`."""

    milliseconds: int
    legs: int
    chance: float
    cost_s: float
    at: int

    _fields_ = (
        ("milliseconds", ctypes.c_int64),
        ("legs", ctypes.c_int64),
        ("chance", ctypes.c_double),
        ("cost_s", ctypes.c_double),
        ("at", ctypes.c_int64),
    )


class OptionRecord(ctypes.Structure):
    """The best way of one kind: its rank, who by their places (below 0: there is none), and what is expected of it."""

    milliseconds: int
    legs: int
    chance: float
    prefill: int
    decode: int
    queue_s: float
    fetch_s: float
    prefill_s: float
    unhidden_s: float
    room_s: float
    tbt_s: float
    harm_s: float

    _fields_ = (
        ("milliseconds", ctypes.c_int64),
        ("legs", ctypes.c_int64),
        ("chance", ctypes.c_double),
        ("prefill", ctypes.c_int64),
        ("decode", ctypes.c_int64),
        ("queue_s", ctypes.c_double),
        ("fetch_s", ctypes.c_double),
        ("prefill_s", ctypes.c_double),
        ("unhidden_s", ctypes.c_double),
        ("room_s", ctypes.c_double),
        ("tbt_s", ctypes.c_double),
        ("harm_s", ctypes.c_double),
    )


_Shortlist = EntryRecord * SHORTLIST


class WeighedRecord(ctypes.Structure):
    """All of a decision among the workers of one layout."""

    prefillers: Sequence[EntryRecord]
    takers: Sequence[EntryRecord]
    alone: Sequence[EntryRecord]
    num_prefillers: int
    num_takers: int
    num_alone: int
    pair: OptionRecord
    single: OptionRecord

    _fields_ = (
        ("prefillers", _Shortlist),
        ("takers", _Shortlist),
        ("alone", _Shortlist),
        ("num_prefillers", ctypes.c_int64),
        ("num_takers", ctypes.c_int64),
        ("num_alone", ctypes.c_int64),
        ("pair", OptionRecord),
        ("single", OptionRecord),
    )


@cache
def pricing_library() -> ctypes.CDLL | None:
    """The functions, typed; None where they are not built, and the reason is logged, once."""
    try:
        library = native.load(native.PRICING)
    except native.NotBuiltError as error:
        _log.warning("workers are priced without C functions", reason=str(error))
        return None
    pointer, number, seconds = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double
    library.baton_weigh.argtypes = [
        *(pointer, pointer, number, number, number, number, seconds),
        *(ctypes.c_uint64, pointer),
    ]
    library.baton_weigh.restype = None
    return library
