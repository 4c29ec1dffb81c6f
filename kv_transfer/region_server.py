"""Hands a region's descriptor to peers on the same host, through a gate that knows when they have let go of it.

A mapping cannot be taken back, so a peer is fenced once its connection to the gate has ended (`gate.py`).
"""

import socket
from dataclasses import dataclass

from baton.errors import TransferError
from kv_transfer.gate import Gate
from kv_transfer.invitation import Invitation, enter
from kv_transfer.regions import SharedRegion

_ATTACHED = b"A"


def serve_region(region: SharedRegion, path: str) -> Gate:
    """Serves the region's descriptor on the Unix socket `path`.

    Raises:
        OSError: The socket cannot be bound.
    """

    def give(peer: socket.socket, _token: bytes) -> None:
        socket.send_fds(peer, [_ATTACHED], [region.fd])

    return Gate(f"unix:{path}", give)


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
    connection = enter(Invitation(token=token, address=f"unix:{path}"))
    try:
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
