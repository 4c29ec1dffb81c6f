import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import CancelledByPeerError, TransferError
from baton.generation import TokenSample
from baton.ids import XferId
from kv_transfer.ledger.ranks import (
    DropOn,
    GroupFailed,
    GroupWithdrawn,
    RankCommitted,
    RankFailed,
    RankGroup,
    StartAll,
    WithdrawOn,
)

X = XferId("x")
FIRST = (TokenSample(sample=0, token=5),)
LOST = TransferError("no room")
CANCEL = GroupWithdrawn(xfer_id=X, error=CancelledByPeerError("client left"))


def committed(rank: int) -> RankCommitted:
    return RankCommitted(xfer_id=X, rank=rank, first_tokens=FIRST)


def failed(rank: int) -> RankFailed:
    return RankFailed(xfer_id=X, rank=rank, error=LOST)


@pytest.fixture
def group() -> RankGroup:
    group = RankGroup(2)
    group.open(X)
    return group


def test_all_ranks_start_together(group: RankGroup):
    assert group.handle(committed(1)) == []
    assert group.handle(committed(0)) == [StartAll(xfer_id=X, first_tokens=FIRST)]
    assert group.in_flight() == 0


def test_a_rank_that_has_committed_drops_what_another_could_not_get(group: RankGroup):
    group.handle(committed(0))
    assert group.handle(failed(1)) == [
        DropOn(xfer_id=X, rank=0),
        GroupFailed(xfer_id=X, error=LOST),
    ]
    assert group.in_flight() == 0


def test_a_commit_that_crossed_the_withdrawal_is_dropped(group: RankGroup):
    withdrawn = group.handle(CANCEL)
    assert withdrawn == [WithdrawOn(xfer_id=X, rank=n, error=CANCEL.error) for n in (0, 1)]
    assert group.handle(failed(0)) == []
    assert group.handle(committed(1)) == [DropOn(xfer_id=X, rank=1)]
    assert group.in_flight() == 0


def test_ranks_that_were_told_different_tokens_do_not_start(group: RankGroup):
    group.handle(committed(0))
    other = RankCommitted(xfer_id=X, rank=1, first_tokens=(TokenSample(sample=0, token=6),))
    actions = group.handle(other)
    assert [type(action) for action in actions] == [DropOn, DropOn, GroupFailed]


@given(
    ranks=st.integers(1, 4),
    commits=st.lists(st.booleans(), min_size=4, max_size=4),
    order=st.permutations(range(5)),
    cancels=st.booleans(),
)
def test_in_any_order_either_all_start_or_none(ranks, commits, order, cancels):
    group, actions = RankGroup(ranks), []
    group.open(X)
    for turn in order:
        if turn < ranks:
            actions += group.handle(committed(turn) if commits[turn] else failed(turn))
        elif turn == 4 and cancels:
            actions += group.handle(CANCEL)
        group.check_integrity()
    dropped = [action.rank for action in actions if isinstance(action, DropOn)]
    started = [action for action in actions if isinstance(action, StartAll)]
    did_commit = {rank for rank in range(ranks) if commits[rank]}
    assert group.in_flight() == 0
    assert len(dropped) == len(set(dropped))
    assert set(dropped) == (set() if started else did_commit)
    assert bool(started) <= (len(did_commit) == ranks)
    assert sum(isinstance(action, GroupFailed) for action in actions) <= 1
