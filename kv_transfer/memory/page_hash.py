"""What one page hashes to: 64 bits of its bytes in one layer, by a rule that both sides of a hand-off know.

`XXH3` where a CPU reads the pages. A GPU computes it badly: each step of it waits for the one before. `WORD_SUM` is a
sum over the page's words, each mixed with its place,
so that any order of adding will do and every thread takes a few words:

    sum over i of  mix(word[i] + (i + 1) * golden)   modulo 2^64, words of 8 bytes, little-endian

`mix` is splitmix64's finaliser, one to one: a page in which one word differs never has the same sum, others have it by
chance only (2^-64). Both find accidental damage; neither protects from a forger (docs/adr/0010).

Pages are hashed where they lie: in host memory, or on a GPU, which hashes its own better with a kernel
(`baton_engine.kernels.triton.page_sum`); the worker that hosts both packages brings it along.
"""

import threading
import time
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from baton.errors import TransferError
from baton.ids import BlockId
from baton.layout import KvLayout
from kv_transfer.memory.arena import ArenaSpan
from kv_transfer.memory.cuda import Cuda, HostBuffer, Stream
from kv_transfer.memory.pages import Pages, layer_pages
from kv_transfer.plan import runs

WORD_BYTES = 8
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)

Hashes = npt.NDArray[np.uint64]


class Checksum(Enum):
    """A rule; the value is its name in the handshake."""

    XXH3 = "xxh3"
    WORD_SUM = "word_sum"


def hash_rows(
    kind: Checksum, pages: Pages, rows: Sequence[int], parts: Sequence[slice] = ()
) -> Hashes:
    """The hash of each of `rows` of `pages` `[num_pages, page_layer_bytes]`; of `parts` of each, one after the other,
    if any are named.

    Raises:
        TransferError: Parts are not of whole words, and the rule wants words.
    """
    if kind is Checksum.WORD_SUM:
        return _word_sums(pages, rows, parts)
    if parts:
        return np.array([_xxh3_of_parts(pages[row], parts) for row in rows], dtype=np.uint64)
    return np.array([xxhash.xxh3_64_intdigest(pages[row]) for row in rows], dtype=np.uint64)


def mixed(words: Hashes, places: Hashes) -> Hashes:
    """`mix(word + (place + 1) * golden)`. Overwrites `words`."""
    with np.errstate(over="ignore"):
        words += (places + np.uint64(1)) * _GOLDEN
        words ^= words >> np.uint64(30)
        words *= _MIX_1
        words ^= words >> np.uint64(27)
        words *= _MIX_2
        words ^= words >> np.uint64(31)
    return words


def _word_sums(pages: Pages, rows: Sequence[int], parts: Sequence[slice]) -> Hashes:
    sums = np.zeros(len(rows), dtype=np.uint64)
    begin = 0
    for part in parts or (slice(0, pages.shape[1]),):
        taken = np.ascontiguousarray(pages[np.asarray(rows, dtype=np.int64), part])
        if taken.shape[1] % WORD_BYTES:
            raise TransferError(f"{taken.shape[1]} bytes of a page are not whole words to add up")
        words = taken.view(np.uint64)
        end = begin + words.shape[1]
        sums += mixed(words, np.arange(begin, end, dtype=np.uint64)).sum(axis=1, dtype=np.uint64)
        begin = end
    return sums


def _xxh3_of_parts(page: npt.NDArray[np.uint8], parts: Sequence[slice]) -> int:
    whole = xxhash.xxh3_64()
    for part in parts:
        whole.update(page[part].data)
    return whole.intdigest()


_YIELD_BYTES = 256 * 1024
"""xxh3 of a small page keeps the interpreter's lock; between so many bytes other threads get it."""
_BOUNCE_BYTES = 8 * 1024 * 1024


class PageHashes(Protocol):
    """Reads a local arena. Called from any thread; blocks."""

    def of_layer(
        self, layer_index: int, blocks: Sequence[BlockId], parts: Sequence[slice] = ()
    ) -> Hashes:
        """The hash of each page in one layer, `[len(blocks)]`; of `parts` of each page where only those are written."""


Hashing = Mapping[Checksum, PageHashes]
"""The rules by which a worker can hash its arena; it asks its own peers for the first."""


class GpuReader(Protocol):
    """Brings a GPU's memory to the host. Faults raise TransferError."""

    def stream(self) -> Stream:
        """A stream that waits for no other."""

    def host_buffer(self, size_bytes: int) -> HostBuffer:
        """Host memory that the GPU writes to by itself; kept until the process ends."""

    def fetch(self, target: int, source: int, size_bytes: int, stream: Stream) -> None:
        """Queues a copy from device memory to a host buffer."""

    def wait(self, stream: Stream) -> None:
        """Blocks until everything queued is done."""


