"""The GPU's kernels as a `KernelSet`: Triton for everything but matrix products, or for these too where bits must not depend on the batch.

Imported by `baton_engine.kernels.select` alone, where Triton is installed. Under `TRITON_INTERPRET=1` the same code runs on the CPU.
"""

import torch

from baton_engine.kernels.ports import HeadNorms, PagedBatch, Rotation
from baton_engine.kernels.splits import SplitRule
from baton_engine.kernels.triton import rms_norm, rotary_store, row_matmul, silu_mul
from baton_engine.kernels.triton.decode_attention import decode_attention
from baton_engine.kernels.triton.prefill_attention import prefill_attention

SUPPORTED_DTYPES = (torch.float16, torch.bfloat16)
"""What the matrix instructions take; float32 is served by torch."""

_PROGRAMS_PER_MULTIPROCESSOR = 4


class TritonKernels:
    """A `KernelSet` for one GPU.

    Args:
        multiprocessors: Of the GPU.
    """

    def __init__(self, multiprocessors: int) -> None:
        self._programs = multiprocessors * _PROGRAMS_PER_MULTIPROCESSOR

    def split_rule(self, num_kv_heads: int) -> SplitRule | None:
        """See `KernelSet.split_rule`: as many pieces as fill the GPU."""
        return SplitRule(spread=max(1, self._programs // num_kv_heads))

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """See `KernelSet.rms_norm`."""
        return rms_norm.rms_norm(x, weight, eps)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """See `KernelSet.add_rms_norm`."""
        return rms_norm.add_rms_norm(x, residual, weight, eps)

    def rotate_and_store(
        self,
        qkv: torch.Tensor,
        rotation: Rotation,
        norms: HeadNorms | None,
        pages: torch.Tensor,
        slots: torch.Tensor,
        scales: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `KernelSet.rotate_and_store`."""
        return rotary_store.rotate_and_store(qkv, rotation, norms, pages, slots, scales)

    def paged_attention(
        self,
        query: torch.Tensor,
        pages: torch.Tensor,
        batch: PagedBatch,
        scale: float,
        window: int | None,
        scales: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `KernelSet.paged_attention`."""
        if batch.splits is None:
            return prefill_attention(query, pages, batch, scale, window, scales)
        decodes = batch.splits.num_decodes
        out = decode_attention(query, pages, batch, batch.splits, scale, window, scales)
        if decodes < batch.context_lens.shape[0]:
            prefill_attention(
                query, pages, batch, scale, window, scales, first_row=decodes, out=out
            )
        return out

    def silu_mul(self, x: torch.Tensor) -> torch.Tensor:
        """See `KernelSet.silu_mul`."""
        return silu_mul.silu_mul(x)


class InvariantTritonKernels(TritonKernels):
    """A `BatchInvariant` for one GPU: every token goes through the prompts' attention, which takes its keys in the same order whether
    it was decoded or computed with others, and is one loop for all tiles.
    """

    def __init__(self) -> None:
        super().__init__(multiprocessors=1)

    def split_rule(self, num_kv_heads: int) -> None:
        """None: contexts are read whole, so that a token that is decoded is summed like one of a prompt."""

    def paged_attention(
        self,
        query: torch.Tensor,
        pages: torch.Tensor,
        batch: PagedBatch,
        scale: float,
        window: int | None,
        scales: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `KernelSet.paged_attention`."""
        return prefill_attention(query, pages, batch, scale, window, scales, uniform=True)

    def linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        out_dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """See `BatchInvariant.linear`."""
        return row_matmul.row_matmul(x, weight, bias, out_dtype)
