"""What the GPU's attention kernels share: how a tile of keys is found in the pages,
and one round of the online softmax.

    pages [num_blocks, num_kv_heads, 2, block_tokens, head_dim]      a tile of keys lies in one page, or gathers from several

Scores are kept times log2(e), since the hardware has 2^x. (Milakov and Gimelshein 2018; FlashAttention-2, Dao 2023.)
"""

import triton
import triton.language as tl

LOG2_E = 1.4426950408889634


@triton.jit
def blocks_of_tile(table, first, end, block_tokens: tl.constexpr, tile: tl.constexpr):
    """The pages of the keys `[first, first + tile)` of a sequence: one number where a page holds them all, else
    `[tile]`, int32.

    Read a round before they are needed: a load whose address was loaded in the same round keeps the compiler from
    fetching the next tile's keys and values while this one's are multiplied.
    Nothing of `table` is read for keys from `end` on.
    """
    if block_tokens >= tile:
        blocks = tl.load(table + first // block_tokens, mask=first < end, other=0)
    else:
        key = first + tl.arange(0, tile)
        blocks = tl.load(table + key // block_tokens, mask=key < end, other=0)
    return blocks


@triton.jit
def key_rows(
    blocks,
    first,
    kv_head,
    kv_heads: tl.constexpr,
    block_tokens: tl.constexpr,
    head_dim: tl.constexpr,
    tile: tl.constexpr,
):
    """Where the keys `[first, first + tile)` of a sequence lie, in elements from the arena's start, `[tile]` int64;
    their values lie `block_tokens * head_dim` further. `first` is a multiple of `tile`; `blocks` are its pages.
    """
    slot = (first + tl.arange(0, tile)) % block_tokens
    if block_tokens >= tile:
        slot = first % block_tokens + tl.arange(0, tile)
    return ((blocks.to(tl.int64) * kv_heads + kv_head) * 2 * block_tokens + slot) * head_dim


@triton.jit
def attend_tile(
    query,
    pages,
    blocks,
    sums,
    total,
    highest,
    position,
    first,
    end,
    scale,
    window,
    kv_head,
    kv_heads: tl.constexpr,
    block_tokens: tl.constexpr,
    head_dim: tl.constexpr,
    width: tl.constexpr,
    tile: tl.constexpr,
    hides: tl.constexpr,
    windowed: tl.constexpr,
):
    """One round: `query` `[rows, width]` over the keys `[first, first + tile)`.

    The tile's pages are `blocks` (`blocks_of_tile`). Without `hides` every row sees every key of the tile. The bits of
    a row's result are the same either way, and do not depend on which other rows are in the tile.

    Returns:
        `sums` `[rows, width]`, `total` `[rows]` and `highest` `[rows]` with these keys taken in.
    """
    at = tl.arange(0, width)
    key = first + tl.arange(0, tile)
    rows = key_rows(blocks, first, kv_head, kv_heads, block_tokens, head_dim, tile)
    key_at = pages + rows[None, :] + at[:, None]
    value_at = pages + (rows + block_tokens * head_dim)[:, None] + at[None, :]
    if hides:
        known = (key < end) & (key >= 0)
        keys = tl.load(key_at, mask=known[None, :] & (at < head_dim)[:, None], other=0.0)
        values = tl.load(value_at, mask=known[:, None] & (at < head_dim)[None, :], other=0.0)
    elif width == head_dim:
        keys = tl.load(key_at)
        values = tl.load(value_at)
    else:
        keys = tl.load(key_at, mask=(at < head_dim)[:, None], other=0.0)
        values = tl.load(value_at, mask=(at < head_dim)[None, :], other=0.0)
    scores = tl.dot(query, keys.to(query.dtype), input_precision="ieee")
    if hides:
        seen = key[None, :] <= position[:, None]
        if windowed:
            seen = seen & (position[:, None] - key[None, :] < window)
        # Before the scale, so that what follows compiles to the same multiply-adds with and without hidden keys.
        scores = tl.where(seen, scores, float("-inf"))
    now = tl.maximum(highest, tl.max(scores, 1) * scale)
    base = tl.where(now == float("-inf"), 0.0, now) if hides else now
    weights = tl.exp2(scores * scale - base[:, None])
    fading = tl.exp2(highest - base)
    total = total * fading + tl.sum(weights, 1)
    sums = sums * fading[:, None]
    sums = tl.dot(weights.to(query.dtype), values.to(query.dtype), sums, input_precision="ieee")
    return sums, total, now
