import ctypes
import struct
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import TransferError
from baton.ids import BlockId, LayerName, XferId
from baton.layout import KvLayout
from baton.pages import PageWrite
from kv_transfer.backends.ucx.frames import (
    MAX_PAYLOAD_BYTES,
    Buffer,
    HeadReader,
    frames_of,
    head_of,
    rows_of,
)
from kv_transfer.heads import plan_link
from kv_transfer.memory.pages import Pages, layer_pages

SMALL = KvLayout(
    model_fingerprint="f",
    dtype="float16",
    block_tokens=4,
    num_kv_heads=2,
    head_dim=8,
    layers=(LayerName("a"), LayerName("b")),
)
BLOCKS = 6


def arena(layout: KvLayout, seed: int | None) -> list[Pages]:
    memory = np.zeros(layout.region_bytes(BLOCKS), np.uint8)
    if seed is not None:
        memory[:] = np.random.default_rng(seed).integers(0, 256, len(memory), np.uint8)
    return layer_pages(memory.data, layout, BLOCKS)


def carry(
    push: PageWrite, here: KvLayout, there: KvLayout, payload_bytes: int = MAX_PAYLOAD_BYTES
) -> tuple[list[Pages], list[Pages], int]:
    """Source, target and the number of frames after a push was carried out."""
    source, target = arena(here, 1), arena(there, None)
    reader, count = HeadReader(layout=there, num_blocks=BLOCKS, arena=target), 0
    plan = plan_link(here, there)
    for frame in frames_of(push, source, plan, target_blocks=BLOCKS, payload_bytes=payload_bytes):
        rows = rows_of(frame, source)
        landing = reader.read(head_of(frame, count).copy(), int(rows[:, 1].sum()))
        assert landing.number == count
        body = b"".join(ctypes.string_at(int(at), int(length)) for at, length in rows)
        for index, (at, length) in enumerate(landing.places.tolist()):
            ctypes.memmove(at, body[index * length : (index + 1) * length], length)
        count += 1
    return source, target, count


def push_of(source: list[int], target: list[int], layer: int = 0) -> PageWrite:
    return PageWrite(
        xfer_id=XferId("x"),
        layer_index=layer,
        source=tuple(map(BlockId, source)),
        target=tuple(map(BlockId, target)),
    )


def test_small_pages_share_a_frame():
    source, target, count = carry(push_of([0, 2, 5], [5, 1, 0], layer=1), SMALL, SMALL)
    assert count == 1
    assert (target[1][[5, 1, 0]] == source[1][[0, 2, 5]]).all()
    assert not target[0].any()
    assert not target[1][[2, 3, 4]].any()


def test_a_page_larger_than_a_frame_is_cut():
    limit = SMALL.page_layer_bytes // 2 - 8
    source, target, count = carry(push_of([4, 0], [1, 3]), SMALL, SMALL, limit)
    assert count == 2 * 2 + 1  # of each page two frames, and the rests share one
    assert (target[0][[1, 3]] == source[0][[4, 0]]).all()
    assert not target[0][[0, 2, 4, 5]].any()


def test_frames_that_are_full_are_followed_by_others():
    source, target, count = carry(
        push_of([0, 1, 2, 5, 4], [4, 3, 0, 1, 2]), SMALL, SMALL, 2 * SMALL.page_layer_bytes
    )
    assert count == 3
    assert (target[0][[4, 3, 0, 1, 2]] == source[0][[0, 1, 2, 5, 4]]).all()


def test_a_rank_that_holds_half_the_heads_fills_half_a_page():
    half = replace(SMALL, num_kv_heads=1, tp_size=2, tp_rank=1)
    source, target, _ = carry(push_of([3], [2]), half, SMALL)
    assert (target[0][2, half.page_layer_bytes :] == source[0][3]).all()
    assert not target[0][2, : half.page_layer_bytes].any()


@pytest.mark.parametrize("page", [-1, BLOCKS, 2**32, 2**70])
@pytest.mark.parametrize("side", ["source", "target"])
def test_a_push_of_a_page_that_is_not_there_is_refused_before_any_frame(side: str, page: int):
    pages = {"source": [0, 1], "target": [2, 3], side: [4, page]}
    plan = plan_link(SMALL, SMALL)
    with pytest.raises(TransferError, match="of a region of"):
        frames_of(
            push_of(pages["source"], pages["target"]), arena(SMALL, 1), plan, target_blocks=BLOCKS
        )


def head() -> tuple[Buffer, int]:
    """A head of two pages, and the length of its body."""
    source = arena(SMALL, 1)
    plan = plan_link(SMALL, SMALL)
    (frame,) = frames_of(push_of([1, 2], [3, 4]), source, plan, target_blocks=BLOCKS)
    return head_of(frame, 7).copy(), 2 * SMALL.page_layer_bytes


def reader() -> HeadReader:
    return HeadReader(layout=SMALL, num_blocks=BLOCKS, arena=arena(SMALL, None))


# Offsets in a head: layer 16, offset 20, row bytes 24, pages 28, the first page's number 32.
@pytest.mark.parametrize(
    ("at", "value"),
    [
        (0, 0),
        (4, 0xFF),
        (16, len(SMALL.layers)),
        (20, 1),
        (20, 2**32 - 1),
        (24, 0),
        (24, 2**32 - 1),
        (28, 0),
        (28, 1),
        (28, 2**32 - 1),
        (32, BLOCKS),
        (36, 2**32 - 1),
    ],
)
def test_a_head_that_leads_outside_the_arena_is_refused(at: int, value: int):
    found, body_bytes = head()
    struct.pack_into("<I", found.data, at, value)
    with pytest.raises(TransferError):
        reader().read(found, body_bytes)


@pytest.mark.parametrize("difference", [-1, 1, -SMALL.page_layer_bytes])
def test_a_body_of_another_length_than_its_head_says_is_refused(difference: int):
    found, body_bytes = head()
    with pytest.raises(TransferError):
        reader().read(found, body_bytes + difference)


@given(cut=st.integers(min_value=0, max_value=39))
def test_a_truncated_head_is_refused(cut: int):
    found, body_bytes = head()
    with pytest.raises(TransferError):
        reader().read(found[:cut], body_bytes)


@given(noise=st.binary(max_size=800), body_bytes=st.integers(0, 2**32))
def test_noise_is_refused(noise: bytes, body_bytes: int):
    with pytest.raises(TransferError):
        reader().read(np.frombuffer(noise, np.uint8), body_bytes)
