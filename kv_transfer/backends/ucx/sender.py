"""The sending half of the backend `ucx` (the other one is `receiver.py`):
a thread per peer that sends frames and hears what became of them.
"""

import os
import queue
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from baton.errors import TransferError, UnreachableError
from baton.layout import KvLayout
from baton.pages import PageWrite
from kv_transfer.backends.ucx.frames import UcxFrame, frames_of, head_of, rows_of
from kv_transfer.backends.ucx.ucp import UcpRequest, places_of
from kv_transfer.backends.ucx.worker import (
    ANSWER,
    BACKEND,
    MAGIC,
    UcxContext,
    UcxWorker,
    body_tag,
    head_tag,
)
from kv_transfer.heads import LinkPlan, plan_link
from kv_transfer.memory.arena import ArenaSpan
from kv_transfer.memory.attach import AttachToken, attach, is_local, read_reply
from kv_transfer.memory.listening import Listening
from kv_transfer.memory.pages import Pages, layer_pages
from kv_transfer.ports import Done, Lease, RegionHandle, begin_write

_WINDOW = 4
"""Frames of one sender on their way."""
_CLOSE_TIMEOUT_S = 5.0
_LOOK_AROUND_S = 0.5


class UcxSender:
    """A prefill worker's arena, from which pages are sent."""

    def __init__(
        self, arena: ArenaSpan, *, num_blocks: int, secret: bytes, listening: Listening
    ) -> None:
        self._arena = arena
        self._num_blocks = num_blocks
        self._secret = secret
        self._listening = listening

    def connect(
        self,
        handle: RegionHandle,
        layout: KvLayout,
        peer: KvLayout | None = None,
        lease: Lease | None = None,
    ) -> "UcxWriter":
        """Opens a connection to the peer. Blocks for at most a few seconds.

        Raises:
            IncompatibleError: The layouts cannot be matched; names the field.
            TransferError: The handle is not ours or is refused.
        """
        plan = plan_link(layout, layout if peer is None else peer)
        if handle.backend != BACKEND:
            raise TransferError("not a handle of the ucx backend")
        token = AttachToken.unpack(handle.opaque, MAGIC)
        local = layer_pages(self._arena.host_view, layout, self._num_blocks)
        attached = attach(token, self._secret)
        connection = attached.connection
        try:
            address = read_reply(attached)
            worker = UcxWorker(UcxContext(self._listening.towards(connection)), connection)
            worker.connect(address, same_host=is_local(token.address))
        except TransferError:
            connection.close()
            raise
        reached = _Peer(
            worker=worker,
            connection=connection,
            head_tag=head_tag(attached.key),
            body_tag=body_tag(attached.key),
            target_blocks=handle.num_blocks,
        )
        return UcxWriter(local, plan, reached, lease)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Peer:
    """How one peer is reached."""

    worker: UcxWorker
    connection: socket.socket
    head_tag: int
    body_tag: int
    target_blocks: int


@dataclass(slots=True, eq=False)
class _Job:
    """A write; `unanswered` counts its frames on their way."""

    write: PageWrite
    done: Done
    unanswered: int = 0
    all_sent: bool = False
    error: TransferError | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _SentFrame:
    job: _Job
    requests: tuple[UcpRequest, UcpRequest]


