"""The peer's side of a region server (`region_server.py`): the attach token that a handle carries,
and how to attach by it.
"""

import hashlib
import hmac
import secrets
import socket
import struct
from dataclasses import dataclass
from typing import Self

from baton.errors import TransferError, UnreachableError
from kv_transfer.memory.proof import (
    CHALLENGE_BYTES,
    NONCE_BYTES,
    PROOF_BYTES,
    ConnectionProof,
    attach_key,
    read_challenge,
)

TOKEN_BYTES = 32
DETACH = b"detach"
"""What a peer says once it writes no more, where its connection's end alone proves nothing (`region_server.py`)."""
UNIX = "unix:"
_CONNECT_TIMEOUT_S = 5.0
_LENGTH = struct.Struct(">I")
_MAX_REPLY_BYTES = 1 << 20
_MAC_BYTES = 32
# A host that is gone without a word: known after two silent seconds and five unanswered probes.
_KEEPALIVE = {"TCP_KEEPIDLE": 2, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": 5, "TCP_USER_TIMEOUT": 7000}


@dataclass(frozen=True, slots=True, kw_only=True)
class AttachToken:
    """What a backend's handle consists of: where the region server is, and a secret by which one peer attaches once."""

    secret: bytes
    address: str

    def pack(self, magic: bytes) -> bytes:
        """As a handle's opaque bytes."""
        return magic + self.secret + self.address.encode()

    @classmethod
    def unpack(cls, opaque: bytes, magic: bytes) -> Self:
        """The inverse.

        Raises:
            TransferError: It is another backend's, or malformed.
        """
        begin, end = len(magic), len(magic) + TOKEN_BYTES
        if not opaque.startswith(magic) or len(opaque) <= end:
            raise TransferError("not a handle of this backend")
        return cls(secret=opaque[begin:end], address=opaque[end:].decode(errors="replace"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Attached:
    """A connection both of whose ends have proven themselves.

    Attributes:
        connection: To the region server; blocks for at most a few seconds.
        key: Of what is said on it (`ConnectionProof.reply_key`).
    """

    connection: socket.socket
    key: bytes


def attach(token: AttachToken, secret: bytes = b"") -> Attached:
    """Connects to a region server; each end proves to the other that it knows the token and the cluster's secret.
    Blocks for at most a few seconds.

    Args:
        token: The server's.
        secret: The cluster's; not needed on a Unix socket, where the kernel tells the server who it talks to.

    Raises:
        UnreachableError: No process serves there, or not in time.
        TransferError: It refuses the token, or does not know it.
    """
    try:
        connection = _connect(token.address)
    except (OSError, ValueError, OverflowError) as error:
        raise UnreachableError(
            f"the peer's memory at {token.address} cannot be reached: {error}"
        ) from error
    try:
        key = _prove(connection, token, attach_key(secret))
    except OSError as error:
        connection.close()
        raise UnreachableError(f"the peer at {token.address} hung up: {error}") from error
    except TransferError:
        connection.close()
        raise
    return Attached(connection=connection, key=key)


def _prove(connection: socket.socket, token: AttachToken, key: bytes) -> bytes:
    nonce = read_challenge(_read(connection, CHALLENGE_BYTES))
    if nonce is None:
        raise TransferError(f"what serves at {token.address} is no region server of this version")
    proof = ConnectionProof(
        key=key,
        token=token.secret,
        server_nonce=nonce,
        peer_nonce=secrets.token_bytes(NONCE_BYTES),
    )
    connection.sendall(proof.answer())
    if not proof.is_servers(_read(connection, PROOF_BYTES)):
        raise TransferError(f"the process at {token.address} does not know its own token")
    return proof.reply_key()


def is_local(address: str) -> bool:
    """Whether only processes of this host can reach the region server at `address`."""
    return address.startswith(UNIX)


def sign_reply(blob: bytes, key: bytes) -> bytes:
    """A region server's reply to a peer that attaches, under the key of its connection: bytes for its transport, which
    would trust them blindly.
    """
    return _LENGTH.pack(len(blob)) + blob + _mac(blob, key)


def read_reply(attached: Attached) -> bytes:
    """The peer's side of `sign_reply`: bytes that come, whole, from the process that made the token.

    Raises:
        UnreachableError: Nothing came in time, or the connection broke.
        TransferError: The token was refused, or the message is not what the receiver sent.
    """
    connection = attached.connection
    try:
        (length,) = _LENGTH.unpack(_read(connection, _LENGTH.size))
        if length > _MAX_REPLY_BYTES:
            raise TransferError(f"a reply of {length} bytes")
        blob, mac = _read(connection, length), _read(connection, _MAC_BYTES)
    except OSError as error:
        raise UnreachableError(f"the peer did not answer: {error}") from error
    if not hmac.compare_digest(mac, _mac(blob, attached.key)):
        raise TransferError("the peer's reply is not the receiver's")
    return blob


def has_hung_up(connection: socket.socket) -> bool:
    """Whether the other side hung up. For non-blocking connections on which nothing else is sent."""
    try:
        return connection.recv(1, socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def detach(connection: socket.socket) -> None:
    """Nothing is written to the peer's memory any more, from here on."""
    try:
        connection.send(DETACH)
    except OSError:
        return  # The peer is gone, and its memory with it.


def keep_alive(connection: socket.socket) -> None:
    """Lets the kernel notice within seconds that the host at the other end is gone."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _connect(address: str) -> socket.socket:
    if not address.startswith(UNIX):
        host, _, port = address.rpartition(":")
        connection = socket.create_connection((host, int(port)), timeout=_CONNECT_TIMEOUT_S)
        keep_alive(connection)
        return connection
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(_CONNECT_TIMEOUT_S)
    try:
        connection.connect(address.removeprefix(UNIX))
    except (OSError, ValueError):
        connection.close()
        raise
    return connection


def _read(connection: socket.socket, size: int) -> bytes:
    found = bytearray()
    while len(found) < size:
        part = connection.recv(size - len(found))
        if not part:
            raise TransferError("the peer refused the token")
        found += part
    return bytes(found)


def _mac(blob: bytes, key: bytes) -> bytes:
    return hashlib.blake2b(blob, key=key, digest_size=_MAC_BYTES).digest()
