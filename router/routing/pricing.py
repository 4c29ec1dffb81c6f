"""The costs of `router.routing.predictive` in C: one call of `pricing.c` per decision and layout.

The C function goes through the records in which workers and forecasts keep their numbers (`WorkerView`, `Forecast`),
and writes what it expects of its choice into a record that is read when it is asked for. Beside numpy: docs/adr/0018.
"""

import ctypes
from collections.abc import Sequence
from functools import cache
from random import Random
from weakref import WeakKeyDictionary

import msgspec

from baton import native
from baton.telemetry.logs import get_logger
from router.routing.policy import Considered, Demand, Predicted
from router.routing.predictive import (
    SHORTLIST,
    Candidates,
    Cheapest,
    LocalPrefill,
    Option,
    PredictedRationale,
    Priced,
    Pricing,
    PythonPricing,
)
from router.routing.table import HeldBySlot
from router.routing.view import WorkerView

_log = get_logger(__name__)


class _CandidatesRecord(ctypes.Structure):
    """`Candidates` and the bounds for doing both. The candidates have to outlive it: it holds addresses of workers.

    Args:
        candidates: The workers.
        local: The bounds.
    """

    _fields_ = (
        ("prefillers", ctypes.c_void_p),
        ("num_prefillers", ctypes.c_int64),
        ("receivers", ctypes.c_void_p),
        ("num_receivers", ctypes.c_int64),
        ("decoders", ctypes.c_void_p),
        ("num_decoders", ctypes.c_int64),
        ("max_tokens", ctypes.c_int64),
        ("max_stall_s", ctypes.c_double),
    )

    def __init__(self, candidates: Candidates, local: LocalPrefill) -> None:
        super().__init__()
        self.local = local
        self._arrays = [
            (ctypes.c_void_p * len(workers))(*map(ctypes.addressof, workers))
            for workers in (candidates.prefillers, candidates.receivers, candidates.decoders)
        ]
        self.prefillers, self.receivers, self.decoders = map(ctypes.addressof, self._arrays)
        self.num_prefillers, self.num_receivers, self.num_decoders = map(len, self._arrays)
        self.max_tokens, self.max_stall_s = local.max_tokens, local.max_stall_s
        self.address = ctypes.addressof(self)


class _PricedRecord(ctypes.Structure):
    """One worker on a shortlist, as `Priced`; `at` is its place among its candidates."""

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


class _OptionRecord(ctypes.Structure):
    """The best way of one kind: its rank, its workers by their places (below 0: there is none), and the `Predicted`."""

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


_Shortlist = _PricedRecord * SHORTLIST


class _CheapestRecord(ctypes.Structure):
    """All of a decision among the workers of one layout."""

    prefillers: Sequence[_PricedRecord]
    receivers: Sequence[_PricedRecord]
    singles: Sequence[_PricedRecord]
    num_prefillers: int
    num_receivers: int
    num_singles: int
    pair: _OptionRecord
    single: _OptionRecord

    _fields_ = (
        ("prefillers", _Shortlist),
        ("receivers", _Shortlist),
        ("singles", _Shortlist),
        ("num_prefillers", ctypes.c_int64),
        ("num_receivers", ctypes.c_int64),
        ("num_singles", ctypes.c_int64),
        ("pair", _OptionRecord),
        ("single", _OptionRecord),
    )


class _RecordedRationale(msgspec.Struct, frozen=True):
    """Why, as C wrote it down (a `Rationale`): read when it is asked for."""

    candidates: Candidates
    record: _CheapestRecord

    def predicted(self, *, alone: bool) -> Predicted:
        """See Rationale; of a way that there is."""
        option = self.record.single if alone else self.record.pair
        return Predicted(
            queue_s=option.queue_s,
            fetch_s=option.fetch_s,
            prefill_s=option.prefill_s,
            unhidden_s=option.unhidden_s,
            room_s=option.room_s,
            tbt_s=option.tbt_s,
            harm_s=option.harm_s,
        )

    def considered(self) -> list[Considered]:
        """See PredictedRationale."""
        return self._read().considered()

    def why(self) -> str:
        """See PredictedRationale."""
        return self._read().why()

    def _read(self) -> PredictedRationale:
        workers, record = self.candidates, self.record
        return PredictedRationale(
            prefillers=_priced(record.prefillers, record.num_prefillers, workers.prefillers),
            receivers=_priced(record.receivers, record.num_receivers, workers.receivers),
            singles=_priced(record.singles, record.num_singles, workers.decoders),
        )


class NativePricing:
    """See `pricing.c` (a `Pricing`).

    Args:
        library: From `pricing_library`.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._cheapest = library.baton_cheapest
        self._records = WeakKeyDictionary[Candidates, _CandidatesRecord]()

    def cheapest(
        self, candidates: Candidates, demand: Demand, rng: Random, local: LocalPrefill
    ) -> Cheapest:
        """See Pricing."""
        prepared = self._records.get(candidates)
        if prepared is None or prepared.local is not local:
            prepared = self._records[candidates] = _CandidatesRecord(candidates, local)
        held = HeldBySlot.covering(demand.held, candidates.slots)
        record = _CheapestRecord()
        self._cheapest(
            prepared.address,
            held.numbers,
            held.slots,
            demand.tokens,
            demand.samples,
            demand.output_tokens,
            demand.now_s,
            rng.getrandbits(64),
            ctypes.byref(record),
        )
        prefillers, receivers = candidates.prefillers, candidates.receivers
        return Cheapest(
            pair=_option(record.pair, prefillers, receivers),
            single=_option(record.single, candidates.decoders, candidates.decoders),
            rationale=_RecordedRationale(candidates, record),
        )


def fastest_pricing() -> Pricing:
    """In C if that can be built, else in Python."""
    library = pricing_library()
    return PythonPricing() if library is None else NativePricing(library)


@cache
def pricing_library() -> ctypes.CDLL | None:
    """The function, typed; None where it is not built, and the reason is logged, once."""
    try:
        library = native.load(native.PRICING)
    except native.NotBuiltError as error:
        _log.warning("workers are priced without C functions", reason=str(error))
        return None
    pointer, number, seconds = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double
    library.baton_cheapest.argtypes = [
        *(pointer, pointer, number, number, number, number, seconds),
        *(ctypes.c_uint64, pointer),
    ]
    library.baton_cheapest.restype = None
    return library


def _option(
    record: _OptionRecord, prefillers: Sequence[WorkerView], decoders: Sequence[WorkerView]
) -> Option | None:
    prefill = record.prefill
    if prefill < 0:
        return None
    rank = record.milliseconds, record.legs, record.chance
    return Option(rank, prefillers[prefill], decoders[record.decode])


def _priced(
    records: Sequence[_PricedRecord], count: int, workers: Sequence[WorkerView]
) -> list[Priced]:
    return [
        (record.milliseconds, record.legs, record.chance, record.cost_s, workers[record.at])
        for record in records[:count]
    ]
