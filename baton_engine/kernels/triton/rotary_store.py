"""Between the projection and attention on a GPU, in one pass: norms of the heads, rotation,
keys and values to their pages.

The torch twin is `reference.rotate_and_store`. A program takes some heads of one token; heads come as queries,
keys, values:

    qkv of a token   q0 q1 q2 q3 | k0 k1 | v0 v1        queries ─▶ out      keys, values ─▶ pages (rounded to 8 bits if those
                     rotated     | rotated | as is                                         are, after dividing by their scale)
"""

import torch
import triton
import triton.language as tl

from baton_engine.kernels.checks import expect
from baton_engine.kernels.ports import HeadNorms, Rotation
from baton_engine.kernels.reference import FP8_MAX
from baton_engine.kernels.triton.checks import expect_pages, expect_scales
from baton_engine.kernels.triton.early_launch import await_earlier, early_launch

_HEADS = 8
"""Heads per program: enough for whole cache lines,
few enough that a single token still spreads over multiprocessors.
"""


@triton.jit
def rotate_and_store_kernel(
    qkv,
    cos,
    sin,
    query_norm,
    key_norm,
    pages,
    slots,
    scales,
    out,
    eps,
    heads: tl.constexpr,
    kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    block_tokens: tl.constexpr,
    normed: tl.constexpr,
    scaled: tl.constexpr,
    limit: tl.constexpr,
    taken: tl.constexpr,
    half_width: tl.constexpr,
    early: tl.constexpr,
):
    """`taken` heads of one token; `half_width` is half a head rounded up to a power of two."""
    if early:
        await_earlier()
    token = tl.program_id(0).to(tl.int64)
    half: tl.constexpr = head_dim // 2
    head = tl.program_id(1) * taken + tl.arange(0, taken)
    at = tl.arange(0, half_width)
    inside = (head < heads + 2 * kv_heads)[:, None] & (at < half)[None, :]
    place = (token * (heads + 2 * kv_heads) + head)[:, None] * head_dim + at[None, :]
    first = tl.load(qkv + place, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(qkv + place + half, mask=inside, other=0.0).to(tl.float32)
    turns = (head < heads + kv_heads)[:, None]
    if normed:
        is_query = (head < heads)[:, None]
        squares = tl.sum(first * first + second * second, 1) / head_dim
        factor = tl.where(turns, tl.rsqrt(squares + eps)[:, None], 1.0)
        for_queries = tl.load(query_norm + at, mask=at < half, other=0.0).to(tl.float32)[None, :]
        for_keys = tl.load(key_norm + at, mask=at < half, other=0.0).to(tl.float32)[None, :]
        weight = tl.where(turns, tl.where(is_query, for_queries, for_keys), 1.0)
        # Rounded here as it would be if the norm were a kernel of its own.
        first = (first * factor * weight).to(qkv.dtype.element_ty).to(tl.float32)
        for_queries = tl.load(query_norm + half + at, mask=at < half, other=0.0).to(tl.float32)
        for_keys = tl.load(key_norm + half + at, mask=at < half, other=0.0).to(tl.float32)
        weight = tl.where(turns, tl.where(is_query, for_queries[None, :], for_keys[None, :]), 1.0)
        second = (second * factor * weight).to(qkv.dtype.element_ty).to(tl.float32)
    cosine = tl.load(cos + token * half + at, mask=at < half, other=1.0)[None, :]
    sine = tl.load(sin + token * half + at, mask=at < half, other=0.0)[None, :]
    cosine, sine = tl.where(turns, cosine, 1.0), tl.where(turns, sine, 0.0)
    low = first * cosine - second * sine
    high = second * cosine + first * sine

    to_out = inside & (head < heads)[:, None]
    place = (token * heads + head)[:, None] * head_dim + at[None, :]
    tl.store(out + place, low.to(out.dtype.element_ty), mask=to_out)
    tl.store(out + place + half, high.to(out.dtype.element_ty), mask=to_out)

    slot = tl.load(slots + token)
    stored = (head >= heads) & (head < heads + 2 * kv_heads)
    to_page = inside & stored[:, None] & (slot >= 0)
    kv_head = (head - heads) % kv_heads
    part = (head - heads) // kv_heads
    if scaled:
        scale = tl.load(scales + kv_head * 2 + part, mask=stored, other=1.0)[:, None]
        low = tl.minimum(tl.maximum(low / scale, -limit), limit)
        high = tl.minimum(tl.maximum(high / scale, -limit), limit)
    # 64 bits: an arena has more elements than an int32 counts.
    row = ((slot // block_tokens * kv_heads + kv_head) * 2 + part) * block_tokens
    place = (row + slot % block_tokens)[:, None] * head_dim + at[None, :]
    tl.store(pages + place, low.to(pages.dtype.element_ty), mask=to_page)
    tl.store(pages + place + half, high.to(pages.dtype.element_ty), mask=to_page)


def rotate_and_store(
    qkv: torch.Tensor,
    rotation: Rotation,
    norms: HeadNorms | None,
    pages: torch.Tensor,
    slots: torch.Tensor,
    scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `KernelSet.rotate_and_store`. A token whose slot is negative is stored nowhere.

    Args:
        qkv: `[num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]`.
        rotation: Of the tokens' positions.
        norms: Applied per head before the rotation, if the model has them.
        pages: One layer's arena, in the dtype of `qkv` or in float8_e4m3fn.
        slots: `[num_tokens]` int64.
        scales: `[num_kv_heads, 2]` float32, by which keys and values are divided before they are rounded to 8 bits;
            only with pages of float8_e4m3fn.

    Raises:
        ValueError: A shape, dtype or device does not fit.
    """
    kv_heads, _, head_dim = expect_pages(pages)
    tokens, device = slots.shape[0], pages.device
    heads = qkv.shape[-1] // head_dim - 2 * kv_heads
    expect("qkv", qkv, (tokens, (heads + 2 * kv_heads) * head_dim), qkv.dtype, device)
    expect("cos", rotation.cos, (tokens, head_dim // 2), torch.float32, device)
    expect("sin", rotation.sin, (tokens, head_dim // 2), torch.float32, device)
    expect("slots", slots, (tokens,), torch.int64, device)
    if norms is not None:
        expect("query norm", norms.query, (head_dim,), qkv.dtype, device)
        expect("key norm", norms.key, (head_dim,), qkv.dtype, device)
    expect_scales(scales, pages, qkv.dtype)
    return launch(qkv, rotation, norms, pages, slots, scales)


def launch(
    qkv: torch.Tensor,
    rotation: Rotation,
    norms: HeadNorms | None,
    pages: torch.Tensor,
    slots: torch.Tensor,
    scales: torch.Tensor | None,
) -> torch.Tensor:
    """`rotate_and_store` of what is known to fit."""
    tokens, device = slots.shape[0], pages.device
    _, kv_heads, _, block_tokens, head_dim = pages.shape
    heads = qkv.shape[1] // head_dim - 2 * kv_heads
    out = torch.empty((tokens, heads, head_dim), dtype=qkv.dtype, device=device)
    if not tokens:
        return out
    rotate_and_store_kernel[(tokens, triton.cdiv(heads + 2 * kv_heads, _HEADS))](
        qkv,
        rotation.cos,
        rotation.sin,
        qkv if norms is None else norms.query,
        qkv if norms is None else norms.key,
        pages,
        slots,
        rotation.cos if scales is None else scales,
        out,
        0.0 if norms is None else norms.eps,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        block_tokens=block_tokens,
        normed=norms is not None,
        scaled=scales is not None,
        limit=FP8_MAX,
        taken=_HEADS,
        half_width=triton.next_power_of_2(head_dim // 2),
        **early_launch(device),
        num_warps=2,
    )
    return out
