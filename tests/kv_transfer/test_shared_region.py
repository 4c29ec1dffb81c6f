import mmap
import os
import threading
from pathlib import Path

import pytest

from baton import cgroups
from baton.errors import OutOfMemoryError, TransferError
from kv_transfer.memory import shared_region
from kv_transfer.memory.shared_region import SharedRegion, available_bytes, shared_huge_pages
from tests.waits import eventually


def test_a_region_is_zeroed_and_writable():
    region = SharedRegion.create(8192)
    assert bytes(region.memoryview) == bytes(8192)
    region.memoryview[5] = 7
    assert region.memoryview[5] == 7
    region.close()


def test_two_mappings_of_one_region_see_the_same_bytes():
    region = SharedRegion.create(4096)
    other = SharedRegion.attach(os.dup(region.fd), 4096)
    region.memoryview[100:104] = b"page"
    assert bytes(other.memoryview[100:104]) == b"page"
    other.close()
    region.close()


@pytest.mark.parametrize("size", [0, 4095, 8192])
def test_a_region_cannot_be_resized_by_anyone(size: int):
    region = SharedRegion.create(4096)
    with pytest.raises(PermissionError):
        os.ftruncate(region.fd, size)
    region.close()


def test_an_unsealed_file_is_refused():
    fd = os.memfd_create("foreign", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 4096)
    with pytest.raises(TransferError, match="sealed"):
        SharedRegion.attach(fd, 4096)
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(fd)


def test_more_memory_than_there_is_is_refused_with_both_numbers(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shared_region, "available_bytes", lambda: 1000)
    with pytest.raises(OutOfMemoryError, match=r"4096 bytes .* 1000 bytes"):
        SharedRegion.create(4096)


def test_what_is_available_is_bounded_by_the_machine():
    assert 0 < shared_region.available_bytes() < 1 << 60


def test_views_outlive_the_region_that_they_came_from():
    region = SharedRegion.create(4096)
    view = memoryview(region.memoryview)
    region.close()
    view[0] = 1
    assert view[0] == 1


def test_a_regions_page_faults_are_taken_in_the_background():
    size = (41 << 20) + 3 * mmap.PAGESIZE
    region = SharedRegion.create(size)
    try:
        eventually(lambda: size in _mapped_bytes("Rss"))
    finally:
        region.close()


@pytest.mark.skipif(
    shared_huge_pages() in {"unknown", "never", "deny"},
    reason=f"shared memory gets no huge pages here, shmem_enabled is {shared_huge_pages()}",
)
def test_a_region_gets_huge_pages_where_the_host_gives_them():
    """As many as it fills; of a machine whose memory is in pieces fewer."""
    size = (41 << 20) + 3 * mmap.PAGESIZE
    region = SharedRegion.create(size)
    try:
        eventually(lambda: any(_mapped_bytes("ShmemPmdMapped")))
        eventually(lambda: size in _mapped_bytes("Rss"))
    finally:
        region.close()


def test_a_region_may_be_closed_while_its_page_faults_are_taken():
    region = SharedRegion.create(256 << 20)
    other = SharedRegion.attach(os.dup(region.fd), 256 << 20)
    region.close()
    other.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "populate"]


def _mapped_bytes(field: str) -> list[int]:
    """What this process has mapped in of each region, as smaps counts it."""
    told = Path("/proc/self/smaps").read_text().split("memfd:baton-kv")[1:]
    return [int(one.partition(f"{field}:")[2].split()[0]) * 1024 for one in told]


@pytest.mark.parametrize(
    ("files", "left"),
    [
        ({"memory.max": "1000", "memory.current": "900"}, 100),
        ({"memory.max": "1000", "memory.current": "900", "memory.stat": "inactive_file 600"}, 700),
        (
            {
                "memory.limit_in_bytes": "1000",
                "memory.usage_in_bytes": "900",
                "memory.stat": "inactive_file 1\ntotal_inactive_file 600",
            },
            700,
        ),
        ({"memory.max": "1000", "memory.current": "900", "memory.stat": "inactive_file 950"}, 1000),
    ],
)
def test_files_that_a_cgroup_has_read_leave_their_memory_to_a_region(
    files: dict[str, str], left: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A model's weights, say, read in a container."""
    for name, text in files.items():
        (tmp_path / name).write_text(text + "\n")
    monkeypatch.setattr(cgroups, "folders", lambda _: [tmp_path])
    assert available_bytes() == left
