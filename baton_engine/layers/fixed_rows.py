"""Matrix products whose rows do not depend on how many there are: for engines that give a request the same bits in any batch."""

from dataclasses import dataclass

import torch
from torch.nn import functional

from baton_engine.kernels.cpu.matmul import BFloat16Panels, Int8Panels
from baton_engine.kernels.ports import BatchInvariant, KernelSet
from baton_engine.layers.linear import Linear, Projection, pack

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
