"""Matrix products with explicit weights: as torch stores them, or repacked for the CPU, where `pack` chooses; such
whose rows do not depend on how many there are, for engines that give a request the same bits in any batch; and the
output head's, which are not rounded to the dtype of the weights.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch.nn import functional

from baton_engine.kernels.cpu.matmul import (
    BFloat16Panels,
    Int8Panels,
    multiplies_bfloat16,
    reads_bfloat16,
)
from baton_engine.kernels.cpu.product_choice import FEW_TOKENS, IN_PANELS, Bfloat16Product
from baton_engine.kernels.ports import (
    BatchInvariant,
    FewRowsProduct,
    FewRowsProducts,
    KernelSet,
)

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


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedProduct:
    """Two forms of one matrix: steps of up to `most_rows` tokens read `few`, longer ones multiply by `many`."""

    few: Projection
    many: Projection
    most_rows: int = FEW_TOKENS

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Maps `[num_tokens, in]` to `[num_tokens, out]`."""
        return self.few(x) if x.shape[0] <= self.most_rows else self.many(x)


def pack(
    linear: Linear,
    quantization: str = "none",
    product: Bfloat16Product = Bfloat16Product.ONEDNN,
    kernels: KernelSet | None = None,
) -> Projection:
    """The fastest form of `linear` on its device; a packed one holds a copy of the weight and no more of the original.

    Args:
        linear: On the CPU its weight may be bfloat16 although float32 is computed in,
            where `product` is one of `IN_PANELS`.
        quantization: `none`, or `int8` where `multiplies_int8()`.
        product: Of bfloat16 weights on a CPU.
        kernels: Multiply few rows themselves where they are `FewRowsProducts`.
    """
    weight = linear.weight
    by_kernel = _few_rows(weight, linear.bias, kernels)
    if by_kernel is not None:
        return MixedProduct(few=by_kernel, many=linear, most_rows=by_kernel.most_rows)
    if quantization == "int8":
        return Int8Panels.pack(weight, linear.bias)
    if weight.device.type != "cpu" or weight.dtype not in _PACKABLE:
        return linear
    if weight.dtype == torch.bfloat16 and product in IN_PANELS:
        return BFloat16Panels.pack(
            weight,
            linear.bias,
            pairs=product.in_pairs,
            compressed=product.is_compressed,
            tiles_above=FEW_TOKENS if product is Bfloat16Product.AMX else None,
        )
    if weight.dtype == torch.bfloat16 and product is Bfloat16Product.MIXED:
        few = BFloat16Panels.pack(weight, linear.bias, pairs=multiplies_bfloat16(), compressed=True)
        return MixedProduct(few=few, many=pack(linear, product=Bfloat16Product.ONEDNN))
    if not _can_pack(weight.dtype):
        return linear
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_FOR_ROWS)
    return PackedLinear(weight=packed, bias=linear.bias)


def _few_rows(
    weight: torch.Tensor, bias: torch.Tensor | None, kernels: KernelSet | None
) -> FewRowsProduct | None:
    if not isinstance(kernels, FewRowsProducts):
        return None
    return kernels.few_rows_product(weight, bias)


def _can_pack(dtype: torch.dtype) -> bool:
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    return dtype != torch.bfloat16 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


ROWS = 16
"""Rows of each product: oneDNN and MKL choose their order of summation by this number, and by none of what stands in
the rows (thinking-machines' batch-invariant operators). Fewer would read the weights more often for a prompt, more
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
    out_dtype: torch.dtype | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Maps `[num_tokens, in]` to `[num_tokens, out]`, of `out_dtype` or else of the dtype of `x`."""
        return self.kernels.linear(x, self.linear.weight, self.linear.bias, self.out_dtype)


def pack_fixed(
    linear: Linear,
    quantization: str,
    kernels: KernelSet,
    product: Bfloat16Product = Bfloat16Product.ONEDNN,
) -> Projection:
    """The fastest form of `linear` in which a row's result does not depend on the other rows; see `pack`.

    Args:
        linear: As `pack` takes it.
        quantization: The same.
        kernels: Multiply themselves where they are `BatchInvariant`.
        product: As `pack` takes it.
    """
    if isinstance(kernels, BatchInvariant):
        return KernelRows(linear=linear, kernels=kernels)
    return fix_rows(pack(linear, quantization, product))


def fix_rows(product: Projection) -> Projection:
    """`product`, so that a row's result does not depend on the other rows.
    Products over panels are like that by themselves, but for AMX's tiles, which then multiply any number of rows.
    """
    if isinstance(product, BFloat16Panels) and product.tiles_above is not None:
        return replace(product, tiles_above=0)
    if isinstance(product, BFloat16Panels | Int8Panels):
        return product
    return FixedRows(product=product)


@dataclass(frozen=True, slots=True, kw_only=True)
class WideProduct:
    """A product that gives float32 because it is given float32: widening a row is exact."""

    product: Projection

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Maps `[num_tokens, in]` to `[num_tokens, out]` float32."""
        return self.product(x.float())


@dataclass(frozen=True, slots=True, kw_only=True)
class WideOutput:
    """A GPU's product of 16 bits that is summed, and given, in float32; of few rows by `few`, where there is one."""

    weight: torch.Tensor
    few: FewRowsProduct | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Maps `[num_tokens, in]` to `[num_tokens, out]` float32."""
        shape = x.shape[0], self.weight.shape[0]
        return self.into(x, torch.empty(shape, dtype=torch.float32, device=x.device))

    def into(self, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """The same, written to `out`, which it returns."""
        if self.few is not None and x.shape[0] <= self.few.most_rows:
            return self.few(x, out)
        return torch.mm(x, self.weight.t(), out_dtype=torch.float32, out=out)


def pack_head(
    weight: torch.Tensor,
    quantization: str,
    kernels: KernelSet,
    product: Bfloat16Product = Bfloat16Product.ONEDNN,
    *,
    fixed_rows: bool,
) -> Projection:
    """The fastest product with the output head's `weight` `[vocab, hidden]` that sums in float32 and gives float32.

    Logits that are rounded to bfloat16, which has 8 significant bits, are equal to the bit again and again: which of
    the two best is drawn then depends on the last bit of what the layers computed.

    Args:
        weight: As `pack` takes it.
        quantization: The same.
        kernels: As `pack_fixed` takes them.
        product: Of the model's bfloat16 weights on a CPU: where they are compressed, these are, too.
        fixed_rows: Whether a row's result must not depend on the other rows.
    """
    linear = Linear(weight=weight)
    if fixed_rows and isinstance(kernels, BatchInvariant):
        return KernelRows(linear=linear, kernels=kernels, out_dtype=torch.float32)
    if weight.device.type != "cpu" and weight.dtype != torch.float32:
        if fixed_rows:
            return fix_rows(WideOutput(weight=weight))
        return WideOutput(weight=weight, few=_few_rows(weight, None, kernels))
    if weight.dtype == torch.bfloat16 and quantization == "none" and reads_bfloat16():
        return BFloat16Panels.pack(weight, None, compressed=product.is_compressed).wide
    if quantization == "none":
        linear = Linear(weight=weight.float())  # no product here gives more bits than it is given
    held = pack_fixed(linear, quantization, kernels) if fixed_rows else pack(linear, quantization)
    return WideProduct(product=held)
