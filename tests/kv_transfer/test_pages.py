"""Copying scattered pages, by the C function and without it."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton import native
from kv_transfer.memory import pages
from kv_transfer.memory.pages import copy_rows, load_library

BLOCKS = 12
# Less than the loop's step, multiples of it, and what leaves a rest; less and more than it looks ahead.
SIZES = (8, 100, 192, 256, 1000, 4096, 4 * 65536)


@pytest.fixture(params=["c", "c past the caches", "numpy"])
def _way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    past = request.param == "c past the caches"
    monkeypatch.setattr(pages, "largest_cache_bytes", lambda: 0 if past else 1 << 30)
    if request.param == "numpy":
        monkeypatch.setattr(pages, "load_library", lambda: None)
    elif load_library() is None:
        pytest.skip("the C functions are not built")


def aligned(size: int, fill: int) -> np.ndarray:
    """Rows that begin at a cache line, as an arena does."""
    raw = np.full(BLOCKS * size + 64, fill, dtype=np.uint8)
    skip = -raw.ctypes.data % 64
    return raw[skip : skip + BLOCKS * size].reshape(BLOCKS, size)


def numbers(pages: list[int]) -> np.ndarray:
    return np.array(pages, dtype=np.int64)


@pytest.mark.usefixtures("_way")
@pytest.mark.parametrize("size", SIZES)
@settings(max_examples=20, deadline=None)
@given(
    pages=st.permutations(range(BLOCKS)),
    to=st.permutations(range(BLOCKS)),
    count=st.integers(0, 12),
)
def test_each_page_lands_where_it_should_and_nothing_else_changes(size, pages, to, count):
    source, target = aligned(size, 0), aligned(size, 7)
    source[:] = np.random.default_rng(count).integers(0, 256, source.shape, dtype=np.uint8)
    expected = target.copy()
    expected[to[:count]] = source[pages[:count]]
    copy_rows(source, target, numbers(pages[:count]), numbers(to[:count]))
    assert (target == expected).all()


@pytest.mark.usefixtures("_way")
@pytest.mark.parametrize("size", [24, 512, 3000])
def test_a_part_of_each_page_is_copied_and_its_neighbours_stay(size):
    source, target = aligned(size + 40, 0), aligned(size + 8, 7)
    source[:] = np.random.default_rng(size).integers(0, 256, source.shape, dtype=np.uint8)
    expected = target.copy()
    expected[[5, 0, 11], 8:] = source[[2, 3, 1], 32:-8]
    copy_rows(source[:, 32:-8], target[:, 8:], numbers([2, 3, 1]), numbers([5, 0, 11]))
    assert (target == expected).all()


@pytest.mark.usefixtures("_way")
def test_regions_that_begin_anywhere_are_copied_too():
    raw = np.arange(1000, dtype=np.uint16).view(np.uint8)
    source, target = raw[3:131].reshape(2, 64), np.zeros(200, dtype=np.uint8)[5:133].reshape(2, 64)
    copy_rows(source, target, numbers([1]), numbers([0]))
    assert (target[0] == source[1]).all()
    assert not target[1].any()


def test_where_nothing_is_built_there_is_no_library_and_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(native, "ROOT", tmp_path)
    load_library.cache_clear()
    try:
        assert load_library() is None
    finally:
        load_library.cache_clear()
