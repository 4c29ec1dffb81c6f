"""Lets peers into a receiver's memory: each shows a token once, and the receiver knows when it has detached.

A peer connects, shows the token that its handle carried, gets what its backend needs and keeps the connection open for as
long as it may write. The kernel closes it when the process dies, however it dies. So the end of the connection proves
that nothing more is written by that peer: this is what fencing means where access cannot be taken back.

Where a killed process's writes may go on for a moment, as those of a GPU may, it proves nothing: there a peer says `DETACH` once
its last write is done, and the end of one that did not counts once its process has ended with all that it held.

On one host the server listens on a Unix socket of the same user; between hosts on TCP, where keep-alive notices a host that died.
The peer's side is `attach.py`.
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
from baton.telemetry.logs import get_logger
from kv_transfer.memory.attach import DETACH, TOKEN_BYTES, UNIX, keep_alive

_log = get_logger(__name__)

OnAttach = Callable[[socket.socket, bytes], None]
"""Gives a peer, over its connection, what it needs; called with its token on the server's thread. The peer is refused when it raises
OSError or TransferError."""


@dataclass(slots=True, eq=False)
class _Attachment:
    """One token and the peer that uses it; `process` is what watches the peer's process until it has detached."""

    token: bytes
    peer: socket.socket | None = None
    process: int | None = None
    gone: Callable[[], None] | None = None


class RegionServer:
    """Lets peers attach on one socket, from one small thread."""

    def __init__(self, address: str, on_attach: OnAttach, *, must_detach: bool = False) -> None:
        """Binds and starts serving.

        Args:
            address: `unix:/path`, or `host:port` where port 0 takes a free one.
            on_attach: Gives a peer that attaches what it needs.
            must_detach: Whether peers say `DETACH` once they write no more, so that without it their process has to end. On Unix
                sockets only.

        Raises:
            OSError: The address is served by another process, a path is too long for a Unix socket (about 100 bytes), or
                its folder is missing.
        """
        self._on_attach = on_attach
        self._must_detach = must_detach
        self._path = address.removeprefix(UNIX) if address.startswith(UNIX) else None
        self._listener = _bind_unix(self._path) if self._path is not None else _bind_tcp(address)
        self.address = address if self._path is not None else _tcp_address(self._listener)
        self._listener.listen(64)
        self._listener.setblocking(False)
        self._wake, self._woken = socket.socketpair()
        self._lock = threading.Lock()
        self._attachments: dict[bytes, _Attachment] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._selector.register(self._woken, selectors.EVENT_READ, self._stop)
        self._serving = True  # the thread's
        self._closed = False  # the callers'
        self._thread = threading.Thread(target=self._serve, name="kv-region-server", daemon=True)
        self._thread.start()

    def issue_token(self, gone: Callable[[], None] | None = None) -> bytes:
        """A fresh token by which one peer may attach once.

        Args:
            gone: Called on the server's thread when the peer that attached has left, unless `revoke` names another.
        """
        token = secrets.token_bytes(TOKEN_BYTES)
        with self._lock:
            self._attachments[token] = _Attachment(token=token, gone=gone)
        return token

    def revoke(self, token: bytes, gone: Callable[[], None]) -> None:
        """No peer attaches by `token` any more, and one that has is asked to leave; calls `gone`, from any thread, once it has."""
        with self._lock:
            attachment = self._attachments.get(token)
            if attachment is not None and attachment.peer is not None:
                attachment.gone = gone
                _hang_up(attachment.peer)
                return
            self._attachments.pop(token, None)
        gone()

    def send(self, token: bytes, data: bytes) -> bool:
        """Sends a few bytes to the peer that attached by `token`; False when it is gone, or lets them pile up unread."""
        with self._lock:
            attachment = self._attachments.get(token)
            peer = attachment.peer if attachment is not None else None
            if peer is None:
                return False
            try:
                return peer.send(data) == len(data)
            except OSError:
                return False

    def num_attached(self) -> int:
        """How many peers are attached."""
        with self._lock:
            return sum(attachment.peer is not None for attachment in self._attachments.values())

    def close(self) -> None:
        """Stops serving and removes the socket file. Peers see their connections end."""
        if self._closed:
            return
        self._closed = True
        self._wake.send(b"x")
        self._thread.join()
        self._wake.close()
        if self._path is not None:
            Path(self._path).unlink(missing_ok=True)

    def _serve(self) -> None:
        while self._serving:
            for key, _ in self._selector.select():
                key.data()
        with self._lock:
            attachments = list(self._attachments.values())
            self._attachments.clear()
        for registered in list(self._selector.get_map().values()):
            file = registered.fileobj
            if isinstance(file, socket.socket):
                file.close()
        for attachment in attachments:
            _forget_process(attachment)
        self._selector.close()

    def _stop(self) -> None:
        self._serving = False

    def _accept(self) -> None:
        try:
            peer, _ = self._listener.accept()
        except OSError:
            return  # It hung up before it was its turn.
        peer.setblocking(False)
        if self._path is None:
            keep_alive(peer)
        elif not is_same_user(peer):
            peer.close()
            return
        self._selector.register(peer, selectors.EVENT_READ, lambda: self._authenticate(peer))

    def _authenticate(self, peer: socket.socket) -> None:
        """The peer's first and only message: its token, in one piece."""
        attachment = self._claim(_receive(peer), peer)
        if attachment is None:
            self._drop(peer)
            return
        try:
            if self._must_detach:
                attachment.process = watch_process(peer)
            self._on_attach(peer, attachment.token)
        except (OSError, TransferError) as error:
            _log.warning("a peer could not attach", reason=str(error))
            _forget_process(attachment)
            self._left(attachment, peer)
            return
        self._selector.modify(peer, selectors.EVENT_READ, lambda: self._heard(attachment, peer))

    def _claim(self, token: bytes, peer: socket.socket) -> _Attachment | None:
        with self._lock:
            for known, attachment in self._attachments.items():
                if hmac.compare_digest(known, token) and attachment.peer is None:
                    attachment.peer = peer
                    return attachment
        return None

    def _heard(self, attachment: _Attachment, peer: socket.socket) -> None:
        """A peer that is attached says nothing but `DETACH`; its silence ends when its connection does."""
        said = _receive(peer)
        if said == DETACH:
            _forget_process(attachment)
        elif not said:
            self._left(attachment, peer)

    def _left(self, attachment: _Attachment, peer: socket.socket) -> None:
        self._drop(peer)
        if attachment.process is None:
            self._gone(attachment)
            return
        _log.warning(
            "a peer hung up without detaching: its process has to end before its pages are free"
        )
        self._selector.register(
            attachment.process, selectors.EVENT_READ, lambda: self._died(attachment)
        )

    def _died(self, attachment: _Attachment) -> None:
        assert attachment.process is not None
        self._selector.unregister(attachment.process)
        _forget_process(attachment)
        self._gone(attachment)

    def _gone(self, attachment: _Attachment) -> None:
        with self._lock:
            self._attachments.pop(attachment.token, None)
            gone = attachment.gone
        if gone is not None:
            gone()

    def _drop(self, peer: socket.socket) -> None:
        self._selector.unregister(peer)
        peer.close()


