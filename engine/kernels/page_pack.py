"""Moves scattered pages on a GPU in one launch: gathered into one run for a wire that wants few large descriptors, scattered
from such a run, or from scattered to scattered pages where both arenas are in reach of one GPU (a peer's through CUDA IPC).

    arena   . 5 . 2 . . 7        pack   ─▶  5 2 7           one descriptor instead of three
    packed  5 2 7                unpack ─▶  . 5 . 2 . . 7   in the peer's pages

A copy engine takes microseconds to begin each copy, which for a page of 16 KiB is most of its time; one kernel begins once. The
pure-torch twin is `reference.move_pages`.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
import triton
import triton.language as tl


class PageMove(Protocol):
    """What `PageKernel` is told: the same part of scattered pages (`kv_transfer.page_mover.PageRows`)."""

    @property
    def source(self) -> int:
        """Address of the part in page 0."""

    @property
    def source_pitch(self) -> int:
        """Bytes from one page to the next."""

    @property
    def source_pages(self) -> Sequence[int]:
        """Which pages."""

    @property
    def target(self) -> int:
        """As `source`, in the other arena."""

    @property
    def target_pitch(self) -> int:
        """As `source_pitch`."""

    @property
    def target_pages(self) -> Sequence[int]:
        """As many."""

    @property
    def length(self) -> int:
        """Bytes of the part."""


_TILE = 4096
"""Words (of 8 bytes) per program: 32 KiB, so that a few pages keep every multiprocessor busy."""
_WORD_BYTES = 8


@triton.jit
def _move_kernel(
    source,
    target,
    source_pages,
    target_pages,
    source_stride,
    target_stride,
    words,
    tile: tl.constexpr,
):
    page = tl.program_id(0)
    # 64 bits: an arena has more words than an int32 counts.
    here = tl.load(source_pages + page).to(tl.int64) * source_stride
    there = tl.load(target_pages + page).to(tl.int64) * target_stride
    at = tl.program_id(1) * tile + tl.arange(0, tile)
    inside = at < words
    moved = tl.load(source + here + at, mask=inside)
    tl.store(target + there + at, moved, mask=inside)


def move_pages(
    source: torch.Tensor,
    source_pages: torch.Tensor,
    target: torch.Tensor,
    target_pages: torch.Tensor,
) -> None:
    """Copies rows of `source` to rows of `target`, on the current stream of their device; does not wait.

    Args:
        source: `[num_pages, row_bytes]` uint8; rows may lie apart, their bytes may not. `row_bytes`, the rows' distance and the
            first address are multiples of 8.
        source_pages: `[n]` int32 or int64, on the same device: which rows.
        target: The same elsewhere, or the same memory where no row is both read and written.
        target_pages: `[n]`, as many; no row twice.

    Raises:
        ValueError: A shape, dtype, device or alignment does not fit; nothing is copied.
    """
    _check(source, source_pages, target, target_pages)
    words = source.shape[1] // _WORD_BYTES
    if not len(source_pages) or not words:
        return
    grid = (len(source_pages), triton.cdiv(words, _TILE))
    here, there = source.view(torch.int64), target.view(torch.int64)
    _move_kernel[grid](
        here,
        there,
        source_pages,
        target_pages,
        here.stride(0),
        there.stride(0),
        words,
        tile=_TILE,
    )


def pack_pages(pages: torch.Tensor, blocks: torch.Tensor, packed: torch.Tensor) -> None:
    """Gathers the rows `blocks` `[n]` of `pages` into `packed` `[n, row_bytes]`, in this order. See `move_pages`."""
    move_pages(pages, blocks, packed, _in_a_row(blocks))


def unpack_pages(packed: torch.Tensor, pages: torch.Tensor, blocks: torch.Tensor) -> None:
    """Scatters `packed` `[n, row_bytes]` into the rows `blocks` `[n]` of `pages`. See `move_pages`."""
    move_pages(packed, _in_a_row(blocks), pages, blocks)


class PageKernel:
    """Moves pages between mapped arenas by one launch per layer (a `kv_transfer.page_mover.PageMover`, made by the worker that hosts
    both packages).
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def move(self, pages: PageMove, stream: int) -> None:
        """Queues the copy on a stream of CUDA's driver; does not wait."""
        with torch.cuda.stream(torch.cuda.ExternalStream(stream, device=self._device)):
            # On the host first: both lists cross in one copy.
            both = torch.tensor([pages.source_pages, pages.target_pages], device=self._device)
            source = self._rows(pages.source, pages.source_pitch, pages.source_pages, pages.length)
            target = self._rows(pages.target, pages.target_pitch, pages.target_pages, pages.length)
            move_pages(source, both[0], target, both[1])

    def _rows(self, address: int, pitch: int, pages: Sequence[int], length: int) -> torch.Tensor:
        """Memory that torch has not allocated, as far as the last page that is named."""
        memory = _Memory(address, shape=(max(pages, default=-1) + 1, length), strides=(pitch, 1))
        return torch.as_tensor(memory, device=self._device)


class _Memory:
    """Says to torch where memory lies (the CUDA array interface)."""

    def __init__(self, address: int, shape: tuple[int, int], strides: tuple[int, int]) -> None:
        self.__cuda_array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "data": (address, False),
            "shape": shape,
            "strides": strides,
        }


def _in_a_row(blocks: torch.Tensor) -> torch.Tensor:
    return torch.arange(len(blocks), dtype=blocks.dtype, device=blocks.device)


def _check(
    source: torch.Tensor,
    source_pages: torch.Tensor,
    target: torch.Tensor,
    target_pages: torch.Tensor,
) -> None:
    for name, rows in (("source", source), ("target", target)):
        if rows.dtype != torch.uint8 or rows.dim() != 2 or rows.stride(1) != 1:
            raise ValueError(f"{name}: rows of bytes are wanted, not {rows.dtype} {rows.shape}")
        if any(n % _WORD_BYTES for n in (rows.shape[1], rows.stride(0), rows.data_ptr())):
            raise ValueError(f"{name}: rows are not aligned to {_WORD_BYTES} bytes")
    if source.shape[1] != target.shape[1]:
        raise ValueError(f"source: rows of {source.shape[1]} bytes for {target.shape[1]}")
    for name, pages in (("source_pages", source_pages), ("target_pages", target_pages)):
        if pages.dtype not in (torch.int32, torch.int64) or pages.dim() != 1:
            raise ValueError(f"{name}: a row of integers is wanted, not {pages.dtype}")
        if pages.device != source.device or not pages.is_contiguous():
            raise ValueError(f"{name}: has to lie in one piece on {source.device}")
    if target.device != source.device:
        raise ValueError(f"target: on {target.device}, source on {source.device}")
    if len(source_pages) != len(target_pages):
        raise ValueError(f"target_pages: {len(target_pages)} for {len(source_pages)}")
