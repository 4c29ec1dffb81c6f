"""Which worker holds which KV blocks: routing asks how deep each worker, and the pool, holds a prompt's chain.

Fed by the holders' own reports, which are the truth as of a moment ago, and by the router's memory of what it has just
sent where, which they correct. Both are hints: a block that is gone by the time the prompt arrives costs a wrong guess,
never a wrong answer.
"""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache

import numpy as np

from baton.blocks import BlockReport
from baton.errors import InvariantError
from baton.ids import WorkerId, WorkerIdentity
from router.routing.columns import Columns
from router.routing.native_table import fastest_operations
from router.routing.table import (
    BlockTable,
    Fingerprints,
    HeldBySlot,
    LookupSources,
    Places,
    TableOperations,
    Words,
    fingerprints_of,
)

_EVERY = 32
_LIFE_S = 30.0
_MAX_NOTED = 200_000


class ReportOutcome(Enum):
    """What became of a report."""

    APPLIED = "applied"
    GAP = "gap"
    REFUSED = "refused"


@dataclass(slots=True, eq=False)
class IndexCounts:
    """Since the start. `events` counts keys stored and removed, `lost` blocks given up for want of room."""

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


class ExpectedBlocks:
    """Chains on their way, by the columns of the workers they were sent to.

    Of a chain only some blocks are noted: the first ones, every 32nd and the last. Depths are found by bisection over
    these, in time that grows with the logarithm of the chain, and are too small by 31 blocks at most. A note lives for
    30 to 60 seconds, or until the worker reports that it gave the block up: by then it has computed the prompt and
    reported it, or it never will.

    Args:
        operations: Implementation of the hot part of the two tables, of recent and of older notes.
    """

    def __init__(self, *, operations: TableOperations) -> None:
        self._recent, self._older = (
            BlockTable(max_blocks=2 * _MAX_NOTED, operations=operations) for _ in range(2)
        )
        self.tables = self._recent, self._older
        """Both tables, in an order that lasts."""
        self._since_s = float("-inf")

    def note(self, fingerprints: Fingerprints, columns: Iterable[int], now_s: float) -> None:
        """The whole chain is expected at every worker of `columns`."""
        age_s = now_s - self._since_s
        if age_s >= _LIFE_S or len(self._recent) > _MAX_NOTED:
            self._turn_over(keep=age_s < 2 * _LIFE_S)
            self._since_s = now_s
        noted = _noted(len(fingerprints))
        for column in columns:
            self._recent.add(fingerprints, column, noted)

    def noted(self, fingerprints: Fingerprints, now_s: float) -> Places | None:
        """Which positions of a chain may have been noted; None where nothing is expected of any worker."""
        is_over = now_s - self._since_s >= 2 * _LIFE_S
        return None if is_over else _noted(len(fingerprints))

    def withdraw(self, fingerprints: Fingerprints, column: int) -> None:
        """A worker has given blocks up."""
        for notes in self.tables:
            if len(notes):
                notes.discard(fingerprints, column)

    def check_integrity(self) -> None:
        """Raises `InvariantError` when a table of notes is broken."""
        for notes in self.tables:
            notes.check_integrity()

    def _turn_over(self, *, keep: bool) -> None:
        """What is recent becomes older, if it is to be kept; what was older is forgotten."""
        self._recent, self._older = self._older, self._recent
        self._recent.clear()
        if not keep:
            self._older.clear()


