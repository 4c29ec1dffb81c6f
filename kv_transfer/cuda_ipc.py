"""The backend `cuda_ipc`: two workers with GPUs on one host. The sender maps the receiver's arena and copies device to device.

What a peer has mapped cannot be taken from it, so a peer is fenced once it has left the gate, which it does with a farewell after its
last copy, or died. A GPU may go on for a moment with what a killed process gave it: its connection may have ended by then, but not the
process, which holds the driver's files to the end. That the driver ends a process's work with the last of them is NVIDIA's promise.
"""

import socket
import struct
from collections.abc import Callable

from baton.errors import TransferError
from baton.layout import KvLayout
from kv_transfer.cuda import IPC_HANDLE_BYTES, CudaDriver, Stream
from kv_transfer.cuda_ipc_writer import CudaIpcWriter, CudaWay
from kv_transfer.gate import Gate
from kv_transfer.heads import plan_link
from kv_transfer.invitation import (
    Invitation,
    enter,
    read_sealed,
    say_farewell,
    seal,
)
from kv_transfer.memory import ArenaSpan
from kv_transfer.page_mover import ArenaPair, DriverMover, MappedArena, PageMover
from kv_transfer.ports import RegionHandle

BACKEND = "cuda_ipc"
_MAGIC = b"BCUI\x01"
_WELCOME = struct.Struct(
    f">{IPC_HANDLE_BYTES}sQQ"
)  # handle, where in its allocation the arena begins, bytes


class CudaIpcReceiver:
    """A decode worker's arena on a GPU, open to peers that hold a handle."""

    def __init__(self, arena: ArenaSpan, driver: CudaDriver, *, path: str, num_blocks: int) -> None:
        """Serves the arena's IPC handle on the Unix socket `path`.

        Raises:
            OSError: The socket cannot be bound.
            TransferError: The memory has no IPC handle.
        """
        handle, offset = driver.export(arena.address)
        self._welcome_bytes = _WELCOME.pack(handle, offset, arena.size_bytes)
        self._num_blocks = num_blocks
        self._gate = Gate(f"unix:{path}", self._welcome, farewells=True)

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

    def _welcome(self, peer: socket.socket, token: bytes) -> None:
        peer.sendall(seal(self._welcome_bytes, token))


class CudaIpcSender:
    """A prefill worker's arena on a GPU, from which pages are copied to peers."""

    def __init__(
        self,
        arena: ArenaSpan,
        driver: CudaDriver,
        *,
        num_blocks: int,
        mover: PageMover | None = None,
    ) -> None:
        """`mover` copies the pages; None leaves it to the driver."""
        self._arena = arena
        self._driver = driver
        self._mover = mover or DriverMover(driver)
        self._num_blocks = num_blocks

    def connect(
        self, handle: RegionHandle, layout: KvLayout, peer: KvLayout | None = None
    ) -> "CudaIpcWriter":
        """Maps the peer's arena. Blocks for at most a few seconds.

        Raises:
            IncompatibleError: The layouts cannot be matched; names the field.
            TransferError: The handle is not ours, is refused, or leads to memory of another size or out of this GPU's reach.
        """
        there = layout if peer is None else peer
        plan = plan_link(layout, there)
        if handle.backend != BACKEND:
            raise TransferError("not a handle of the cuda_ipc backend")
        self._arena.check_holds(layout, self._num_blocks)
        invitation = Invitation.unpack(handle.opaque, _MAGIC)
        connection = enter(invitation)
        try:
            welcome = read_sealed(connection, invitation.token)
            named, offset = _parse(welcome, there.region_bytes(handle.num_blocks))
            mapped, stream = self._map(named)
        except TransferError:
            say_farewell(connection)  # nothing was ever written
            connection.close()
            raise
        arenas = ArenaPair(
            here=MappedArena(self._arena.address, layout, self._num_blocks),
            there=MappedArena(mapped + offset, there, handle.num_blocks),
            plan=plan,
        )
        way = CudaWay(
            driver=self._driver,
            mover=self._mover,
            mapped=mapped,
            stream=stream,
            connection=connection,
        )
        return CudaIpcWriter(arenas, way)

    def _map(self, named: bytes) -> tuple[int, Stream]:
        """Where the peer's allocation begins here, and what to write to it by."""
        stream = self._driver.stream()
        try:
            return self._driver.open(named), stream
        except TransferError:
            self._driver.end(stream)
            raise


def _parse(welcome: bytes, size_bytes: int) -> tuple[bytes, int]:
    """The IPC handle, and where the peer's arena begins in what it names.

    Raises:
        TransferError: It is not of the size that its handle promised.
    """
    if len(welcome) != _WELCOME.size:
        raise TransferError("the peer's welcome is malformed")
    named, offset, found = _WELCOME.unpack(welcome)
    if found != size_bytes:
        raise TransferError(f"the peer's region has {found} bytes, expected {size_bytes}")
    return named, offset
