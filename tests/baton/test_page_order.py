"""Pages of texts whose layers form groups: counted as they are listed, and leading blocks lead the list."""

from hypothesis import given
from hypothesis import strategies as st

from baton.page_order import first_block, num_pages, pages_in_order

WINDOWS = st.lists(st.integers(0, 40), max_size=4)


def all_pages(num_tokens: int, block_tokens: int, windows: list[int]) -> list[tuple[int, int]]:
    end = -(-num_tokens // block_tokens)
    return list(pages_in_order(num_tokens, block_tokens, windows, start=0, end=end))


def test_the_example_of_the_modules_text():
    assert all_pages(9, 2, [0, 4]) == [
        (0, 0),
        (1, 0),
        (2, 0),
        (2, 1),
        (3, 0),
        (3, 1),
        (4, 0),
        (4, 1),
    ]


def test_without_groups_pages_are_token_blocks():
    assert all_pages(9, 4, []) == [(0, 0), (1, 0), (2, 0)]
    assert num_pages(9, 4, []) == 3


@given(st.integers(1, 200), st.integers(1, 16), WINDOWS)
def test_each_group_has_exactly_the_blocks_with_a_token_of_its_window(n, size, windows):
    wanted = {
        (token // size, group)
        for group, window in enumerate(windows or [0])
        for token in range(max(0, n - window) if window else 0, n)
    }
    listed = all_pages(n, size, windows)
    assert len(listed) == len(set(listed)) == num_pages(n, size, windows)
    assert set(listed) == wanted


@given(st.integers(1, 200), st.integers(1, 16), WINDOWS, st.integers(0, 30))
def test_the_pages_of_leading_blocks_lead_the_list(n, size, windows, num_blocks):
    listed = all_pages(n, size, windows)
    leading = num_pages(n, size, windows, num_blocks=num_blocks)
    assert all(block < num_blocks for block, _ in listed[:leading])
    assert all(block >= num_blocks for block, _ in listed[leading:])


@given(st.integers(0, 300), st.integers(1, 16), st.integers(1, 40))
def test_a_window_never_moves_back(n, size, window):
    assert first_block(n, size, window) <= first_block(n + 1, size, window)
