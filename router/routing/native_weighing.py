"""Weighing in C, where it can be built: one call of `pricing.c` per decision and layout."""

import ctypes
from collections.abc import Iterator, Sequence
from random import Random
from struct import Struct
from typing import NamedTuple

from router.routing.costs import Entry
from router.routing.held import HeldBySlot
from router.routing.local import LocalPrefill
from router.routing.policy import Considered, Demand, Predicted
from router.routing.pricing_library import AskedRecord, FieldRecord, SideRecord, pricing_library
from router.routing.side import Side
from router.routing.view import WorkerView
from router.routing.weighing import (
    SHORTLIST,
    Field,
    Option,
    PlainWeigher,
    Weighed,
    Weigher,
    Weighing,
)

_ENTRY, _COUNTS, _OPTION = Struct("qqddq"), Struct("3q"), Struct("qqdqq7d")
_LIST_BYTES = SHORTLIST * _ENTRY.size
_COUNTS_AT = 3 * _LIST_BYTES
_PAIR_AT = _COUNTS_AT + _COUNTS.size
_ALONE_AT = _PAIR_AT + _OPTION.size
_Record = ctypes.c_char * (_ALONE_AT + _OPTION.size)


class _NativeWeighed(NamedTuple):
    """The grounds as C wrote them (`Grounds`): read when somebody asks."""

    field: Field
    record: ctypes.Array[ctypes.c_char]

    def considered(self) -> list[Considered]:
        """See Weighed."""
        return self._read().considered()

    def why(self) -> str:
        """See Weighed."""
        return self._read().why()

    def _read(self) -> Weighed:
        field, counts = self.field, _COUNTS.unpack_from(self.record, _COUNTS_AT)
        sides = (field.prefillers, field.takers, field.decoders)
        lists = [
            list(self._entries(number, side, count))
            for number, (side, count) in enumerate(zip(sides, counts, strict=True))
        ]
        return Weighed(prefillers=lists[0], decoders=lists[1], alone=lists[2])

    def _entries(self, number: int, side: Side[WorkerView], count: int) -> Iterator[Entry]:
        for place in range(count):
            at = number * _LIST_BYTES + place * _ENTRY.size
            milliseconds, legs, chance, cost_s, who = _ENTRY.unpack_from(self.record, at)
            yield milliseconds, legs, chance, cost_s, side.workers[who]


class NativeWeigher:
    """See `pricing.c` (a `Weigher`).

    Args:
        library: From `pricing_library`.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._weigh = library.baton_weigh
        self._among: tuple[Field, LocalPrefill, FieldRecord] | None = None

    def weigh(self, field: Field, demand: Demand, rng: Random, local: LocalPrefill) -> Weighing:
        """See Weigher."""
        held = HeldBySlot.covering(demand.held, field.slots)
        asked = AskedRecord(
            held.address,
            held.slots,
            demand.tokens,
            demand.samples,
            demand.output_tokens,
            demand.now_s,
        )
        record, among = _Record(), self._record_of(field, local)
        self._weigh(
            ctypes.byref(among), ctypes.byref(asked), rng.getrandbits(64), ctypes.byref(record)
        )
        takers, decoders = field.takers.workers, field.decoders.workers
        return Weighing(
            pair=_option(record, _PAIR_AT, field.prefillers.workers, takers),
            alone=_option(record, _ALONE_AT, decoders, decoders),
            grounds=_NativeWeighed(field=field, record=record),
        )

    def _record_of(self, field: Field, local: LocalPrefill) -> FieldRecord:
        """Mostly that of the last decision."""
        if self._among is not None and self._among[0] is field and self._among[1] is local:
            return self._among[2]
        sides = [_side(side) for side in (field.prefillers, field.takers, field.decoders)]
        record = FieldRecord(*sides, local.max_tokens, local.max_stall_s)
        self._among = field, local, record
        return record


def fastest_weigher() -> Weigher:
    """In C if that can be built."""
    library = pricing_library()
    return PlainWeigher() if library is None else NativeWeigher(library)


def _side(side: Side[WorkerView]) -> SideRecord:
    return SideRecord(ctypes.addressof(side.addresses), len(side.workers))


def _option(
    record: ctypes.Array[ctypes.c_char],
    at: int,
    prefillers: Sequence[WorkerView],
    decoders: Sequence[WorkerView],
) -> Option | None:
    values = _OPTION.unpack_from(record, at)
    milliseconds, legs, chance, prefill, decode = values[:5]
    if prefill < 0:
        return None
    queue_s, fetch_s, prefill_s, unhidden_s, room_s, tbt_s, harm_s = values[5:]
    return Option(
        rank=(milliseconds, legs, chance),
        prefill=prefillers[prefill],
        decode=decoders[decode],
        predicted=Predicted(
            queue_s=queue_s,
            fetch_s=fetch_s,
            prefill_s=prefill_s,
            unhidden_s=unhidden_s,
            room_s=room_s,
            tbt_s=tbt_s,
            harm_s=harm_s,
        ),
    )