def _bind_tcp(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    return socket.create_server((host, int(port)))


def _tcp_address(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"{host}:{port}"


def _bind_unix(path: str) -> socket.socket:
    """A socket bound to `path`, in place of one that a killed predecessor left there."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if _abandoned(path):
            Path(path).unlink(missing_ok=True)
        listener.bind(path)
    except OSError as error:
        listener.close()
        raise OSError(f"cannot bind the region's socket {path}: {error}") from error
    Path(path).chmod(0o600)
    return listener


def _abandoned(path: str) -> bool:
    """Whether a socket file lies there that no process serves."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            return Path(path).is_socket()
        except FileNotFoundError:
            return False
    return False


def _hang_up(peer: socket.socket) -> None:
    try:
        peer.shutdown(socket.SHUT_WR)
    except OSError:
        return  # It is gone already, which the server's thread is about to see.


def _forget_process(attachment: _Attachment) -> None:
    if attachment.process is not None:
        os.close(attachment.process)
        attachment.process = None


def _receive(peer: socket.socket) -> bytes:
    """What the peer sent; empty when it is gone."""
    try:
        return peer.recv(TOKEN_BYTES + 1)
    except BlockingIOError:
        return b"-"
    except OSError:
        return b""


_UCRED = struct.Struct("3i")  # pid, uid, gid


def is_same_user(peer: socket.socket) -> bool:
    """Whether the peer runs as this process's user."""
    return _credentials(peer)[1] == os.getuid()


def watch_process(peer: socket.socket) -> int:
    """A descriptor of the peer's process that becomes readable once it has ended and all its files are closed, a GPU's among them.
    The caller closes it.

    Raises:
        TransferError: The process has ended, or is out of sight: it has to share this one's process ids.
    """
    pid = _credentials(peer)[0]
    if pid == 0:
        raise TransferError("the peer's process is in another namespace of process ids")
    try:
        return os.pidfd_open(pid)
    except OSError as error:
        raise TransferError(f"the peer's process {pid} cannot be watched: {error}") from error


def _credentials(peer: socket.socket) -> tuple[int, int, int]:
    raw = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    pid, uid, gid = _UCRED.unpack(raw)
    return pid, uid, gid
