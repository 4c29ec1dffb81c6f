"""Who is at the other end of a Unix socket, as the kernel knows it, whatever is said over it."""

import os
import socket
import struct

from baton.errors import TransferError

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
