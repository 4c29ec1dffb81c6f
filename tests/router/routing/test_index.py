from collections.abc import Iterator, Mapping
from hashlib import blake2b
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton import native
from baton.blocks import BlockReport, joined
from baton.ids import BlockKey, Incarnation, WorkerId, WorkerIdentity
from router.routing.index import PrefixIndex, ReportOutcome
from router.routing.native_table import NativeTable, fastest_operations
from router.routing.plain_table import PlainTable
from router.routing.table import TableMemory, Words, fingerprints_of


def worker(name: str, incarnation: int = 1) -> WorkerIdentity:
    return WorkerIdentity(worker_id=WorkerId(name), incarnation=Incarnation(incarnation))


def key(*blocks: int) -> BlockKey:
    """Stands for the last of `blocks` and all before it."""
    return BlockKey(blake2b(repr(blocks).encode(), digest_size=16).digest())


def depths(index: PrefixIndex, keys: list[BlockKey], now_s: float = 0.0) -> Mapping[int, int]:
    return index.held_blocks(fingerprints_of(joined(keys)), now_s)


def expect(index: PrefixIndex, keys: list[BlockKey], slots: list[int]) -> None:
    index.expect(fingerprints_of(joined(keys)), slots, 0.0)


def chain(*blocks: int) -> list[BlockKey]:
    return [key(*blocks[: depth + 1]) for depth in range(len(blocks))]


class Holder:
    """A worker that reports as workers do."""

    def __init__(self, index: PrefixIndex, name: str = "a", incarnation: int = 1) -> None:
        ragged = name == "pool"
        self.index = index
        self.identity = worker(name, incarnation)
        self.slot = index.admit(self.identity, ragged=ragged)
        self.seq = 0
        self.holds: list[BlockKey] = []

    def snapshot(self, *keys: BlockKey) -> ReportOutcome:
        self.holds = list(keys)
        return self.send(stored=joined(keys), snapshot=True, first=True, last=True)

    def change(self, stored=(), removed=()) -> ReportOutcome:
        self.holds = [k for k in self.holds if k not in removed] + list(stored)
        return self.send(stored=joined(stored), removed=joined(removed))

    def send(self, **fields) -> ReportOutcome:
        self.seq += 1
        return self.index.apply(self.identity, BlockReport(seq=self.seq, **fields))


def test_each_holder_is_as_deep_as_it_reported():
    index = PrefixIndex()
    a, b = Holder(index, "a"), Holder(index, "b")
    a.snapshot(*chain(1, 2, 3, 4))
    b.snapshot(*chain(1, 2))
    assert depths(index, chain(1, 2, 3, 9)) == {a.slot: 3, b.slot: 2}
    assert depths(index, chain(9, 2)) == {}
    assert depths(index, []) == {}


def test_what_was_evicted_is_forgotten():
    index = PrefixIndex()
    a = Holder(index)
    a.snapshot(*chain(1, 2, 3))
    a.change(removed=chain(1, 2, 3)[1:])
    assert depths(index, chain(1, 2, 3)) == {a.slot: 1}
    a.change(removed=chain(1))
    assert len(index) == 0


def test_a_hole_in_the_middle_ends_the_depth_and_filling_it_restores_it():
    index = PrefixIndex()
    pool = Holder(index, "pool")
    pool.snapshot(*chain(1, 2, 3))
    pool.change(removed=[key(1, 2)])
    assert depths(index, chain(1, 2, 3)) == {pool.slot: 1}
    pool.change(stored=[key(1, 2)])
    assert depths(index, chain(1, 2, 3)) == {pool.slot: 3}


def test_after_a_gap_nothing_is_believed_before_the_next_snapshot():
    index = PrefixIndex()
    a = Holder(index)
    a.snapshot(*chain(1))
    a.seq += 1
    assert a.change(stored=[key(1, 2)]) is ReportOutcome.GAP
    assert a.change(stored=[key(1, 2, 3)]) is ReportOutcome.REFUSED
    assert depths(index, chain(1, 2, 3)) == {a.slot: 1}
    assert a.snapshot(*chain(1, 2, 3)) is ReportOutcome.APPLIED
    assert depths(index, chain(1, 2, 3)) == {a.slot: 3}
    assert index.counts.gaps == 1


def test_a_snapshot_makes_void_what_was_reported_before():
    index = PrefixIndex()
    a = Holder(index)
    a.snapshot(*chain(1, 2))
    a.snapshot(*chain(5))
    assert depths(index, chain(1, 2)) == {}
    assert depths(index, chain(5)) == {a.slot: 1}


def test_reports_of_another_incarnation_are_refused_and_counted():
    index = PrefixIndex()
    old = Holder(index, "a", 1)
    old.snapshot(*chain(1))
    new = Holder(index, "a", 2)
    assert old.change(stored=[key(1, 2)]) is ReportOutcome.REFUSED
    assert depths(index, chain(1, 2)) == {}
    assert index.counts.refused == 1
    new.snapshot(*chain(1))
    assert depths(index, chain(1, 2)) == {new.slot: 1}


