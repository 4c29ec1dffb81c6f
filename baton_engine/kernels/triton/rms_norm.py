"""Root-mean-square norm on a GPU, alone or with the residual addition before it: one program per token,
one pass over memory.

The torch twin is `reference.rms_norm`. A token's result does not depend on how many others there are.
"""

import torch
import triton
import triton.language as tl

from baton_engine.kernels.checks import expect
from baton_engine.kernels.triton.early_launch import await_earlier, early_launch


@triton.jit
def rms_norm_kernel(
    x,
    residual,
    weight,
    out,
    hidden,
    eps,
    adds: tl.constexpr,
    width: tl.constexpr,
    early: tl.constexpr,
):
    """`width` is `hidden` rounded up to a power of two; with `adds`, `residual` takes the sum."""
    if early:
        await_earlier()
    row = tl.program_id(0).to(tl.int64) * hidden
    at = tl.arange(0, width)
    inside = at < hidden
    values = tl.load(x + row + at, mask=inside, other=0.0)
    if adds:
        before = tl.load(residual + row + at, mask=inside, other=0.0)
        # Rounded before the norm, as the residual that the next layer reads is.
        values = (values.to(tl.float32) + before.to(tl.float32)).to(before.dtype)
        tl.store(residual + row + at, values, mask=inside)
    wide = values.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / hidden + eps)
    weights = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row + at, (wide * scale * weights).to(out.dtype.element_ty), mask=inside)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Scales each row of `x` `[num_tokens, hidden]` to root mean square 1,
    then by `weight` `[hidden]` of the same dtype.

    Raises:
        ValueError: A shape, dtype or device does not fit.
    """
    _expect_norm(x, weight)
    return launch(x, None, weight, eps)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """Adds `x` to `residual`, of the same shape, in place and returns the norm of the sum. See `rms_norm`."""
    expect("residual", residual, x.shape, x.dtype, x.device)
    _expect_norm(x, weight)
    return launch(x, residual, weight, eps)


def _expect_norm(x: torch.Tensor, weight: torch.Tensor) -> None:
    expect("x", x, (None, None), x.dtype, x.device)
    expect("weight", weight, (x.shape[1],), x.dtype, x.device)


def launch(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """`rms_norm`, or with `residual` `add_rms_norm`, of what is known to fit."""
    tokens, hidden = x.shape
    out = torch.empty_like(x)
    if not tokens:
        return out
    width = triton.next_power_of_2(hidden)
    rms_norm_kernel[(tokens,)](
        x,
        x if residual is None else residual,
        weight,
        out,
        hidden,
        eps,
        adds=residual is not None,
        width=width,
        **early_launch(x.device),
        num_warps=min(16, max(1, width // 512)),
    )
    return out
