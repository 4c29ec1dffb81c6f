"""The memory that KV pages live in: one arena per layer, laid over bytes that it does not own.

The bytes come from `ArenaAllocator`, shared with other processes where pages are handed off; nothing is copied.
"""

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from baton.ids import BlockId
from baton.layout import KvLayout
from baton_engine.kernels.reference import copy_pages
from baton_engine.staging import DeviceStaging, StagedBatch

if TYPE_CHECKING:
    from baton_engine.kernels.triton.page_move import PageKernel
    from baton_engine.kernels.triton.page_sum import PageSums

_DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float8_e4m3fn": torch.float8_e4m3fn,
}


class KvArena:
    """Torch views over the KV region of one worker.

    Args:
        layout: Shape of the pages.
        num_blocks: Pages per layer.
        buffer: At least `layout.region_bytes(num_blocks)` writable bytes: host memory, or a tensor `[size_bytes]` uint8
            on the model's device. Must outlive the arena.

    Raises:
        ValueError: The buffer is too small or read-only.
    """

    def __init__(
        self, layout: KvLayout, num_blocks: int, buffer: memoryview | torch.Tensor
    ) -> None:
        size = layout.region_bytes(num_blocks)
        readonly = isinstance(buffer, memoryview) and buffer.readonly
        if readonly or buffer.nbytes < size:
            raise ValueError(
                f"an arena of {num_blocks} pages needs {size} writable bytes, "
                f"not {buffer.nbytes} {'read-only' if readonly else 'writable'} ones"
            )
        self.layout = layout
        self.num_blocks = num_blocks
        flat = _as_tensor(buffer)[:size].view(_DTYPES[layout.dtype])
        shape = (num_blocks, layout.num_kv_heads, 2, layout.block_tokens, layout.head_dim)
        whole = flat.view(len(layout.layers), *shape)  # as `KvLayout.layer_offset` has it
        self._layers = tuple(whole[index] for index in range(len(layout.layers)))
        self._staging = DeviceStaging(self.device)

    @property
    def dtype(self) -> torch.dtype:
        """What the pages hold."""
        return _DTYPES[self.layout.dtype]

    @property
    def device(self) -> torch.device:
        """Where the pages lie."""
        return self._layers[0].device

    def page_bytes(self, index: int) -> torch.Tensor:
        """One layer's pages as bytes, `[num_blocks, page_layer_bytes]` uint8; a view, never a copy."""
        return self._layers[index].view(self.num_blocks, -1).view(torch.uint8)

    def layer(self, index: int) -> torch.Tensor:
        """One layer's pages, `[num_blocks, num_kv_heads, 2, block_tokens, head_dim]`; a view, never a copy."""
        return self._layers[index]

    def copy_pages(self, pairs: Sequence[tuple[BlockId, BlockId]]) -> None:
        """Copies whole pages (source, target) in every layer; no page is both a source and a target."""
        if not pairs:
            return
        staged = StagedBatch()
        sources, targets = (
            staged.add(np.array(blocks, np.int64)) for blocks in zip(*pairs, strict=True)
        )
        self._staging.send(staged)
        for pages in self._layers:
            copy_pages(pages, sources.tensor, targets.tensor)


class DrafterPages:
    """The pages of an arena as a draft model sees them: its layers stand behind the model's own, several of them in one
    of the arena where each takes less.

        arena     layer 0 .. 31 the model's | layer 32  page 0 [draft 0, draft 1]  page 1 [draft 0, draft 1] ..

    A drafter's layer begins at its part of page 0, and its pages are as large as that part:
    page i of the arena is its page `stride * i`.

    Args:
        arena: All pages.
        first_layer: Of the arena, behind the model's.
        num_layers: Of the drafter.
        kv_heads: Of the drafter.
        head_dim: Of the drafter; its heads take a whole fraction of what the model's take.

    Attributes:
        stride: See above.
    """

    def __init__(
        self, arena: KvArena, *, first_layer: int, num_layers: int, kv_heads: int, head_dim: int
    ) -> None:
        layout = arena.layout
        self.stride = layout.num_kv_heads * layout.head_dim // (kv_heads * head_dim)
        page = (kv_heads, 2, layout.block_tokens, head_dim)
        self._layers: list[torch.Tensor] = []
        for index in range(num_layers):
            layer, part = divmod(index, self.stride)
            parts = arena.layer(first_layer + layer).view(-1, *page)
            self._layers.append(parts[part:])

    def layer(self, index: int) -> torch.Tensor:
        """One layer's pages; a view, never a copy."""
        return self._layers[index]


