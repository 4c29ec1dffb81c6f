"""The attending half of a decoder layer, over paged KV."""

from dataclasses import dataclass

import torch

from baton_engine.kernels.ports import HeadNorms, KernelSet, PagedBatch, Rotation
from baton_engine.layers.linear import Projection


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedSelfAttention:
    """Grouped-query attention with rotary positions.

    Attributes:
        qkv: Queries, keys and values in one matrix, `[(num_heads + 2 * num_kv_heads) * head_dim, hidden]`.
        output: Back to the hidden size.
        norms: Per-head norms, where the model has them.
        scale: Of the products of queries and keys.
        window: Sliding window in tokens; None for none.
        scales: Where pages hold 8 bits: what keys and values are divided by, `[num_kv_heads, 2]` float32.
    """

    qkv: Projection
    output: Projection
    norms: HeadNorms | None
    scale: float
    window: int | None
    kernels: KernelSet
    scales: torch.Tensor | None = None

    def __call__(
        self, x: torch.Tensor, rotation: Rotation, pages: torch.Tensor, batch: PagedBatch
    ) -> torch.Tensor:
        """Writes the tokens' keys and values into `pages`, then attends.

        Args:
            x: `[num_tokens, hidden]`.
            rotation: Of the tokens' positions.
            pages: This layer's arena, `[num_blocks, num_kv_heads, 2, block_tokens, head_dim]`.
            batch: Rows and their pages.

        Returns:
            `[num_tokens, hidden]`.
        """
        query = self.kernels.rotate_and_store(
            self.qkv(x), rotation, self.norms, pages, batch.slots, self.scales
        )
        attended = self.kernels.paged_attention(
            query, pages, batch, self.scale, self.window, self.scales
        )
        return self.output(attended.flatten(1))
