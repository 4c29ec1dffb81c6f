"""Causal attention of prompt chunks over KV pages on a GPU: what was cached before the chunk, and the chunk itself.

A program takes some tokens of one row times all query heads that share a KV head: these are the rows of one matrix
product, so a page is read once for the whole group. Which row of the batch a program works for it finds itself, by
bisection over the rows' first tokens, so the host need not know their lengths.

    keys   0 ........ begin ........ full ........... end       a tile of queries sees [begin, end): before `begin` all are out of
           | outside  |  all visible   | partly hidden |        the window, and only keys near the diagonal need a mask

The torch twin is `reference.paged_attention`. A token's bits do not depend on how its prompt was cut into chunks: tiles
of keys begin at multiples of the tile, and a hidden key adds exactly nothing.
"""

import torch
import triton
import triton.language as tl

from baton_engine.kernels.checks import expect
from baton_engine.kernels.ports import PagedBatch
from baton_engine.kernels.triton.checks import expect_heads, expect_pages, expect_scales
from baton_engine.kernels.triton.paged_tiles import LOG2_E, attend_tile, blocks_of_tile


# Not compiled anew for arguments that change from step to step: rows are counted, and the leading ones cut off.
@triton.jit(
    do_not_specialize=["num_rows", "table_width"],
    do_not_specialize_on_alignment=["query_starts", "context_lens", "block_tables"],
)
def prefill_attention_kernel(
    query,
    pages,
    query_starts,
    context_lens,
    block_tables,
    scales,
    out,
    num_rows,
    table_width,
    scale,
    window,
    heads: tl.constexpr,
    kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    block_tokens: tl.constexpr,
    rows: tl.constexpr,
    tile: tl.constexpr,
    width: tl.constexpr,
    windowed: tl.constexpr,
    scaled: tl.constexpr,
    uniform: tl.constexpr,
):
    """`rows` queries against tiles of `tile` keys; `width` is `head_dim` rounded up to a power of two. With `uniform`
    every tile of keys goes through the same loop, whether it needs a mask or not.
    """
    group: tl.constexpr = heads // kv_heads
    tokens: tl.constexpr = rows // group
    # The last tiles of a prompt have the most keys: they start first, so that no long one is left alone at the end.
    unit = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    origin = tl.load(query_starts)
    row = row_of(query_starts, origin, unit, num_rows, tokens)
    begin_token = tl.load(query_starts + row)
    length = tl.load(query_starts + row + 1) - begin_token
    offset = (unit - (begin_token - origin) // tokens - row) * tokens
    if offset >= length:
        return
    context = tl.load(context_lens + row)
    table = block_tables + row.to(tl.int64) * table_width

    at = tl.arange(0, width)
    member = tl.arange(0, rows)
    token = offset + member // group
    inside = (token < length) & (member < tokens * group)
    position = context - length + tl.minimum(token, length - 1)
    place = (begin_token + token).to(tl.int64) * heads + kv_head * group + member % group
    place = place[:, None] * head_dim + at[None, :]
    present = inside[:, None] & (at < head_dim)[None, :]
    queries = tl.load(query + place, mask=present, other=0.0)
    if scaled:
        scale = scale * tl.load(scales + kv_head * 2)

    first_position = context - length + offset
    last_position = context - length + tl.minimum(offset + tokens, length) - 1
    end = last_position + 1
    full = (first_position + 1) // tile * tile
    begin = 0
    plain = 0
    if windowed:
        begin = tl.maximum(0, first_position - window + 1) // tile * tile
        plain = (tl.maximum(0, last_position - window + 1) + tile - 1) // tile * tile
        plain = tl.minimum(tl.maximum(plain, begin), (end + tile - 1) // tile * tile)
        full = tl.maximum(full, plain)
    if uniform:
        full = begin
    sums = tl.zeros([rows, width], tl.float32)
    total = tl.zeros([rows], tl.float32)
    highest = tl.full([rows], float("-inf"), tl.float32)
    if windowed and not uniform:
        coming = blocks_of_tile(table, begin, end, block_tokens, tile)
        for first in tl.range(begin, plain, tile):
            blocks = coming
            coming = blocks_of_tile(table, first + tile, end, block_tokens, tile)
            sums, total, highest = attend_tile(
                queries, pages, blocks, sums, total, highest, position, first, end, scale, window,
                kv_head, kv_heads, block_tokens, head_dim, width, tile, True, windowed,
            )  # fmt: skip
    if not uniform:
        coming = blocks_of_tile(table, plain, end, block_tokens, tile)
        for first in tl.range(plain, full, tile):
            blocks = coming
            coming = blocks_of_tile(table, first + tile, end, block_tokens, tile)
            sums, total, highest = attend_tile(
                queries, pages, blocks, sums, total, highest, position, first, end, scale, window,
                kv_head, kv_heads, block_tokens, head_dim, width, tile, False, windowed,
            )  # fmt: skip
    coming = blocks_of_tile(table, full, end, block_tokens, tile)
    for first in tl.range(full, end, tile):
        blocks = coming
        coming = blocks_of_tile(table, first + tile, end, block_tokens, tile)
        sums, total, highest = attend_tile(
            queries, pages, blocks, sums, total, highest, position, first, end, scale, window,
            kv_head, kv_heads, block_tokens, head_dim, width, tile, True, windowed,
        )  # fmt: skip
    result = sums / tl.where(total == 0.0, 1.0, total)[:, None]
    if scaled:
        result = result * tl.load(scales + kv_head * 2 + 1)
    tl.store(out + place, result.to(out.dtype.element_ty), mask=present)


@triton.jit
def row_of(query_starts, origin, unit, num_rows, tokens: tl.constexpr):
    """The row that the tile of queries `unit` belongs to.
    Row r has its tiles from (its first token / tokens + r) on.
    """
    low = 0
    high = num_rows
    while low < high:
        middle = (low + high) // 2
        if (tl.load(query_starts + middle) - origin) // tokens + middle <= unit:
            low = middle + 1
        else:
            high = middle
    return low - 1


def prefill_attention(
    query: torch.Tensor,
    pages: torch.Tensor,
    batch: PagedBatch,
    scale: float,
    window: int | None,
    scales: torch.Tensor | None = None,
    *,
    first_row: int = 0,
    out: torch.Tensor | None = None,
    uniform: bool = False,
) -> torch.Tensor:
    """See `KernelSet.paged_attention`; rows may have any number of tokens.
    One whose context is empty attends to nothing and gets zeros.

    Args:
        query: `[num_tokens, num_heads, head_dim]`.
        pages: One layer's arena, in the dtype of `query` or in float8_e4m3fn.
        batch: Rows and their pages.
        scale: Multiplies the products of queries and keys; positive.
        window: How many tokens back a token attends, itself included; None for all.
        scales: `[num_kv_heads, 2]` float32, with pages of float8_e4m3fn: what keys and values were divided by.
        first_row: Rows before this one are left alone; each of them has one token.
        out: Where the result goes, a new tensor if None.
        uniform: Mask every tile of keys, needed or not: one loop's instructions for all, which costs a little time.

    Raises:
        ValueError: A shape, dtype, device or number does not fit.
    """
    expect_attention(query, pages, batch, scale, window, scales)
    return launch(
        query, pages, batch, scale, window, scales, first_row=first_row, out=out, uniform=uniform
    )


def launch(
    query: torch.Tensor,
    pages: torch.Tensor,
    batch: PagedBatch,
    scale: float,
    window: int | None,
    scales: torch.Tensor | None,
    *,
    first_row: int = 0,
    out: torch.Tensor | None = None,
    uniform: bool = False,
) -> torch.Tensor:
    """`prefill_attention` of what is known to fit."""
    heads = query.shape[1]
    _, kv_heads, _, block_tokens, head_dim = pages.shape
    if out is None:
        out = torch.empty_like(query)
    num_rows = batch.context_lens.shape[0] - first_row
    group = heads // kv_heads
    hopper = is_hopper(pages.device)
    tile = tile_of(head_dim, group, hopper=hopper, narrow=scales is not None)
    tokens = tile["rows"] // group
    num_tokens = query.shape[0] - first_row
    if num_rows and num_tokens:
        prefill_attention_kernel[(num_tokens // tokens + num_rows, kv_heads)](
            query,
            pages,
            batch.query_starts[first_row:],
            batch.context_lens[first_row:],
            batch.block_tables[first_row:],
            query if scales is None else scales,
            out,
            num_rows,
            batch.block_tables.shape[1],
            scale * LOG2_E,
            window or 0,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            block_tokens=block_tokens,
            windowed=window is not None,
            scaled=scales is not None,
            uniform=uniform,
            **tile,
        )
    return out


def tile_of(head_dim: int, group: int, *, hopper: bool, narrow: bool = False) -> dict[str, int]:
    """Launch settings that keep everything in registers, and eight warps or more on a multiprocessor, in one program or
    two, so that the softmax of some runs under the matrix products of the others. On an H200 one program of two warp
    groups and three stages was 5 % faster with 2,048 tokens, and 17 % with 8,192, than two programs of one group and
    two stages. Pages that matrix instructions do not read as they are, those of 8 bits (`narrow`) and any before
    Hopper, take a stage more until two buffers are in turn.
    """
    width = triton.next_power_of_2(head_dim)
    wide = width > 128
    two_groups = hopper and not narrow and not wide
    rows = max(128 if two_groups else 64, triton.next_power_of_2(group))
    two_stages = (not narrow and width != 128) if hopper else wide
    return {
        "rows": rows,
        "tile": 64 if hopper and not wide else 32,
        "width": width,
        "num_warps": 4 if rows == 64 and not wide else 8,
        "num_stages": 2 if two_stages else 3,
    }


def is_hopper(device: torch.device) -> bool:
    """Whether the device has Hopper's matrix instructions or later ones; taken for granted under the interpreter."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (9, 0)


def expect_attention(
    query: torch.Tensor,
    pages: torch.Tensor,
    batch: PagedBatch,
    scale: float,
    window: int | None,
    scales: torch.Tensor | None,
) -> None:
    """Refuses what an attention kernel would misread.

    Raises:
        ValueError: Names the argument.
    """
    _, _, head_dim = expect_pages(pages)
    tokens = batch.slots.shape[0]
    expect("query", query, (tokens, None, head_dim), query.dtype, pages.device)
    expect_heads(query.shape[1], pages)
    expect_scales(scales, pages, query.dtype)
    if scale <= 0:
        raise ValueError(f"scale: {scale} is not positive")
    if window is not None and window < 1:
        raise ValueError(f"window: a sliding window holds at least 1 token, not {window}")
