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

NOBODY: Words = np.zeros(1, np.uint64)
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
    notes = [
        BlockTable(max_blocks=1, operations=hot, num_columns=table.num_columns) for _ in range(2)
    ]
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
    table.add(blocks[:5000], 90)
    table.discard(blocks[9000:], 3)
    table.check_integrity()
    everybody = np.full(2, ~np.uint64(0))
    assert depths(hot, table, blocks, everybody) == {3: 9000, 90: 5000}
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
    assert np.array_equal(ours.cells, theirs.cells)


def size_of_a_bucket(table: BlockTable) -> int:
    return table.size_bytes // (table.memory.num_buckets + 1)


def test_a_full_table_takes_nothing_new_and_still_knows_what_it_has(hot):
    table, blocks = BlockTable(max_blocks=100, operations=hot), prints(0, 250)
    assert table.add(blocks, 0) == 150
    assert table.add(blocks[:100], 1) == 0
    assert len(table) == 100
    table.discard(blocks[:10], 0)
    table.discard(blocks[:10], 1)
    assert table.add(blocks[200:], 0) == 40
    table.check_integrity()


def test_columns_are_cleared_together_and_blocks_that_nobody_holds_with_them(hot):
    table, blocks = BlockTable(max_blocks=1000, operations=hot), prints(0, 100)
    table.widen()
    table.add(blocks, 0)
    table.add(blocks[:50], 70)
    table.keep_columns(np.array([0, 1 << 6], np.uint64))
    table.check_integrity()
    assert len(table) == 50
    none = np.zeros(2, np.uint64)
    assert depths(hot, table, blocks, ~none) == {70: 50}


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
        column, adds = data.draw(st.integers(0, 63)), data.draw(st.booleans())
        if adds:
            assert len({table.add(some, column) for table in tables}) == 1
        else:
            for table in tables:
                table.discard(some, column)
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
