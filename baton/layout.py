"""The shape of KV pages, as two workers must agree on it before one writes into the other's memory.

A page holds `block_tokens` tokens of one sequence. Memory is one arena per layer, head-major:
`[num_blocks, num_kv_heads, 2, block_tokens, head_dim]` (2: key, value), so that a rank with fewer heads reads a
contiguous slice of each page. The layers' arenas lie one after the other in one region.
"""

import hashlib
from dataclasses import dataclass, fields

from baton.ids import LayerName

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class KvLayout:
    """What fixes the bytes of a page.

    Attributes:
        model_fingerprint: Digest of the model's config and weights' names and sizes (engine.models.config).
        dtype: `float32`, `float16` or `bfloat16`.
        block_tokens: Tokens per page, a power of two from 1 to 256.
        num_kv_heads: Per rank.
        head_dim: Elements per head.
        layers: Names in computing order. Peers pair layers by name, never by position.
        tp_size: Tensor-parallel ranks the heads are spread over.
    """

    model_fingerprint: str
    dtype: str
    block_tokens: int
    num_kv_heads: int
    head_dim: int
    layers: tuple[LayerName, ...]
    tp_size: int = 1

    @property
    def page_layer_bytes(self) -> int:
        """Bytes of one page in one layer's arena."""
        elements = self.num_kv_heads * 2 * self.block_tokens * self.head_dim
        return elements * DTYPE_BYTES[self.dtype]

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all layers."""
        return self.page_layer_bytes * len(self.layers)

    def region_bytes(self, num_blocks: int) -> int:
        """Bytes of the whole region of `num_blocks` pages."""
        return self.page_bytes * num_blocks

    def layer_offset(self, layer_index: int, num_blocks: int) -> int:
        """Where the arena of the layer at `layer_index` begins in the region, in bytes."""
        return layer_index * self.page_layer_bytes * num_blocks

    def num_blocks_for(self, tokens: int) -> int:
        """Pages that `tokens` tokens take."""
        return -(-tokens // self.block_tokens)

    def digest(self) -> str:
        """A short hash that is equal exactly for equal layouts."""
        text = repr([(f.name, getattr(self, f.name)) for f in fields(self)])
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    def difference(self, other: "KvLayout") -> str | None:
        """Names the first field in which `other` differs and both values, or None when the layouts agree."""
        for field in fields(self):
            mine, theirs = getattr(self, field.name), getattr(other, field.name)
            if mine != theirs:
                return f"{field.name}: {mine!r} here, {theirs!r} there"
        return None
