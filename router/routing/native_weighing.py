"""Weighing in C, where it can be built: one call of `pricing.c` per decision and layout."""

import ctypes
from collections.abc import Sequence
from random import Random

import msgspec

from router.routing.costs import Entry
from router.routing.held import HeldBySlot
from router.routing.local import LocalPrefill
from router.routing.policy import Considered, Demand, Predicted
from router.routing.pricing_library import (
    EntryRecord,
    FieldRecord,
    OptionRecord,
    SideRecord,
    WeighedRecord,
    pricing_library,
)
from router.routing.side import Side
from router.routing.weighing import (
    Field,
    Option,
    PlainWeigher,
    Weighed,
    Weigher,
    Weighing,
)
from router.routing.worker_view import WorkerView


class _NativeWeighed(msgspec.Struct, frozen=True):
    """The grounds as C wrote them (`Grounds`): read when somebody asks."""

    field: Field
    record: WeighedRecord

    def predicted(self, *, alone: bool) -> Predicted:
        """See Weighed; of a way that there is."""
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
        """See Weighed."""
        return self._read().considered()

    def why(self) -> str:
        """See Weighed."""
        return self._read().why()

    def _read(self) -> Weighed:
        field, record = self.field, self.record
        return Weighed(
            prefillers=_entries(record.prefillers, record.num_prefillers, field.prefillers),
            decoders=_entries(record.takers, record.num_takers, field.takers),
            alone=_entries(record.alone, record.num_alone, field.decoders),
        )


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
        record = WeighedRecord()
        self._weigh(
            self._record_of(field, local),
            held.numbers,
            held.slots,
            demand.tokens,
            demand.samples,
            demand.output_tokens,
            demand.now_s,
            rng.getrandbits(64),
            ctypes.byref(record),
        )
        takers, decoders = field.takers.workers, field.decoders.workers
        return Weighing(
            pair=_option(record.pair, field.prefillers.workers, takers),
            alone=_option(record.single, decoders, decoders),
            grounds=_NativeWeighed(field, record),
        )

    def _record_of(self, field: Field, local: LocalPrefill) -> int:
        """Its address; mostly that of the last decision."""
        if self._among is not None and self._among[0] is field and self._among[1] is local:
            return self._among[2].address
        sides = [_side(side) for side in (field.prefillers, field.takers, field.decoders)]
        record = FieldRecord(*sides, local.max_tokens, local.max_stall_s)
        self._among = field, local, record
        return record.address


def fastest_weigher() -> Weigher:
    """In C if that can be built."""
    library = pricing_library()
    return PlainWeigher() if library is None else NativeWeigher(library)


def _side(side: Side[WorkerView]) -> SideRecord:
    return SideRecord(ctypes.addressof(side.addresses), len(side.workers))


def _option(
    record: OptionRecord, prefillers: Sequence[WorkerView], decoders: Sequence[WorkerView]
) -> Option | None:
    prefill = record.prefill
    if prefill < 0:
        return None
    rank = record.milliseconds, record.legs, record.chance
    return Option(rank, prefillers[prefill], decoders[record.decode])


def _entries(shortlist: Sequence[EntryRecord], count: int, side: Side[WorkerView]) -> list[Entry]:
    return [
        (entry.milliseconds, entry.legs, entry.chance, entry.cost_s, side.workers[entry.at])
        for entry in shortlist[:count]
    ]
