"""What was flushed on a node with a disk stays flushed, whenever the node is killed after it has answered,
and what was put afterwards is not flushed again by its next start.
"""

import asyncio
import shutil
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import xxhash

from baton.clock import ManualClock
from baton.config.schema import PoolConfig
from baton.errors import PoolUnavailableError, UnavailableError
from kvpool.directory.memory import MemoryDirectory
from kvpool.messages import DiskBlock, Erase, FlushMark, Owner, PutGrant, Selection
from kvpool.node.pool_node import PoolNode
from kvpool.ssd.store import SsdStore
from tests.kvpool.nodes_world import ANNA, LAYOUT, identity, keys, until
from tests.waits import WAIT_S, soon

BERT = Owner(tenant="bert", scope="bert", model="m")
ALL_OF_ANNA = Selection(tenant="anna")
NUM_SLOTS = 8
SSD_BYTES = 1 << 20
REDIS = "redis://pool:old-password@redis:6379/0"
"""Nobody connects: it names a directory."""


class HeldUpDisk(SsdStore):
    """Writes and forgets when it may; how often it has been about to is counted."""

    def __init__(self, folder: Path, slot_bytes: int) -> None:
        super().__init__(folder, SSD_BYTES, slot_bytes)
        self.may_write, self.may_forget = threading.Event(), threading.Event()
        self.may_write.set()
        self.may_forget.set()
        self.writing = self.forgetting = 0

    def write(self, block: DiskBlock, data: memoryview) -> None:
        self.writing += 1
        assert self.may_write.wait(WAIT_S)
        super().write(block, data)

    def forget(self, erased: Sequence[Erase], mark: FlushMark | None = None) -> None:
        self.forgetting += 1
        assert self.may_forget.wait(WAIT_S)
        super().forget(erased, mark)


class FailingDisk(SsdStore):
    def __init__(self, folder: Path, slot_bytes: int) -> None:
        super().__init__(folder, SSD_BYTES, slot_bytes)

    def forget(self, erased: Sequence[Erase], mark: FlushMark | None = None) -> None:
        del erased, mark
        raise OSError("it takes nothing")


