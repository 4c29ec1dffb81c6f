"""The parts of a page that ranks exchange: each byte of each receiver comes once, from the right place."""

from collections import Counter
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import IncompatibleError, TransferError
from baton.ids import BlockId, LayerName, XferId
from baton.layout import KvLayout
from baton.pages import PageWrite
from kv_transfer.backends.shm import copy_pages
from kv_transfer.heads import HeadSlice, plan_link, plan_sender
from tests.kv_transfer.sharding import WHOLE, Bytes, heads_of, spread, truth

SIZES = (1, 2, 4, 8)
SHAPES = [
    (total, senders, receivers)
    for total, senders, receivers in product(range(1, 17), SIZES, SIZES)
    if spread(total, senders) and spread(total, receivers)
]
GQA = [(1, 8, 2), (2, 8, 4), (2, 4, 8), (3, 6, 12), (2, 12, 8), (2, 6, 4), (1, 3, 2), (4, 16, 1)]


def ranks(total: int, tp_size: int, **more) -> list[KvLayout]:
    found = spread(total, tp_size, **more)
    assert found is not None
    return found


def coordinates(layout: KvLayout) -> np.ndarray:
    """For each byte of a rank's page which byte of the whole model's page it is."""
    size = layout.head_bytes
    return np.concatenate([np.arange(head * size, (head + 1) * size) for head in heads_of(layout)])


def check_each_byte(sources: list[KvLayout], targets: list[KvLayout]) -> None:
    """Every byte of every receiver is written once, and with the byte of the same coordinate."""
    written = [np.zeros(target.page_layer_bytes, dtype=int) for target in targets]
    got = [np.full(target.page_layer_bytes, -1) for target in targets]
    for source in sources:
        code = coordinates(source)
        for part in plan_sender(source, targets[0]):
            written[part.target_rank][part.target] += 1
            got[part.target_rank][part.target] = code[part.source]
    for target in targets:
        assert (written[target.tp_rank] == 1).all()
        assert (got[target.tp_rank] == coordinates(target)).all()


@pytest.mark.parametrize(("total", "senders", "receivers"), SHAPES + GQA)
@pytest.mark.parametrize("block_tokens", [1, 2])
def test_each_byte_of_each_receiver_is_written_once_and_comes_from_the_same_coordinate(
    total: int, senders: int, receivers: int, block_tokens: int
):
    sources = ranks(total, senders, block_tokens=block_tokens)
    check_each_byte(sources, ranks(total, receivers, block_tokens=block_tokens))


@pytest.mark.parametrize(("total", "senders", "receivers"), SHAPES + GQA)
def test_senders_share_the_work_to_within_one_row_for_each_of_their_heads(
    total: int, senders: int, receivers: int
):
    sources, target = ranks(total, senders), ranks(total, receivers)[0]
    loads = [sum(part.length for part in plan_sender(one, target)) for one in sources]
    row = target.head_bytes // (2 * target.block_tokens)
    assert max(loads) - min(loads) <= row * sources[0].num_kv_heads


@pytest.mark.parametrize(("total", "senders", "receivers"), SHAPES + GQA)
def test_no_two_slices_of_a_pair_could_be_one(total: int, senders: int, receivers: int):
    for source in ranks(total, senders):
        parts = plan_sender(source, ranks(total, receivers)[0])
        assert all(part.length > 0 for part in parts)
        for before, after in pairwise(parts):
            assert before.target_rank <= after.target_rank
            if before.target_rank == after.target_rank:
                assert before.target.stop <= after.target.start
                assert (before.source.stop, before.target.stop) != (
                    after.source.start,
                    after.target.start,
                )


@pytest.mark.parametrize(("total", "senders", "receivers"), SHAPES + GQA)
def test_the_plans_of_the_links_are_together_the_plan_of_the_sender(
    total: int, senders: int, receivers: int
):
    targets = ranks(total, receivers)
    for source in ranks(total, senders):
        parts: list[HeadSlice] = []
        for target in targets:
            with suppress(IncompatibleError):
                parts += plan_link(source, target).slices
        assert tuple(parts) == plan_sender(source, targets[0])


def test_several_heads_on_several_ranks_each_are_cut_head_by_head():
    """Ranks that hold more than one head and share them, as with attention spread less than the rest of the model."""
    sources = [
        replace(WHOLE, num_kv_heads=2, tp_size=6, kv_head_replicas=3, tp_rank=rank)
        for rank in range(6)
    ]
    for targets in (ranks(4, 1), ranks(4, 2), ranks(4, 4), ranks(4, 8), sources):
        check_each_byte(sources, targets)
        check_each_byte(targets, sources)


def test_the_common_shapes_read_as_one_would_draw_them():
    head = WHOLE.head_bytes

    def drawn(total: int, senders: int, receivers: int) -> list[list[tuple[int, int, int, float]]]:
        target = ranks(total, receivers)[0]
        return [
            [
                (
                    part.source_offset // head,
                    part.target_rank,
                    part.target_offset // head,
                    part.length / head,
                )
                for part in plan_sender(source, target)
            ]
            for source in ranks(total, senders)
        ]

    assert drawn(4, 1, 2) == [[(0, 0, 0, 2), (2, 1, 0, 2)]]
    assert drawn(4, 2, 1) == [[(0, 0, 0, 2)], [(0, 0, 2, 2)]]
    assert drawn(4, 2, 4) == [[(0, 0, 0, 1), (1, 1, 0, 1)], [(0, 2, 0, 1), (1, 3, 0, 1)]]
    assert drawn(2, 4, 4) == [[(0, 0, 0, 1)], [(0, 1, 0, 1)], [(0, 2, 0, 1)], [(0, 3, 0, 1)]]
    assert drawn(1, 1, 2) == [[(0, 0, 0, 1), (0, 1, 0, 1)]]
    assert drawn(1, 2, 1) == [[(0, 0, 0, 0.5)], [(0, 0, 0, 0.5)]]


