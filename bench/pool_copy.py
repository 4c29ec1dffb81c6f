"""Getting resident blocks out of the slab, and putting them there, against one memcpy of the same bytes, in the same
run: `python -m bench.pool_copy [--json FILE]`. A part of `bench.pool`.

A get is what an engine does: `start_load_kv`, `wait_for_layer_load` for each layer, `finish_load_kv`, by the reader's
own thread, checksums compared; a put is the writer's call. Blocks and pages are in random order; both regions are
shared memory, touched before. `unverified`: the same get, rows copied by `kv_transfer.memory.pages` and nothing hashed.

Blocks as models have them: 192 KiB are 16 tokens of Qwen2.5-0.5B in bfloat16 (24 layers, rows of 8 KiB), 8 MiB are 64
tokens of Llama-3.1-8B (32 layers, rows of 256 KiB). 16 KiB, rows of 2 KiB, is smaller than any.
"""

import argparse
import ctypes
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np

from baton.block_ids import Numbers
from baton.clock import MonotonicClock
from baton.ids import BlockId, BlockKey, LayerName, SeqId
from baton.layout import KvLayout
from baton.pages import PageFetch, PublishedPage
from bench.harness.report import Report
from kv_transfer.memory.pages import Pages, copy_rows, layer_pages
from kv_transfer.memory.shared_region import SharedRegion
from kvpool.client.arena_pages import HostPages, slab_layers
from kvpool.client.publisher import Placed, PoolWriter
from kvpool.client.read_leases import ReadLeases
from kvpool.client.reader import PoolReader
from kvpool.hashed_copy import Hashes
from kvpool.messages import BlockLease, HeldBlock
from kvpool.ports import ArenaPages

BLOCK_BYTES = {
    "16k": 16 << 10,
    "128k": 128 << 10,
    "192k": 192 << 10,
    "1m": 1 << 20,
    "8m": 8 << 20,
}
_NUM_LAYERS = {16 << 10: 8, 192 << 10: 24}
_SEQ = SeqId("bench/0")
_TOKENS, _HEAD_DIM = 16, 16
_ROW_UNIT = 2 * _TOKENS * _HEAD_DIM * 2

Way = Callable[[], None]


class _NoDesk:
    def wanted(self, seq_id: SeqId, keys: Sequence[BlockKey]) -> None:
        """Does nothing: no sequence is preempted here."""

    def released(self, lease_ids: Sequence[str]) -> None:
        """Does nothing: leases are not counted here."""

    def corrupt(self, keys: Sequence[BlockKey]) -> None:
        """Bytes that come out wrong would make every figure meaningless."""
        raise RuntimeError(f"{len(keys)} blocks were corrupt")


class _Unhashed:
    """An arena that believes what it is given; leases for it have checksums of zero."""

    def __init__(self, memory: memoryview, layout: KvLayout, num_blocks: int) -> None:
        self._layers = layer_pages(memory, layout, num_blocks)

    @property
    def num_layers(self) -> int:
        return len(self._layers)

    def copy_in(self, layer_index: int, source: Pages, slots: Numbers, pages: Numbers) -> Hashes:
        copy_rows(source, self._layers[layer_index], slots, pages)
        return np.zeros(len(pages), dtype=np.uint64)

    def copy_out(self, layer_index: int, pages: Numbers, target: Pages, slots: Numbers) -> Hashes:
        copy_rows(self._layers[layer_index], target, pages, slots)
        return np.zeros(len(pages), dtype=np.uint64)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolCopying:
    """What is measured.

    Attributes:
        block_bytes: Of each block.
        region_bytes: Of all blocks together, which are got in one step.
        rounds: How often each way is taken, besides a first time that does not count.
    """

    block_bytes: int
    region_bytes: int
    rounds: int


def measure(copying: PoolCopying) -> dict[str, float]:
    """Median GB/s of each way, by its name: `memcpy`, `get`, `get_unverified`, `put`."""
    layout = block_layout(copying.block_bytes)
    num_blocks = copying.region_bytes // layout.page_bytes
    arena = SharedRegion.create(layout.region_bytes(num_blocks))
    slab = SharedRegion.create(layout.region_bytes(num_blocks))
    np.frombuffer(arena.memoryview, dtype=np.uint8)[:] = 1
    rows = slab_layers(slab.memoryview, layout, num_slots=num_blocks, slot_bytes=layout.page_bytes)
    pages, slots = (random.sample(range(num_blocks), num_blocks) for _ in range(2))
    keys = [BlockKey(number.to_bytes(16)) for number in range(num_blocks)]
    fetch = PageFetch(
        seq_id=_SEQ, first_block=0, keys=tuple(keys), blocks=tuple(map(BlockId, pages))
    )
    host = HostPages(arena.memoryview, layout, num_blocks=num_blocks)
    places = [
        Placed(
            page=PublishedPage(key=key, block=BlockId(page), generation=0, index=0, scope=""),
            slot=slot,
        )
        for key, page, slot in zip(keys, pages, slots, strict=True)
    ]
    writer = PoolWriter(host, _never_again)
    checksums = writer.write(places, rows)
    plain = _Unhashed(arena.memoryview, layout, num_blocks)
    none = [bytes(len(sums)) for sums in checksums]
    readers = [
        _reader(host, rows, keys, slots, checksums),
        _reader(plain, rows, keys, slots, none),
    ]
    ways: dict[str, Way] = {
        "memcpy": memcpy(slab.memoryview, arena.memoryview),
        "get": lambda: _get(readers[0], fetch, len(rows)),
        "get_unverified": lambda: _get(readers[1], fetch, len(rows)),
        "put": lambda: _expect(all(writer.write(places, rows))),
    }
    rates = _alternate(ways, layout.region_bytes(num_blocks), copying.rounds)
    for reader in readers:
        reader.close()
    return rates


