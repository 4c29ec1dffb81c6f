"""The memory that KV pages live in: one arena per layer, laid over bytes that somebody else owns.

The bytes come from `ArenaMemory`, in shared memory where pages are handed from process to process; nothing is copied.
"""

from collections.abc import Sequence

import torch

from baton.ids import BlockId
from baton.layout import KvLayout
from engine.kernels.reference import copy_pages

_DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}


class KvArena:
    """Torch views over the KV region of one worker.

    Args:
        layout: Shape of the pages.
        num_blocks: Pages per layer.
        buffer: At least `layout.region_bytes(num_blocks)` writable bytes; must outlive the arena.

    Raises:
        ValueError: The buffer is too small or read-only.
    """

    def __init__(self, layout: KvLayout, num_blocks: int, buffer: memoryview) -> None:
        if buffer.readonly or buffer.nbytes < layout.region_bytes(num_blocks):
            raise ValueError(
                f"an arena of {num_blocks} pages needs {layout.region_bytes(num_blocks)} writable bytes, "
                f"not {buffer.nbytes} {'read-only' if buffer.readonly else 'writable'} ones"
            )
        self.layout = layout
        self.num_blocks = num_blocks
        shape = (num_blocks, layout.num_kv_heads, 2, layout.block_tokens, layout.head_dim)
        elements = num_blocks * layout.num_kv_heads * 2 * layout.block_tokens * layout.head_dim
        self._layers = tuple(
            torch.frombuffer(
                buffer,
                dtype=_DTYPES[layout.dtype],
                count=elements,
                offset=layout.layer_offset(index, num_blocks),
            ).view(shape)
            for index in range(len(layout.layers))
        )

    @property
    def dtype(self) -> torch.dtype:
        """What the pages hold."""
        return _DTYPES[self.layout.dtype]

    def layer(self, index: int) -> torch.Tensor:
        """One layer's pages, `[num_blocks, num_kv_heads, 2, block_tokens, head_dim]`; a view, never a copy."""
        return self._layers[index]

    def copy_pages(self, pairs: Sequence[tuple[BlockId, BlockId]]) -> None:
        """Copies whole pages (source, target) in every layer; no page is both a source and a target."""
        if pairs:
            for pages in self._layers:
                copy_pages(pages, pairs)
