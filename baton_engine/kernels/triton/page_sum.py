"""Adds up the words of pages on a GPU: the checksum `word_sum` of `kv_transfer.memory.page_hash`,
which says what it is and why.

Every word is mixed with its place in the page first, so the order of adding does not matter: a page is cut into tiles,
a program adds up one of them. The pure-torch twin is `reference.sum_pages`.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

_TILE = 2048
"""Words (of 8 bytes) per program."""
_WORD_BYTES = 8


# Not compiled anew for each part of a page.
@triton.jit(do_not_specialize=["first_word"])
def _sum_kernel(pages, blocks, sums, stride, words, first_word, tile: tl.constexpr):
    page = tl.program_id(0)
    # 64 bits: an arena has more words than an int32 counts.
    here = tl.load(blocks + page).to(tl.int64) * stride
    at = tl.program_id(1) * tile + tl.arange(0, tile)
    inside = at < words
    word = tl.load(pages + here + at, mask=inside, other=0).to(tl.uint64, bitcast=True)
    mixed = word + (at + first_word + 1).to(tl.uint64) * 0x9E3779B97F4A7C15
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB
    mixed = mixed ^ (mixed >> 31)
    total = tl.sum(tl.where(inside, mixed.to(tl.int64, bitcast=True), 0), 0)
    tl.store(sums + page * tl.num_programs(1) + tl.program_id(1), total)


def sum_pages(pages: torch.Tensor, blocks: torch.Tensor, first_word: int = 0) -> torch.Tensor:
    """The word sums of rows, on the current stream of their device; does not wait.

    Args:
        pages: `[num_pages, row_bytes]` uint8; rows may lie apart, their bytes may not. `row_bytes`, the rows' distance
            and the first address are multiples of 8.
        blocks: `[n]` int32 or int64, on the same device: which rows.
        first_word: Place of a row's first word, where the row is a later part of what is summed.

    Returns:
        `[n]` int64: the sums' bits.

    Raises:
        ValueError: A shape, dtype, device or alignment does not fit.
    """
    _check(pages, blocks)
    words = pages.shape[1] // _WORD_BYTES
    tiles = triton.cdiv(words, _TILE)
    sums = torch.empty((len(blocks), tiles), dtype=torch.int64, device=pages.device)
    if sums.numel():
        rows = pages.view(torch.int64)
        _sum_kernel[(len(blocks), tiles)](
            rows, blocks, sums, rows.stride(0), words, first_word, tile=_TILE
        )
    return sums.sum(1)


class PageSums:
    """Hashes of an arena on a GPU (a `kv_transfer.memory.page_hash.PageHashes` of the rule `word_sum`),
    on a stream of its own.

    Args:
        layers: Each layer's pages, `[num_blocks, page_layer_bytes]` uint8.
    """

    def __init__(self, layers: Sequence[torch.Tensor]) -> None:
        self._layers = tuple(layers)
        device = self._layers[0].device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @property
    def page_bytes(self) -> int:
        """Of a page in one layer."""
        return self._layers[0].shape[1]

    def of_layer(
        self, layer_index: int, blocks: Sequence[int], parts: Sequence[slice] = ()
    ) -> npt.NDArray[np.uint64]:
        """The sum of each page, `[len(blocks)]`; of `parts` of each. Called from any thread;
        blocks until they are on the host.
        """
        # No stream, no GPU: the context does nothing then.
        with torch.cuda.stream(self._stream):
            pages = self._layers[layer_index]
            numbers = torch.tensor(blocks, dtype=torch.int64, device=pages.device)
            total, begin = torch.zeros_like(numbers), 0
            for part in parts or (slice(0, pages.shape[1]),):
                total += sum_pages(pages[:, part], numbers, begin)
                begin += (part.stop - part.start) // _WORD_BYTES
            sums: npt.NDArray[np.int64] = total.cpu().numpy()
        return sums.view(np.uint64)


def _check(pages: torch.Tensor, blocks: torch.Tensor) -> None:
    if pages.dtype != torch.uint8 or pages.dim() != 2 or pages.stride(1) != 1:
        raise ValueError(f"pages: rows of bytes are wanted, not {pages.dtype} {pages.shape}")
    if any(n % _WORD_BYTES for n in (pages.shape[1], pages.stride(0), pages.data_ptr())):
        raise ValueError(f"pages: rows are not aligned to {_WORD_BYTES} bytes")
    if blocks.dtype not in (torch.int32, torch.int64) or blocks.dim() != 1:
        raise ValueError(f"blocks: a row of integers is wanted, not {blocks.dtype}")
    if blocks.device != pages.device or not blocks.is_contiguous():
        raise ValueError(f"blocks: has to lie in one piece on {pages.device}")
