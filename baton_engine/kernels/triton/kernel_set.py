"""The GPU's kernels as a `KernelSet`: Triton for everything but matrix products of many rows,
or for these too where bits must not depend on the batch.

What is called in every layer launches without looking at what it was given (`KernelSet`); who calls a kernel by itself
takes the function of its module that does.

Imported by `baton_engine.kernels.select` alone, where Triton is installed.
Under `TRITON_INTERPRET=1` the same code runs on the CPU.
"""

from dataclasses import dataclass

import torch

from baton_engine.kernels.ports import FewRowsProduct, HeadNorms, PagedBatch, Rotation
from baton_engine.kernels.splits import SplitRule
from baton_engine.kernels.triton import (
    decode_attention,
    few_rows_matmul,
    prefill_attention,
    rms_norm,
    rotary_store,
    row_matmul,
    silu_mul,
)
from baton_engine.kernels.triton.checks import expect_heads, expect_pages

SUPPORTED_DTYPES = (torch.float16, torch.bfloat16)
"""What the matrix instructions take; float32 is served by torch."""

_TURNS = 2
"""Of a multiprocessor's programs in a step. On an H200 6 % (64 rows of 1,024 tokens) to 12 % (8 of 8,192) faster than
one turn; four are slower again.
"""
_PROGRAMS_INTERPRETED = 2
"""Per multiprocessor, where there is none to hold them."""


class TritonKernels:
    """A `KernelSet` for one GPU.

    Args:
        multiprocessors: Of the GPU.
    """

    def __init__(self, multiprocessors: int) -> None:
        self._multiprocessors = multiprocessors

    def split_rule(self, num_heads: int, pages: torch.Tensor) -> SplitRule | None:
        """See `KernelSet.split_rule`: twice as many pieces as the GPU works on at once, so that those that end early
        are followed by others, and no more of a row than are soon added up, unless fewer left multiprocessors idle.
        """
        expect_pages(pages)
        expect_heads(num_heads, pages)
        kv_heads = pages.shape[1]
        at_once = _PROGRAMS_INTERPRETED
        if pages.device.type == "cuda":
            at_once = decode_attention.programs_per_multiprocessor(num_heads, pages)
        return SplitRule(
            spread=max(1, _TURNS * self._multiprocessors * at_once // kv_heads),
            most_of_row=max(
                2 * decode_attention.PIECES_AT_ONCE, -(-self._multiprocessors // kv_heads)
            ),
        )

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """See `KernelSet.rms_norm`."""
        return rms_norm.launch(x, None, weight, eps)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """See `KernelSet.add_rms_norm`."""
        return rms_norm.launch(x, residual, weight, eps)

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
        return rotary_store.launch(qkv, rotation, norms, pages, slots, scales)

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
            return prefill_attention.launch(query, pages, batch, scale, window, scales)
        decodes = batch.splits.num_decodes
        out = decode_attention.launch(query, pages, batch, batch.splits, scale, window, scales)
        if decodes < batch.context_lens.shape[0]:
            prefill_attention.launch(
                query, pages, batch, scale, window, scales, first_row=decodes, out=out
            )
        return out

    def silu_mul(self, x: torch.Tensor) -> torch.Tensor:
        """See `KernelSet.silu_mul`."""
        return silu_mul.launch(x)

    def few_rows_product(
        self, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> FewRowsProduct | None:
        """See `FewRowsProducts.few_rows_product`."""
        if not few_rows_matmul.is_faster(weight):
            return None
        return TritonFewRows(
            weight=weight,
            bias=bias,
            arrived=few_rows_matmul.counters(weight),
            multiprocessors=self._multiprocessors,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TritonFewRows:
    """A `FewRowsProduct`."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    arrived: torch.Tensor
    multiprocessors: int
    most_rows: int = few_rows_matmul.MOST_ROWS

    def __call__(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """See `FewRowsProduct`."""
        return few_rows_matmul.launch(
            x, self.weight, self.bias, self.arrived, self.multiprocessors, out
        )


class InvariantTritonKernels(TritonKernels):
    """A `BatchInvariant` for one GPU: every token goes through the prompts' attention, which takes its keys in the same
    order whether it was decoded or computed with others, and is one loop for all tiles.
    """

    def __init__(self) -> None:
        super().__init__(multiprocessors=1)

    def split_rule(self, num_heads: int, pages: torch.Tensor) -> None:
        """None: contexts are read whole, so that a token that is decoded is summed like one of a prompt."""
        expect_pages(pages)
        expect_heads(num_heads, pages)

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
        return prefill_attention.launch(query, pages, batch, scale, window, scales, uniform=True)

    def linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        out_dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """See `BatchInvariant.linear`."""
        return row_matmul.launch(x, weight, bias, out_dtype)
