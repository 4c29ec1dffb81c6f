"""Corrects how vLLM 0.32 applies adapters on a CPU: a row without an adapter has the index -1, by which its kernels in
torch read the last adapter's matrices as soon as any row of the step has one. Named to vLLM by `baton_vllm.build`.
"""

from typing import Any

import torch
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU


class MaskedPunicaWrapper(PunicaWrapperCPU):  # type: ignore[misc]
    """vLLM's, with nothing to add for rows that have no adapter. `x` is `[..., features]` in each method."""

    def add_lora_linear(self, y: torch.Tensor, x: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        """See vLLM."""
        super().add_lora_linear(y, _masked(x, self.token_lora_indices), *args, **kwargs)

    def add_lora_embedding(
        self, y: torch.Tensor, x: torch.Tensor, *args: Any, **kwargs: Any
    ) -> None:
        """See vLLM."""
        super().add_lora_embedding(y, _masked(x, self.token_lora_indices), *args, **kwargs)

    def add_lora_logits(self, y: torch.Tensor, x: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        """See vLLM."""
        super().add_lora_logits(y, _masked(x, self.sampler_indices), *args, **kwargs)


def _masked(x: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """`x` with zeros in the rows of no adapter."""
    return x.masked_fill((indices < 0).view(*x.shape[:-1], 1), 0)
