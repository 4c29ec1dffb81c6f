"""The few operations a decoder needs that are not plain matrix products, and the batch they work on.

A decoder asks for a `KernelSet`; `baton_engine.kernels.select` chooses the fastest one the machine can run. Matrix
products stay with torch, except those of few rows on a GPU (`FewRowsProducts`), and where a request is to get the
same bits in any batch (`BatchInvariant`).
"""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from baton_engine.kernels.checks import expect
from baton_engine.kernels.splits import SplitRule, Splits


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedBatch:
    """Where the tokens of one step stand, on the device. Rows are ragged: decodes of one token, prefills of a chunk.

    Attributes:
        slots: `[num_tokens]` int64, where each token's key and value go: page * block_tokens + offset in the page;
            nowhere where it is negative.
        query_starts: `[num_rows + 1]` int32, first token of each row, and the number of tokens at the end.
        context_lens: `[num_rows]` int32, tokens of each row's sequence up to and including its last one here.
        block_tables: `[num_rows, max_blocks]` int32, pages of each row's sequence in order; what lies past the context
            is never read.
        splits: How the leading rows, if they have one token each,
            are cut for kernels that ask for it (`KernelSet.split_rule`).
    """

    slots: torch.Tensor
    query_starts: torch.Tensor
    context_lens: torch.Tensor
    block_tables: torch.Tensor
    splits: Splits | None = None

    def __post_init__(self) -> None:
        """Refuses shapes and dtypes that a kernel would misread: once per step, for all of its layers."""
        rows, device = len(self.context_lens), self.slots.device
        expect("slots", self.slots, (None,), torch.int64, device)
        expect("query_starts", self.query_starts, (rows + 1,), torch.int32, device)
        expect("context_lens", self.context_lens, (rows,), torch.int32, device)
        expect("block_tables", self.block_tables, (rows, None), torch.int32, device)
        if self.splits is not None:
            self.splits.check(rows, device)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadNorms:
    """Weights `[head_dim]` of the per-head norms of queries and keys."""

    query: torch.Tensor
    key: torch.Tensor
    eps: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotation:
    """Cosines and sines of a step's positions, each `[num_tokens, head_dim / 2]` float32."""

    cos: torch.Tensor
    sin: torch.Tensor

    def __post_init__(self) -> None:
        """Refuses what a kernel would misread, once per step."""
        expect("cos", self.cos, (None, None), torch.float32, self.cos.device)
        expect("sin", self.sin, self.cos.shape, torch.float32, self.cos.device)


class KernelSet(Protocol):
    """One implementation of the operations; all tensors on one device, activations in one dtype; pages in the same, or
    in float8_e4m3fn over scales.

    `split_rule` is asked once, when a model is given its pages (`baton_engine.models.prepare`). The operations, which
    are called in every layer, may take what they are given to fit:
    weights and pages to be those that were checked then, inputs those of a step.
    """

    def split_rule(self, num_heads: int, pages: torch.Tensor) -> SplitRule | None:
        """How `paged_attention` wants the contexts of decodes to be cut; None where it does not. May compile a kernel.

        Args:
            num_heads: Query heads.
            pages: One layer's arena.

        Raises:
            ValueError: No kernel reads such pages, or no kernel for so many heads.
        """

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Scales each row of `x` `[num_tokens, hidden]` to root mean square 1, then by `weight` `[hidden]`."""

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """Adds `x` to `residual` in place and returns the norm of the sum."""

    def rotate_and_store(
        self,
        qkv: torch.Tensor,
        rotation: Rotation,
        norms: HeadNorms | None,
        pages: torch.Tensor,
        slots: torch.Tensor,
        scales: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Rotates queries and keys, and writes keys and values into their pages.

        Args:
            qkv: `[num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]`: queries, keys, values.
            rotation: Of the tokens' positions.
            norms: Applied per head before the rotation, if the model has them.
            pages: One layer's arena, `[num_blocks, num_kv_heads, 2, block_tokens, head_dim]`.
            slots: As in `PagedBatch`.
            scales: `[num_kv_heads, 2]` float32, with pages of float8_e4m3fn: what keys and values are divided by before
                they are rounded.

        Returns:
            The queries, `[num_tokens, num_heads, head_dim]`.
        """

    def paged_attention(
        self,
        query: torch.Tensor,
        pages: torch.Tensor,
        batch: PagedBatch,
        scale: float,
        window: int | None,
        scales: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attends causally over the pages: prefill chunks and decodes of the whole batch in one call.

        Args:
            query: `[num_tokens, num_heads, head_dim]`.
            pages: One layer's arena; the step's own keys and values are already in it.
            batch: Rows and their pages.
            scale: Multiplies the products of queries and keys.
            window: How many tokens back a token attends, itself included; None for all.
            scales: Those that keys and values were stored over.

        Returns:
            `[num_tokens, num_heads, head_dim]`.
        """

    def silu_mul(self, x: torch.Tensor) -> torch.Tensor:
        """Of `x` `[num_tokens, 2 * width]`: silu of the first half times the second."""


class FewRowsProduct(Protocol):
    """A product of few rows with one matrix."""

    @property
    def most_rows(self) -> int:
        """Rows that it multiplies."""

    def __call__(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Maps `[num_tokens, in]` to `[num_tokens, out]`: to `out`, rounded to its dtype, where that is given."""


@runtime_checkable
class FewRowsProducts(KernelSet, Protocol):
    """A `KernelSet` that multiplies few rows itself, since a step with a library's products takes longer."""

    def few_rows_product(
        self, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> FewRowsProduct | None:
        """The product with `weight` `[out, in]`, plus `bias` `[out]`; None where that is left to a library."""


@runtime_checkable
class BatchInvariant(KernelSet, Protocol):
    """A `KernelSet` that gives a token the same bits whatever is computed with it, and in whatever chunks its prompt
    was cut: also in the matrix products, which are its own.
    """

    def linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        out_dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """`x @ weight.T + bias` of `x` `[num_tokens, in]`, `weight` `[out, in]` and `bias` `[out]`,
        of `out_dtype` or else that of `x`.
        """