class ArenaHashes:
    """Of an arena in host memory. For background threads."""

    def __init__(
        self,
        memory: memoryview,
        layout: KvLayout,
        *,
        num_blocks: int,
        kind: Checksum = Checksum.XXH3,
    ) -> None:
        self._kind = kind
        self._layers = layer_pages(memory, layout, num_blocks)
        self._pages_per_turn = max(1, _YIELD_BYTES // layout.page_layer_bytes)

    def of_layer(
        self, layer_index: int, blocks: Sequence[BlockId], parts: Sequence[slice] = ()
    ) -> Hashes:
        """See `PageHashes`."""
        pages = self._layers[layer_index]
        hashes = np.empty(len(blocks), dtype=np.uint64)
        for begin in range(0, len(blocks), self._pages_per_turn):
            turn = blocks[begin : begin + self._pages_per_turn]
            hashes[begin : begin + len(turn)] = hash_rows(self._kind, pages, turn, parts)
            time.sleep(0)
        return hashes


class ReadBackHashes:
    """Of an arena on a GPU, read back to the host some pages at a time: for peers in host memory,
    and where there is no Triton.
    """

    def __init__(
        self,
        arena: ArenaSpan,
        reader: GpuReader,
        layout: KvLayout,
        *,
        num_blocks: int,
        kind: Checksum = Checksum.XXH3,
    ) -> None:
        self._arena = arena
        self._reader = reader
        self._layout = layout
        self._num_blocks = num_blocks
        self._kind = kind
        self._lock = threading.Lock()
        self._pages_per_turn = max(1, _BOUNCE_BYTES // layout.page_layer_bytes)
        self._stream: Stream | None = None
        self._bounce: HostBuffer | None = None

    def of_layer(
        self, layer_index: int, blocks: Sequence[BlockId], parts: Sequence[slice] = ()
    ) -> Hashes:
        """See `PageHashes`.

        Raises:
            TransferError: The GPU refuses.
        """
        hashes = np.empty(len(blocks), dtype=np.uint64)
        for begin in range(0, len(blocks), self._pages_per_turn):
            turn = blocks[begin : begin + self._pages_per_turn]
            with self._lock:  # one bounce buffer for all threads
                hashes[begin : begin + len(turn)] = self._turn(layer_index, turn, parts)
        return hashes

    def _turn(self, layer_index: int, blocks: Sequence[BlockId], parts: Sequence[slice]) -> Hashes:
        size, stream, bounce = self._layout.page_layer_bytes, *self._opened()
        layer = self._arena.address + self._layout.layer_offset(layer_index, self._num_blocks)
        for first, at, count in runs(blocks, range(len(blocks))):
            source, target = layer + first * size, bounce.address + at * size
            self._reader.fetch(target, source, count * size, stream)
        self._reader.wait(stream)
        found = np.frombuffer(bounce.view, dtype=np.uint8)[: len(blocks) * size]
        return hash_rows(self._kind, found.reshape(-1, size), range(len(blocks)), parts)

    def _opened(self) -> tuple[Stream, HostBuffer]:
        """Taken at the first use: most workers never read back."""
        if self._stream is None or self._bounce is None:
            size = self._pages_per_turn * self._layout.page_layer_bytes
            self._stream, self._bounce = self._reader.stream(), self._reader.host_buffer(size)
        return self._stream, self._bounce


def ways_to_hash(
    arena: ArenaSpan, layout: KvLayout, *, num_blocks: int, kernel: PageHashes | None = None
) -> dict[Checksum, PageHashes]:
    """How pages of an arena are hashed, the cheapest rule first.

    Args:
        arena: Where it lies.
        layout: Of its pages.
        num_blocks: Its pages.
        kernel: Adds up words on the GPU; None on a CPU, or without.

    Raises:
        TransferError: The arena is smaller than that, or on a GPU whose driver cannot be opened.
    """
    arena.check_holds(layout, num_blocks)
    if arena.device is None:
        return {
            kind: ArenaHashes(arena.host_view, layout, num_blocks=num_blocks, kind=kind)
            for kind in (Checksum.XXH3, Checksum.WORD_SUM)
        }
    reader = Cuda(arena.device)
    read_back: dict[Checksum, PageHashes] = {
        kind: ReadBackHashes(arena, reader, layout, num_blocks=num_blocks, kind=kind)
        for kind in (Checksum.XXH3, Checksum.WORD_SUM)
    }
    return (
        {Checksum.WORD_SUM: kernel, Checksum.XXH3: read_back[Checksum.XXH3]}
        if kernel
        else read_back
    )
