"""Matrix products with explicit weights: as torch stores them, or repacked for the CPU, where `pack` chooses; and such whose rows do not
depend on how many there are, for engines that give a request the same bits in any batch.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional

from baton_engine.kernels.cpu.matmul import BFloat16Panels, Int8Panels, streams_bfloat16
from baton_engine.kernels.ports import BatchInvariant, KernelSet

Projection = Callable[[torch.Tensor], torch.Tensor]
"""Maps `[num_tokens, in]` to `[num_tokens, out]`."""

_PACKED_FOR_ROWS = 32
_PACKABLE = (torch.float32, torch.bfloat16)


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """`x @ weight.T + bias`; `weight` is `[out, in]`, as checkpoints store it."""

    weight: torch.Tensor
    bias: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Maps `[num_tokens, in]` to `[num_tokens, out]`."""
        return functional.linear(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedLinear:
    """A `Linear` whose weight lies in oneDNN's own blocked order.

    A plain weight is repacked inside every call once there are a few rows, which makes a decode batch of 8 nearly three
    times as slow as one of 1. `weight` is opaque: only this product understands it.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Maps `[num_tokens, in]` to `[num_tokens, out]`."""
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self.weight, self.bias, "none", [], ""
        )
        return product


def pack(linear: Linear, quantization: str = "none") -> Projection:
    """The fastest form of `linear` on its device; a packed one holds a copy of the weight and no more of the original.

    Args:
        linear: On the CPU its weight may be bfloat16 although float32 is computed in, where `streams_bfloat16()`.
        quantization: `none`, or `int8` where `multiplies_int8()`.
    """
    weight = linear.weight
    if quantization == "int8":
        return Int8Panels.pack(weight, linear.bias)
    if weight.device.type != "cpu" or weight.dtype not in _PACKABLE:
        return linear
    if weight.dtype == torch.bfloat16 and streams_bfloat16():
        return BFloat16Panels.pack(weight, linear.bias)
    if not _can_pack(weight.dtype):
        return linear
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_FOR_ROWS)
    return PackedLinear(weight=packed, bias=linear.bias)


def _can_pack(dtype: torch.dtype) -> bool:
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    return dtype != torch.bfloat16 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


ROWS = 16
"""Rows of each product: oneDNN and MKL choose their order of summation by this number, and by none of what stands in the rows
(thinking-machines' batch-invariant operators). Fewer would read the weights more often for a prompt, more
compute more zeros for a decode.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedRows:
    """A product taken `ROWS` rows at a time, the last ones filled up with zeros."""

    product: Projection

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Maps `[num_tokens, in]` to `[num_tokens, out]`."""
        rows = x.shape[0]
        filled = functional.pad(x, (0, 0, 0, -rows % ROWS))
        firsts = range(0, max(1, filled.shape[0]), ROWS)
        return torch.cat([self.product(filled[i : i + ROWS]) for i in firsts])[:rows]


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelRows:
    """A product that a kernel set takes row by row, by itself."""

    linear: Linear
    kernels: BatchInvariant

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Maps `[num_tokens, in]` to `[num_tokens, out]`."""
        return self.kernels.linear(x, self.linear.weight, self.linear.bias)


def pack_fixed(linear: Linear, quantization: str, kernels: KernelSet) -> Projection:
    """The fastest form of `linear` in which a row's result does not depend on the other rows; see `pack`.

    Args:
        linear: As `pack` takes it.
        quantization: The same.
        kernels: Multiply themselves where they are `BatchInvariant`.
    """
    if isinstance(kernels, BatchInvariant):
        return KernelRows(linear=linear, kernels=kernels)
    return fix_rows(pack(linear, quantization))


def fix_rows(product: Projection) -> Projection:
    """`product`, so that a row's result does not depend on the other rows. Products over panels are like that by themselves."""
    if isinstance(product, BFloat16Panels | Int8Panels):
        return product
    return FixedRows(product=product)
