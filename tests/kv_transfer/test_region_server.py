"""Who is let in, who has left, and who only seems to have: a killed process's writes may outlast its connection."""

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from baton.clock import ManualClock
from baton.errors import TransferError
from kv_transfer.memory import region_server
from kv_transfer.memory.attach import AttachToken, attach, read_reply, sign_reply
from kv_transfer.memory.listening import Listening
from kv_transfer.memory.proof import (
    ANSWER_BYTES,
    CHALLENGE_BYTES,
    PROOF_BYTES,
    ConnectionProof,
    attach_key,
    challenge,
    read_challenge,
)
from kv_transfer.memory.region_server import Refused, RegionAccess, RegionServer
from tests.kv_transfer.conformance import SECRET
from tests.waits import WAIT_S, join

TIMEOUT_S = 30
PEER = """
import socket, sys
from kv_transfer.memory.attach import AttachToken, attach, detach, read_reply
token = AttachToken(secret=bytes.fromhex(sys.argv[1]), address=sys.argv[2])
attached = attach(token)
connection = attached.connection
read_reply(attached)
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
        self._process.communicate(timeout=WAIT_S)

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
        lambda peer, _token, key: peer.sendall(sign_reply(b"welcome", key)),
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


class Gate:
    """A region server on TCP, and what it refused."""

    def __init__(self, refused: Callable[[Refused], None] | None = None) -> None:
        self.refused: list[Refused] = []
        admission = RegionAccess(secret=SECRET, refused=refused or self.refused.append)
        self.server = RegionServer("127.0.0.1:0", self._welcome, admission)

    def token(self) -> AttachToken:
        return AttachToken(secret=self.server.issue_token(), address=self.server.address)

    def stranger(self, source: str = "127.0.0.1") -> socket.socket:
        """A connection that has heard the challenge."""
        host, _, port = self.server.address.rpartition(":")
        connection = socket.create_connection(
            (host, int(port)), timeout=TIMEOUT_S, source_address=(source, 0)
        )
        assert len(_all(connection, CHALLENGE_BYTES)) == CHALLENGE_BYTES
        return connection

    def _welcome(self, peer: socket.socket, _token: bytes, key: bytes) -> None:
        peer.sendall(sign_reply(b"welcome", key))


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.server.close()


def _all(connection: socket.socket, size: int) -> bytes:
    found = b""
    while len(found) < size and (part := connection.recv(size - len(found))):
        found += part
    return found


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_who_knows_token_and_secret_is_let_in_once(gate: Gate) -> None:
    token = gate.token()
    attached = attach(token, SECRET)
    assert read_reply(attached) == b"welcome"
    with pytest.raises(TransferError, match="refused"):
        attach(token, SECRET)
    attached.connection.close()
    assert gate.refused == [Refused.UNPROVEN]


def test_a_token_without_the_clusters_secret_opens_nothing_and_stays_good(gate: Gate) -> None:
    token = gate.token()
    for secret in (b"", b"x" * 32):
        with pytest.raises(TransferError, match="refused"):
            attach(token, secret)
    attach(token, SECRET).connection.close()


def test_a_token_that_nobody_shows_for_long_is_worth_nothing_and_not_kept(
    gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    unused, shown = gate.token(), gate.token()
    inside = attach(shown, SECRET)
    monkeypatch.setattr(region_server, "_TOKEN_LIFE_S", 0.0)
    fresh = gate.token()
    with pytest.raises(TransferError, match="refused"):
        attach(unused, SECRET)
    attach(fresh, SECRET).connection.close()
    assert gate.server.send(shown.secret, b"x")
    inside.connection.close()


def test_the_secret_without_a_token_opens_nothing(gate: Gate) -> None:
    gate.token()
    with pytest.raises(TransferError, match="refused"):
        attach(AttachToken(secret=bytes(32), address=gate.server.address), SECRET)


def test_a_recorded_answer_is_worth_nothing_to_another_challenge(gate: Gate) -> None:
    host, _, port = gate.server.address.rpartition(":")
    token = gate.token()
    with socket.create_connection((host, int(port)), timeout=TIMEOUT_S) as first:
        nonce = read_challenge(_all(first, CHALLENGE_BYTES))
    assert nonce is not None
    proof = ConnectionProof(
        key=attach_key(SECRET), token=token.secret, server_nonce=nonce, peer_nonce=bytes(32)
    )
    with gate.stranger() as second:
        second.sendall(proof.answer())
        assert second.recv(1) == b""
    attach(token, SECRET).connection.close()  # nobody has used it up


def test_a_server_that_does_not_know_the_token_is_not_believed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        host, port = listener.getsockname()
        echo = threading.Thread(target=_reflect, args=(listener,))
        echo.start()
        with pytest.raises(TransferError, match="does not know"):
            attach(AttachToken(secret=bytes(32), address=f"{host}:{port}"), SECRET)
        join(echo)


def _reflect(listener: socket.socket) -> None:
    """Sends the peer's own proof back to it."""
    peer, _ = listener.accept()
    with peer:
        peer.sendall(challenge(bytes(32)))
        peer.sendall(_all(peer, ANSWER_BYTES)[-PROOF_BYTES:])


@pytest.mark.parametrize("said", [b"", b"x", b"x" * (ANSWER_BYTES - 1)])
def test_who_has_not_proven_itself_in_time_is_gone(gate: Gate, said: bytes) -> None:
    with gate.stranger() as stranger:
        stranger.sendall(said)
        assert stranger.recv(1) == b""  # blocks until the server hangs up
    assert gate.refused == [Refused.LATE]