class PrefixIndex:
    """Block key to the set of its holders.

    Pure and single-threaded; time comes in as `now_s`. Depths by reports are exact: so many leading blocks the holder
    has reported and not reported gone. More than that is promised only by expectation, of a worker that was just sent
    the prompt (`ExpectedBlocks`), and for no longer than a minute. A holder has a *slot*, stable while it is admitted,
    and a column of the table, which it changes with every snapshot: leaving and starting over cost nothing at the time,
    the columns that are left are cleared little by little (`Columns`).

    Args:
        max_blocks: Blocks remembered at most. With more, each new one takes the place of one that few hold, which is
            counted as lost: a hole in a text makes its holders' depths too small.
        operations: Implementation of the table's hot part; the fastest there is if None.
    """

    def __init__(
        self, *, max_blocks: int = 4_000_000, operations: TableOperations | None = None
    ) -> None:
        self._operations = operations or fastest_operations()
        self._table = BlockTable(max_blocks=max_blocks, operations=self._operations)
        self._expected = ExpectedBlocks(operations=self._operations)
        self._holders: dict[WorkerId, _Holder] = {}
        self._free_slots: list[int] = []
        self._columns = Columns((self._table, *self._expected.tables))
        self._live = self._ragged = 0
        self._slot_of: dict[int, int] = {}
        self._column_of: dict[int, int] = {}
        self._sources: LookupSources | None = None
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
            identity: The worker or pool that reports.
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

    def apply(self, identity: WorkerIdentity, report: BlockReport) -> ReportOutcome:
        """Takes a holder's report. After a gap nothing is believed before the next snapshot."""
        holder = self._holders.get(identity.worker_id)
        if holder is None or holder.identity != identity:
            self.counts.refused += 1
            return ReportOutcome.REFUSED
        if report.snapshot and report.first:
            self._start_over(holder)
        elif holder.seq is None:
            return ReportOutcome.REFUSED
        elif report.seq != holder.seq + 1:
            holder.seq = None
            self.counts.gaps += 1
            return ReportOutcome.GAP
        holder.seq = report.seq
        self._change(holder, report)
        return ReportOutcome.APPLIED

    def expect(self, chain: Fingerprints, slots: Iterable[int], now_s: float) -> None:
        """Remembers that the workers at `slots` are about to hold the whole chain."""
        self._expected.note(chain, map(self._column_of.__getitem__, slots), now_s)

    def expect_no_more(self, chain: Fingerprints, slot: int) -> None:
        """The worker at `slot` will not hold the chain after all. What it has reported itself counts as ever."""
        self._expected.withdraw(chain, self._column_of[slot])

    def held_blocks(
        self, chain: Fingerprints, now_s: float, *, unit: int = 1, among: HeldBySlot | None = None
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
            self._operations.held(sources, chain, self._expected.noted(chain, now_s), unit, held)
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
        self._columns.check_integrity([holder.column for holder in holders])

    def _change(self, holder: _Holder, report: BlockReport) -> None:
        if report.removed:
            removed = fingerprints_of(report.removed)
            self._table.discard(removed, holder.column)
            self._expected.withdraw(removed, holder.column)
            self.counts.events += len(removed)
        if report.stored:
            stored = fingerprints_of(report.stored)
            self._columns.make_room(len(stored))
            self.counts.lost += self._table.add(stored, holder.column)
            self.counts.events += len(stored)
            holder.is_blank = False

    def _start_over(self, holder: _Holder) -> None:
        self.counts.snapshots += 1
        if not holder.is_blank:
            self._vacate(holder)
            self._occupy(holder)

    def _occupy(self, holder: _Holder) -> None:
        holder.column, holder.is_blank = self._columns.take(), True
        self._slot_of[holder.column] = holder.slot
        self._column_of[holder.slot] = holder.column
        self._live |= 1 << holder.column
        self._ragged |= holder.ragged << holder.column
        self._sources = None

    def _vacate(self, holder: _Holder) -> None:
        self._columns.give_up(holder.column)
        del self._slot_of[holder.column], self._column_of[holder.slot]
        self._live &= ~(1 << holder.column)
        self._ragged &= self._live
        self._sources = None

    def _open_sources(self) -> LookupSources:
        slots = np.zeros(self._table.num_columns, np.int64)
        for column, slot in self._slot_of.items():
            slots[column] = slot
        self._sources = LookupSources(
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


@lru_cache(maxsize=1024)
def _noted(num_blocks: int) -> Places:
    """Positions of a chain that are noted; which they are does not depend on its length, but for the last."""
    noted = [*range(min(_EVERY, num_blocks)), *range(2 * _EVERY - 1, num_blocks, _EVERY)]
    if num_blocks > _EVERY and noted[-1] != num_blocks - 1:
        noted.append(num_blocks - 1)
    return array("q", noted)
