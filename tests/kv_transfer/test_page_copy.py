"""Copying scattered pages, by the C function and without it."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.ids import BlockId
from kv_transfer import page_copy
from kv_transfer.page_copy import copy_whole_pages, load_library

BLOCKS = 12
# Whole cache lines, an odd number of them, and sizes that no streaming store fits.
SIZES = (8, 64, 100, 192, 4096, 4 * 65536)


@pytest.fixture(params=["c", "numpy"])
def _way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "numpy":
        monkeypatch.setattr(page_copy, "load_library", lambda: None)
    elif load_library() is None:
        pytest.skip("there is no C compiler here")


def aligned(size: int, fill: int) -> np.ndarray:
    """Rows that begin at a cache line, as an arena does."""
    raw = np.full(BLOCKS * size + 64, fill, dtype=np.uint8)
    skip = -raw.ctypes.data % 64
    return raw[skip : skip + BLOCKS * size].reshape(BLOCKS, size)


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
    sources, targets = ([BlockId(p) for p in group[:count]] for group in (pages, to))
    copy_whole_pages(source, target, tuple(sources), tuple(targets))
    assert (target == expected).all()


@pytest.mark.usefixtures("_way")
def test_regions_that_begin_anywhere_are_copied_too():
    raw = np.arange(1000, dtype=np.uint16).view(np.uint8)
    source, target = raw[3:131].reshape(2, 64), np.zeros(200, dtype=np.uint8)[5:133].reshape(2, 64)
    copy_whole_pages(source, target, (BlockId(1),), (BlockId(0),))
    assert (target[0] == source[1]).all()
    assert not target[1].any()


def test_without_a_compiler_there_is_no_library_and_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert load_library(tmp_path / "cache") is None