class Host:
    """One node with a disk, on which a quarter of the memory is kept free."""

    def __init__(
        self,
        folder: Path,
        open_disk: Callable[[Path, int], SsdStore],
        directory: MemoryDirectory | None = None,
        *,
        redis_url: str = "",
        incarnation: int = 1,
        attached: bool = True,
    ) -> None:
        self._folder = folder
        self._open_disk = open_disk
        self.opened: list[SsdStore] = []
        self.directory = directory or MemoryDirectory(ManualClock())
        clock = self._clock = ManualClock()
        self._lease_s = PoolConfig().node_lease_s
        self.node = PoolNode(
            replace(
                PoolConfig(),
                memory_bytes=NUM_SLOTS * LAYOUT.page_bytes,
                high_watermark=0.75,
                low_watermark=0.5,
                directory="redis" if redis_url else "memory",
                redis_url=redis_url,
            ),
            identity("pool-0", incarnation),
            address="",
            region_path=str(folder / "kv"),
            directory=self.directory,
            clock=clock,
            open_disk=self._open,
        )
        if attached:
            self.attach()

    def attach(self) -> None:
        """A worker comes."""
        self.node.attach(identity("decode-0"), LAYOUT)

    def _open(self, slot_bytes: int) -> SsdStore:
        self.opened.append(self._open_disk(self._folder / "disk", slot_bytes))
        return self.opened[-1]

    def put(self, *numbers: int, owner: Owner = ANNA) -> None:
        """Puts blocks of zeros, as the slab has from the beginning."""
        grant = self.node.reserve(
            keys(*numbers),
            owner,
            first=0,
            size_bytes=LAYOUT.page_bytes,
            writer=identity("decode-0"),
        )
        assert isinstance(grant, PutGrant)
        layer = xxhash.xxh3_64_intdigest(bytes(LAYOUT.page_bytes // len(LAYOUT.layers)))
        sums = np.full(len(LAYOUT.layers), layer, dtype="<u8").tobytes()
        assert self.node.commit(grant.put_id, [sums] * len(numbers)) == len(numbers)

    async def slots_free(self, number: int) -> None:
        """Until the disk has what memory has no room for."""
        await until(lambda: self.node.usage().slots_free == number)

    def after_a_kill(self) -> list[int]:
        """What a restart would find if the node were killed now."""
        store = SsdStore(self.killed() / "disk", SSD_BYTES, LAYOUT.page_bytes)
        found = store.recover()
        store.close()
        return sorted(block.key[0] for block in found)

    def killed(self) -> Path:
        """A folder with the disk as a kill leaves it now."""
        folder = Path(tempfile.mkdtemp(dir=self._folder))
        shutil.copytree(self._folder / "disk", folder / "disk")
        (folder / "disk").chmod(0o700)
        return folder

    async def registered(self) -> None:
        """The node renews its lease."""
        self._clock.advance(self._lease_s)
        await self.node.register()

    @property
    def on_disk(self) -> int:
        return self.node.usage().ssd_blocks


async def test_what_was_flushed_does_not_come_back_with_a_restart(tmp_path: Path) -> None:
    host = Host(tmp_path, HeldUpDisk)
    host.put(1, 2, owner=BERT)
    host.put(3, 4, 5, 6, 7)
    await host.slots_free(4)
    before = host.after_a_kill()
    assert set(before) & {3, 4, 5, 6, 7}
    await soon(host.node.flush(ALL_OF_ANNA))
    assert host.after_a_kill() == [number for number in before if number <= 2]
    await host.node.close()


async def test_a_flush_waits_neither_for_what_is_written_nor_is_that_found_later(
    tmp_path: Path,
) -> None:
    host = Host(tmp_path, HeldUpDisk)
    (disk,) = host.opened
    assert isinstance(disk, HeldUpDisk)
    disk.may_write.clear()
    host.put(1, 2, 3, 4, 5, 6, 7)
    await until(lambda: disk.writing)
    assert await soon(host.node.flush(ALL_OF_ANNA)) == 7
    disk.may_write.set()
    await host.slots_free(NUM_SLOTS)
    assert host.after_a_kill() == []
    host.put(1, 2, 3, 4, 5, 6, 7)
    await host.slots_free(4)
    assert len(host.after_a_kill()) == 3, "what is put afterwards is kept"
    await host.node.close()


async def test_a_node_goes_on_while_a_flush_waits_for_the_disk(tmp_path: Path) -> None:
    host = Host(tmp_path, HeldUpDisk)
    (disk,) = host.opened
    assert isinstance(disk, HeldUpDisk)
    disk.may_forget.clear()
    host.put(1)
    flushing = asyncio.create_task(host.node.flush(ALL_OF_ANNA))
    await until(lambda: disk.forgetting)
    host.put(2, owner=BERT)
    assert not flushing.done()
    disk.may_forget.set()
    assert await soon(flushing) == 1
    await host.node.close()


async def test_a_flush_that_the_disk_has_not_recorded_says_so(tmp_path: Path) -> None:
    host = Host(tmp_path, FailingDisk)
    host.put(1)
    with pytest.raises(UnavailableError, match="it takes nothing"):
        await soon(host.node.flush(ALL_OF_ANNA))
    assert host.node.usage().slots_free == NUM_SLOTS
    await host.node.close()


async def test_what_is_flushed_before_a_worker_has_come_is_gone_when_one_does(
    tmp_path: Path,
) -> None:
    directory = MemoryDirectory(ManualClock())
    host = Host(tmp_path, HeldUpDisk, directory, redis_url=REDIS)
    host.put(1, 2, 3, 4, 5, 6, 7)
    await host.slots_free(4)
    early, twin = (
        Host(host.killed(), HeldUpDisk, directory, redis_url=REDIS, incarnation=n, attached=False)
        for n in (2, 3)
    )
    assert await soon(early.node.flush(ALL_OF_ANNA)) == 0
    early.attach()
    assert early.on_disk == 0
    twin.attach()
    await twin.registered()
    assert twin.on_disk == 0, "as a start of the same node: the directory remembers"
    for each in (host, early, twin):
        await each.node.close()


async def test_a_flush_that_nothing_remembers_until_a_worker_comes_says_so(tmp_path: Path) -> None:
    host = Host(tmp_path, HeldUpDisk)
    host.put(1, 2, 3, 4, 5, 6, 7)
    await host.slots_free(4)
    early = Host(host.killed(), HeldUpDisk, attached=False)
    with pytest.raises(UnavailableError, match="no worker has attached since the node started"):
        await soon(early.node.flush(ALL_OF_ANNA))
    early.attach()
    assert early.on_disk == 0
    await until(lambda: early.after_a_kill() == [])
    for each in (host, early):
        await each.node.close()


class AwayDirectory(MemoryDirectory):
    async def flush(self, selection: Selection) -> int:
        raise PoolUnavailableError("nobody answers")


@pytest.mark.parametrize("attached", [True, False])
async def test_a_flush_of_which_other_nodes_do_not_hear_says_so(
    tmp_path: Path, attached: bool
) -> None:
    directory = AwayDirectory(ManualClock())
    host = Host(tmp_path, HeldUpDisk, directory, redis_url=REDIS, attached=attached)
    if attached:
        host.put(1)
    with pytest.raises(UnavailableError, match="other nodes have not been told") as told:
        await soon(host.node.flush(ALL_OF_ANNA))
    assert ("if the node starts again" in told.value.message) is not attached
    if attached:
        assert host.node.usage().slots_free == NUM_SLOTS
        await host.node.close()


async def flushed_and_filled(folder: Path, directory: MemoryDirectory) -> tuple[Host, HeldUpDisk]:
    """A node that has carried out a flush of the directory and then put blocks, three of them on its disk."""
    host = Host(folder, HeldUpDisk, directory, redis_url=REDIS)
    (disk,) = host.opened
    assert isinstance(disk, HeldUpDisk)
    await directory.flush(ALL_OF_ANNA)
    await host.registered()
    await until(lambda: disk.flush_mark)
    host.put(1, 2, 3, 4, 5, 6, 7)
    await host.slots_free(4)
    return host, disk


@pytest.mark.parametrize("url", [REDIS, REDIS.replace("old-password", "new-password")])
async def test_a_start_repeats_no_flush_that_an_earlier_one_has_carried_out(
    tmp_path: Path, url: str
) -> None:
    directory = MemoryDirectory(ManualClock())
    host, _ = await flushed_and_filled(tmp_path, directory)
    again = Host(host.killed(), HeldUpDisk, directory, redis_url=url, incarnation=2)
    await again.registered()
    assert again.on_disk == 3
    await directory.flush(ALL_OF_ANNA)
    await again.registered()
    assert again.on_disk == 0
    for each in (host, again):
        await each.node.close()


async def test_a_start_carries_out_the_flushes_that_the_node_has_missed(tmp_path: Path) -> None:
    directory = MemoryDirectory(ManualClock())
    host, _ = await flushed_and_filled(tmp_path, directory)
    folder = host.killed()
    await directory.flush(ALL_OF_ANNA)
    again = Host(folder, HeldUpDisk, directory, redis_url=REDIS, incarnation=2)
    assert again.on_disk == 3
    await again.registered()
    assert again.on_disk == 0
    for each in (host, again):
        await each.node.close()


async def test_a_start_carries_out_a_flush_that_the_disk_had_not_recorded_when_it_was_killed(
    tmp_path: Path,
) -> None:
    directory = MemoryDirectory(ManualClock())
    host, disk = await flushed_and_filled(tmp_path, directory)
    disk.may_forget.clear()
    await directory.flush(ALL_OF_ANNA)
    await host.registered()
    assert host.on_disk == 0
    await until(lambda: disk.forgetting == 2)
    again = Host(host.killed(), HeldUpDisk, directory, redis_url=REDIS, incarnation=2)
    await again.registered()
    assert again.on_disk == 0
    disk.may_forget.set()
    for each in (host, again):
        await each.node.close()


async def test_the_number_of_one_directorys_flush_is_nothing_in_another(tmp_path: Path) -> None:
    host, _ = await flushed_and_filled(tmp_path, MemoryDirectory(ManualClock()))
    other = MemoryDirectory(ManualClock())
    await other.flush(ALL_OF_ANNA)
    elsewhere = REDIS.replace("/0", "/1")
    again = Host(host.killed(), HeldUpDisk, other, redis_url=elsewhere, incarnation=2)
    await again.registered()
    assert again.on_disk == 0, "its only flush has the number of the other's only one"
    for each in (host, again):
        await each.node.close()
