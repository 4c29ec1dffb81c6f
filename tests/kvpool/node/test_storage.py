"""What a node stores blocks in: made at once or not at all."""

from functools import partial
from pathlib import Path

import pytest

from baton.clock import ManualClock
from baton.config.schema import PoolConfig
from baton.errors import OutOfMemoryError
from kvpool.node.storage import NodeStorage, StorageConfig
from kvpool.ssd.store import SsdStore
from tests.kvpool.nodes_world import identity

SLOT_BYTES = 4096
SSD_BYTES = 1 << 20


def storage(folder: Path, memory_bytes: int) -> NodeStorage:
    config = StorageConfig(
        pool=PoolConfig(),
        memory_bytes=memory_bytes,
        region_path=str(folder / "kv"),
        identity=identity("pool-0"),
        open_disk=partial(SsdStore, folder / "disk", SSD_BYTES),
    )
    return NodeStorage(config, SLOT_BYTES, ManualClock())


async def test_a_slab_that_cannot_be_made_leaves_the_disk_to_the_next_try(tmp_path: Path) -> None:
    with pytest.raises(OutOfMemoryError, match=r"pool\.memory_bytes") as caught:
        storage(tmp_path, 1 << 60)
    assert caught.value.param == "pool.memory_bytes"
    made = storage(tmp_path, 4 * SLOT_BYTES)
    assert made.ledger.usage().ssd_works
    await made.close()
