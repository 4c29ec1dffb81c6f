"""The thread of the backend `nixl` (`nixl.py`) that posts one peer's writes and drives them until they are done."""

import queue
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from baton.errors import TransferError
from kv_transfer.invitation import has_ended
from kv_transfer.nixl_pages import NixlPages
from kv_transfer.ports import Push

_CLOSE_TIMEOUT_S = 5.0
_MIN_POLL_S, _MAX_POLL_S = 20e-6, 1e-3
_IDLE_POLL_S = 0.5

Done = Callable[[TransferError | None], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    push: Push
    done: Done


@dataclass(frozen=True, slots=True, kw_only=True)
class _OnItsWay:
    request: Any
    done: Done


class NixlWriter:
    """An open way into one peer's arena, with the thread that posts writes and waits for them."""

    def __init__(self, pages: NixlPages, connection: socket.socket) -> None:
        self._pages = pages
        self._connection = connection
        connection.setblocking(False)
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._on_their_way: deque[_OnItsWay] = deque()
        self._give_up_at_s: float | None = None
        self._lost = False
        self._thread = threading.Thread(target=self._run, name="kv-pusher", daemon=True)
        self._thread.start()

    def push(self, push: Push, done: Done) -> None:
        """Queues a write; `done` is called from the writer's thread."""
        if self._lost:
            done(TransferError("the peer's memory has been let go"))
            return
        self._jobs.put(_Job(push=push, done=done))

    def close(self) -> None:
        """Waits until everything queued is written, for a few seconds at most, then lets go of the peer's arena. Blocks."""
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        while not self._lost and self._serve_once():
            pass
        self._lost = True
        self._fail_all()
        self._pages.forget_peer()
        self._connection.close()
        self._fail_all()  # Whatever was queued while the peer was being forgotten.

    def _serve_once(self) -> bool:
        """One job or one look at what is on its way; False once closed and nothing is."""
        if has_ended(self._connection):
            self._lost = True
        elif self._give_up_at_s is None:
            self._take_job()
        elif not self._on_their_way:
            return False
        elif time.monotonic() > self._give_up_at_s:
            self._lost = True
        if self._on_their_way and not self._lost:
            self._wait()
        return True

    def _take_job(self) -> None:
        try:
            # Waits for a job unless there are writes to look after; wakes at times to see whether the peer is there.
            job = self._jobs.get(block=not self._on_their_way, timeout=_IDLE_POLL_S)
        except queue.Empty:
            return
        if job is None:
            self._give_up_at_s = time.monotonic() + _CLOSE_TIMEOUT_S
            return
        self._post(job)

    def _post(self, job: _Job) -> None:
        try:
            job.push.await_ready()
            job.push.check_lease()
            request, is_done = self._pages.post(job.push)
        except TransferError as error:
            job.done(error)
        except Exception as error:  # noqa: BLE001  # NIXL's errors have no base class
            job.done(TransferError(f"NIXL refuses a write: {error!r}"))
        else:
            if is_done:
                self._pages.release(request)
                job.done(None)
            else:
                self._on_their_way.append(_OnItsWay(request=request, done=job.done))

    def _wait(self) -> None:
        """Looks at all writes on their way until one is over or a job waits, ever more rarely."""
        pause_s = _MIN_POLL_S
        while not self._settle() and self._jobs.empty() and pause_s < _MAX_POLL_S:
            time.sleep(pause_s)
            pause_s *= 2

    def _settle(self) -> bool:
        before = len(self._on_their_way)
        for _ in range(before):
            write = self._on_their_way.popleft()
            try:
                if not self._pages.poll(write.request):
                    self._on_their_way.append(write)
                    continue
                error = None
            except Exception as fault:  # noqa: BLE001  # NIXL's errors have no base class
                error = TransferError(f"a write failed: {fault!r}")
            self._pages.release(write.request)
            write.done(error)
        return len(self._on_their_way) < before

    def _fail_all(self) -> None:
        lost = TransferError("the peer let go of its memory or died")
        while self._on_their_way:
            write = self._on_their_way.popleft()
            self._pages.release(write.request)
            write.done(lost)
        while not self._jobs.empty():
            job = self._jobs.get()
            if job is not None:
                job.done(lost)
