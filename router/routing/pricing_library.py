"""`pricing.c`, built at first use as the prefix table's hot part is."""

import ctypes
from functools import cache
from pathlib import Path

from baton.native import CannotBuildError, Library, build
from baton.telemetry.logs import get_logger

_log = get_logger(__name__)

_LIBRARY = Library(
    name="pricing",
    compiler="cc",
    sources=(Path(__file__).with_name("pricing.c"),),
    # Without contraction every operation is rounded as Python rounds it, so that both ways choose alike.
    flags=("-O3", "-march=native", "-ffp-contract=off", "-fwrapv"),
)


class AskedRecord(ctypes.Structure):
    """What of a `Demand` matters to a price."""

    held: int
    slots: int
    tokens: int
    samples: int
    output_tokens: int
    now_s: float

    _fields_ = (
        ("held", ctypes.c_void_p),
        ("slots", ctypes.c_int64),
        ("tokens", ctypes.c_int64),
        ("samples", ctypes.c_int64),
        ("output_tokens", ctypes.c_int64),
        ("now_s", ctypes.c_double),
    )


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


@cache
def pricing_library() -> ctypes.CDLL | None:
    """The functions, typed; None where they cannot be built, and the reason is logged, once."""
    try:
        library = ctypes.CDLL(str(build(_LIBRARY)))
    except (OSError, CannotBuildError) as error:
        _log.warning("workers are priced without C functions", reason=str(error))
        return None
    pointer, number, seconds = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double
    library.baton_weigh.argtypes = [pointer, pointer, ctypes.c_uint64, pointer]
    library.baton_weigh.restype = None
    library.baton_all_ready.argtypes = [pointer, number, seconds, seconds]
    library.baton_all_ready.restype = ctypes.c_bool
    return library
