import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.routing.native_table import NativeTable, fastest_operations
from router.routing.plain_table import PlainTable
from router.routing.table import (
    BlockTable,
    Fingerprints,
    HeldBySlot,
    LookupSources,
    TableOperations,
    Words,
    fingerprints_of,
)

NOBODY: Words = np.zeros(2, np.uint64)
EVERYBODY: Words = ~NOBODY


@pytest.fixture(params=["c", "python"])
def hot(request):
    if request.param == "python":
        return PlainTable()
    if not isinstance(fastest_operations(), NativeTable):
        pytest.skip("the C functions are not built")
    return fastest_operations()


def prints(seed: int, count: int) -> Fingerprints:
    return fingerprints_of(np.random.default_rng(seed).bytes(16 * count))


def depths(
    hot: TableOperations,
    table: BlockTable,
    asked: Fingerprints,
    whole: Words,
    ragged: Words | None = None,
) -> dict[int, int]:
    """By column: every holder's slot is that of its column."""
    notes = [BlockTable(max_blocks=1, operations=hot) for _ in range(2)]
    while notes[0].num_columns < table.num_columns:
        for one in notes:
            one.widen()
    sources = LookupSources(
        reports=table.memory,
        notes=[table.memory for table in notes],
        live=whole,
        whole=whole,
        ragged=ragged,
        slots=np.arange(table.num_columns),
    )
    held = HeldBySlot(table.num_columns)
    hot.held(sources, asked, None, 1, held)
    return dict(held)


def test_a_table_grows_and_loses_nothing(hot):
    table, blocks = BlockTable(max_blocks=20_000, operations=hot), prints(0, 6000)
    assert table.add(blocks, 3) == 0
    table.check_integrity()
    assert len(table) == 6000
    assert depths(hot, table, blocks, NOBODY, EVERYBODY) == {3: 6000}
    assert depths(hot, table, blocks, EVERYBODY) == {3: 6000}


def test_a_table_grows_a_little_with_each_report(hot):
    table, blocks, size = BlockTable(max_blocks=40_000, operations=hot), prints(0, 20_500), 0
    for begin in range(0, 20_500, 500):
        assert table.add(blocks[begin : begin + 500], 3) == 0
        if size:
            assert table.size_bytes < size + 2100 * size_of_a_bucket(table)
        size = table.size_bytes
        table.check_integrity()
    assert table.memory.num_buckets > table.memory.num_unsplit
    assert depths(hot, table, blocks, EVERYBODY) == {3: 20_500}
    assert depths(hot, table, blocks, NOBODY, EVERYBODY) == {3: 20_500}


def test_a_table_can_be_widened_and_cleared_while_it_grows(hot):
    table, blocks = BlockTable(max_blocks=40_000, operations=hot), prints(0, 10_000)
    table.add(blocks, 3)
    assert table.memory.num_buckets > table.memory.num_unsplit
    table.widen()
    table.add(blocks[:5000], 190)
    table.discard(blocks[9000:], 3)
    table.check_integrity()
    everybody = np.full(5, ~np.uint64(0))
    assert depths(hot, table, blocks, everybody) == {3: 9000, 190: 5000}
    table.clear()
    table.check_integrity()
    assert depths(hot, table, blocks, everybody) == {}


def test_c_and_python_leave_the_same_bytes_while_a_table_grows():
    if not isinstance(fastest_operations(), NativeTable):
        pytest.skip("the C functions are not built")
    blocks = prints(2, 10_000)
    tables = [
        BlockTable(max_blocks=40_000, operations=hot)
        for hot in (fastest_operations(), PlainTable())
    ]
    for table in tables:
        table.add(blocks, 3)
    ours, theirs = (table.memory for table in tables)
    assert ours.num_unsplit < ours.num_buckets < 2 * ours.num_unsplit
    assert np.array_equal(ours.fingerprints, theirs.fingerprints)
    assert np.array_equal(ours.sets, theirs.sets)


def size_of_a_bucket(table: BlockTable) -> int:
    return table.size_bytes // (table.memory.num_buckets + 1)


def test_a_full_table_takes_what_is_new_in_place_of_what_it_has(hot):
    table, blocks = BlockTable(max_blocks=2000, operations=hot), prints(0, 2500)
    assert table.add(blocks[:2000], 0) == 0
    assert table.add(blocks[:2000], 1) == 0
    table.discard(blocks[:1500], 1)
    assert table.add(blocks[2000:], 0) == 500
    table.check_integrity()
    assert len(table) == 2000
    assert len(unplaced(hot, table, blocks[2000:])) < 150
    table.discard(blocks[:100], 0)
    assert table.add(prints(1, 10), 0) == 0


