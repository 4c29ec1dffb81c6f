"""Lets peers into a receiver's memory: each proves once that it has a token,
and the receiver knows when it has detached.

A peer connects, proves that it knows the token that its handle carried and the cluster's secret (`proof.py`), gets what
its backend needs and keeps the connection open for as long as it may write. The kernel closes it when the process dies,
however it dies. So the end of the connection proves that nothing more is written by that peer: this is what fencing
means where access cannot be taken back.

Where a killed process's writes may go on for a moment, as those of a GPU may, it proves nothing: there a peer says
`DETACH` once its last write is done, and the end of one that did not counts once its process has ended with all that it
held.

On one host the server listens on a Unix socket of the same user; between hosts on TCP, where keep-alive notices a host
that died. Whoever proves nothing is gone after two seconds, holds a few kilobytes until then, and makes room for others
long before: see `RegionAccess`. The peer's side is `attach.py`.
"""

import errno
import os
import secrets
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from baton.errors import TransferError
from baton.telemetry.logs import get_logger
from baton.unix_socket import is_served
from kv_transfer.memory.attach import DETACH, TOKEN_BYTES, UNIX, keep_alive
from kv_transfer.memory.listening import Listening
from kv_transfer.memory.proof import (
    ANSWER_BYTES,
    NONCE_BYTES,
    ConnectionProof,
    attach_key,
    challenge,
    read_answer,
    token_name,
)

_log = get_logger(__name__)

OnAttach = Callable[[socket.socket, bytes, bytes], None]
"""Gives a peer, over its connection, what it needs; called with its token and the key of its connection on the server's
thread. The peer is refused when it raises. While it takes time, others wait.
"""

PROOF_TIMEOUT_S = 2.0
"""From accepting a connection until its peer has to have proven itself."""
_TOKEN_LIFE_S = 60.0
"""Peers attach within seconds or not at all; a token that none has shown for so long is forgotten when the next is
issued.
"""
_MAX_UNPROVEN = 64
_MAX_UNPROVEN_PER_HOST = 16
_RECEIVE_BUFFER_BYTES = 4096
"""What a peer may send before it is read: an answer, later `DETACH`."""
_NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)
_NO_DESCRIPTORS_PAUSE_S = 0.1


class Refused(Enum):
    """Why a connection was closed before its peer attached; a closed set, fit for a metric's label."""

    UNPROVEN = "unproven"  # it answered, and wrongly; or it hung up
    LATE = "late"  # it did not answer in time
    CROWDED = "crowded"  # too many others had not answered yet


def _not_counted(_reason: Refused) -> None:
    """For servers on Unix sockets, which only this user reaches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionAccess:
    """Whom a region server lets in.

    Attributes:
        secret: The cluster's, which peers prove to know beside their token. Empty on a Unix socket,
            where the kernel tells the user.
        listening: Where its socket on TCP is bound, and what peers are told of that.
        refused: Told, on the server's thread, of each connection that was closed before its peer attached.
    """

    secret: bytes = b""
    listening: Listening = field(default_factory=Listening)
    refused: Callable[[Refused], None] = _not_counted


@dataclass(slots=True, eq=False)
class _Attachment:
    """One token and the peer that uses it; `process` is what watches the peer's process until it has detached."""

    token: bytes
    name: bytes
    issued_s: float
    peer: socket.socket | None = None
    process: int | None = None
    gone: Callable[[], None] | None = None


@dataclass(slots=True, eq=False)
class _Unproven:
    """A connection whose peer has not proven itself yet."""

    peer: socket.socket
    host: str
    nonce: bytes
    until_s: float
    said: bytearray = field(default_factory=bytearray)