class UcxWriter:
    """An open connection to one peer, with the thread that sends frames and hears what became of them."""

    def __init__(
        self, local: list[Pages], plan: LinkPlan, peer: _Peer, lease: Lease | None = None
    ) -> None:
        self._local = local
        self._lease = lease
        self._plan = plan
        self._peer = peer
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._frames: Iterator[UcxFrame] = iter(())
        self._current: _Job | None = None
        self._in_flight: dict[int, _SentFrame] = {}
        self._answered: list[UcpRequest] = []  # which UCX has not finished with here
        self._heard = bytearray()
        self._number = 0
        self._give_up_at_s: float | None = None
        self._lost: UnreachableError | None = None
        self._lock = threading.Lock()
        peer.connection.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="kv-pusher", daemon=True)
        self._thread.start()

    def push(self, write: PageWrite, done: Done) -> None:
        """Queues a write; `done` is called from the writer's thread."""
        with self._lock:
            if self._lost is None:
                self._jobs.put(_Job(write=write, done=done))
                os.eventfd_write(self._wake, 1)
                return
        done(self._lost)

    def close(self) -> None:
        """Waits until everything queued is written, for a few seconds at most, then leaves the peer. Blocks."""
        with self._lock:
            if self._lost is None:
                self._jobs.put(None)
                os.eventfd_write(self._wake, 1)
        self._thread.join()

    def _run(self) -> None:
        worker, others = self._peer.worker, [self._wake, self._peer.connection.fileno()]
        error = TransferError("the connection to the peer was closed")
        try:
            while not self._is_over():
                worker.progress()
                self._hear()
                self._send_what_fits()
                if self._in_flight or self._give_up_at_s is None:
                    worker.wait(others, _LOOK_AROUND_S, in_haste=bool(self._in_flight))
        except TransferError as fault:
            error = fault
        except Exception as fault:  # noqa: BLE001  # ucxx raises what UCX says; no push may wait for ever for it
            error = TransferError(f"UCX cannot send: {fault!r}")
        self._end(error)

    def _is_over(self) -> bool:
        """Whether everything is written after `close`.

        Raises:
            TransferError: It is not, and time is up.
        """
        if self._give_up_at_s is None:
            return False
        if time.monotonic() > self._give_up_at_s:
            raise TransferError(
                "the peer did not take what was sent before the connection to it was closed"
            )
        return not self._in_flight and self._current is None

    def _hear(self) -> None:
        """The receiver's answers; and UCX's own news of frames that cannot arrive."""
        self._answered = [request for request in self._answered if not request.done()]
        for entry in self._in_flight.values():
            for request in entry.requests:
                request.done()
        with suppress(BlockingIOError):
            while True:
                heard = self._listen()
                if not heard:
                    raise TransferError("the peer let go of its memory or died")
                self._heard += heard
        size = len(self._heard) // ANSWER.size * ANSWER.size
        for number, refused in ANSWER.iter_unpack(self._heard[:size]):
            if refused or number not in self._in_flight:
                raise TransferError("the peer refused what was sent")
            entry = self._in_flight.pop(number)
            self._answered += entry.requests
            entry.job.unanswered -= 1
            _finish(entry.job)
        del self._heard[:size]

    def _listen(self) -> bytes:
        try:
            return self._peer.connection.recv(4096)
        except ConnectionError:
            return b""

    def _send_what_fits(self) -> None:
        with suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        while len(self._in_flight) < _WINDOW and (frame := self._next_frame()) is not None:
            assert self._current is not None
            try:
                begin_write(self._current.write, self._lease)
            except TransferError as error:
                self._current.error, self._frames = error, iter(())
                continue
            self._send(frame, self._current)

    def _send(self, frame: UcxFrame, job: _Job) -> None:
        peer, self._number = self._peer, self._number + 1
        head = head_of(frame, self._number)
        requests = (
            peer.worker.send(peer.head_tag, places_of(head), head),
            peer.worker.send(peer.body_tag, rows_of(frame, self._local)),
        )
        self._in_flight[self._number] = _SentFrame(job=job, requests=requests)
        job.unanswered += 1

    def _next_frame(self) -> UcxFrame | None:
        while True:
            frame = next(self._frames, None)
            if frame is not None:
                return frame
            if self._current is not None:
                self._current.all_sent = True
                _finish(self._current)
                self._current = None
            if not self._next_job():
                return None

    def _next_job(self) -> bool:
        """Begins the next push that can be begun; False when none waits."""
        while not self._jobs.empty():
            job = self._jobs.get()
            if job is None:
                self._give_up_at_s = time.monotonic() + _CLOSE_TIMEOUT_S
                return False
            blocks = self._peer.target_blocks
            try:
                self._frames = frames_of(job.write, self._local, self._plan, target_blocks=blocks)
            except TransferError as error:
                job.done(error)
            else:
                self._current = job
                return True
        return False

    def _end(self, error: TransferError) -> None:
        """The thread's last act: nothing is read or sent any more, and every push that is left fails."""
        self._peer.worker.close()
        lost = UnreachableError(error.message)
        with self._lock:
            self._lost = lost
        waiting = {id(entry.job): entry.job for entry in self._in_flight.values()}
        if self._current is not None:
            waiting[id(self._current)] = self._current
        while not self._jobs.empty():
            job = self._jobs.get()
            if job is not None:
                waiting[id(job)] = job
        for job in waiting.values():
            job.done(lost)
        self._peer.connection.close()
        os.close(self._wake)


def _finish(job: _Job) -> None:
    if job.all_sent and not job.unanswered:
        job.done(job.error)