def test_what_many_hold_is_not_given_up_for_what_is_new(hot):
    table, blocks = BlockTable(max_blocks=2000, operations=hot), prints(0, 12_000)
    for column in range(3):
        table.add(blocks[:1000], column)
    table.add(blocks[1000:2000], 0)
    table.add(blocks[2000:], 0)
    table.check_integrity()
    assert len(unplaced(hot, table, blocks[:1000])) < 500
    assert len(unplaced(hot, table, blocks[1000:2000])) > 900


def unplaced(hot: TableOperations, table: BlockTable, blocks: Fingerprints) -> list[int]:
    """Those of which the table has nothing."""
    everybody = np.full(len(table.memory.sets), ~np.uint64(0))
    each = [blocks[at : at + 1] for at in range(len(blocks))]
    return [one[0] for one in each if not depths(hot, table, one, everybody)]


def test_a_table_widens_without_being_moved(hot):
    table, blocks = BlockTable(max_blocks=1000, operations=hot), prints(0, 100)
    table.add(blocks, 0)
    before = table.memory.fingerprints.ctypes.data, [s.ctypes.data for s in table.memory.sets]
    table.widen()
    assert table.num_columns == 320
    table.add(blocks[:50], 319)
    table.check_integrity()
    first, *words = (lines.ctypes.data for lines in (table.memory.fingerprints, *table.memory.sets))
    assert (first, words[:2]) == before


def test_columns_are_cleared_in_pieces_and_blocks_that_nobody_holds_with_them(hot):
    table, blocks = BlockTable(max_blocks=1000, operations=hot), prints(0, 100)
    table.widen()
    table.add(blocks, 0)
    table.add(blocks[:50], 170)
    gone = np.array([1, 0, 0, 0, 0], np.uint64)
    middle = table.num_buckets // 2
    table.clear_columns(gone, 0, middle)
    table.check_integrity()
    assert 50 < len(table) < 100
    table.clear_columns(gone, middle, table.num_buckets)
    table.check_integrity()
    assert len(table) == 50
    assert depths(hot, table, blocks, np.full(5, ~np.uint64(0))) == {170: 50}


@pytest.mark.parametrize("begin", [0, 1, 14, 15, 16, 37, 83])
def test_a_hole_of_sixteen_blocks_ends_the_depth_of_a_ragged_column(hot, begin):
    table, blocks = BlockTable(max_blocks=1000, operations=hot), prints(0, 100)
    table.add(blocks, 0)
    table.discard(blocks[begin : begin + 16], 0)
    assert depths(hot, table, blocks, NOBODY, EVERYBODY).get(0, 0) == begin


@pytest.mark.parametrize(("begin", "depth"), [(30, 100), (31, 31), (32, 100), (96, 96)])
def test_a_hole_of_one_block_is_seen_near_the_end_and_at_every_sixteenth_block(hot, begin, depth):
    table, blocks = BlockTable(max_blocks=1000, operations=hot), prints(0, 100)
    table.add(blocks, 0)
    table.discard(blocks[begin : begin + 1], 0)
    assert depths(hot, table, blocks, NOBODY, EVERYBODY) == {0: depth}


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_c_and_python_do_the_same(data):
    """The same changes leave the same bytes, and the same depths."""
    if not isinstance(fastest_operations(), NativeTable):
        pytest.skip("the C functions are not built")
    blocks = prints(1, 5000)
    hots = (fastest_operations(), PlainTable())
    tables = [BlockTable(max_blocks=4000, operations=hot) for hot in hots]
    for _ in range(data.draw(st.integers(1, 8))):
        start = data.draw(st.integers(0, 4900))
        some = blocks[start : start + data.draw(st.integers(1, 1500))]
        column = data.draw(st.integers(0, 127))
        match data.draw(st.sampled_from(["add", "discard", "clear"])):
            case "add":
                assert len({table.add(some, column) for table in tables}) == 1
            case "discard":
                for table in tables:
                    table.discard(some, column)
            case "clear":
                gone = np.array(data.draw(st.sampled_from([(1, 0), (0, 1), (3, 1 << 63)])), "<u8")
                begin = data.draw(st.integers(0, tables[0].num_buckets))
                for table in tables:
                    table.clear_columns(gone, begin // 2, begin)
        assert len(tables[0]) == len(tables[1])
    asked = blocks[data.draw(st.integers(0, 4900)) :]
    for whole in (NOBODY, EVERYBODY):
        found = [
            depths(hot, table, asked, whole, ~whole)
            for hot, table in zip(hots, tables, strict=True)
        ]
        assert found[0] == found[1]
    for table in tables:
        table.check_integrity()
    ours, theirs = (table.memory for table in tables)
    assert np.array_equal(ours.fingerprints, theirs.fingerprints)
    assert np.array_equal(ours.sets, theirs.sets)