def test_who_left_holds_nothing_and_his_slot_is_given_again():
    index = PrefixIndex()
    a, b = Holder(index, "a"), Holder(index, "b")
    a.snapshot(*chain(1, 2))
    b.snapshot(*chain(1))
    index.retire(a.identity)
    assert depths(index, chain(1, 2)) == {b.slot: 1}
    assert Holder(index, "c").slot == a.slot
    assert depths(index, chain(1, 2)) == {b.slot: 1}


def test_what_was_sent_is_expected_until_it_is_reported_gone():
    index = PrefixIndex()
    a = Holder(index)
    a.snapshot()
    expect(index, chain(1, 2, 3), [a.slot])
    assert depths(index, chain(1, 2, 3, 4), 1.0) == {a.slot: 3}
    a.change(stored=chain(1, 2, 3))
    a.change(removed=[key(1, 2, 3)])
    assert depths(index, chain(1, 2, 3, 4), 2.0) == {a.slot: 2}


def test_what_is_never_reported_is_not_expected_for_ever():
    index = PrefixIndex()
    a = Holder(index)
    expect(index, chain(1, 2), [a.slot])
    assert depths(index, chain(1, 2), 29.0) == {a.slot: 2}
    assert depths(index, chain(1, 2), 61.0) == {}


def test_a_long_chain_is_expected_to_within_a_few_blocks():
    index = PrefixIndex()
    a = Holder(index)
    sent = [key(number) for number in range(1000)]
    expect(index, sent, [a.slot])
    assert depths(index, sent) == {a.slot: 1000}
    shared = [*sent[:700], *chain(1, 2, 3)]
    assert 700 - 31 <= depths(index, shared)[a.slot] <= 700


class CountedWork(NativeTable):
    """Notes how many rows of a table each clearing looks at."""

    def __init__(self) -> None:
        super().__init__(native.load(native.BLOCK_TABLE))
        self.rows: list[int] = []

    def clear(self, memory: TableMemory, gone: Words, first: int, last: int) -> None:
        self.rows.append((last - first) * int(np.count_nonzero(gone)))
        super().clear(memory, gone, first, last)


@pytest.fixture
def counted() -> CountedWork:
    if not isinstance(fastest_operations(), NativeTable):
        pytest.skip("the C functions are not built")
    return CountedWork()


def many(seed: int, count: int) -> bytes:
    """Keys that nobody else has."""
    return np.random.default_rng(seed).bytes(16 * count)


def test_no_report_waits_until_what_is_gone_is_cleared(counted):
    index = PrefixIndex(max_blocks=300_000, operations=counted)
    holders = [Holder(index, str(number)) for number in range(200)]
    for number, holder in enumerate(holders):
        holder.send(stored=many(number, 1500), snapshot=True, first=True, last=True)
    all_rows, counted.rows = index.size_bytes // 64, []
    for number in range(100):
        holder = Holder(index, str(number), 2)
        holder.snapshot()
        for report in range(30):
            holder.send(stored=many(1000 * (1 + number) + report, 50))
    index.check_integrity()
    assert sum(counted.rows) > all_rows
    assert max(counted.rows) <= 1 << 15
    # New blocks take the room of those that are gone; some are stored before all of it is cleared.
    assert index.counts.lost < 100 * 1500 / 4


def test_columns_are_cleared_in_time_where_hardly_a_block_is_stored():
    index = PrefixIndex()
    other = Holder(index, "other")
    other.send(stored=many(0, 100_000), snapshot=True, first=True, last=True)
    size = index.size_bytes
    for incarnation in range(1, 1000):
        Holder(index, "a", incarnation).snapshot(key(incarnation))
    index.check_integrity()
    assert index.size_bytes == size


def test_when_all_holders_begin_anew_the_tables_widen_by_little():
    index = PrefixIndex()
    holders = [Holder(index, str(number)) for number in range(500)]
    keys = [many(number, 40) for number in range(500)]
    for _ in range(4):
        for holder, held in zip(holders, keys, strict=True):
            holder.send(stored=held, snapshot=True, first=True, last=True)
    index.check_integrity()
    assert len(index) == 20_000
    buckets = 8192
    assert index.size_bytes <= 12 * 64 * buckets  # fingerprints, and words of 704 columns