class OccupiedGate(Gate):
    """Gives the first peer what it needs once it may go on."""

    def __init__(self) -> None:
        self.busy, self.go_on = threading.Event(), threading.Event()
        super().__init__()

    def _welcome(self, peer: socket.socket, _token: bytes, key: bytes) -> None:
        if not self.busy.is_set():
            self.busy.set()
            assert self.go_on.wait(WAIT_S)
        super()._welcome(peer, _token, key)


def test_who_answers_while_another_is_let_in_for_long_is_let_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A transport starts when its first peer comes: longer than others have to answer."""
    clock = ManualClock()
    monkeypatch.setattr(
        region_server, "time", SimpleNamespace(monotonic=clock.now_s, sleep=time.sleep)
    )
    gate = OccupiedGate()
    host, _, port = gate.server.address.rpartition(":")
    token = gate.token()
    with (
        gate.stranger() as silent,
        socket.create_connection((host, int(port)), timeout=TIMEOUT_S) as half_way,
    ):
        nonce = read_challenge(_all(half_way, CHALLENGE_BYTES))
        assert nonce is not None
        first = attach(gate.token(), SECRET)
        assert gate.busy.wait(WAIT_S)
        clock.advance(5 * region_server.PROOF_TIMEOUT_S)
        proof = ConnectionProof(
            key=attach_key(SECRET), token=token.secret, server_nonce=nonce, peer_nonce=bytes(32)
        )
        half_way.sendall(proof.answer())
        gate.go_on.set()
        assert read_reply(first) == b"welcome"
        assert _all(half_way, PROOF_BYTES) == proof.of_server()
        assert silent.recv(1) == b""
        assert gate.refused == [Refused.LATE]
        first.connection.close()
    gate.server.close()


def test_garbage_is_answered_by_hanging_up(gate: Gate) -> None:
    with gate.stranger() as stranger:
        stranger.sendall(b"x" * ANSWER_BYTES)
        assert stranger.recv(1) == b""
    assert gate.refused == [Refused.UNPROVEN]


def test_silent_connections_hold_few_descriptors_and_keep_nobody_out(gate: Gate) -> None:
    before = _descriptors()
    address = gate.server.address.rpartition(":")
    silent = [socket.create_connection((address[0], int(address[2]))) for _ in range(200)]
    attached = attach(gate.token(), SECRET)
    assert read_reply(attached) == b"welcome"
    assert _descriptors() - before - len(silent) < 70  # 64 that have proven nothing, at most
    for one in silent:
        one.settimeout(TIMEOUT_S)
        with suppress(ConnectionResetError):
            _all(one, CHALLENGE_BYTES + 1)  # until the server hangs up
    assert _descriptors() - before - len(silent) == 2  # both ends of the one that is attached
    assert len(gate.refused) == 200
    for one in silent:
        one.close()
    attached.connection.close()


def test_who_answers_as_it_has_to_make_room_for_another_keeps_nobody_out() -> None:
    """Both are seen at once: the answer is that of a connection which is closed by then."""
    busy, go_on = threading.Event(), threading.Event()

    def refused(_reason: Refused) -> None:
        busy.set()
        assert go_on.wait(WAIT_S)

    gate = Gate(refused)
    with ExitStack() as strangers:
        other_host = strangers.enter_context(gate.stranger("127.0.0.2"))
        oldest, *_ = [strangers.enter_context(gate.stranger()) for _ in range(16)]
        other_host.sendall(b"x" * ANSWER_BYTES)
        assert busy.wait(WAIT_S)
        host, _, port = gate.server.address.rpartition(":")
        strangers.enter_context(socket.create_connection((host, int(port)), timeout=TIMEOUT_S))
        oldest.sendall(b"x")
        go_on.set()
        attach(gate.token(), SECRET).connection.close()
    gate.server.close()


def test_a_peer_cannot_leave_much_unread(gate: Gate) -> None:
    with gate.stranger() as stranger:
        stranger.setblocking(False)
        sent = 0
        with suppress(OSError):
            while sent < 1 << 26:
                sent += stranger.send(b"x" * 65536)
    assert sent < 1 << 24  # the stranger's own buffer


def test_a_peer_that_cannot_be_given_what_it_needs_keeps_nobody_out() -> None:
    faults = [OSError("no descriptor"), TransferError("no agent"), RuntimeError("no thread")]

    def welcome(peer: socket.socket, _token: bytes, key: bytes) -> None:
        if faults:
            raise faults.pop(0)
        peer.sendall(sign_reply(b"welcome", key))

    server = RegionServer("127.0.0.1:0", welcome, RegionAccess(secret=SECRET))
    for _ in range(len(faults)):
        attached = attach(AttachToken(secret=server.issue_token(), address=server.address), SECRET)
        with pytest.raises(TransferError):
            read_reply(attached)
        attached.connection.close()
    attached = attach(AttachToken(secret=server.issue_token(), address=server.address), SECRET)
    assert read_reply(attached) == b"welcome"
    attached.connection.close()
    server.close()


def test_a_server_on_tcp_needs_the_secret() -> None:
    with pytest.raises(ValueError, match="secret"):
        RegionServer("127.0.0.1:0", lambda *_: None)


@pytest.mark.parametrize("told", ["[::1]:7001", "127.0.0.1:7001"])
def test_a_server_at_every_address_is_reached_where_peers_are_told_over_ipv6_and_ipv4(
    told: str,
) -> None:
    """As the gRPC port of the same process is."""
    admission = RegionAccess(secret=SECRET, listening=Listening.at("[::]:7001", "", told))
    try:
        server = RegionServer("[::]:0", lambda *_: None, admission)
    except OSError as error:
        pytest.skip(f"no IPv6: {error}")
    try:
        token = AttachToken(secret=server.issue_token(), address=server.address)
        attach(token, SECRET).connection.close()
    finally:
        server.close()
