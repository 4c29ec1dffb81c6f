"""What a node stores blocks in: made at once or not at all."""

import asyncio
import threading
from functools import partial
from pathlib import Path

import pytest
import xxhash

from baton.clock import ManualClock
from baton.config.schema import PoolConfig
from baton.errors import OutOfMemoryError
from kvpool.messages import Demote, DiskBlock, Owner, PutGrant
from kvpool.node.storage import NodeStorage, StorageConfig
from kvpool.ssd.store import SsdStore
from tests.kvpool.nodes_world import identity, keys
from tests.waits import WAIT_S

SLOT_BYTES = 4096
SSD_BYTES = 1 << 20
NUM_SLOTS = 20


class HeldUpDisk(SsdStore):
    """Writes once it is let."""

    let = threading.Event()

    def write(self, block: DiskBlock, data: memoryview) -> None:
        assert self.let.wait(WAIT_S)
        super().write(block, data)


def storage(folder: Path, memory_bytes: int, disk: type[SsdStore] = SsdStore) -> NodeStorage:
    config = StorageConfig(
        pool=PoolConfig(),
        memory_bytes=memory_bytes,
        region_path=str(folder / "kv"),
        identity=identity("pool-0"),
        open_disk=partial(disk, folder / "disk", SSD_BYTES),
    )
    return NodeStorage(config, SLOT_BYTES, ManualClock())


async def test_a_slab_that_cannot_be_made_leaves_the_disk_to_the_next_try(tmp_path: Path) -> None:
    with pytest.raises(OutOfMemoryError, match=r"pool\.memory_bytes") as caught:
        storage(tmp_path, 1 << 60)
    assert caught.value.param == "pool.memory_bytes"
    made = storage(tmp_path, 4 * SLOT_BYTES)
    assert made.ledger.usage().ssd_works
    await made.close()


async def test_what_moves_while_a_node_stops_is_the_last_that_does(tmp_path: Path) -> None:
    faults: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, fault: faults.append(fault))
    made = storage(tmp_path, NUM_SLOTS * SLOT_BYTES, HeldUpDisk)
    put = made.ledger.reserve(keys(*range(NUM_SLOTS)), Owner(tenant="t", scope="", model=""), 0.0)
    assert isinstance(put, PutGrant)
    checksum = xxhash.xxh3_64_intdigest(bytes(SLOT_BYTES)).to_bytes(8, "little")
    made.ledger.commit(put.put_id, [checksum] * NUM_SLOTS, 0.0)
    moves = made.ledger.take_actions()
    assert made._mover is not None
    made._mover.carry_out(moves)
    # Readers have come: memory stays too full, and the ledger wants other blocks moved.
    for move in moves:
        assert isinstance(move, Demote)
        made.ledger.lease([move.block.key], 30.0, 0.0)
    closing = asyncio.create_task(made.close())
    await asyncio.sleep(0)
    HeldUpDisk.let.set()
    await closing
    assert made.ledger.usage().ssd_blocks > 0
    assert not faults
