import numpy as np
import pytest
import xxhash

from kvpool import hashed_copy
from kvpool.hashed_copy import copy_hashed, load_library

SIZES = [1, 64, 240, 241, 255, 256, 257, 960, 1023, 1024, 1025, 1088, 2048, 4096, 5000, 131_072]


@pytest.fixture(params=["in C", "in Python"])
def way(request, monkeypatch):
    """Both ways must do the same; the first needs the C function."""
    if request.param == "in Python":
        monkeypatch.setattr(hashed_copy, "load_library", lambda: None)
    elif load_library() is None:
        pytest.skip("the C functions are not built")


def numbers(values) -> np.ndarray:
    return np.array(values, dtype=np.int64)


@pytest.mark.parametrize("row_bytes", SIZES)
def test_rows_arrive_where_they_belong_and_their_hashes_are_xxh3(way, row_bytes):
    rng = np.random.default_rng(row_bytes)
    source = rng.integers(0, 256, (7, row_bytes), dtype=np.uint8)
    target = np.zeros((9, row_bytes), dtype=np.uint8)
    hashes = copy_hashed(source, target, numbers([6, 0, 3]), numbers([1, 8, 2]))
    for row, place, found in zip([6, 0, 3], [1, 8, 2], hashes.tolist(), strict=True):
        assert np.array_equal(target[place], source[row])
        assert found == xxhash.xxh3_64_intdigest(source[row].tobytes())
    assert not target[[0, 3, 4, 5, 6, 7]].any()


def test_rows_may_lie_apart_on_both_sides(way):
    rng = np.random.default_rng(1)
    slab = rng.integers(0, 256, (5, 3, 512), dtype=np.uint8)
    arena = np.zeros((4, 2, 512), dtype=np.uint8)
    hashes = copy_hashed(slab[:, 1], arena[:, 0], numbers([4, 2]), numbers([0, 3]))
    assert np.array_equal(arena[[0, 3], 0], slab[[4, 2], 1])
    assert not arena[:, 1].any()
    assert hashes.tolist() == [xxhash.xxh3_64_intdigest(slab[row, 1].tobytes()) for row in (4, 2)]


def test_no_rows_are_no_hashes(way):
    empty = np.zeros((2, 300), dtype=np.uint8)
    assert copy_hashed(empty, empty.copy(), numbers([]), numbers([])).tolist() == []
