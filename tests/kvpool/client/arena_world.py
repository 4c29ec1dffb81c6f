"""A slab, an arena and everything between them, in plain memory."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import xxhash

from baton.clock import ManualClock
from baton.ids import BlockId, BlockKey, LayerName, SeqId
from baton.layout import KvLayout
from baton.pages import PageFetch
from kv_transfer.memory.pages import layer_pages
from kvpool.client.arena_pages import HostPages, slab_layers
from kvpool.client.read_leases import ReadLeases
from kvpool.messages import BlockLease, HeldBlock

SEQ, OTHER = SeqId("w/1"), SeqId("w/2")
NUM_SLOTS, NUM_PAGES = 8, 6
TIMEOUT_S = 30


def layout(num_layers: int = 3) -> KvLayout:
    return KvLayout(
        model_fingerprint="tiny",
        dtype="float32",
        block_tokens=4,
        num_kv_heads=2,
        head_dim=8,
        layers=tuple(LayerName(str(index)) for index in range(num_layers)),
    )


def key(number: int) -> BlockKey:
    return BlockKey(bytes([number]) * 16)


@dataclass
class Desk:
    """What the copying threads told."""

    want: list[tuple[SeqId, tuple[BlockKey, ...]]] = field(default_factory=list)
    let_go: list[str] = field(default_factory=list)
    bad: list[BlockKey] = field(default_factory=list)

    def wanted(self, seq_id, keys) -> None:
        self.want.append((seq_id, tuple(keys)))

    def released(self, lease_ids) -> None:
        self.let_go += lease_ids

    def corrupt(self, keys) -> None:
        self.bad += keys


class ArenaWorld:
    """Block `i` lies in slot `i` of the slab, filled with random bytes; the arena is empty."""

    def __init__(self) -> None:
        self.layout = layout()
        size = self.layout.page_bytes
        rng = np.random.default_rng(7)
        self.slab = memoryview(bytearray(rng.bytes(NUM_SLOTS * size)))
        self.arena = memoryview(bytearray(NUM_PAGES * size))
        self.rows = slab_layers(self.slab, self.layout, num_slots=NUM_SLOTS, slot_bytes=size)
        self.pages = layer_pages(self.arena, self.layout, NUM_PAGES)
        self.host = HostPages(self.arena, self.layout, num_blocks=NUM_PAGES)
        self.clock = ManualClock(100.0)
        self.desk = Desk()
        self.leases = ReadLeases(self.clock, self.desk.released)

    def checksums(self, slot: int) -> bytes:
        sums = [xxhash.xxh3_64_intdigest(rows[slot].tobytes()) for rows in self.rows]
        return b"".join(value.to_bytes(8, "little") for value in sums)

    def held(self, number: int) -> HeldBlock:
        return HeldBlock(key=key(number), slot=number, epoch=1, checksums=self.checksums(number))

    def lease(
        self, seq_id: SeqId, *numbers: int, lease_id: str = "L", lease_s: float = 5.0
    ) -> None:
        blocks = tuple(self.held(number) for number in numbers)
        lease = BlockLease(lease_id=lease_id, blocks=blocks, lease_s=lease_s)
        self.leases.add(seq_id, lease, asked_s=self.clock.now_s())

    def is_there(self, page: int, slot: int, layer_index: int) -> bool:
        return bool(np.array_equal(self.pages[layer_index][page], self.rows[layer_index][slot]))


def fetch(seq_id: SeqId, *placed: tuple[int, int], first_block: int = 0) -> PageFetch:
    """Blocks to pages."""
    return PageFetch(
        seq_id=seq_id,
        first_block=first_block,
        keys=tuple(key(number) for number, _ in placed),
        blocks=tuple(BlockId(page) for _, page in placed),
    )


class Gated:
    """An arena that copies a layer only once it is let; `after` runs when a layer has been copied."""

    def __init__(self, host: HostPages, *, is_open: bool = False) -> None:
        self._host = host
        self.num_layers = host.num_layers
        self.gates = [threading.Event() for _ in range(self.num_layers)]
        self.entered = [threading.Event() for _ in range(self.num_layers)]
        self.after: Callable[[int], None] = lambda layer_index: None
        if is_open:
            self.open()

    def open(self) -> None:
        for gate in self.gates:
            gate.set()

    def copy_in(self, layer_index, source, slots, pages):
        self.entered[layer_index].set()
        assert self.gates[layer_index].wait(TIMEOUT_S)
        hashes = self._host.copy_in(layer_index, source, slots, pages)
        self.after(layer_index)
        return hashes

    def copy_out(self, layer_index, pages, target, slots):
        return self._host.copy_out(layer_index, pages, target, slots)
