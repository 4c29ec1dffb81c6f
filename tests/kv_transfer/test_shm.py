"""The shm backend between two real processes: the receiver's region is owned by a child."""

import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.errors import TransferError
from kv_transfer.backends.shm import BACKEND, ShmReceiver, ShmSender
from kv_transfer.memory.shared_region import SharedRegion
from kv_transfer.ports import RegionHandle
from tests.kv_transfer.conformance import (
    LAYOUT,
    RECEIVER_BLOCKS,
    SENDER_BLOCKS,
    Link,
    RemoteConformance,
    ShardedConformance,
)
from tests.kv_transfer.remote import ROOT, Remote, remote
from tests.waits import WAIT_S


@pytest.fixture(scope="module")
def arena() -> Iterator[SharedRegion]:
    region = SharedRegion.create(LAYOUT.region_bytes(SENDER_BLOCKS))
    yield region
    region.close()


class TestSharedMemoryBackend(RemoteConformance, ShardedConformance):
    @pytest.fixture(scope="class")
    @classmethod
    def both(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Remote]:
        with remote(BACKEND, f"unix:{tmp_path_factory.mktemp('kv') / 'region'}") as both:
            yield both

    @pytest.fixture
    def link(self, both: Remote) -> Link:
        return both.link()


@pytest.fixture
def receiver(tmp_path: Path) -> Iterator[ShmReceiver]:
    region = SharedRegion.create(LAYOUT.region_bytes(RECEIVER_BLOCKS))
    receiver = ShmReceiver(region, path=str(tmp_path / "kv"), num_blocks=RECEIVER_BLOCKS)
    yield receiver
    receiver.close()
    region.close()


def test_a_handle_admits_one_peer_only(receiver: ShmReceiver, arena: SharedRegion):
    sender = ShmSender(arena.memoryview, num_blocks=SENDER_BLOCKS)
    handle = receiver.handle()
    writer = sender.connect(handle, LAYOUT)
    assert receiver.attached() == 1
    with pytest.raises(TransferError, match="refused"):
        sender.connect(handle, LAYOUT)
    writer.close()


def test_a_region_of_another_size_is_refused(receiver: ShmReceiver, arena: SharedRegion):
    sender = ShmSender(arena.memoryview, num_blocks=SENDER_BLOCKS)
    handle = receiver.handle()
    larger = RegionHandle(backend=BACKEND, opaque=handle.opaque, num_blocks=handle.num_blocks + 1)
    with pytest.raises(TransferError, match="bytes"):
        sender.connect(larger, LAYOUT)


def test_a_peer_that_dies_is_known_to_be_gone(tmp_path: Path, receiver: ShmReceiver):
    handle = receiver.handle()
    code = (
        "import sys\n"
        "from kv_transfer.memory.attach import AttachToken\n"
        "from kv_transfer.memory.shared_region import attach_region\n"
        "opaque, size = bytes.fromhex(sys.argv[1]), int(sys.argv[2])\n"
        "token = AttachToken.unpack(opaque, b'BSHM\\x02')\n"
        "held = attach_region(token.address.removeprefix('unix:'), token.secret, size)\n"
        "print('attached', flush=True)\n"
        "sys.stdin.read()\n"
    )
    size = str(LAYOUT.region_bytes(RECEIVER_BLOCKS))
    peer = subprocess.Popen(
        [sys.executable, "-c", code, handle.opaque.hex(), size],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert peer.stdout is not None
    assert peer.stdout.readline() == b"attached\n"
    gone = threading.Event()
    receiver.revoke(handle, gone.set)
    assert not gone.is_set()
    peer.kill()
    peer.communicate(timeout=WAIT_S)
    assert gone.wait(30)
    assert receiver.attached() == 0


def test_closing_removes_the_socket_file(tmp_path: Path):
    region = SharedRegion.create(4096)
    path = tmp_path / "region"
    receiver = ShmReceiver(region, path=str(path), num_blocks=1)
    assert path.is_socket()
    assert path.stat().st_mode & 0o077 == 0
    receiver.close()
    assert not path.exists()
    region.close()


def test_the_socket_file_of_a_killed_predecessor_is_replaced(tmp_path: Path):
    path = tmp_path / "kv"
    left_behind = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    left_behind.bind(str(path))
    left_behind.close()
    region = SharedRegion.create(4096)
    receiver = ShmReceiver(region, path=str(path), num_blocks=1)
    with pytest.raises(OSError, match="cannot bind"):
        ShmReceiver(region, path=str(path), num_blocks=1)
    receiver.close()
    region.close()


@pytest.mark.parametrize("name", ["x" * 120, "missing/kv"])
def test_a_path_that_cannot_be_bound_is_named(tmp_path: Path, name: str):
    region = SharedRegion.create(4096)
    with pytest.raises(OSError, match="cannot bind"):
        ShmReceiver(region, path=str(tmp_path / name), num_blocks=1)
    region.close()


def test_a_file_that_is_no_socket_is_left_alone(tmp_path: Path):
    path = tmp_path / "kv"
    path.write_text("precious")
    region = SharedRegion.create(4096)
    with pytest.raises(OSError, match="cannot bind"):
        ShmReceiver(region, path=str(path), num_blocks=1)
    assert path.read_text() == "precious"
    region.close()
