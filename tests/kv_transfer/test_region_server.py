"""Who has left, and who only seems to have: a killed process's writes may outlast its connection."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kv_transfer.memory.attach import sign_reply
from kv_transfer.memory.region_server import RegionServer

pytestmark = pytest.mark.alone

TIMEOUT_S = 30
PEER = """
import socket, sys
from kv_transfer.memory.attach import AttachToken, attach, detach, read_reply
token = AttachToken(secret=bytes.fromhex(sys.argv[1]), address=sys.argv[2])
connection = attach(token)
read_reply(connection, token.secret)
print("in", flush=True)
for line in sys.stdin:
    if line == "detach\\n":
        detach(connection)
    if line == "close\\n":
        connection.close()
    print("done", flush=True)
"""


class Peer:
    """A process that is attached to the region server, and does what it is told."""

    def __init__(self, server: RegionServer) -> None:
        self.token = server.issue_token()
        self._process = subprocess.Popen(
            [sys.executable, "-c", PEER, self.token.hex(), server.address],
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


class Served:
    """A server whose peers write what may go on when they are killed, and one peer in it."""

    def __init__(self, server: RegionServer, peer: Peer) -> None:
        self.server, self.peer = server, peer
        self.gone = threading.Event()

    def revoke(self) -> None:
        self.server.revoke(self.peer.token, self.gone.set)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    server = RegionServer(
        f"unix:{tmp_path}/server",
        lambda peer, token: peer.sendall(sign_reply(b"welcome", token)),
        must_detach=True,
    )
    peer = Peer(server)
    yield Served(server, peer)
    peer.kill()
    server.close()


def test_a_peer_that_detached_has_left_once_the_connection_ends(served: Served) -> None:
    served.revoke()
    served.peer.tell("detach")
    assert not served.gone.is_set()
    served.peer.tell("close")
    assert served.gone.wait(TIMEOUT_S)


def test_who_leaves_without_a_word_is_gone_once_its_process_has_ended(served: Served) -> None:
    served.revoke()
    served.peer.tell("close")
    other = Peer(served.server)  # admitted by the thread that has seen the first one leave
    assert not served.gone.is_set()
    assert served.server.num_attached() == 2
    other.kill()
    served.peer.kill()
    assert served.gone.wait(TIMEOUT_S)


def test_a_killed_peer_is_gone(served: Served) -> None:
    served.peer.kill()
    served.revoke()
    assert served.gone.wait(TIMEOUT_S)


def test_a_peer_is_waited_for_whether_it_is_revoked_before_or_after_it_left(served: Served) -> None:
    served.peer.tell("close")
    other = Peer(served.server)
    served.revoke()
    assert not served.gone.is_set()
    other.kill()
    served.peer.kill()
    assert served.gone.wait(TIMEOUT_S)
