"""Copying for `bench.handoff`: every way to move one region's pages into another, in random order, taking turns.

Baselines: `memcpy` is libc's, one call for the whole region, one thread; `memcpy_pages` the same pages in the same
order, one call for each. Both go between two regions of this process, of the kind that backends use (memfd), touched
before. `ucx_perftool`, `ucx_loop` and `nixl_perftool`: see `bench.transfer.perftools`.
"""

import ctypes
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection

import numpy as np

from baton.block_ids import BlockIds
from baton.errors import TransferError
from baton.ids import BlockId, LayerName, XferId
from baton.layout import KvLayout
from baton.pages import PageWrite
from bench.transfer.perftools import TOOLS, Region
from kv_transfer.backends.registry import open_receivers, open_senders
from kv_transfer.memory.listening import Listening
from kv_transfer.memory.region_server import RegionAccess
from kv_transfer.memory.shared_region import SharedRegion
from kv_transfer.ports import KvWriter, RegionHandle

SECRET = bytes(32)
_TIMEOUT_S = 120.0

Way = Callable[[], float]
"""Moves the region once; gives the seconds that took."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Copying:
    """What is measured.

    Attributes:
        page_bytes: Of each page; a multiple of 8 KiB.
        region_bytes: Of all pages together.
        rounds: How often each way is taken, besides a first time that does not count.
        seed: Of the random order, of pages and of turns.
    """

    page_bytes: int
    region_bytes: int
    rounds: int
    seed: int


def measure(copying: Copying, backends: Sequence[str]) -> dict[str, float]:
    """Median GB/s of each way, by its name."""
    layout = _layout(copying.page_bytes)
    num_pages = copying.region_bytes // copying.page_bytes
    push = push_of_all(num_pages, copying.seed)
    local = SharedRegion.create(layout.region_bytes(num_pages))
    np.frombuffer(local.memoryview, dtype=np.uint8)[:] = 1
    plain = _PlainCopies(local.memoryview, copying.page_bytes)
    ways: dict[str, Way] = {"memcpy": plain.whole, "memcpy_pages": lambda: plain.pages(push)}
    with ExitStack() as stack:
        writers = stack.enter_context(_writers(backends, local, layout, num_pages))
        ways |= {name: pushing(writer, push) for name, writer in writers.items()}
        region = Region(memory=local.memoryview, page_bytes=copying.page_bytes)
        for name in backends:
            for kind, tool in TOOLS.get(name, {}).items():
                if way := stack.enter_context(tool(region, push)):
                    ways[f"{name}_{kind}"] = way
        rates = _alternate(ways, len(local.memoryview), copying)
    local.close()
    return rates


def push_of_all(num_pages: int, seed: int) -> PageWrite:
    """All pages in random order on both sides."""
    rng = random.Random(seed)
    source, target = (rng.sample(range(num_pages), num_pages) for _ in range(2))
    return PageWrite(
        xfer_id=XferId("bench"),
        layer_index=0,
        source=BlockIds(map(BlockId, source)),
        target=BlockIds(map(BlockId, target)),
    )


def _layout(page_bytes: int) -> KvLayout:
    """One layer whose page has that many bytes: float32 keys and values of 16 tokens and heads of 64."""
    heads = page_bytes // (2 * 16 * 64 * 4)
    return KvLayout(
        model_fingerprint="bench",
        dtype="float32",
        block_tokens=16,
        num_kv_heads=heads,
        head_dim=64,
        layers=(LayerName("layers.0"),),
    )


def _alternate(ways: dict[str, Way], num_bytes: int, copying: Copying) -> dict[str, float]:
    """Median GB/s of each way; the first round warms up.

    Each round has an order of its own: what ran just before leaves its bytes in the caches,
    and a core that has rested is faster.
    """
    rng = random.Random(copying.seed)
    took_s = {name: list[float]() for name in ways}
    for _ in range(copying.rounds + 1):
        for name in rng.sample(list(ways), len(ways)):
            took_s[name].append(ways[name]())
    return {name: num_bytes / statistics.median(took[1:]) / 1e9 for name, took in took_s.items()}


class _PlainCopies:
    """libc's memcpy from the region into another of the same kind, touched before: what this process alone can do."""

    def __init__(self, source: memoryview, page_bytes: int) -> None:
        self._target_region = SharedRegion.create(len(source))
        target = np.frombuffer(self._target_region.memoryview, dtype=np.uint8)
        target[:] = 2
        self._source = np.frombuffer(source, dtype=np.uint8).ctypes.data
        self._target = target.ctypes.data
        self._num_bytes = len(source)
        self._page_bytes = page_bytes
        self._memcpy = ctypes.CDLL(None).memcpy
        self._memcpy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
        self._memcpy.restype = ctypes.c_void_p

    def whole(self) -> float:
        """Everything at once."""
        began_s = time.perf_counter()
        self._memcpy(self._target, self._source, self._num_bytes)
        return time.perf_counter() - began_s

    def pages(self, push: PageWrite) -> float:
        """The same pages as the push."""
        began_s = time.perf_counter()
        memcpy, size = self._memcpy, self._page_bytes
        for source, target in zip(push.source, push.target, strict=True):
            memcpy(self._target + target * size, self._source + source * size, size)
        return time.perf_counter() - began_s


def pushing(writer: KvWriter, push: PageWrite) -> Way:
    """Pushes and waits until the bytes are there."""

    def copy() -> float:
        landed = threading.Event()
        errors: list[TransferError] = []

        def done(error: TransferError | None) -> None:
            if error is not None:
                errors.append(error)
            landed.set()

        began_s = time.perf_counter()
        writer.push(push, done)
        if not landed.wait(_TIMEOUT_S):
            raise RuntimeError(f"the push did not end in {_TIMEOUT_S:.0f} s")
        if errors:
            raise errors[0]
        return time.perf_counter() - began_s

    return copy


@contextmanager
def _writers(
    backends: Sequence[str], local: SharedRegion, layout: KvLayout, num_pages: int
) -> Iterator[dict[str, KvWriter]]:
    """An open way into another process's region for each backend."""
    here, there = get_context("spawn").Pipe()
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as folder:
        child = get_context("spawn").Process(
            target=_receive, args=(there, backends, layout, num_pages, folder)
        )
        child.start()
        there.close()  # a child that dies is then an end of file, not a wait for ever
        try:
            senders = open_senders(
                backends, local, num_blocks=num_pages, secret=SECRET, listening=Listening()
            )
            opened: dict[str, KvWriter] = {}
            for name in backends:
                here.send(name)
                handle = RegionHandle(backend=name, opaque=here.recv(), num_blocks=num_pages)
                opened[name] = senders[name].connect(handle, layout)
            yield opened
            for writer in opened.values():
                writer.close()
        finally:
            here.send("")
            child.join(30)


def _receive(
    asked: Connection, backends: Sequence[str], layout: KvLayout, num_pages: int, folder: str
) -> None:
    """The other process: owns a region and gives handles to it."""
    region = SharedRegion.create(layout.region_bytes(num_pages))
    receivers = open_receivers(
        backends,
        region,
        server_address=lambda name: f"unix:{folder}/{name}.kv",
        layout=layout,
        num_blocks=num_pages,
        admission=RegionAccess(secret=SECRET),
    )
    while name := asked.recv():
        asked.send(receivers[name].handle().opaque)
    for receiver in receivers.values():
        receiver.close()
