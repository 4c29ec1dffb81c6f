"""Attention of decodes over KV pages on a GPU: one token per row,
its context cut into pieces that are attended to at once.

A program takes one piece of one row for one KV head. The query heads that share it are the rows of the matrix product,
so each key is read once for all of them (the idea of TensorRT-LLM's XQA). A second kernel adds up the pieces of each
row, weighted by how much of the softmax each one saw. Which pieces there are stands in `splits.Splits`: no grid depends
on a length, so both can be captured in a CUDA graph.

The torch twin is `reference.paged_attention`.
"""

import torch
import triton
import triton.language as tl

from baton_engine.kernels.ports import PagedBatch
from baton_engine.kernels.splits import PIECE_TOKENS, Splits
from baton_engine.kernels.triton.early_launch import await_earlier, early_launch
from baton_engine.kernels.triton.occupancy import resident_programs
from baton_engine.kernels.triton.paged_tiles import LOG2_E, attend_tile, blocks_of_tile
from baton_engine.kernels.triton.prefill_attention import expect_attention

PIECES_AT_ONCE = 16
"""Added up by a program in one go: their loads do not wait for one another."""
_LEAST_ROWS = 16
"""The smallest matrix instruction's."""


# Not compiled anew for the length of the longest context.
@triton.jit(do_not_specialize=["table_width"])
def decode_attention_kernel(
    query,
    pages,
    context_lens,
    block_tables,
    row_of_piece,
    first_piece,
    scales,
    piece_sums,
    piece_logs,
    table_width,
    scale,
    window,
    heads: tl.constexpr,
    kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    block_tokens: tl.constexpr,
    rows: tl.constexpr,
    tile: tl.constexpr,
    run: tl.constexpr,
    width: tl.constexpr,
    windowed: tl.constexpr,
    scaled: tl.constexpr,
    early: tl.constexpr,
):
    """One piece for one KV head: its weighted values, normalised, and log2 of its weights' sum."""
    if early:
        await_earlier()
    group: tl.constexpr = heads // kv_heads
    piece = tl.program_id(0)
    kv_head = tl.program_id(1)
    row = tl.load(row_of_piece + piece)
    if row < 0:
        return
    context = tl.load(context_lens + row)
    table = block_tables + row.to(tl.int64) * table_width
    first_of_row = tl.load(first_piece + row)
    num_pieces = tl.load(first_piece + row + 1) - first_of_row
    start = 0
    if windowed:  # what the window hides is not cut into pieces
        start = tl.maximum(0, context - window) // run * run
    runs = (context - start + run - 1) // run
    size = (runs + num_pieces - 1) // num_pieces * run
    begin = start + (piece - first_of_row) * size
    end = tl.minimum(begin + size, context)

    at = tl.arange(0, width)
    member = tl.arange(0, rows)
    present = (member < group)[:, None] & (at < head_dim)[None, :]
    head = kv_head * group + member
    place = (row * heads + head)[:, None] * head_dim + at[None, :]
    queries = tl.load(query + place, mask=present, other=0.0)
    if scaled:
        scale = scale * tl.load(scales + kv_head * 2)
    position = tl.zeros([rows], tl.int32) + context - 1
    sums = tl.zeros([rows, width], tl.float32)
    total = tl.zeros([rows], tl.float32)
    highest = tl.full([rows], float("-inf"), tl.float32)
    coming = blocks_of_tile(table, begin, end, block_tokens, tile)
    for first in tl.range(begin, end, tile):
        blocks = coming
        coming = blocks_of_tile(table, first + tile, end, block_tokens, tile)
        sums, total, highest = attend_tile(
            queries, pages, blocks, sums, total, highest, position, first, end, scale, window,
            kv_head, kv_heads, block_tokens, head_dim, width, tile, True, windowed,
        )  # fmt: skip
    # A piece may be empty, when there are more than runs to share out.
    nothing = total == 0.0
    total = tl.where(nothing, 1.0, total)
    logs = tl.where(nothing, float("-inf"), highest + tl.log2(total))
    result = sums / total[:, None]
    if scaled:
        result = result * tl.load(scales + kv_head * 2 + 1)
    place = (piece.to(tl.int64) * heads + head)[:, None] * head_dim + at[None, :]
    tl.store(piece_sums + place, result, mask=present)
    tl.store(piece_logs + piece * heads + head, logs, mask=member < group)


@triton.jit
def add_pieces_kernel(
    piece_sums,
    piece_logs,
    first_piece,
    out,
    heads: tl.constexpr,
    head_dim: tl.constexpr,
    width: tl.constexpr,
    taken: tl.constexpr,
    early: tl.constexpr,
):
    """One head of one row: its pieces in order, `taken` of them at once; zeros where there are none."""
    if early:
        await_earlier()
    row = tl.program_id(0)
    head = tl.program_id(1)
    at = tl.arange(0, width)
    begin = tl.load(first_piece + row)
    end = tl.load(first_piece + row + 1)
    sums = tl.zeros([width], tl.float32)
    total = 0.0
    highest = float("-inf")
    for first in tl.range(begin, end, taken):
        piece = first + tl.arange(0, taken)
        place = piece.to(tl.int64) * heads + head
        logs = tl.load(piece_logs + place, mask=piece < end, other=float("-inf"))
        values = tl.load(
            piece_sums + place[:, None] * head_dim + at[None, :],
            mask=(piece < end)[:, None] & (at < head_dim)[None, :],
            other=0.0,
        )
        now = tl.maximum(highest, tl.max(logs, 0))
        base = tl.where(now == float("-inf"), 0.0, now)
        fading = tl.exp2(highest - base)
        weights = tl.exp2(logs - base)
        sums = sums * fading + tl.sum(values * weights[:, None], 0)
        total = total * fading + tl.sum(weights, 0)
        highest = now
    result = sums / tl.where(begin == end, 1.0, total)
    place = (row.to(tl.int64) * heads + head) * head_dim + at
    tl.store(out + place, result.to(out.dtype.element_ty), mask=at < head_dim)