class RegionServer:
    """Lets peers attach on one socket, from one small thread."""

    def __init__(
        self,
        address: str,
        on_attach: OnAttach,
        admission: RegionAccess = RegionAccess(),  # frozen
        *,
        must_detach: bool = False,
    ) -> None:
        """Binds and starts serving.

        Args:
            address: `unix:/path`, or `host:port` where port 0 takes a free one of those that it may.
            on_attach: Gives a peer that attaches what it needs.
            admission: Which peers may; on TCP it has the cluster's secret.
            must_detach: Whether peers say `DETACH` once they write no more, so that without it their process has to
                end. On Unix sockets only.

        Raises:
            ValueError: An address on TCP without the cluster's secret.
            OSError: The address is served by another process, a path is too long for a Unix socket (about 100 bytes),
                or its folder is missing.
        """
        if not address.startswith(UNIX) and not admission.secret:
            raise ValueError("a region server on TCP needs the cluster's secret")
        self._on_attach = on_attach
        self._admission = admission
        self._key = attach_key(admission.secret)
        self._must_detach = must_detach
        self._path = address.removeprefix(UNIX) if address.startswith(UNIX) else None
        if self._path is not None:
            self._listener, self.address = _bind_unix(self._path), address
        else:
            self._listener, self.address = _bind_tcp(address, admission.listening)
        self._listener.listen(_MAX_UNPROVEN)
        self._listener.setblocking(False)
        self._wake, self._woken = socket.socketpair()
        self._lock = threading.Lock()
        self._attachments: dict[bytes, _Attachment] = {}
        self._unproven: dict[socket.socket, _Unproven] = {}  # the oldest first; the thread's
        self._refusing = False  # whether it has been logged; the thread's
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._selector.register(self._woken, selectors.EVENT_READ, self._stop)
        self._serving = True  # the thread's
        self._closed = False  # the callers'
        self._thread = threading.Thread(target=self._serve, name="kv-region-server", daemon=True)
        self._thread.start()

    def issue_token(self, gone: Callable[[], None] | None = None) -> bytes:
        """A fresh token by which one peer may attach once; one that none has shown is forgotten after a minute or more.

        Args:
            gone: Called on the server's thread when the peer that attached has left, unless `revoke` names another.
        """
        token, now_s = secrets.token_bytes(TOKEN_BYTES), time.monotonic()
        name = token_name(token, self._key)
        with self._lock:
            self._forget_unused(now_s - _TOKEN_LIFE_S)
            self._attachments[token] = _Attachment(token, name, issued_s=now_s, gone=gone)
        return token

    def revoke(self, token: bytes, gone: Callable[[], None]) -> None:
        """No peer attaches by `token` any more, and one that has is asked to leave; calls `gone`, from any thread,
        once it has.
        """
        with self._lock:
            attachment = self._attachments.get(token)
            if attachment is not None and attachment.peer is not None:
                attachment.gone = gone
                _hang_up(attachment.peer)
                return
            self._attachments.pop(token, None)
        gone()

    def send(self, token: bytes, data: bytes) -> bool:
        """Sends a few bytes to the peer that attached by `token`; False when it is gone,
        or lets them pile up unread.
        """
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

    def _forget_unused(self, issued_before_s: float) -> None:
        """A peer that cannot get here asks for token after token where they are given out."""
        unused = [
            token
            for token, attachment in self._attachments.items()
            if attachment.peer is None and attachment.issued_s <= issued_before_s
        ]
        for token in unused:
            del self._attachments[token]

    def _serve(self) -> None:
        while self._serving:
            ready = self._selector.select(self._patience_s())
            # Letting a peer in may take seconds (a transport starts): answers that came meanwhile are read first.
            looked_s = time.monotonic()
            for key, _ in ready:
                # One of the others may have ended it, and a new connection have its descriptor.
                if self._selector.get_map().get(key.fd) is key:
                    key.data()
            self._refuse_late(looked_s)
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

    def _patience_s(self) -> float | None:
        """Until the oldest connection whose peer has not proven itself is closed."""
        for oldest in self._unproven.values():
            return max(oldest.until_s - time.monotonic(), 0.0)
        return None

    def _accept(self) -> None:
        try:
            peer, address = self._listener.accept()
        except OSError as error:
            if error.errno in _NO_DESCRIPTORS:
                time.sleep(_NO_DESCRIPTORS_PAUSE_S)  # it waits in the kernel's queue meanwhile
            return  # else it hung up before it was its turn
        peer.setblocking(False)
        if self._path is None:
            keep_alive(peer)
        elif not is_same_user(peer):
            peer.close()
            return
        host = "" if self._path is not None else address[0]
        self._make_room(host)
        nonce = secrets.token_bytes(NONCE_BYTES)
        unproven = _Unproven(
            peer=peer, host=host, nonce=nonce, until_s=time.monotonic() + PROOF_TIMEOUT_S
        )
        self._unproven[peer] = unproven
        self._selector.register(peer, selectors.EVENT_READ, lambda: self._answered(unproven))
        try:
            peer.send(challenge(nonce))  # fits: nothing else has been sent
        except OSError:
            self._refuse(unproven, Refused.UNPROVEN)

    def _make_room(self, host: str) -> None:
        """Closes the oldest connections that are too many, for an honest peer answers at once."""
        of_host = [one for one in self._unproven.values() if one.host == host]
        if self._path is None and len(of_host) >= _MAX_UNPROVEN_PER_HOST:
            self._refuse(of_host[0], Refused.CROWDED)
        elif len(self._unproven) >= _MAX_UNPROVEN:
            self._refuse(next(iter(self._unproven.values())), Refused.CROWDED)

    def _refuse_late(self, looked_s: float) -> None:
        """Those whose time was over when the thread last looked for answers, and whose answer was not there."""
        for unproven in [one for one in self._unproven.values() if one.until_s <= looked_s]:
            self._refuse(unproven, Refused.LATE)

    def _refuse(self, unproven: _Unproven, reason: Refused) -> None:
        """Counts each, and logs the first since a peer was let in."""
        del self._unproven[unproven.peer]
        self._admission.refused(reason)
        self._drop(unproven.peer)
        if not self._refusing:
            self._refusing = True
            _log.warning(
                "a connection to the KV memory was refused; more are only counted",
                peer=unproven.host,
                reason=reason.value,
            )

    def _answered(self, unproven: _Unproven) -> None:
        """The peer's first and only message: its answer to the challenge."""
        said = _receive(unproven.peer, ANSWER_BYTES - len(unproven.said))
        if said is None:
            return
        unproven.said += said
        if said and len(unproven.said) < ANSWER_BYTES:
            return
        proof, attachment = self._proof_of(unproven)
        if proof is None or attachment is None:
            self._refuse(unproven, Refused.UNPROVEN)
            return
        del self._unproven[unproven.peer]
        self._refusing = False
        self._let_in(attachment, unproven.peer, proof)

    def _proof_of(self, unproven: _Unproven) -> tuple[ConnectionProof | None, _Attachment | None]:
        """What the peer's answer proves, and the attachment that is now its own;
        a token that somebody shows wrongly stays good.
        """
        answer = read_answer(bytes(unproven.said))
        if answer is None:
            return None, None
        with self._lock:
            free = (one for one in self._attachments.values() if one.peer is None)
            found = next((one for one in free if one.name == answer.name), None)
            if found is None:
                return None, None
            proof = ConnectionProof(
                key=self._key,
                token=found.token,
                server_nonce=unproven.nonce,
                peer_nonce=answer.nonce,
            )
            if not proof.is_peers(answer.proof):
                return None, None
            found.peer = unproven.peer
            return proof, found

    def _let_in(self, attachment: _Attachment, peer: socket.socket, proof: ConnectionProof) -> None:
        try:
            if self._must_detach:
                attachment.process = watch_process(peer)
            peer.sendall(proof.of_server())
            self._on_attach(peer, attachment.token, proof.reply_key())
        except Exception as error:  # noqa: BLE001
            # Also a transport's own, or that no thread is left for the peer: others wait to be let in.
            if isinstance(error, OSError | TransferError):
                _log.warning("a peer could not attach", reason=str(error))
            else:
                _log.error("a peer could not attach", cause=error)
            _forget_process(attachment)
            self._left(attachment, peer)
            return
        self._selector.modify(peer, selectors.EVENT_READ, lambda: self._heard(attachment, peer))

    def _heard(self, attachment: _Attachment, peer: socket.socket) -> None:
        """A peer that is attached says nothing but `DETACH`; its silence ends when its connection does."""
        said = _receive(peer, len(DETACH))
        if said == DETACH:
            _forget_process(attachment)
        elif said == b"":
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


