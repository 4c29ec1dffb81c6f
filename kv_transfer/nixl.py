"""The backend `nixl`: one-sided writes by NVIDIA's NIXL over UCX (RDMA, NVLink, TCP, or a copy between processes).

The receiver registers its arena once and takes no part in a write. What a peer needs for one, NIXL's metadata and where
the arena begins, it gets at the gate in exchange for the handle's token, sealed; the handle itself names nothing.

A write is done, for its sender, when NIXL reports the transfer DONE: its UCX plugin ends every batch of puts with a flush
of the endpoint, which completes once all of them are in the remote memory, not when the local buffer may be reused.
Nothing needs to be said to the receiver's process about it; the commit record that follows is what it acts upon.

Fencing: a remote key cannot be taken back from one peer of many, so a peer is fenced once it has left the gate or died.
Revoking asks it to leave: its writer fails what is on its way, forgets the key and hangs up.

Peers are trusted with the arena, and over TCP with more: UCX has no adapter there that checks a peer's addresses, and
carries out what the peer asks. Between hosts without RDMA that are not trusted alike use `ucx`, which checks each page.
"""

import socket
import struct
import threading
from collections.abc import Callable

from baton.errors import TransferError
from baton.layout import KvLayout
from kv_transfer.gate import Gate
from kv_transfer.heads import plan_link
from kv_transfer.invitation import Invitation, enter, on_one_host, read_sealed, seal
from kv_transfer.memory import ArenaSpan
from kv_transfer.nixl_agent import NixlAgent
from kv_transfer.nixl_pages import NixlPages, Side
from kv_transfer.nixl_writer import NixlWriter
from kv_transfer.ports import RegionHandle

BACKEND = "nixl"
_MAGIC = b"BNXL\x01"
_WELCOME = struct.Struct(">QQi")  # address, size in bytes, device (-1: host memory)
_HOST = -1
_DRIVE_PERIOD_S = 1e-3


class NixlReceiver:
    """A decode worker's arena, registered for one-sided writes."""

    def __init__(self, arena: ArenaSpan, *, address: str, num_blocks: int) -> None:
        """Opens the gate; the arena is registered when the first peer comes.

        Raises:
            OSError: The address cannot be bound.
        """
        self._driven = on_one_host(address)
        self._agent = NixlAgent(arena, own_thread=not self._driven)
        self._num_blocks = num_blocks
        self._closed = threading.Event()
        self._driver: threading.Thread | None = None
        self._gate = Gate(address, self._welcome)

    def handle(self) -> RegionHandle:
        """A handle that lets one peer in once."""
        invitation = Invitation(token=self._gate.grant(), address=self._gate.address)
        return RegionHandle(
            backend=BACKEND, opaque=invitation.pack(_MAGIC), num_blocks=self._num_blocks
        )

    def revoke(self, handle: RegionHandle, gone: Callable[[], None]) -> None:
        """Asks the peer to leave; calls `gone` once it has, or died."""
        self._gate.revoke(Invitation.unpack(handle.opaque, _MAGIC).token, gone)

    def close(self) -> None:
        """Refuses later peers."""
        self._gate.close()
        self._closed.set()
        if self._driver is not None:
            self._driver.join()

    def _welcome(self, peer: socket.socket, token: bytes) -> None:
        arena = self._agent.arena
        device = _HOST if arena.device is None else arena.device
        place = _WELCOME.pack(arena.address, arena.size_bytes, device)
        welcome = place + self._agent.get().get_agent_metadata()
        if self._driven and self._driver is None:
            self._driver = threading.Thread(target=self._drive, name="kv-receiver", daemon=True)
            self._driver.start()
        peer.sendall(seal(welcome, token))

    def _drive(self) -> None:
        """Greets new peers. On one host their writes do not need this process, unless the system forbids copying between
        processes: they are carried out here then, and this is often enough to keep a socket's buffer from running full.
        """
        while not self._closed.wait(_DRIVE_PERIOD_S):
            if self._gate.inside():
                self._agent.drive()


class NixlSender:
    """A prefill worker's arena, registered as the source of writes."""

    def __init__(self, arena: ArenaSpan, *, num_blocks: int) -> None:
        self._agent = NixlAgent(arena)
        self._num_blocks = num_blocks

    def connect(
        self, handle: RegionHandle, layout: KvLayout, peer: KvLayout | None = None
    ) -> "NixlWriter":
        """Loads the peer's metadata. Blocks for at most a few seconds.

        Raises:
            IncompatibleError: The layouts cannot be matched; names the field.
            TransferError: The handle is not ours, is refused, or leads to a region of another size.
        """
        there = layout if peer is None else peer
        plan = plan_link(layout, there)
        if handle.backend != BACKEND:
            raise TransferError("not a handle of the nixl backend")
        invitation = Invitation.unpack(handle.opaque, _MAGIC)
        self._agent.arena.check_holds(layout, self._num_blocks)
        connection = enter(invitation)
        try:
            welcome = read_sealed(connection, invitation.token)
            target = _parse(welcome, there.region_bytes(handle.num_blocks))
            here = Side(arena=self._agent.arena, layout=layout, num_blocks=self._num_blocks)
            far = Side(arena=target, layout=there, num_blocks=handle.num_blocks)
            pages = NixlPages(self._agent.get(), welcome[_WELCOME.size :], here, far, plan)
        except TransferError:
            connection.close()
            raise
        return NixlWriter(pages, connection)


def _parse(welcome: bytes, size_bytes: int) -> ArenaSpan:
    """Where the peer's arena lies.

    Raises:
        TransferError: It is not of the size that its handle promised.
    """
    if len(welcome) <= _WELCOME.size:
        raise TransferError("the peer's welcome is too short")
    address, found, device = _WELCOME.unpack_from(welcome)
    if found != size_bytes:
        raise TransferError(f"the peer's region has {found} bytes, expected {size_bytes}")
    return ArenaSpan(address=address, size_bytes=found, device=None if device == _HOST else device)
