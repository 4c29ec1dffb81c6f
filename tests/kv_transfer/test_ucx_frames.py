import struct
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import TransferError
from baton.ids import BlockId, LayerName, XferId
from baton.layout import KvLayout
from kv_transfer.heads import plan_link
from kv_transfer.page_copy import Pages
from kv_transfer.ports import Push
from kv_transfer.shm import layer_pages
from kv_transfer.ucx_frames import (
    MAX_FRAME_BYTES,
    MAX_PAYLOAD_BYTES,
    Buffer,
    FrameReader,
    frames_of,
    write_frame,
)

SMALL = KvLayout(
    model_fingerprint="f",
    dtype="float16",
    block_tokens=4,
    num_kv_heads=2,
    head_dim=8,
    layers=(LayerName("a"), LayerName("b")),
)
LARGE = replace(SMALL, block_tokens=256, head_dim=1280, layers=(LayerName("a"),))
BLOCKS = 6


def arena(layout: KvLayout, seed: int | None) -> list[Pages]:
    memory = np.zeros(layout.region_bytes(BLOCKS), np.uint8)
    if seed is not None:
        memory[:] = np.random.default_rng(seed).integers(0, 256, len(memory), np.uint8)
    return layer_pages(memory.data, layout, BLOCKS)


def carry(push: Push, here: KvLayout, there: KvLayout) -> tuple[list[Pages], list[Pages], int]:
    """Source, target and the number of frames after a push was carried out."""
    source, target = arena(here, 1), arena(there, None)
    reader = FrameReader(layout=there, num_blocks=BLOCKS, arena=target)
    buffer, count = np.empty(MAX_FRAME_BYTES, np.uint8), 0
    for frame in frames_of(push, source, plan_link(here, there), target_blocks=BLOCKS):
        length = write_frame(frame, count, source, buffer)
        assert reader.take(buffer[:length].copy()) == count
        count += 1
    return source, target, count


def push_of(source: list[int], target: list[int], layer: int = 0) -> Push:
    return Push(
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
    assert LARGE.page_layer_bytes > 2 * MAX_PAYLOAD_BYTES
    source, target, count = carry(push_of([4, 0], [1, 3]), LARGE, LARGE)
    assert count > 4
    assert (target[0][[1, 3]] == source[0][[4, 0]]).all()
    assert not target[0][[0, 2, 4, 5]].any()


def test_a_rank_that_holds_half_the_heads_fills_half_a_page():
    half = replace(SMALL, num_kv_heads=1, tp_size=2, tp_rank=1)
    source, target, _ = carry(push_of([3], [2]), half, SMALL)
    assert (target[0][2, half.page_layer_bytes :] == source[0][3]).all()
    assert not target[0][2, : half.page_layer_bytes].any()


def frame_bytes() -> Buffer:
    source, buffer = arena(SMALL, 1), np.empty(MAX_FRAME_BYTES, np.uint8)
    plan = plan_link(SMALL, SMALL)
    (frame,) = frames_of(push_of([1, 2], [3, 4]), source, plan, target_blocks=BLOCKS)
    return buffer[: write_frame(frame, 7, source, buffer)].copy()


# Offsets in a frame: layer 16, offset 20, row bytes 24, pages 28, the first page's number 32.
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
def test_a_frame_that_leads_outside_the_arena_is_refused_and_writes_nothing(at: int, value: int):
    target = arena(SMALL, None)
    reader = FrameReader(layout=SMALL, num_blocks=BLOCKS, arena=target)
    frame = frame_bytes()
    struct.pack_into("<I", frame.data, at, value)
    with pytest.raises(TransferError):
        reader.take(frame)
    assert not any(layer.any() for layer in target)


@given(cut=st.integers(min_value=0, max_value=575))
def test_a_truncated_frame_is_refused(cut: int):
    target = arena(SMALL, None)
    reader = FrameReader(layout=SMALL, num_blocks=BLOCKS, arena=target)
    with pytest.raises(TransferError):
        reader.take(frame_bytes()[:cut])
    assert not any(layer.any() for layer in target)


@given(noise=st.binary(max_size=800))
def test_noise_is_refused(noise: bytes):
    reader = FrameReader(layout=SMALL, num_blocks=BLOCKS, arena=arena(SMALL, None))
    with pytest.raises(TransferError):
        reader.take(np.frombuffer(noise, np.uint8))