def _bind_tcp(address: str, listening: Listening) -> tuple[socket.socket, str]:
    """A socket that listens, and where peers are told that it does."""
    host, _, port = address.rpartition(":")
    listener = socket.create_server((host, int(port))) if int(port) else listening.bind(host)
    # Connections inherit it.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BUFFER_BYTES)
    bound, taken = listener.getsockname()[:2]
    return listener, f"{listening.advertised_host or bound}:{taken}"


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
    return not is_served(path) and Path(path).is_socket()


def _hang_up(peer: socket.socket) -> None:
    try:
        peer.shutdown(socket.SHUT_WR)
    except OSError:
        return  # It is gone already, which the server's thread is about to see.


def _forget_process(attachment: _Attachment) -> None:
    if attachment.process is not None:
        os.close(attachment.process)
        attachment.process = None


def _receive(peer: socket.socket, size: int) -> bytes | None:
    """What the peer sent, up to so many bytes; empty when it is gone, None when there is nothing after all."""
    try:
        return peer.recv(size)
    except BlockingIOError:
        return None
    except OSError:
        return b""


_UCRED = struct.Struct("3i")  # pid, uid, gid


def is_same_user(peer: socket.socket) -> bool:
    """Whether the peer runs as this process's user."""
    return _credentials(peer)[1] == os.getuid()


def watch_process(peer: socket.socket) -> int:
    """A descriptor of the peer's process that becomes readable once it has ended and all its files are closed, a GPU's
    among them. The caller closes it.

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
