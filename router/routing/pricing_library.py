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
    tokens: int
    samples: int
    output_tokens: int
    now_s: float

    _fields_ = (
        ("held", ctypes.c_void_p),
        ("tokens", ctypes.c_int64),
        ("samples", ctypes.c_int64),
        ("output_tokens", ctypes.c_int64),
        ("now_s", ctypes.c_double),
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
    shortlist = (pointer, number, pointer, ctypes.c_uint64, pointer, number)
    library.baton_price_prefill.argtypes = shortlist
    library.baton_price_decode.argtypes = shortlist
    library.baton_price_both.argtypes = (*shortlist, number, seconds)
    for price in (
        library.baton_price_prefill,
        library.baton_price_decode,
        library.baton_price_both,
    ):
        price.restype = number
    library.baton_all_ready.argtypes = [pointer, number, seconds, seconds]
    library.baton_all_ready.restype = ctypes.c_bool
    return library
