"""The gate of a feed-forward layer on a GPU: silu of one half times the other, in one pass over memory.

The torch twin is `reference.silu_mul`.
"""

import torch
import triton
import triton.language as tl

from baton_engine.kernels.checks import expect
from baton_engine.kernels.triton.early_launch import await_earlier, early_launch

_TILE = 1024


@triton.jit
def silu_mul_kernel(x, out, width, tile: tl.constexpr, early: tl.constexpr):
    """One tile of one token."""
    if early:
        await_earlier()
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * tile + tl.arange(0, tile)
    inside = at < width
    gate = tl.load(x + token * 2 * width + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + token * 2 * width + width + at, mask=inside, other=0.0).to(tl.float32)
    product = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + token * width + at, product.to(out.dtype.element_ty), mask=inside)


def silu_mul(x: torch.Tensor) -> torch.Tensor:
    """Of `x` `[num_tokens, 2 * width]`: silu of the first half times the second, `[num_tokens, width]`.

    Raises:
        ValueError: `x` has another shape or does not lie in one piece.
    """
    if x.dim() != 2 or x.shape[1] % 2:
        raise ValueError(f"x must be [num_tokens, 2 * width], not {list(x.shape)}")
    expect("x", x, x.shape, x.dtype, x.device)
    return launch(x)


def launch(x: torch.Tensor) -> torch.Tensor:
    """`silu_mul` of what is known to fit."""
    tokens, width = x.shape[0], x.shape[1] // 2
    out = torch.empty((tokens, width), dtype=x.dtype, device=x.device)
    if tokens:
        grid = (tokens, triton.cdiv(width, _TILE))
        silu_mul_kernel[grid](x, out, width, tile=_TILE, **early_launch(x.device))
    return out
