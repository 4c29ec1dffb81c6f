"""Blocks for a disk, whose bytes follow from their names, so that whoever reads one knows what it must be."""

import random
import struct
from pathlib import Path

import xxhash

from baton.errors import CorruptKvError
from baton.ids import BlockKey
from kvpool.messages import DiskBlock, Owner
from kvpool.ssd.store import SsdStore

SLOT_BYTES = 6000
NUM_LAYERS = 3
NUM_EXTENTS = 12
SIZE_BYTES = NUM_EXTENTS * (3 * 4096 + 4096)


def key(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(16, "little"))


def bytes_of(block_key: BlockKey, size_bytes: int = SLOT_BYTES) -> bytes:
    return random.Random(block_key).randbytes(size_bytes)


def block(
    number: int,
    extent: int = 0,
    epoch: int = 1,
    *,
    size_bytes: int = SLOT_BYTES,
    tenant: str = "t",
) -> DiskBlock:
    data, layer = bytes_of(key(number), size_bytes), size_bytes // NUM_LAYERS
    hashes = [
        xxhash.xxh3_64_intdigest(data[i * layer : (i + 1) * layer]) for i in range(NUM_LAYERS)
    ]
    return DiskBlock(
        extent=extent,
        epoch=epoch,
        key=key(number),
        owner=Owner(tenant=tenant, scope="s", model="m"),
        size_bytes=size_bytes,
        position=number,
        checksums=struct.pack(f"<{NUM_LAYERS}Q", *hashes),
    )


def open_store(path: Path, num_extents: int = NUM_EXTENTS) -> SsdStore:
    return SsdStore(path, num_extents * (SIZE_BYTES // NUM_EXTENTS), SLOT_BYTES)


def put(store: SsdStore, put_block: DiskBlock) -> None:
    store.write(put_block, memoryview(bytes_of(put_block.key, put_block.size_bytes)))


def get(store: SsdStore, got_block: DiskBlock) -> bytes | None:
    """The block's bytes, None for a miss."""
    slot = bytearray(SLOT_BYTES)
    try:
        store.read(got_block, memoryview(slot))
    except CorruptKvError:
        return None
    return bytes(slot[: got_block.size_bytes])


def is_right(store: SsdStore, got_block: DiskBlock) -> bool:
    return get(store, got_block) == bytes_of(got_block.key, got_block.size_bytes)
