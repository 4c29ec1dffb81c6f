"""The receiving half of the backend `ucx` (`worker.py` says how it works): lets peers attach, and gives each a session
with a thread of its own, which checks heads and receives bodies into the pages.

The UCX worker to which a peer sends is its session's alone. Ending the session destroys it,
and with it whatever is half received.
"""

import os
import socket
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from baton.errors import TransferError
from baton.layout import KvLayout
from baton.telemetry.logs import get_logger
from kv_transfer.backends.ucx.frames import MAX_HEAD_BYTES, Buffer, HeadReader
from kv_transfer.backends.ucx.ucp import Found, UcpRequest, places_of
from kv_transfer.backends.ucx.worker import (
    ANSWER,
    BACKEND,
    MAGIC,
    UcxContext,
    UcxWorker,
    body_tag,
    head_tag,
)
from kv_transfer.memory.arena import ArenaSpan
from kv_transfer.memory.attach import AttachToken, sign_reply
from kv_transfer.memory.pages import layer_pages
from kv_transfer.memory.region_server import RegionAccess, RegionServer
from kv_transfer.ports import RegionHandle

_log = get_logger(__name__)

_LOOK_AROUND_S = 0.5
_MAX_WAITING = 64
"""Heads, or bodies, that wait for their other half. A sender that keeps to its window is far below."""

