"""Moves scattered pages on a GPU in few launches, from where they lie in one arena to where they belong in another that
this GPU reaches (a peer's through CUDA IPC).

    here    . 5 . 2 . . 7
              │   └──│─────┐
              └──┐   └──┐  │
    there   . . .5. . . 7. 2

A copy engine takes microseconds to begin each copy, which for a page of 16 KiB is most of its time; one kernel begins
once. It is told addresses, so that pages of several prompts go together. The pure-torch twin is `reference.move_pages`.
"""

import math
import mmap
import threading
from collections import defaultdict
from collections.abc import Sequence
from functools import cache
from typing import Any, Protocol

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

    @property
    def count(self) -> int:
        """Pages."""

    @property
    def alignment(self) -> int:
        """What all addresses are multiples of: a power of two up to 16."""

    def write_addresses(self, out: Addresses, begin: int) -> None:
        """Where the parts from `begin` on are and where they go, to `out` `[n, 2]`."""


_TILE = 4096
"""Words (of 8 bytes) that a program moves at once at most: 32 KiB."""
_WORDS_PER_WARP = 256
_WORD_BYTES = 8
_TABLE_ROWS = 16_384
"""Addresses that go to the GPU in one copy at most: 256 KiB."""
_FIRST_BYTES = 256 << 20
"""Of a push of more: so few that the GPU begins early, so many that the next ones are there before it is through."""