def _never_again(_block: BlockId) -> int:
    """No page is handed out a second time."""
    return 0


def block_layout(block_bytes: int) -> KvLayout:
    """Of one of the sizes of `BLOCK_BYTES`: 16-bit pages with rows of 2 KiB or more."""
    num_layers = _NUM_LAYERS.get(block_bytes, 32)
    return KvLayout(
        model_fingerprint="bench",
        dtype="bfloat16",
        block_tokens=_TOKENS,
        num_kv_heads=block_bytes // num_layers // _ROW_UNIT,
        head_dim=_HEAD_DIM,
        layers=tuple(LayerName(f"layers.{index}") for index in range(num_layers)),
    )


def _reader(
    arena: ArenaPages,
    rows: Sequence[Pages],
    keys: Sequence[BlockKey],
    slots: Sequence[int],
    checksums: Sequence[bytes],
) -> PoolReader:
    clock, desk = MonotonicClock(), _NoDesk()
    leases = ReadLeases(clock, desk.released)
    held = tuple(
        HeldBlock(key=key, slot=slot, epoch=1, checksums=sums)
        for key, slot, sums in zip(keys, slots, checksums, strict=True)
    )
    leases.add(_SEQ, BlockLease(lease_id="bench", blocks=held, lease_s=3600), asked_s=clock.now_s())
    reader = PoolReader(arena, leases, desk, clock)
    reader.connect(rows)
    return reader


def _get(reader: PoolReader, fetch: PageFetch, num_layers: int) -> None:
    reader.start_load_kv([fetch])
    for layer_index in range(num_layers):
        reader.wait_for_layer_load(layer_index)
    _expect(reader.finish_load_kv().num_blocks == len(fetch.keys))


def _expect(went_well: bool) -> None:
    if not went_well:
        raise RuntimeError("blocks did not arrive")


def memcpy(source: memoryview, target: memoryview) -> Way:
    """libc's, one call, one thread."""
    read, write = (np.frombuffer(memory, dtype=np.uint8) for memory in (source, target))

    def copy() -> None:
        ctypes.memmove(write.ctypes.data, read.ctypes.data, len(source))

    return copy


def _alternate(ways: dict[str, Way], num_bytes: int, rounds: int) -> dict[str, float]:
    """Median GB/s of each way; the first round warms up."""
    took_s = {name: list[float]() for name in ways}
    for _ in range(rounds + 1):
        for name, way in ways.items():
            began_s = time.perf_counter()
            way()
            took_s[name].append(time.perf_counter() - began_s)
    return {name: num_bytes / median(took[1:]) / 1e9 for name, took in took_s.items()}


def measure_all(region_bytes: int, rounds: int) -> dict[str, float]:
    """Figures for every size of block, told as they come; `get_over_memcpy` is the worst of them,
    `…_192k` that of the models here.
    """
    figures: dict[str, float] = {}
    for label, block_bytes in BLOCK_BYTES.items():
        copying = PoolCopying(block_bytes=block_bytes, region_bytes=region_bytes, rounds=rounds)
        rates = measure(copying)
        for name, rate in rates.items():
            figures[f"{name}_{label}_gb_s"] = rate
            if name != "memcpy":
                figures[f"{name}_over_memcpy_{label}"] = rate / rates["memcpy"]
        shown = "   ".join(f"{name} {rate:5.2f}" for name, rate in rates.items())
        print(f"{label:>4} blocks, GB/s:   {shown}", flush=True)
    for name in ("get", "get_unverified", "put"):
        shares = [figures[f"{name}_over_memcpy_{label}"] for label in BLOCK_BYTES]
        figures[f"{name}_over_memcpy"] = min(shares)
    return figures


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--json", type=Path, help="write the report here")
    parser.add_argument("--region-mib", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args(argv)
    report = Report(
        benchmark="pool_copy",
        settings={"region_mib": arguments.region_mib, "rounds": arguments.rounds},
        figures=measure_all(arguments.region_mib << 20, arguments.rounds),
    )
    if arguments.json:
        report.write(arguments.json)


if __name__ == "__main__":
    main()
