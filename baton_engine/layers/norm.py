"""Root-mean-square normalisation, alone or fused with the residual addition before it."""

from dataclasses import dataclass

import torch

from baton_engine.kernels.ports import KernelSet


@dataclass(frozen=True, slots=True, kw_only=True)
class RmsNorm:
    """Scales rows to root mean square 1, then by `weight` `[hidden]`."""

    weight: torch.Tensor
    eps: float
    kernels: KernelSet

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The norm of `x` `[num_tokens, hidden]`."""
        return self.kernels.rms_norm(x, self.weight, self.eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Adds `x` to `residual` in place and returns the norm of the sum."""
        return self.kernels.add_rms_norm(x, residual, self.weight, self.eps)