@triton.jit(do_not_specialize=["tiles", "tiles_of_row"])
def _move_kernel(
    addresses,
    words,
    tiles,
    tiles_of_row,
    tile: tl.constexpr,
    alignment: tl.constexpr,
    ragged: tl.constexpr,
):
    """Each program takes every `num_programs`-th tile."""
    for number in tl.range(tl.program_id(0), tiles, tl.num_programs(0)):
        row = number // tiles_of_row
        source = tl.load(addresses + 2 * row).to(tl.pointer_type(tl.int64))
        target = tl.load(addresses + 2 * row + 1).to(tl.pointer_type(tl.int64))
        source, target = tl.multiple_of(source, alignment), tl.multiple_of(target, alignment)
        # 64 bits: a row may have more bytes than an int32 counts.
        at = (number % tiles_of_row).to(tl.int64) * tile + tl.arange(0, tile)
        # Neither side is read again soon: the caches are better kept for what is.
        if ragged:
            inside = at < words
            words_read = tl.load(source + at, mask=inside, eviction_policy="evict_first")
            tl.store(target + at, words_read, mask=inside, eviction_policy="evict_first")
        else:
            words_read = tl.load(source + at, eviction_policy="evict_first")
            tl.store(target + at, words_read, eviction_policy="evict_first")


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
    of_row = triton.cdiv(words, tile)
    tiles = len(addresses) * of_row
    _move_kernel[(min(tiles, _programs(addresses.device) * (_TILE // tile)),)](
        addresses,
        words,
        tiles,
        of_row,
        tile=tile,
        alignment=alignment,
        ragged=words % tile > 0,
        num_warps=max(1, tile // _WORDS_PER_WARP),
    )


@cache
def _programs(device: torch.device) -> int:
    """Of the largest tiles, one on each multiprocessor: 8 GiB within an H200 take 4.32 ms so and 4.59 with a program
    for each tile, since fewer places in memory are read and written at once; the driver's own copy takes 4.01.
    """
    if device.type != "cuda":
        return 2
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


class PageKernel:
    """Moves pages between mapped arenas (`kv_transfer.backends.cuda_ipc.PageMovers`, made by the worker that hosts both
    packages).

    Args:
        device: The GPU; on a CPU, under Triton's interpreter, pages are moved at once.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # Writers have a thread each, and what a first launch loads is shared.
        self._launching = threading.Lock()

    def on(self, stream: int) -> "StreamMover":
        """What moves pages in the order of a stream of CUDA's driver."""
        return StreamMover(self._device, stream, self._launching)

    def warm_up(self, page_bytes: int) -> None:
        """Compiles and loads what moves pages of so many bytes. Blocks."""
        memory = torch.zeros(2, page_bytes, dtype=torch.uint8, device=self._device)
        addresses = torch.tensor([[memory[0].data_ptr(), memory[1].data_ptr()]])
        with self._launching:
            move_rows(addresses.to(self._device), page_bytes, math.gcd(16, page_bytes))
            if self._device.type == "cuda":
                torch.cuda.current_stream(self._device).synchronize()


class StreamMover:
    """Moves pages in the order of one stream (a `kv_transfer.backends.cuda_ipc.PageMover`).

    Addresses go through two tables in turn. Of many pages the first are on their way while the host still works out
    where the others are:

        host   table 0 | table 1 | table 0 (once its last rows were read) | table 1 ...
        GPU            | copies  | copies                                 | copies ...
    """

    def __init__(self, device: torch.device, stream: int, launching: threading.Lock) -> None:
        self._device, self._launching = device, launching
        self._stream = None
        if device.type == "cuda":
            self._stream = torch.cuda.ExternalStream(stream, device=device)
        self._tables: list[_Table] = []

    def move(self, pages: Sequence[PageMove]) -> None:
        """Queues the copies; waits only where more than two tables of addresses are under way.

        Raises:
            ValueError: Addresses or lengths are no multiples of 8; parts of other lengths may have been queued.
        """
        by_length: dict[int, list[PageMove]] = defaultdict(list)
        for part in pages:
            by_length[part.length].append(part)
        with torch.cuda.stream(self._stream):
            while len(self._tables) < 2:
                self._tables.append(_Table(self._device))
            for length, parts in by_length.items():
                self._move_alike(length, parts)

    def close(self) -> None:
        """Gives back the tables; everything that was queued is done."""
        while self._tables:
            self._tables.pop().close()

    def _move_alike(self, length: int, parts: Sequence[PageMove]) -> None:
        alignment = min((part.alignment for part in parts), default=_WORD_BYTES)
        if alignment < _WORD_BYTES:
            raise ValueError(f"addresses: rows are not aligned to {_WORD_BYTES} bytes")
        most = min(_TABLE_ROWS, max(1, _FIRST_BYTES // max(1, length)))
        self._tables[0].forget()
        for part in parts:
            begin = 0
            while begin < part.count:
                table = self._tables[0]
                rows = table.room(min(most - table.gathered, part.count - begin))
                part.write_addresses(rows, begin)
                table.gather(len(rows))
                begin += len(rows)
                if table.gathered == most or table.is_full:
                    self._launch(length, alignment)
                    most = min(2 * most, _TABLE_ROWS)
        if self._tables[0].gathered:
            self._launch(length, alignment)

    def _launch(self, length: int, alignment: int) -> None:
        """Moves what was gathered; a table that is full has its next turn after the other one."""
        table = self._tables[0]
        try:
            rows = table.send()
            with self._launching:  # and not while a table is waited for: others' pushes go on
                move_rows(rows, length, alignment)
        finally:
            if table.is_full:
                table.leave()
                self._tables.reverse()


class _Table:
    """Addresses on their way to a GPU: pinned host memory, and as much on the device.

    Not torch's pinned memory: torch marks on a stream that it was read there, and ends the process where it does so
    after the stream has ended.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._here = np.frombuffer(mmap.mmap(-1, 2 * 8 * _TABLE_ROWS), np.int64).reshape(-1, 2)
        self._tensor = self._there = torch.from_numpy(self._here)
        self._sent = self._end = 0
        self._read: torch.cuda.Event | None = None
        if self._on_gpu:
            # Registered last: what fails before leaves no memory pinned that the system has back.
            self._there = torch.empty_like(self._tensor, device=device)
            self._read = torch.cuda.Event()
            size = self._here.nbytes
            torch.cuda.check_error(_cuda().cudaHostRegister(self._here.ctypes.data, size, 0))

    @property
    def gathered(self) -> int:
        """Rows that were taken and not sent."""
        return self._end - self._sent

    @property
    def is_full(self) -> bool:
        """Whether no row is left."""
        return self._end == _TABLE_ROWS

    def room(self, most: int) -> Addresses:
        """The next rows, at least one, to write addresses to; waits until the GPU has read what the first ones held."""
        if not self._end and self._read is not None:
            self._read.synchronize()
        return self._here[self._end : self._end + most]

    def gather(self, rows: int) -> None:
        """So many more were written."""
        self._end += rows

    def forget(self) -> None:
        """Drops what was gathered for a push that broke off."""
        self._end = self._sent

    def send(self) -> torch.Tensor:
        """The gathered rows, on the device once the current stream comes by."""
        rows = slice(self._sent, self._end)
        self._sent = self._end
        if self._on_gpu:
            self._there[rows].copy_(self._tensor[rows], non_blocking=True)
        return self._there[rows]

    def leave(self) -> None:
        """Begins again from the first row, once the current stream has come by."""
        if self._read is not None:
            self._read.record()
        self._sent = self._end = 0

    def close(self) -> None:
        """Lets the system have the memory back; nothing is read any more."""
        if self._on_gpu:  # where the GPU is lost, this fails too, and is of no account
            _cuda().cudaHostUnregister(self._here.ctypes.data)


def _cuda() -> Any:
    return torch.cuda.cudart()
