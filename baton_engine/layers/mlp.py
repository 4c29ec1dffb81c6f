"""The gated feed-forward half of a decoder layer."""

from dataclasses import dataclass

import torch

from baton_engine.kernels.ports import KernelSet
from baton_engine.layers.linear import Projection


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedMlp:
    """`down(silu(gate(x)) * up(x))`, with gate and up fused into one matrix `[2 * intermediate, hidden]`."""

    gate_up: Projection
    down: Projection
    kernels: KernelSet

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Maps `[num_tokens, hidden]` to the same shape."""
        return self.down(self.kernels.silu_mul(self.gate_up(x)))
