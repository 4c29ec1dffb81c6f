"""Moves scattered pages on a GPU in one launch, from where they lie in one arena to where they belong in another that
this GPU reaches (a peer's through CUDA IPC).

    here    . 5 . 2 . . 7
              │   └──│─────┐
              └──┐   └──┐  │
    there   . . .5. . . 7. 2

A copy engine takes microseconds to begin each copy, which for a page of 16 KiB is most of its time; one kernel begins
once. It is told addresses, so that pages of several prompts go together. The pure-torch twin is `reference.move_pages`.
"""

import threading
from collections import defaultdict
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

Addresses = npt.NDArray[np.int64]


class PageMove(Protocol):
    """What `PageKernel` is told: the same part of scattered pages (`kv_transfer.backends.cuda_ipc.PageRows`)."""

    @property
    def length(self) -> int:
        """Bytes of the part."""

    def addresses(self) -> Addresses:
        """Where each part is and where it goes, `[n, 2]`."""


_TILE = 8192
"""Words (of 8 bytes) per program at most: 64 KiB, so that a few pages keep every multiprocessor busy."""
_WORDS_PER_WARP = 512
"""With them, 2 GiB within an H200 take 1.12 ms, with twice as many 1.14; the driver's own copy 1.02."""
_WORD_BYTES = 8
_VECTOR_BYTES = 16
"""What a thread reads at once where addresses allow it."""


@triton.jit
def _move_kernel(addresses, words, tile: tl.constexpr, alignment: tl.constexpr):
    row = tl.program_id(0)
    source = tl.load(addresses + 2 * row).to(tl.pointer_type(tl.int64))
    target = tl.load(addresses + 2 * row + 1).to(tl.pointer_type(tl.int64))
    source, target = tl.multiple_of(source, alignment), tl.multiple_of(target, alignment)
    # 64 bits: a row may have more bytes than an int32 counts.
    at = tl.program_id(1).to(tl.int64) * tile + tl.arange(0, tile)
    inside = at < words
    # Neither side is read again soon: the caches are better kept for what is.
    words_read = tl.load(source + at, mask=inside, eviction_policy="evict_first")
    tl.store(target + at, words_read, mask=inside, eviction_policy="evict_first")


def move_rows(addresses: torch.Tensor, length: int, alignment: int = _WORD_BYTES) -> None:
    """Copies runs of bytes, on the current stream of their device; does not wait.

    Args:
        addresses: `[n, 2]` int64 on the device: where each run is and where it goes, multiples of `alignment`. No run
            may be written that another one of the call reads,
            and one that is written twice has to get the same bytes both times.
        length: Bytes of each run, a multiple of 8.
        alignment: 8 or 16 bytes.

    Raises:
        ValueError: A shape, dtype or size does not fit; nothing is copied.
    """
    if addresses.dtype != torch.int64 or addresses.dim() != 2 or addresses.shape[1] != 2:
        raise ValueError(
            f"addresses: pairs of int64 are wanted, not {addresses.dtype} {tuple(addresses.shape)}"
        )
    if not addresses.is_contiguous():
        raise ValueError("addresses: have to lie in one piece")
    if length < 0 or length % _WORD_BYTES:
        raise ValueError(f"length: {length} is no multiple of {_WORD_BYTES}")
    words = length // _WORD_BYTES
    if not len(addresses) or not words:
        return
    tile = min(_TILE, triton.next_power_of_2(words))
    grid = (len(addresses), triton.cdiv(words, tile))
    warps = max(1, tile // _WORDS_PER_WARP)
    _move_kernel[grid](addresses, words, tile=tile, alignment=alignment, num_warps=warps)


class PageKernel:
    """Moves pages between mapped arenas by one launch (a `kv_transfer.backends.cuda_ipc.PageMover`, made by the worker
    that hosts both packages).

    Args:
        device: The GPU; on a CPU, under Triton's interpreter, pages are moved at once.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # Writers have a thread each, and what a first launch loads is shared.
        self._lock = threading.Lock()

    def move(self, pages: Sequence[PageMove], stream: int) -> None:
        """Queues the copies on a stream of CUDA's driver, a launch for all parts of a length; does not wait.

        Raises:
            ValueError: Addresses or lengths are no multiples of 8; parts of other lengths may have been queued.
        """
        by_length: dict[int, list[Addresses]] = defaultdict(list)
        for part in pages:
            by_length[part.length].append(part.addresses())
        with self._lock, self._on(stream):
            for length, found in by_length.items():
                addresses = np.concatenate(found)
                move_rows(self._brought(addresses), length, _alignment(addresses))

    def warm_up(self, page_bytes: int) -> None:
        """Compiles and loads what moves pages of so many bytes. Blocks."""
        memory = torch.zeros(2, page_bytes, dtype=torch.uint8, device=self._device)
        addresses = np.array([[memory[0].data_ptr(), memory[1].data_ptr()]], np.int64)
        with self._lock:
            move_rows(self._brought(addresses), page_bytes, _alignment(addresses))
            if self._device.type == "cuda":
                torch.cuda.current_stream(self._device).synchronize()

    def _on(self, stream: int) -> AbstractContextManager[object]:
        if self._device.type != "cuda":
            return nullcontext()
        return torch.cuda.stream(torch.cuda.ExternalStream(stream, device=self._device))

    def _brought(self, addresses: Addresses) -> torch.Tensor:
        """On the device. From pinned memory, for otherwise the host would wait for all that the stream was given
        before.
        """
        here = torch.from_numpy(addresses)
        if self._device.type != "cuda":
            return here
        return here.pin_memory().to(self._device, non_blocking=True)


def _alignment(addresses: Addresses) -> int:
    """What all addresses are multiples of, as far as it matters.

    Raises:
        ValueError: Not even of a word.
    """
    low_bits = int(np.bitwise_or.reduce(addresses, axis=None)) if addresses.size else 0
    if low_bits % _WORD_BYTES:
        raise ValueError(f"addresses: rows are not aligned to {_WORD_BYTES} bytes")
    return _VECTOR_BYTES if low_bits % _VECTOR_BYTES == 0 else _WORD_BYTES