def test_a_full_index_knows_the_newest_blocks():
    index = PrefixIndex(max_blocks=3000)
    Holder(index, "a").snapshot(*(key(number) for number in range(3000)))
    b, newest = Holder(index, "b"), chain(*range(-20, 0))
    b.snapshot()
    b.change(stored=newest)
    assert depths(index, newest) == {b.slot: 20}
    assert index.counts.lost == 20


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 10)), min_size=5, max_size=60))
def test_what_is_stored_while_columns_are_cleared_is_all_known(reports):
    """Five holders, of which one after the other starts anew over a table that takes many reports to clear."""
    index = PrefixIndex()
    filler = Holder(index, "filler")
    filler.send(stored=many(0, 30_000), snapshot=True, first=True, last=True)
    holders = [Holder(index, str(number)) for number in range(5)]
    held: dict[int, bytes] = {}
    for seed, (number, count) in enumerate(reports, 1):
        holder = holders[number]
        keys = held[number] = many(seed, count)
        holder.send(stored=keys, snapshot=True, first=True, last=True)
        index.check_integrity()
    for number, keys in held.items():
        found = index.held_blocks(fingerprints_of(keys), 0.0)
        assert found == {holders[number].slot: len(keys) // 16}


def test_memory_is_bounded_and_what_found_no_room_is_counted():
    index = PrefixIndex(max_blocks=3000)
    a = Holder(index)
    keys = [key(number) for number in range(10_000)]
    a.snapshot(*keys)
    assert len(index) == 3000
    assert index.counts.lost == len(keys) - 3000
    index.check_integrity()


def test_what_holders_that_are_gone_held_takes_no_room_from_others():
    index = PrefixIndex(max_blocks=3000)
    other = Holder(index, "b")
    other.snapshot(*chain(1, 2, 3))
    for incarnation in range(1, 10):
        a = Holder(index, "a", incarnation)
        held = [key(-incarnation, number) for number in range(1000)]
        a.snapshot(*held)
        assert depths(index, held) == {a.slot: 1000}
        index.check_integrity()
    assert depths(index, chain(1, 2, 3)) == {other.slot: 3}
    assert index.counts.lost == 0


def test_many_restarts_do_not_make_the_table_grow_for_ever():
    index = PrefixIndex()
    other = Holder(index, "b")
    other.snapshot(*chain(1, 2, 3))
    size = index.size_bytes
    for incarnation in range(1, 1000):
        a = Holder(index, "a", incarnation)
        a.snapshot(*chain(1, 2, incarnation % 256))
        assert depths(index, chain(1, 2, 3))[a.slot] >= 2
        assert a.slot == 1
    index.check_integrity()
    assert index.size_bytes == size


def test_more_holders_than_a_word_has_bits():
    index = PrefixIndex()
    holders = [Holder(index, str(number)) for number in range(200)]
    for number, holder in enumerate(holders):
        holder.snapshot(*chain(1, 2, 3, 4)[: 1 + number % 4])
    index.check_integrity()
    expected = {holder.slot: 1 + number % 4 for number, holder in enumerate(holders)}
    assert depths(index, chain(1, 2, 3, 4)) == expected


NAMES = ("a", "b", "pool")
BLOCKS = st.lists(st.integers(0, 2), min_size=1, max_size=5)
OPERATION = st.one_of(
    st.tuples(st.sampled_from(["store", "remove", "snapshot"]), st.sampled_from(NAMES), BLOCKS),
    st.tuples(st.sampled_from(["restart", "miss", "leave"]), st.sampled_from(NAMES), st.just([0])),
)


def _operate(kind: str, holder: Holder, blocks: list[int]) -> Holder:
    keys = chain(*blocks)
    match kind:
        case "store":
            holder.change(stored=[k for k in keys if k not in holder.holds])
        case "remove":
            gone = [k for k in keys[-1:] if k in holder.holds]
            if holder.identity.worker_id != "pool":
                gone += [k for k in _beyond(blocks) if k in holder.holds]
            holder.change(removed=gone if keys[-1] in holder.holds else [])
        case "snapshot":
            holder.snapshot(*keys)
        case "miss":
            holder.seq += 1
        case "restart":
            name, incarnation = holder.identity.worker_id, holder.identity.incarnation
            return Holder(holder.index, name, incarnation + 1)
        case "leave":
            holder.index.retire(holder.identity)
            return Holder(holder.index, holder.identity.worker_id, holder.identity.incarnation)
    return holder


def _beyond(blocks: list[int]) -> Iterator[BlockKey]:
    """Every block that may come after these in a text."""
    for length in range(1, 6 - len(blocks)):
        for more in product(range(3), repeat=length):
            yield key(*blocks, *more)


@settings(max_examples=150, deadline=None)
@given(st.lists(OPERATION, max_size=30), BLOCKS, st.booleans())
def test_the_index_knows_exactly_what_was_reported(operations, blocks, in_c):
    """Against a dictionary of sets; who has missed a report is compared again after a snapshot."""
    index, asked = (
        PrefixIndex(operations=fastest_operations() if in_c else PlainTable()),
        chain(*blocks),
    )
    holders = {name: Holder(index, name) for name in NAMES}
    for holder in holders.values():
        holder.snapshot()
    for kind, name, subject in operations:
        holders[name] = _operate(kind, holders[name], subject)
        index.check_integrity()
    for holder in holders.values():
        if holder.change() is not ReportOutcome.APPLIED:
            assert holder.snapshot(*holder.holds) is ReportOutcome.APPLIED
    found = depths(index, asked)
    for holder in holders.values():
        missing = [at for at, k in enumerate(asked) if k not in holder.holds]
        assert found.get(holder.slot, 0) == (missing[0] if missing else len(asked))
