"""Who has left, and who only seems to have: a killed process's writes may outlast its connection."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kv_transfer.memory.attach import seal
from kv_transfer.memory.region_server import RegionServer

pytestmark = pytest.mark.alone

TIMEOUT_S = 30
PEER = """
import socket, sys
from kv_transfer.memory.attach import AttachToken, attach, detach, read_sealed
invitation = AttachToken(token=bytes.fromhex(sys.argv[1]), address=sys.argv[2])
connection = attach(invitation)
read_sealed(connection, invitation.token)
print("in", flush=True)
for line in sys.stdin:
    if line == "farewell\\n":
        detach(connection)
    if line == "close\\n":
        connection.close()
    print("done", flush=True)
"""


class Peer:
    """A process that has entered the gate, and does what it is told."""

    def __init__(self, gate: RegionServer) -> None:
        self.token = gate.grant()
        self._process = subprocess.Popen(
            [sys.executable, "-c", PEER, self.token.hex(), gate.address],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._said("in")

    def tell(self, what: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{what}\n")
        self._process.stdin.flush()
        self._said("done")

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _said(self, what: str) -> None:
        assert self._process.stdout is not None
        assert self._process.stdout.readline().strip() == what


class Doors:
    """A gate whose peers write what may go on when they are killed, and one peer in it."""

    def __init__(self, gate: RegionServer, peer: Peer) -> None:
        self.gate, self.peer = gate, peer
        self.gone = threading.Event()

    def revoke(self) -> None:
        self.gate.revoke(self.peer.token, self.gone.set)


@pytest.fixture
def doors(tmp_path: Path) -> Iterator[Doors]:
    gate = RegionServer(
        f"unix:{tmp_path}/gate",
        lambda peer, token: peer.sendall(seal(b"welcome", token)),
        farewells=True,
    )
    peer = Peer(gate)
    yield Doors(gate, peer)
    peer.kill()
    gate.close()


def test_who_says_farewell_has_left_once_the_connection_ends(doors: Doors) -> None:
    doors.revoke()
    doors.peer.tell("farewell")
    assert not doors.gone.is_set()
    doors.peer.tell("close")
    assert doors.gone.wait(TIMEOUT_S)


def test_who_leaves_without_a_word_is_gone_once_its_process_has_ended(doors: Doors) -> None:
    doors.revoke()
    doors.peer.tell("close")
    other = Peer(doors.gate)  # admitted by the thread that has seen the first one leave
    assert not doors.gone.is_set()
    assert doors.gate.inside() == 2
    other.kill()
    doors.peer.kill()
    assert doors.gone.wait(TIMEOUT_S)


def test_a_killed_peer_is_gone(doors: Doors) -> None:
    doors.peer.kill()
    doors.revoke()
    assert doors.gone.wait(TIMEOUT_S)


def test_a_peer_is_waited_for_whether_it_is_revoked_before_or_after_it_left(doors: Doors) -> None:
    doors.peer.tell("close")
    other = Peer(doors.gate)
    doors.revoke()
    assert not doors.gone.is_set()
    other.kill()
    doors.peer.kill()
    assert doors.gone.wait(TIMEOUT_S)
