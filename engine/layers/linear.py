"""A matrix product with explicit weights."""

from dataclasses import dataclass

import torch
from torch.nn import functional


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """`x @ weight.T + bias`; `weight` is `[out, in]`, as checkpoints store it."""

    weight: torch.Tensor
    bias: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Maps `[num_tokens, in]` to `[num_tokens, out]`."""
        return functional.linear(x, self.weight, self.bias)
