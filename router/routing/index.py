"""Who holds which KV blocks: routing asks how deep each worker, and the pool, holds a prompt's chain.

Fed by the holders' own reports, which are the truth as of a moment ago, and by the router's memory of what it has just
sent where, which they correct. Both are hints: a block that is gone by the time the prompt arrives costs a wrong guess,
never a wrong answer.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

import numpy as np

from baton.blocks import BlockReport
from baton.errors import InvariantError
from baton.ids import WorkerId, WorkerIdentity
from router.routing.expected import ExpectedBlocks
from router.routing.held import HeldBySlot
from router.routing.memory import Prints, Words, prints_of
from router.routing.sources import Sources
from router.routing.table import BlockTable, HotPart
from router.routing.table_library import hot_part

_SPARE_SHARE = 4
"""Columns of holders that are gone are cleared together, once they are a quarter of all."""


class Heard(Enum):
    """What became of a report."""

    APPLIED = "applied"
    GAP = "gap"
    REFUSED = "refused"


@dataclass(slots=True, eq=False)
class IndexCounts:
    """Since the start. `events` counts keys stored and removed, `lost` those that found no room."""

    events: int = 0
    snapshots: int = 0
    gaps: int = 0
    refused: int = 0
    lost: int = 0


@dataclass(slots=True, eq=False)
class _Holder:
    """A worker or the pool. `seq` is the number of its last report; None while a snapshot is awaited."""

    identity: WorkerIdentity
    slot: int
    column: int
    ragged: bool
    seq: int | None = None
    is_blank: bool = True


class PrefixIndex:
    """Block key to the set of its holders.

    Pure and single-threaded; time comes in as `now_s`. Depths by reports are exact: so many leading blocks the holder
    has reported and not reported gone. More than that is promised only by expectation, of a worker that was just sent the
    prompt (`ExpectedBlocks`), and for no longer than a minute. A holder has a *slot*, stable while it is admitted, and a column of the table, which it
    changes with every snapshot: leaving and starting over cost nothing at the time, the table is cleared of
    many columns at once.

    Args:
        max_blocks: Blocks remembered at most. With more, new ones are not taken up, and counted as lost.
        hot: Who does the table's hot part; the fastest there is if None.
    """

    def __init__(self, *, max_blocks: int = 4_000_000, hot: HotPart | None = None) -> None:
        self._hot = hot or hot_part()
        self._table = BlockTable(max_blocks=max_blocks, hot=self._hot)
        self._expected = ExpectedBlocks(hot=self._hot, num_columns=self._table.num_columns)
        self._holders: dict[WorkerId, _Holder] = {}
        self._free_slots: list[int] = []
        self._free_columns = list(range(self._table.num_columns))
        self._live = self._ragged = 0
        self._slot_of: dict[int, int] = {}
        self._column_of: dict[int, int] = {}
        self._sources: Sources | None = None
        self.counts = IndexCounts()

    def __len__(self) -> int:
        return len(self._table)

    @property
    def size_bytes(self) -> int:
        """Memory of the table."""
        return self._table.size_bytes

    def admit(self, identity: WorkerIdentity, *, ragged: bool = False) -> int:
        """The slot of a worker, or of the pool under a name of its own. An older incarnation of it is forgotten.

        Args:
            identity: Who reports.
            ragged: It may give a block up and hold on to those after it, as a pool does and a worker's cache does not.
                Its depths take a look at every 16th block of a chain, so a shorter hole may be passed over.
        """
        known = self._holders.get(identity.worker_id)
        if known is not None and known.identity == identity:
            return known.slot
        if known is not None:
            self.retire(known.identity)
        slot = self._free_slots.pop() if self._free_slots else len(self._holders)
        holder = _Holder(identity=identity, slot=slot, column=-1, ragged=ragged)
        self._holders[identity.worker_id] = holder
        self._occupy(holder)
        return slot

    def retire(self, identity: WorkerIdentity) -> None:
        """Forgets all that this incarnation holds, and frees its slot. Takes no time however much that is."""
        holder = self._holders.get(identity.worker_id)
        if holder is None or holder.identity != identity:
            return
        self._vacate(holder)
        self._free_slots.append(holder.slot)
        del self._holders[identity.worker_id]

    def apply(self, identity: WorkerIdentity, report: BlockReport) -> Heard:
        """Takes a holder's report. After a gap nothing is believed before the next snapshot."""
        holder = self._holders.get(identity.worker_id)
        if holder is None or holder.identity != identity:
            self.counts.refused += 1
            return Heard.REFUSED
        if report.snapshot and report.first:
            self._start_over(holder)
        elif holder.seq is None:
            return Heard.REFUSED
        elif report.seq != holder.seq + 1:
            holder.seq = None
            self.counts.gaps += 1
            return Heard.GAP
        holder.seq = report.seq
        self._change(holder, report)
        return Heard.APPLIED

    def expect(self, chain: Prints, slots: Iterable[int], now_s: float) -> None:
        """Remembers that the workers at `slots` are about to hold the whole chain."""
        self._expected.note(chain, map(self._column_of.__getitem__, slots), now_s)

    def held_blocks(
        self, chain: Prints, now_s: float, *, unit: int = 1, among: HeldBySlot | None = None
    ) -> HeldBySlot:
        """How many leading blocks of the chain each holder has or is about to have.

        Args:
            chain: Of a prompt.
            now_s: Now.
            unit: A block counts for so many, as tokens do.
            among: Where to enter them, if the same prompt's chain in another layout was looked up before.
        """
        held = among
        if held is None:
            held = HeldBySlot(len(self._holders) + len(self._free_slots))
        if chain:
            sources = self._sources or self._open_sources()
            self._hot.held(sources, chain, self._expected.noted(chain, now_s), unit, held)
        return held

    def check_integrity(self) -> None:
        """Raises `InvariantError` when the bookkeeping of holders, columns or the table is broken."""
        self._table.check_integrity()
        self._expected.check_integrity()
        holders = self._holders.values()
        by_slot = {holder.slot: holder.column for holder in holders}
        if by_slot != self._column_of or self._slot_of != {c: s for s, c in by_slot.items()}:
            raise InvariantError("columns and slots do not match the holders")
        slots = sorted([holder.slot for holder in holders] + self._free_slots)
        if slots != list(range(len(slots))):
            raise InvariantError(f"slots {slots}")
        if self._live != sum(1 << holder.column for holder in holders):
            raise InvariantError("live columns do not match the holders")
        if self._live & sum(1 << column for column in self._free_columns):
            raise InvariantError("a column is free and in use")

    def _change(self, holder: _Holder, report: BlockReport) -> None:
        if report.removed:
            removed = prints_of(report.removed)
            self._table.discard(removed, holder.column)
            self._expected.withdraw(removed, holder.column)
            self.counts.events += len(removed)
        if report.stored:
            stored = prints_of(report.stored)
            self.counts.lost += self._table.add(stored, holder.column)
            self.counts.events += len(stored)
            holder.is_blank = False

    def _start_over(self, holder: _Holder) -> None:
        self.counts.snapshots += 1
        if not holder.is_blank:
            self._vacate(holder)
            self._occupy(holder)

    def _occupy(self, holder: _Holder) -> None:
        if not self._free_columns:
            self._find_columns()
        holder.column, holder.is_blank = self._free_columns.pop(), True
        self._slot_of[holder.column] = holder.slot
        self._column_of[holder.slot] = holder.column
        self._live |= 1 << holder.column
        self._ragged |= holder.ragged << holder.column
        self._sources = None

    def _vacate(self, holder: _Holder) -> None:
        """Its column is cleared later, together with others."""
        del self._slot_of[holder.column], self._column_of[holder.slot]
        self._live &= ~(1 << holder.column)
        self._ragged &= self._live
        self._sources = None

    def _find_columns(self) -> None:
        total = self._table.num_columns
        if (total - len(self._slot_of)) * _SPARE_SHARE >= total:
            self._table.keep_columns(self._words(self._live))
            self._expected.keep_columns(self._words(self._live))
            self._free_columns = [c for c in range(total) if not self._live >> c & 1]
        else:
            self._table.widen()
            self._expected.widen()
            self._free_columns = list(range(total, self._table.num_columns))

    def _open_sources(self) -> Sources:
        slots = np.zeros(self._table.num_columns, np.int64)
        for column, slot in self._slot_of.items():
            slots[column] = slot
        self._sources = Sources(
            reports=self._table.memory,
            notes=[table.memory for table in self._expected.tables],
            live=self._words(self._live),
            whole=self._words(self._live & ~self._ragged),
            ragged=self._words(self._live & self._ragged) if self._ragged else None,
            slots=slots,
        )
        return self._sources

    def _words(self, columns: int) -> Words:
        return np.frombuffer(columns.to_bytes(self._table.num_columns // 8, "little"), np.uint64)