Answer = Callable[[int, bool], None]
"""Tells the peer of a frame by its number, and whether it was refused. Called on the session's thread."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Head:
    """A head that is being received."""

    bytes: Buffer
    request: UcpRequest


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Arriving:
    """A body that is being received."""

    number: int
    request: UcpRequest


class UcxSession:
    """Receives from one peer until it is ended, or the peer sends what it must not.

    Args:
        key: Of the peer's connection.
        worker: To which it sends; owned from now on.
        reader: Knows the arena.
        answer: See `Answer`.
    """

    def __init__(self, key: bytes, worker: UcxWorker, reader: HeadReader, answer: Answer) -> None:
        self._head_tag, self._body_tag = head_tag(key), body_tag(key)
        self._worker = worker
        self._reader = reader
        self._answer = answer
        self._heads: deque[_Head] = deque()
        self._bodies: deque[Found] = deque()
        self._arriving: list[_Arriving] = []
        self._ended: Callable[[], None] | None = None
        self._is_over = False
        self._lock = threading.Lock()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="kv-receiver", daemon=True)
        self._thread.start()

    def end(self, ended: Callable[[], None]) -> None:
        """Calls `ended`, from any thread, once nothing of this peer can land any more. To be called once."""
        with self._lock:
            self._ended = ended
            over = self._is_over
            if not over:
                os.eventfd_write(self._wake, 1)
        if over:
            ended()

    def join(self) -> None:
        """Waits until it has ended. Blocks."""
        self._thread.join()

    def _run(self) -> None:
        try:
            while self._ended is None:
                self._worker.progress()
                self._hear()
                self._land()
                self._answer_landed()
                in_haste = bool(self._heads or self._bodies or self._arriving)
                self._worker.wait([self._wake], _LOOK_AROUND_S, in_haste=in_haste)
        except TransferError as error:
            self._refuse(error.message)
        except Exception as error:  # noqa: BLE001  # whatever the peer made UCX say ends this peer, no other
            self._refuse(repr(error))
        self._worker.close()
        with self._lock:
            self._is_over = True
            ended = self._ended
            os.close(self._wake)
        if ended is not None:
            ended()

    def _hear(self) -> None:
        while (found := self._worker.probe()) is not None:
            if found.tag == self._head_tag and found.length <= MAX_HEAD_BYTES:
                head = np.empty(found.length, np.uint8)
                request = self._worker.receive(found, places_of(head))
                self._heads.append(_Head(bytes=head, request=request))
            elif found.tag == self._body_tag:
                self._bodies.append(found)
            else:
                raise TransferError(f"a message of {found.length} bytes of another session")
            if max(len(self._heads), len(self._bodies)) > _MAX_WAITING:
                raise TransferError("more frames at once than a sender has on their way")

    def _land(self) -> None:
        """Receives the bodies whose heads are here; both come in the order in which they were sent."""
        while self._heads and self._bodies and self._heads[0].request.done():
            head, body = self._heads.popleft(), self._bodies.popleft()
            landing = self._reader.read(head.bytes, body.length)
            request = self._worker.receive(body, landing.places)
            self._arriving.append(_Arriving(number=landing.number, request=request))

    def _answer_landed(self) -> None:
        """Answers the frames whose bodies are whole."""
        landed = [frame for frame in self._arriving if frame.request.done()]
        for frame in landed:
            self._arriving.remove(frame)
            self._answer(frame.number, False)

    def _refuse(self, reason: str) -> None:
        """A peer that sends what it must not is not listened to any more."""
        _log.warning("refused a frame", reason=reason)
        with suppress(OSError):
            self._answer(0, True)


class UcxReceiver:
    """A decode worker's arena, and its peers' sessions."""

    def __init__(
        self,
        arena: ArenaSpan,
        *,
        layout: KvLayout,
        address: str,
        num_blocks: int,
        admission: RegionAccess,
    ) -> None:
        """Starts serving; UCX starts when the first peer comes.

        Raises:
            OSError: The address cannot be bound.
        """
        pages = layer_pages(arena.host_view, layout, num_blocks)
        self._reader = HeadReader(layout=layout, num_blocks=num_blocks, arena=pages)
        self._num_blocks = num_blocks
        self._lock = threading.Lock()
        self._context: UcxContext | None = None
        self._sessions: dict[bytes, UcxSession] = {}  # by token; of peers that are attached
        self._closed = False
        self._listening = admission.listening
        self._server = RegionServer(address, self._on_attach, admission)

    def handle(self) -> RegionHandle:
        """A handle that lets one peer attach once."""
        token = AttachToken(secret=self._server.issue_token(), address=self._server.address)
        return RegionHandle(backend=BACKEND, opaque=token.pack(MAGIC), num_blocks=self._num_blocks)

    def revoke(self, handle: RegionHandle, gone: Callable[[], None]) -> None:
        """Ends whatever the peer's session receives; calls `gone` from its thread, at once."""
        token = AttachToken.unpack(handle.opaque, MAGIC).secret
        with self._lock:
            inside = token in self._sessions
        if inside:
            self._server.revoke(token, _nothing)
            self._end(token, gone)
        else:  # a peer that is just attaching is asked to leave
            self._server.revoke(token, lambda: self._end(token, gone))

    def close(self) -> None:
        """Refuses later peers and stops receiving."""
        self._server.close()
        with self._lock:
            sessions, self._sessions, self._closed = list(self._sessions.values()), {}, True
        for session in sessions:
            session.end(_nothing)
            session.join()

    def _on_attach(self, peer: socket.socket, token: bytes, key: bytes) -> None:
        with self._lock:
            if self._closed:
                raise TransferError("the receiver is closed")
            if self._context is None:
                self._context = UcxContext(self._listening)
            worker = UcxWorker(self._context, peer)
            self._sessions[token] = UcxSession(
                key,
                worker,
                self._reader,
                lambda number, refused: self._answer(token, number, refused),
            )
        peer.sendall(sign_reply(worker.address, key))

    def _end(self, token: bytes, gone: Callable[[], None]) -> None:
        with self._lock:
            session = self._sessions.pop(token, None)
        if session is None:
            gone()
        else:
            session.end(gone)

    def _answer(self, token: bytes, number: int, refused: bool) -> None:
        self._server.send(token, ANSWER.pack(number, refused))
        if refused:
            self._server.revoke(token, _nothing)


def _nothing() -> None:
    """No one waits for a peer to leave here: it cannot write by itself."""
