"""The few operations a decoder needs that are not plain matrix products, and the batch they work on.

A decoder asks for a `KernelSet`; `baton_engine.kernels.select` chooses the fastest one the machine can run. Matrix products stay
with torch, except where a request is to get the same bits in any batch (`BatchInvariant`).
"""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from baton_engine.kernels.splits import SplitRule, Splits


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedBatch:
    """Where the tokens of one step stand, on the device. Rows are ragged: decodes of one token, prefills of a chunk.

    Attributes:
        slots: `[num_tokens]` int64, where each token's key and value go: page * block_tokens + offset in the page; nowhere
            where it is negative.
        query_starts: `[num_rows + 1]` int32, first token of each row, and the number of tokens at the end.
        context_lens: `[num_rows]` int32, tokens of each row's sequence up to and including its last one here.
        block_tables: `[num_rows, max_blocks]` int32, pages of each row's sequence in order; what lies past the context is
            never read.
        splits: How the leading rows, if they have one token each, are cut for kernels that ask for it (`KernelSet.split_rule`).
    """

    slots: torch.Tensor
    query_starts: torch.Tensor
    context_lens: torch.Tensor
    block_tables: torch.Tensor
    splits: Splits | None = None

    def __post_init__(self) -> None:
        """Refuses shapes and dtypes that a kernel would misread."""
        rows = self.context_lens.shape[0]
        _expect("slots", self.slots, torch.int64, (None,))
        _expect("query_starts", self.query_starts, torch.int32, (rows + 1,))
        _expect("context_lens", self.context_lens, torch.int32, (rows,))
        _expect("block_tables", self.block_tables, torch.int32, (rows, None))


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


class KernelSet(Protocol):
    """One implementation of the operations; all tensors on one device, activations in one dtype; pages in the same, or in
    float8_e4m3fn over scales."""

    def split_rule(self, num_heads: int, pages: torch.Tensor) -> SplitRule | None:
        """How `paged_attention` wants the contexts of decodes to be cut; None where it does not. May compile a kernel.

        Args:
            num_heads: Query heads.
            pages: One layer's arena.
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
            scales: `[num_kv_heads, 2]` float32, with pages of float8_e4m3fn: what keys and values are divided by before they
                are rounded.

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


@runtime_checkable
class BatchInvariant(KernelSet, Protocol):
    """A `KernelSet` that gives a token the same bits whatever is computed with it, and in whatever chunks its prompt was cut: also
    in the matrix products, which are its own.
    """

    def linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        out_dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """`x @ weight.T + bias` of `x` `[num_tokens, in]`, `weight` `[out, in]` and `bias` `[out]`, of `out_dtype` or else that of `x`."""


def _expect(
    name: str, tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int | None, ...]
) -> None:
    fits = tensor.dim() == len(shape) and all(
        want is None or want == have for want, have in zip(shape, tensor.shape, strict=False)
    )
    if not fits or tensor.dtype != dtype or not tensor.is_contiguous():
        raise ValueError(
            f"{name} must be contiguous {dtype} of shape {shape}, "
            f"not {tensor.dtype} of shape {tuple(tensor.shape)}"
        )
