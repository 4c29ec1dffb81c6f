"""Hands a region's descriptor to peers on the same host, and knows when they have let go of it.

A peer connects to a Unix socket, shows a one-time token and gets the descriptor (SCM_RIGHTS). It keeps the connection open
for as long as it maps the region; the kernel closes it when the process dies, however it dies. So the end of the
connection proves that nothing more is written by that peer: this is what fencing means in shared memory, where a mapping
cannot be taken back.
"""

import hmac
import os
import secrets
import selectors
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from baton.errors import TransferError
from kv_transfer.regions import SharedRegion

TOKEN_BYTES = 32
_ATTACHED = b"A"
_CONNECT_TIMEOUT_S = 5.0
_UCRED = struct.Struct("3i")  # pid, uid, gid


@dataclass(slots=True, eq=False)
class _Grant:
    """One token and who uses it."""

    token: bytes
    peer: socket.socket | None = None
    gone: Callable[[], None] | None = None


class RegionServer:
    """Serves one region on one socket file, from one small thread."""

    def __init__(self, region: SharedRegion, path: str) -> None:
        """Binds and starts serving.

        Raises:
            OSError: The path is served by another process, too long for a Unix socket (about 100 bytes), or its folder is missing.
        """
        self._region = region
        self.path = path
        self._listener = _bind(path)
        Path(path).chmod(0o600)
        self._listener.listen(64)
        self._listener.setblocking(False)
        self._wake, self._woken = socket.socketpair()
        self._lock = threading.Lock()
        self._grants: dict[bytes, _Grant] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._selector.register(self._woken, selectors.EVENT_READ, self._stop)
        self._serving = True  # the thread's
        self._closed = False  # the callers'
        self._thread = threading.Thread(target=self._serve, name="kv-regions", daemon=True)
        self._thread.start()

    def grant(self) -> bytes:
        """A fresh token with which one peer may attach once."""
        token = secrets.token_bytes(TOKEN_BYTES)
        with self._lock:
            self._grants[token] = _Grant(token=token)
        return token

    def revoke(self, token: bytes, gone: Callable[[], None]) -> None:
        """Lets nobody attach by `token` any more; calls `gone`, from any thread, once whoever did has let go."""
        with self._lock:
            grant = self._grants.get(token)
            if grant is not None and grant.peer is not None:
                grant.gone = gone
                return
            self._grants.pop(token, None)
        gone()

    def attached(self) -> int:
        """How many peers map the region now."""
        with self._lock:
            return sum(grant.peer is not None for grant in self._grants.values())

    def close(self) -> None:
        """Stops serving and removes the socket file; peers that are attached keep their mapping."""
        if self._closed:
            return
        self._closed = True
        self._wake.send(b"x")
        self._thread.join()
        self._wake.close()
        Path(self.path).unlink(missing_ok=True)

    def _serve(self) -> None:
        while self._serving:
            for key, _ in self._selector.select():
                key.data()
        for registered in list(self._selector.get_map().values()):
            sock = registered.fileobj
            assert isinstance(sock, socket.socket)
            sock.close()
        self._selector.close()

    def _stop(self) -> None:
        self._serving = False

    def _accept(self) -> None:
        peer, _ = self._listener.accept()
        peer.setblocking(False)
        if not _same_user(peer):
            peer.close()
            return
        self._selector.register(peer, selectors.EVENT_READ, lambda: self._introduce(peer))

    def _introduce(self, peer: socket.socket) -> None:
        """The peer's first and only message: its token, in one piece."""
        grant = self._claim(_receive(peer), peer)
        if grant is None:
            self._drop(peer)
            return
        try:
            socket.send_fds(peer, [_ATTACHED], [self._region.fd])
        except OSError:
            self._detach(grant, peer)
            return
        self._selector.modify(peer, selectors.EVENT_READ, lambda: self._detach(grant, peer))

    def _claim(self, token: bytes, peer: socket.socket) -> _Grant | None:
        with self._lock:
            for known, grant in self._grants.items():
                if hmac.compare_digest(known, token) and grant.peer is None:
                    grant.peer = peer
                    return grant
        return None

    def _detach(self, grant: _Grant, peer: socket.socket) -> None:
        """Whatever a peer says after attaching, its end included, ends its use of the region."""
        if _receive(peer):
            return
        self._drop(peer)
        with self._lock:
            self._grants.pop(grant.token, None)
            gone = grant.gone
        if gone is not None:
            gone()

    def _drop(self, peer: socket.socket) -> None:
        self._selector.unregister(peer)
        peer.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Attachment:
    """A peer's mapped region. Closing it tells the owner that nothing more will be written."""

    region: SharedRegion
    connection: socket.socket

    def close(self) -> None:
        """Unmaps first: the owner may reuse the memory as soon as the connection ends."""
        self.region.close()
        self.connection.close()


def attach(path: str, token: bytes, size_bytes: int) -> Attachment:
    """Gets and maps the region that `token` stands for. Blocks for at most a few seconds.

    Raises:
        TransferError: Nobody serves there, the token is refused, or the region is not of that size.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(_CONNECT_TIMEOUT_S)
    try:
        connection.connect(path)
        connection.sendall(token)
        answer, fds, _, _ = socket.recv_fds(connection, len(_ATTACHED), 1)
        if answer != _ATTACHED or len(fds) != 1:
            raise TransferError("the peer refused the region's token")
        region = SharedRegion.attach(fds[0], size_bytes)
    except OSError as error:
        connection.close()
        raise TransferError(f"the peer's region at {path} cannot be reached: {error}") from error
    except TransferError:
        connection.close()
        raise
    return Attachment(region=region, connection=connection)


def _bind(path: str) -> socket.socket:
    """A socket bound to `path`, in place of one that a killed predecessor left there."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if _abandoned(path):
            Path(path).unlink(missing_ok=True)
        listener.bind(path)
    except OSError as error:
        listener.close()
        raise OSError(f"cannot bind the region's socket {path}: {error}") from error
    return listener


def _abandoned(path: str) -> bool:
    """Whether a socket file lies there that nobody serves."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            return Path(path).is_socket()
        except FileNotFoundError:
            return False
    return False


def _same_user(peer: socket.socket) -> bool:
    raw = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    _, uid, _ = _UCRED.unpack(raw)
    return bool(uid == os.getuid())


def _receive(peer: socket.socket) -> bytes:
    """What the peer sent; empty when it is gone."""
    try:
        return peer.recv(TOKEN_BYTES + 1)
    except BlockingIOError:
        return b"-"
    except OSError:
        return b""