class HiddenPages:
    """A vector per token in layers of an arena: what a drafter reads of the model stands where the token's KV stands,
    and goes where that goes.

    Args:
        arena: All pages; its last one is nobody's where places are negative.
        first_layer: The first of those that hold the vectors, one part after the other.
        width: Elements of a vector.
    """

    def __init__(self, arena: KvArena, *, first_layer: int, width: int) -> None:
        self._block_tokens = arena.layout.block_tokens
        self._nowhere = (arena.num_blocks - 1) * self._block_tokens
        per_layer = token_elements(arena.layout)
        self._width = width
        self._layers = [
            arena.layer(first_layer + index).view(-1, per_layer)[:, : width - begin]
            for index, begin in enumerate(range(0, width, per_layer))
        ]

    def write(self, slots: torch.Tensor, vectors: torch.Tensor) -> None:
        """Puts `vectors` `[num_tokens, width]` to `slots` `[num_tokens]` int64, as `PagedBatch` has them."""
        places = slots.where(slots >= 0, self._nowhere)
        begin = 0
        for layer in self._layers:
            end = begin + layer.shape[1]
            layer.index_copy_(0, places, vectors[:, begin:end].to(layer.dtype))
            begin = end

    def read(self, slots: torch.Tensor) -> torch.Tensor:
        """The vectors of `slots`, `[num_tokens, width]`, in the dtype of pages."""
        return torch.cat([layer.index_select(0, slots) for layer in self._layers], 1)


def token_elements(layout: KvLayout) -> int:
    """Elements of keys and values of one token in one layer."""
    return 2 * layout.num_kv_heads * layout.head_dim


def _as_tensor(buffer: memoryview | torch.Tensor) -> torch.Tensor:
    return (
        buffer if isinstance(buffer, torch.Tensor) else torch.frombuffer(buffer, dtype=torch.uint8)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PageKernels:
    """The kernels by which pages of an arena on a GPU are moved and checked, for the worker that hands them off.

    Attributes:
        movers: Copy scattered pages (a `kv_transfer.backends.cuda_ipc.PageMovers`).
        sums: Hashes pages by `word_sum` (a `kv_transfer.memory.page_hash.PageHashes`).
        num_kv_heads: Of a page. A peer among whose ranks heads are divided otherwise takes or gives a slice of these.
    """

    movers: "PageKernel"
    sums: "PageSums"
    num_kv_heads: int

    def warm_up(self) -> None:
        """Compiles and loads both, for whole pages and for every slice into which their heads divide. Blocks."""
        self.sums.of_layer(0, [0])
        heads, page_bytes = self.num_kv_heads, self.sums.page_bytes
        for slices in range(1, heads + 1):
            if heads % slices == 0:
                self.movers.warm_up(page_bytes // slices)


def page_kernels(arena: KvArena) -> PageKernels | None:
    """The kernels of an arena on a GPU; None for one in host memory, and without Triton:
    the driver's own copies serve there.
    """
    if arena.device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return None
    from baton_engine.kernels.triton.page_move import PageKernel
    from baton_engine.kernels.triton.page_sum import PageSums

    layers = [arena.page_bytes(index) for index in range(len(arena.layout.layers))]
    return PageKernels(
        movers=PageKernel(arena.device),
        sums=PageSums(layers),
        num_kv_heads=arena.layout.num_kv_heads,
    )
