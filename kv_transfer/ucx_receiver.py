"""The receiving half of the backend `ucx` (`ucx.py`): lets peers in, and gives each a session of its own."""

import socket
import threading
from collections.abc import Callable

from baton.errors import TransferError
from baton.layout import KvLayout
from kv_transfer.gate import Gate
from kv_transfer.invitation import Invitation, seal
from kv_transfer.memory import ArenaSpan
from kv_transfer.ports import RegionHandle
from kv_transfer.shm import layer_pages
from kv_transfer.ucx import ANSWER, BACKEND, MAGIC, UcxContext, UcxWorker
from kv_transfer.ucx_frames import HeadReader
from kv_transfer.ucx_session import UcxSession


class UcxReceiver:
    """A decode worker's arena, and its peers' sessions."""

    def __init__(
        self, arena: ArenaSpan, *, layout: KvLayout, address: str, num_blocks: int
    ) -> None:
        """Opens the gate; UCX starts when the first peer comes.

        Raises:
            OSError: The address cannot be bound.
        """
        pages = layer_pages(arena.host_view, layout, num_blocks)
        self._reader = HeadReader(layout=layout, num_blocks=num_blocks, arena=pages)
        self._num_blocks = num_blocks
        self._lock = threading.Lock()
        self._context: UcxContext | None = None
        self._sessions: dict[bytes, UcxSession] = {}  # by token; of peers that were let in
        self._closed = False
        self._gate = Gate(address, self._welcome)

    def handle(self) -> RegionHandle:
        """A handle that lets one peer in once."""
        invitation = Invitation(token=self._gate.grant(), address=self._gate.address)
        return RegionHandle(
            backend=BACKEND, opaque=invitation.pack(MAGIC), num_blocks=self._num_blocks
        )

    def revoke(self, handle: RegionHandle, gone: Callable[[], None]) -> None:
        """Ends whatever the peer's session receives; calls `gone` from its thread, at once."""
        token = Invitation.unpack(handle.opaque, MAGIC).token
        with self._lock:
            inside = token in self._sessions
        if inside:
            self._gate.revoke(token, _nothing)
            self._end(token, gone)
        else:  # whoever is just being let in is asked to leave
            self._gate.revoke(token, lambda: self._end(token, gone))

    def close(self) -> None:
        """Refuses later peers and stops receiving."""
        self._gate.close()
        with self._lock:
            sessions, self._sessions, self._closed = list(self._sessions.values()), {}, True
        for session in sessions:
            session.end(_nothing)
            session.join()

    def _welcome(self, peer: socket.socket, token: bytes) -> None:
        with self._lock:
            if self._closed:
                raise TransferError("the receiver is closed")
            if self._context is None:
                self._context = UcxContext()
            worker = UcxWorker(self._context)
            self._sessions[token] = UcxSession(
                token,
                worker,
                self._reader,
                lambda number, refused: self._answer(token, number, refused),
            )
        peer.sendall(seal(worker.address, token))

    def _end(self, token: bytes, gone: Callable[[], None]) -> None:
        with self._lock:
            session = self._sessions.pop(token, None)
        if session is None:
            gone()
        else:
            session.end(gone)

    def _answer(self, token: bytes, number: int, refused: bool) -> None:
        self._gate.send(token, ANSWER.pack(number, refused))
        if refused:
            self._gate.revoke(token, _nothing)


def _nothing() -> None:
    """Nobody waits for a peer to leave here: it cannot write by itself."""
