from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import TransferError
from baton.ids import BlockId, XferId
from baton.pages import PageWrite
from kv_transfer.plan import Grant, check_grant, check_source, place, runs


def pages(*ids: int) -> tuple[BlockId, ...]:
    return tuple(map(BlockId, ids))


def export(first: int, *source: int, layer: int = 0) -> PageWrite:
    return PageWrite(
        xfer_id=XferId("x"), layer_index=layer, first_block=first, source=pages(*source)
    )


GRANT = Grant(held_blocks=2, blocks=pages(7, 9, 4, 1))


def test_pages_that_the_peer_holds_are_left_out():
    plan = place(export(1, 31, 32, 33), GRANT)
    assert plan is not None
    assert (plan.first_block, plan.source, plan.target) == (2, pages(32, 33), pages(7, 9))


def test_an_export_of_held_pages_only_sends_nothing():
    assert place(export(0, 30, 31), GRANT) is None


@pytest.mark.parametrize(
    ("grant", "why"),
    [
        (Grant(held_blocks=1, blocks=pages(1, 2)), "for 4 blocks"),
        (Grant(held_blocks=5, blocks=()), "for 4 blocks"),
        (Grant(held_blocks=2, blocks=pages(1, 10)), "page 10"),
        (Grant(held_blocks=2, blocks=pages(-1, 3)), "page -1"),
        (Grant(held_blocks=2, blocks=pages(3, 3)), "twice"),
    ],
)
def test_a_grant_that_does_not_fit_is_refused(grant: Grant, why: str):
    with pytest.raises(TransferError, match=why):
        check_grant(grant, num_blocks=4, region_blocks=10)


@pytest.mark.parametrize(
    "wrong", [export(3, 1, 2), export(-1, 1), export(0, 1, layer=2), export(0, 1, layer=-1)]
)
def test_an_export_outside_the_prompt_is_refused(wrong: PageWrite):
    with pytest.raises(TransferError):
        check_source(wrong, num_blocks=4, num_layers=2)


@given(st.data())
def test_every_block_that_is_not_held_is_sent_exactly_once(data: st.DataObject):
    num_blocks = data.draw(st.integers(1, 12))
    held = data.draw(st.integers(0, num_blocks))
    targets = data.draw(st.permutations(range(num_blocks)))[: num_blocks - held]
    cuts = sorted({0, num_blocks, *data.draw(st.lists(st.integers(0, num_blocks)))})
    grant = Grant(held_blocks=held, blocks=pages(*targets))
    sent: dict[int, int] = {}
    for first, end in pairwise(cuts):
        plan = place(export(first, *range(100 + first, 100 + end)), grant)
        if plan is not None:
            sent.update(zip(plan.source, plan.target, strict=True))
    assert sent == {100 + held + index: target for index, target in enumerate(targets)}


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=20))
def test_runs_cover_the_same_pages_in_the_same_order(pairs: list[tuple[int, int]]):
    source, target = pages(*(a for a, _ in pairs)), pages(*(b for _, b in pairs))
    covered = [(at + i, to + i) for at, to, count in runs(source, target) for i in range(count)]
    assert covered == pairs
