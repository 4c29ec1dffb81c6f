"""The open way into a peer's arena on a GPU: the thread that queues copies, waits for them, and leaves with a farewell (`cuda_ipc.py`).

Pages are copied on a stream of the writer's own, which waits for the event of their layer (`Push.ready`); `done` is called once
the stream has passed them.
"""

import itertools
import queue
import socket
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from baton.errors import TransferError
from baton.telemetry.logs import get_logger
from kv_transfer.cuda import CudaDriver, Stream
from kv_transfer.invitation import has_ended, say_farewell
from kv_transfer.page_mover import ArenaPair, PageMover, PageRows
from kv_transfer.ports import Push

_log = get_logger(__name__)

_LOOK_AROUND_S = 0.5
_MAX_TOGETHER = 64
"""Pushes that are waited for at once: waiting costs more than beginning a copy."""

Done = Callable[[TransferError | None], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaWay:
    """How one peer is reached: its memory as mapped here, and the connection that says so."""

    driver: CudaDriver
    mover: PageMover
    mapped: int
    stream: Stream
    connection: socket.socket


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    push: Push
    done: Done


class CudaIpcWriter:
    """An open way into one peer's arena, with the thread that queues copies and waits for them."""

    def __init__(self, arenas: ArenaPair, way: CudaWay) -> None:
        self._arenas = arenas
        self._way = way
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._over = False
        way.connection.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="kv-pusher", daemon=True)
        self._thread.start()

    def push(self, push: Push, done: Done) -> None:
        """Queues a write; `done` is called from the writer's thread."""
        with self._lock:
            if not self._over:
                self._jobs.put(_Job(push=push, done=done))
                return
        done(_gone())

    def close(self) -> None:
        """Waits until everything queued is written, then unmaps and lets the peer know. Blocks."""
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        while self._take(self._next_jobs()):
            pass
        with self._lock:
            self._over = True
        while not self._jobs.empty():
            job = self._jobs.get()
            if job is not None:
                job.done(_gone())
        self._leave()

    def _leave(self) -> None:
        """Unmaps first: the owner may reuse the memory as soon as it hears the farewell. One that hears none waits for this process to
        end, as it has to where the GPU refuses everything.
        """
        try:
            self._way.driver.end(self._way.stream)
            self._way.driver.close(self._way.mapped)
        except TransferError as error:
            _log.error("a peer's memory cannot be let go of", reason=error.message)
        else:
            say_farewell(self._way.connection)
        self._way.connection.close()

    def _next_jobs(self) -> list[_Job | None]:
        """What is queued; waits for the first, and wakes at times to see whether the peer still wants any."""
        try:
            found = [self._jobs.get(timeout=_LOOK_AROUND_S)]
        except queue.Empty:
            return []
        while found[-1] is not None and not self._jobs.empty() and len(found) < _MAX_TOGETHER:
            found.append(self._jobs.get())
        return found

    def _take(self, jobs: list[_Job | None]) -> bool:
        """Carries out pushes; False once closed, or once the peer has hung up."""
        left = has_ended(self._way.connection)
        wanted = [job for job in jobs if job is not None]
        if left:
            for job in wanted:
                job.done(_gone())
            return False
        self._copy(wanted)
        return None not in jobs

    def _copy(self, jobs: list[_Job]) -> None:
        """Queues the copies of a layer's pushes together, and behind its event: no layer waits for one that is computed later."""
        begun: list[_Job] = []
        for _, of_layer in itertools.groupby(jobs, key=lambda job: job.push.ready):
            found = self._with_rows(of_layer)
            together = [job for job, _ in found]
            try:
                self._begin(together, [part for _, rows in found for part in rows])
            except Exception as error:  # noqa: BLE001  # torch and Triton have faults of their own; others wait for this thread
                self._settle([*begun, *together], _fault(error))
                begun = []
            else:
                begun += together
        self._settle(begun, None)

    def _with_rows(self, jobs: Iterable[_Job]) -> list[tuple[_Job, list[PageRows]]]:
        """What to copy for each; those that must not be, or cannot, are told so."""
        found: list[tuple[_Job, list[PageRows]]] = []
        for job in jobs:
            try:
                job.push.check_lease()
                found.append((job, self._arenas.rows(job.push)))
            except Exception as error:  # noqa: BLE001  # whatever it is, the others' pushes have to go on
                job.done(_fault(error))
        return found

    def _begin(self, jobs: list[_Job], rows: list[PageRows]) -> None:
        if not jobs:
            return
        ready = jobs[0].push.ready
        if ready is not None:
            self._way.driver.follow(self._way.stream, ready.event)
        self._way.mover.move(rows, self._way.stream)

    def _settle(self, jobs: list[_Job], error: TransferError | None) -> None:
        """Nobody hears of a push before the GPU is through with it, also of one that failed in between."""
        if not jobs:
            return
        try:
            self._way.driver.wait(self._way.stream)
        except TransferError as fault:
            error = fault
        for job in jobs:
            job.done(error)


def _fault(error: Exception) -> TransferError:
    if isinstance(error, TransferError):
        return error
    return TransferError(f"copying pages failed: {error!r}")


def _gone() -> TransferError:
    return TransferError("the peer let go of its memory or died")