def test_equal_ranks_write_whole_pages():
    for source in ranks(8, 4):
        plan = plan_link(source, source)
        assert plan.whole_pages
        assert plan.bytes_per_page == source.page_bytes
    assert not plan_link(ranks(8, 4)[0], ranks(8, 2)[0]).whole_pages


def test_ranks_that_share_no_heads_are_refused_by_name():
    with pytest.raises(IncompatibleError, match=r"tp_rank: 0 of 2 .* 1 of 2"):
        plan_link(ranks(4, 2)[0], ranks(4, 2)[1])


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("model_fingerprint", {"model_fingerprint": "g"}),
        ("dtype", {"dtype": "float32"}),
        ("block_tokens", {"block_tokens": 4}),
        ("head_dim", {"head_dim": 8}),
        ("total_kv_heads", {"num_kv_heads": 3}),
        ("total_kv_heads", {"tp_size": 2}),
        ("kv_head_replicas", {"tp_size": 2**31, "kv_head_replicas": 0}),
        ("layers", {"layers": (LayerName("other"),)}),
    ],
)
def test_pages_that_do_not_match_are_refused_by_name(field: str, values):
    for plan in (plan_link, plan_sender):
        with pytest.raises(IncompatibleError, match=f"{field}: "):
            plan(WHOLE, replace(WHOLE, **values))


def test_a_peer_that_claims_two_billion_ranks_costs_no_more_than_one():
    claimed = replace(WHOLE, num_kv_heads=1, tp_size=2**31, kv_head_replicas=2**29)
    plan = plan_link(WHOLE, replace(claimed, tp_rank=2**31 - 1))
    assert [(part.source_offset, part.length) for part in plan.slices] == [
        (3 * WHOLE.head_bytes, WHOLE.head_bytes)
    ]


@given(st.permutations(range(6)), st.sets(st.integers(0, 5), min_size=1))
def test_layers_are_paired_by_name_in_whatever_order_and_number(order: list[int], held: set[int]):
    names = [LayerName(f"l{index}") for index in range(6)]
    source = replace(WHOLE, layers=tuple(names))
    target = replace(WHOLE, layers=tuple(names[index] for index in order if index in held))
    plan = plan_link(source, target)
    for index, name in enumerate(names):
        if index in held:
            assert target.layers[plan.target_layer(index)] == name
        else:
            with pytest.raises(TransferError, match=f"layer {index} is none"):
                plan.target_layer(index)
    assert plan.bytes_per_page == target.page_bytes


@st.composite
def moves(draw) -> tuple[list[tuple[int, int]], tuple[int, int, int]]:
    """Pages from here to there, and a shape."""
    pairs = draw(st.integers(0, 6))
    here = draw(st.lists(st.integers(0, 7), min_size=pairs, max_size=pairs, unique=True))
    there = draw(st.lists(st.integers(0, 9), min_size=pairs, max_size=pairs, unique=True))
    return list(zip(here, there, strict=True)), draw(st.sampled_from(SHAPES + GQA))


@given(moves())
def test_any_pages_arrive_as_if_sharded_anew_and_no_other_byte_changes(moved):
    pairs, (total, senders, receivers) = moved
    layer = WHOLE.layers[1]
    sources, targets = ranks(total, senders), ranks(total, receivers, layers=WHOLE.layers[::-1])
    arenas = [_arena(target, 10, fill=0xEE) for target in targets]
    wanted = [_arena(target, 10, fill=0xEE) for target in targets]
    for target, arena in zip(targets, wanted, strict=True):
        for here, there in pairs:
            arena[1][there] = truth(layer, [here], target)[0]
    push = PageWrite(
        xfer_id=XferId("x"),
        layer_index=1,
        source=tuple(BlockId(here) for here, _ in pairs),
        target=tuple(BlockId(there) for _, there in pairs),
    )
    for source in sources:
        memory = _arena(source, 8, fill=0x11)
        memory[1][:] = truth(layer, list(range(8)), source)
        for rank in {part.target_rank for part in plan_sender(source, targets[0])}:
            copy_pages(push, memory, arenas[rank], plan_link(source, targets[rank]))
    for arena, expected in zip(arenas, wanted, strict=True):
        for got, want in zip(arena, expected, strict=True):
            assert np.array_equal(got, want)


def test_a_layer_that_the_receiver_lacks_is_refused_and_nothing_is_written():
    target = replace(WHOLE, layers=WHOLE.layers[:1])
    memory, arena = _arena(WHOLE, 1, fill=1), _arena(target, 1, fill=2)
    push = PageWrite(xfer_id=XferId("x"), layer_index=1, source=(BlockId(0),), target=(BlockId(0),))
    with pytest.raises(TransferError, match="layer 1 is none of the receiver's"):
        copy_pages(push, memory, arena, plan_link(WHOLE, target))
    assert (arena[0] == 2).all()


def test_the_shapes_cover_splitting_joining_and_replication():
    seen = Counter(
        (senders < receivers, senders > receivers, total < max(senders, receivers))
        for total, senders, receivers in SHAPES
    )
    assert len(SHAPES) > 100
    assert len(seen) == 6


def _arena(layout: KvLayout, num_blocks: int, *, fill: int) -> list[Bytes]:
    shape = (num_blocks, layout.page_layer_bytes)
    return [np.full(shape, fill, dtype=np.uint8) for _ in layout.layers]
