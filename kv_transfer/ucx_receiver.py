"""The receiving half of the backend `ucx` (`ucx.py`): a thread that checks frames and puts their pages in place."""

import os
import queue
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from baton.errors import TransferError
from baton.layout import KvLayout
from baton.telemetry.logs import get_logger
from kv_transfer.gate import Gate, Invitation, seal
from kv_transfer.memory import ArenaSpan
from kv_transfer.ports import RegionHandle
from kv_transfer.shm import layer_pages
from kv_transfer.ucx import ANSWER, BACKEND, MAGIC, UcxWorker, tag_of
from kv_transfer.ucx_frames import MAX_FRAME_BYTES, Buffer, FrameReader

_log = get_logger(__name__)

_BUFFERS = 8
_LOOK_AROUND_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Arriving:
    """A frame that is being received."""

    tag: int
    buffer: Buffer
    length: int
    request: Any


class UcxReceiver:
    """A decode worker's arena, and the thread that puts frames into it."""

    def __init__(
        self, arena: ArenaSpan, *, layout: KvLayout, address: str, num_blocks: int
    ) -> None:
        """Opens the gate; UCX starts when the first peer comes.

        Raises:
            OSError: The address cannot be bound.
        """
        pages = layer_pages(arena.host_view, layout, num_blocks)
        self._reader = FrameReader(layout=layout, num_blocks=num_blocks, arena=pages)
        self._num_blocks = num_blocks
        self._sessions: dict[int, bytes] = {}  # tags to tokens
        self._lock = threading.Lock()
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._worker: UcxWorker | None = None
        self._thread: threading.Thread | None = None
        self._closing = False
        self._free = [np.empty(MAX_FRAME_BYTES, np.uint8) for _ in range(_BUFFERS)]
        self._arriving: list[_Arriving] = []
        self._abandoned: list[_Arriving] = []
        self._gate = Gate(address, self._welcome)
        self.refused = 0

    def handle(self) -> RegionHandle:
        """A handle that lets one peer in once."""
        token = self._gate.grant()
        self._sessions[tag_of(token)] = token
        invitation = Invitation(token=token, address=self._gate.address)
        return RegionHandle(
            backend=BACKEND, opaque=invitation.pack(MAGIC), num_blocks=self._num_blocks
        )

    def revoke(self, handle: RegionHandle, gone: Callable[[], None]) -> None:
        """Drops whatever else the peer sends; calls `gone` from the receiving thread, at once."""
        token = Invitation.unpack(handle.opaque, MAGIC).token

        def fence() -> None:
            self._forget(tag_of(token))
            self._gate.revoke(token, _nothing)
            gone()

        self._do(fence)

    def close(self) -> None:
        """Refuses later peers and stops receiving."""
        self._gate.close()
        with self._lock:
            if self._closing:
                return
            thread, self._closing = self._thread, True
        os.eventfd_write(self._wake, 1)
        if thread is not None:
            thread.join()
        os.close(self._wake)

    def _do(self, command: Callable[[], None]) -> None:
        """Runs something on the receiving thread, or here where none runs."""
        with self._lock:
            running = self._thread is not None and not self._closing
            if running:
                self._commands.put(command)
                os.eventfd_write(self._wake, 1)
        if not running:
            command()

    def _start(self) -> UcxWorker:
        """Opens UCX at first use.

        Raises:
            TransferError: It cannot be used, or nobody is let in any more.
        """
        if self._closing:
            raise TransferError("the receiver is closed")
        if self._worker is None:
            self._worker = UcxWorker()
            self._thread = threading.Thread(
                target=self._run, args=(self._worker,), name="kv-receiver", daemon=True
            )
            self._thread.start()
        return self._worker

    def _welcome(self, peer: socket.socket, token: bytes) -> None:
        with self._lock:
            worker = self._start()
        peer.sendall(seal(worker.address, token))

    def _run(self, worker: UcxWorker) -> None:
        while not self._closing:
            worker.progress()
            self._settle()
            while self._free and (found := worker.probe()) is not None:
                self._accept(worker, found.tag, found.length, found.message)
            self._obey()
            worker.wait([self._wake], _LOOK_AROUND_S)
        self._obey()
        worker.close()

    def _obey(self) -> None:
        with suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        while not self._commands.empty():
            self._commands.get()()

    def _accept(self, worker: UcxWorker, tag: int, length: int, message: Any) -> None:
        if tag not in self._sessions or length > MAX_FRAME_BYTES:
            self._refuse(tag, f"a message of {length} bytes of no session here")
            worker.discard(message)
            return
        buffer = self._free.pop()
        request = worker.receive(message, buffer[:length])
        self._arriving.append(_Arriving(tag=tag, buffer=buffer, length=length, request=request))

    def _settle(self) -> None:
        """Puts the frames that are whole in place, in the order in which they came."""
        for arriving in [entry for entry in self._arriving if entry.request.completed]:
            if arriving in self._arriving:  # else its session ended with the frame before it
                self._arriving.remove(arriving)
                self._take(arriving)
                self._free.append(arriving.buffer)

    def _take(self, arriving: _Arriving) -> None:
        try:
            arriving.request.check_error()
            number = self._reader.take(arriving.buffer[: arriving.length])
        except TransferError as error:
            self._refuse(arriving.tag, error.message)
        except Exception as error:  # noqa: BLE001  # one broken message must not end the thread and starve all peers
            self._refuse(arriving.tag, repr(error))
        else:
            self._gate.send(self._sessions[arriving.tag], ANSWER.pack(number, 0))

    def _refuse(self, tag: int, reason: str) -> None:
        """A peer that sends what it must not is not listened to any more."""
        self.refused += 1
        _log.warning("refused a frame", reason=reason)
        token = self._forget(tag)
        if token is not None:
            self._gate.send(token, ANSWER.pack(0, 1))
            self._gate.revoke(token, _nothing)

    def _forget(self, tag: int) -> bytes | None:
        """Ends a session. A frame of which half came may never be whole: its buffer is left to UCX, and replaced."""
        for arriving in [entry for entry in self._arriving if entry.tag == tag]:
            self._arriving.remove(arriving)
            self._abandoned.append(arriving)
            self._free.append(np.empty(MAX_FRAME_BYTES, np.uint8))
        self._abandoned = [entry for entry in self._abandoned if not entry.request.completed]
        return self._sessions.pop(tag, None)


def _nothing() -> None:
    """Nobody waits for a peer to leave here: it cannot write by itself."""
