import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from baton_engine.kernels.splits import PIECE_TOKENS, SplitRule

CONTEXTS = st.lists(st.integers(0, 200_000), min_size=1, max_size=40)


def runs_of(context: int) -> int:
    return -(-context // PIECE_TOKENS)


@given(contexts=CONTEXTS, spread=st.integers(1, 600))
def test_pieces_fit_the_grid_and_belong_to_their_rows_in_order(contexts, spread):
    rule = SplitRule(spread=spread)
    row_of_piece, first_piece = rule.cut(np.array(contexts, np.int32))
    assert len(row_of_piece) == rule.max_pieces(len(contexts))
    for row in range(len(contexts)):
        assert (row_of_piece[first_piece[row] : first_piece[row + 1]] == row).all()
    assert (row_of_piece[first_piece[-1] :] == -1).all()


@given(contexts=CONTEXTS, spread=st.integers(1, 600))
def test_every_context_has_a_piece_and_an_empty_one_has_none(contexts, spread):
    _, first_piece = SplitRule(spread=spread).cut(np.array(contexts, np.int32))
    for context, count in zip(contexts, np.diff(first_piece), strict=True):
        assert (count > 0) == (context > 0)


@given(contexts=CONTEXTS, spread=st.integers(1, 600), most=st.integers(1, 40))
def test_no_piece_is_longer_than_its_share_of_the_step_or_of_its_row(contexts, spread, most):
    rule = SplitRule(spread=spread, most_of_row=most)
    _, first_piece = rule.cut(np.array(contexts, np.int32))
    share = max(1, -(-sum(map(runs_of, contexts)) // spread))
    for context, count in zip(contexts, np.diff(first_piece), strict=True):
        assert count <= most
        assert runs_of(context) <= count * max(share, -(-runs_of(context) // most))
