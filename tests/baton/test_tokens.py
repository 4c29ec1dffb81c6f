import copy
import pickle

import pytest

from baton.tokens import PackedTokens


def test_packed_tokens_are_the_tuple_they_were_made_of():
    packed = PackedTokens.of([1, 2, 70_000])
    assert packed == (1, 2, 70_000)
    assert packed != (1, 2)
    assert hash(packed) == hash((1, 2, 70_000))
    assert list(packed) == [1, 2, 70_000]
    assert packed[1:] == PackedTokens.of([2, 70_000])
    assert packed[-1] == 70_000
    assert (len(packed), packed.highest(), PackedTokens(b"").highest()) == (3, 70_000, 0)


def test_packing_what_is_packed_costs_nothing():
    packed = PackedTokens.of([1])
    assert PackedTokens.of(packed) is packed


def test_ids_that_are_none_and_bytes_that_are_cut_short_are_refused():
    with pytest.raises(OverflowError):
        PackedTokens.of([-1])
    with pytest.raises(ValueError, match="4 bytes"):
        PackedTokens(b"12345")


def test_packed_tokens_can_be_copied_and_pickled():
    packed = PackedTokens.of([3, 1, 2])
    assert copy.deepcopy(packed) == packed == pickle.loads(pickle.dumps(packed))