def decode_attention(
    query: torch.Tensor,
    pages: torch.Tensor,
    batch: PagedBatch,
    splits: Splits,
    scale: float,
    window: int | None,
    scales: torch.Tensor | None = None,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `KernelSet.paged_attention`; for the leading rows of `batch` that `splits` cuts, each of one token.

    A row whose context is empty attends to nothing and gets zeros.

    Args:
        query: `[num_tokens, num_heads, head_dim]`.
        pages: One layer's arena, in the dtype of `query` or in float8_e4m3fn.
        batch: Rows and their pages.
        splits: The pieces of the leading rows' contexts.
        scale: Multiplies the products of queries and keys; positive.
        window: How many tokens back a token attends, itself included; None for all.
        scales: `[num_kv_heads, 2]` float32, with pages of float8_e4m3fn: what keys and values were divided by.
        out: Where the result goes, a new tensor if None; other rows of it are left alone.

    Raises:
        ValueError: A shape, dtype, device or number does not fit.
    """
    expect_attention(query, pages, batch, scale, window, scales)
    splits.check(len(batch.context_lens), pages.device)
    return launch(query, pages, batch, splits, scale, window, scales, out=out)


def launch(
    query: torch.Tensor,
    pages: torch.Tensor,
    batch: PagedBatch,
    splits: Splits,
    scale: float,
    window: int | None,
    scales: torch.Tensor | None,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """`decode_attention` of what is known to fit."""
    heads, device = query.shape[1], pages.device
    _, kv_heads, _, block_tokens, head_dim = pages.shape
    decodes, pieces = splits.num_decodes, splits.row_of_piece.shape[0]
    if out is None:
        out = torch.empty_like(query)
    if not decodes:
        return out
    piece_sums = torch.empty((pieces, heads, head_dim), dtype=torch.float32, device=device)
    piece_logs = torch.empty((pieces, heads), dtype=torch.float32, device=device)
    decode_attention_kernel[(pieces, kv_heads)](
        query,
        pages,
        batch.context_lens,
        batch.block_tables,
        splits.row_of_piece,
        splits.first_piece,
        query if scales is None else scales,
        piece_sums,
        piece_logs,
        batch.block_tables.shape[1],
        scale * LOG2_E,
        window or 0,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        block_tokens=block_tokens,
        windowed=window is not None,
        scaled=scales is not None,
        **early_launch(device),
        **decode_tile(head_dim, heads // kv_heads),
    )
    add_pieces_kernel[(decodes, heads)](
        piece_sums,
        piece_logs,
        splits.first_piece,
        out,
        heads=heads,
        head_dim=head_dim,
        width=triton.next_power_of_2(head_dim),
        taken=PIECES_AT_ONCE,
        **early_launch(device),
        num_warps=2,
    )
    return out


def programs_per_multiprocessor(num_heads: int, pages: torch.Tensor) -> int:
    """How many programs a multiprocessor holds at once of the kernel that decodes without a window are attended by;
    compiles it, which blocks for about a second where it is not in Triton's cache.

    Args:
        num_heads: Query heads.
        pages: One layer's arena, on a GPU, which the kernel can read.
    """
    _, kv_heads, _, block_tokens, head_dim = pages.shape
    narrow = pages.dtype.itemsize == 1
    dtype = torch.bfloat16 if narrow else pages.dtype
    tile = decode_tile(head_dim, num_heads // kv_heads)
    integers, numbers = (torch.int32,) * 4, (torch.float32,) * 2
    compiled = decode_attention_kernel.warmup(
        dtype,
        pages.dtype,
        *integers,
        torch.float32 if narrow else dtype,
        *numbers,
        1,
        1.0,
        0,
        heads=num_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        block_tokens=block_tokens,
        windowed=False,
        scaled=narrow,
        grid=(1,),
        **early_launch(pages.device),
        **tile,
    )
    compiled._init_handles()  # as Triton's own guide does: registers are known once it is loaded
    gpu = torch.cuda.get_device_properties(pages.device)
    return resident_programs(
        shared_memory=gpu.shared_memory_per_multiprocessor,
        most_threads=gpu.max_threads_per_multi_processor,
        registers=compiled.n_regs,
        shared_bytes=compiled.metadata.shared,
        num_warps=tile["num_warps"],
    )


def decode_tile(head_dim: int, group: int) -> dict[str, int]:
    """Launch settings: the next tile's keys and values are fetched while this one's are multiplied, from two buffers
    each, which shared memory holds for two or three programs per multiprocessor.
    """
    return {
        "rows": max(_LEAST_ROWS, triton.next_power_of_2(group)),
        "tile": 32 if head_dim > 128 else PIECE_TOKENS,
        "run": PIECE_TOKENS,
        "width": triton.next_power_of_2(head_dim),
        "num_warps": 4,
        "num_stages": 3,
    }
