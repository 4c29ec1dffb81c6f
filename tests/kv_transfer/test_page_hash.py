"""What a page hashes to, by either rule."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import TransferError
from kv_transfer.memory.page_hash import Checksum, hash_rows

WORDS = 12


def splitmix(word: int, place: int) -> int:
    """The rule as it is written down, in numbers of any size."""
    x = (word + (place + 1) * 0x9E3779B97F4A7C15) % 2**64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
    return x ^ (x >> 31)


def pages_of(*rows: list[int]) -> np.ndarray:
    return np.array(rows, dtype="<u8").view(np.uint8)


rows_of_words = st.lists(st.integers(0, 2**64 - 1), min_size=WORDS, max_size=WORDS)


@given(words=rows_of_words)
def test_a_word_sum_adds_up_every_word_mixed_with_its_place(words: list[int]) -> None:
    wanted = sum(splitmix(word, place) for place, word in enumerate(words)) % 2**64
    assert hash_rows(Checksum.WORD_SUM, pages_of(words), [0])[0] == wanted


@given(words=rows_of_words, place=st.integers(0, WORDS - 1), bits=st.integers(1, 2**64 - 1))
def test_a_page_in_which_one_word_differs_has_another_sum(
    words: list[int], place: int, bits: int
) -> None:
    other = [*words]
    other[place] ^= bits
    sums = hash_rows(Checksum.WORD_SUM, pages_of(words, other), [0, 1])
    assert sums[0] != sums[1]


@pytest.mark.parametrize("kind", Checksum)
def test_words_that_changed_places_are_found(kind: Checksum) -> None:
    """Signs alone: what plain sums miss."""
    words = [1 << 63, *([0] * (WORDS - 1))]
    sums = hash_rows(kind, pages_of(words, words[::-1]), [0, 1])
    assert sums[0] != sums[1]


@pytest.mark.parametrize("kind", Checksum)
def test_parts_of_a_page_hash_like_a_page_that_consists_of_them(kind: Checksum) -> None:
    page = pages_of(list(range(WORDS)))
    parts = (slice(8, 24), slice(40, 48))
    joined = np.concatenate([page[0, part] for part in parts])[None, :]
    assert hash_rows(kind, page, [0], parts) == hash_rows(kind, joined, [0])


def test_rows_are_hashed_in_the_order_asked_for() -> None:
    pages = pages_of(*[[number] * WORDS for number in range(4)])
    whole = hash_rows(Checksum.WORD_SUM, pages, [0, 1, 2, 3])
    assert np.array_equal(hash_rows(Checksum.WORD_SUM, pages, [3, 0]), whole[[3, 0]])


def test_parts_that_are_not_whole_words_are_refused() -> None:
    with pytest.raises(TransferError, match="4 bytes"):
        hash_rows(Checksum.WORD_SUM, pages_of([0] * WORDS), [0], (slice(0, 4),))
