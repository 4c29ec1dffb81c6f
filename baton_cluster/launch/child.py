"""What every child process has in common, whatever its role: lifeline, signals, logs, and how it ends.

A child ends well when the launcher asks it to (SIGTERM) or has died (end of the lifeline); then its role drains what is
in flight. It ends badly with one `fatal` status line. SIGINT is ignored: Ctrl-C is the launcher's to handle.
"""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NoReturn

import uvloop

from baton.errors import BatonError
from baton.telemetry import logs
from baton_cluster.launch.assignment import Assignment
from baton_cluster.launch.command_line import show_as
from baton_cluster.launch.lifeline import (
    ChildEnd,
    Progress,
    Ready,
    ScaleRequest,
    WorkersChanged,
    fatal,
)
from baton_cluster.launch.runtime_dir import leave

_PROGRESS_INTERVAL_S = 0.1
_ORPHAN_GRACE_S = 5.0
_LOWEST_PRIORITY = 19

_log = logs.get_logger(__name__)


class Child:
    """A child process as its role sees it.

    Attributes:
        assignment: What the launcher asks of it.
        stop: Set when the role shall finish what is in flight and return.
        on_workers: Called on the event loop when the launcher tells of changed workers.
    """

    def __init__(self, assignment: Assignment, end: ChildEnd) -> None:
        self.assignment = assignment
        self.stop = asyncio.Event()
        self.on_workers: Callable[[WorkersChanged], None] | None = None
        self._end = end
        self._serves = False
        self._last_progress: tuple[str, float] = ("", 0.0)

    @property
    def serves(self) -> bool:
        """Whether something may be in flight here: `serving` or `ready` was called."""
        return self._serves

    def progress(self, what: str, done: float | None = None) -> None:
        """Tells the launcher how far the start is; from any thread, as often as one likes."""
        last_what, last_s = self._last_progress
        now_s = time.monotonic()
        if what == last_what and done != 1.0 and now_s - last_s < _PROGRESS_INTERVAL_S:
            return
        self._last_progress = (what, now_s)
        self._end.send(Progress(what=what, done=done))

    def serving(self) -> None:
        """From now on a stop waits for what is in flight, though the launcher is told later that this process serves."""
        self._serves = True

    def ready(self) -> None:
        """Tells the launcher that this process serves."""
        self.serving()
        self._end.send(Ready())

    def ask_for_workers(self, request: ScaleRequest) -> None:
        """Asks the launcher for other numbers of workers. Its answer comes to `on_workers`."""
        self._end.send(request)


RoleMain = Callable[[Child], Awaitable[None]]


def run(
    role_main: RoleMain,
    lifeline_fd: int,
    *,
    interruptible: bool = False,
    hear_out: Callable[[], None] | None = None,
) -> None:
    """Runs `role_main` as this process; does not return.

    Args:
        role_main: What it is to be.
        lifeline_fd: Of the launcher.
        interruptible: Ctrl-C is its own to handle, as SIGTERM.
        hear_out: Waits until all that the role said is heard, where that is a thread of this process, which ends with it.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end = ChildEnd(socket.socket(fileno=lifeline_fd))
    stops = (signal.SIGTERM, signal.SIGINT) if interruptible else (signal.SIGTERM,)
    _be(role_main, _assigned(end), end, stops, hear_out)


def run_standby(
    role_of: Callable[[str], RoleMain], preload: Callable[[], None], lifeline_fd: int
) -> None:
    """Imports what a worker needs, waits for a worker's part, and becomes that worker; does not return.

    Args:
        role_of: What each role runs.
        preload: Imports; called in a thread that gives way to every other process.
        lifeline_fd: Of the launcher.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end = ChildEnd(socket.socket(fileno=lifeline_fd))
    standby = _assigned(end)
    try:
        _call_niced(preload)
    except Exception as error:  # noqa: BLE001  # whatever an import does: the launcher must hear of it
        end.send(fatal(BatonError(f"{type(error).__name__}: {error}")))
    else:
        end.send(Ready())
    try:
        assignment = end.receive()
    except BatonError:  # the launcher is gone, or does not need this process
        _take_leave(standby)
        os._exit(0)
    worker = assignment.part.worker
    assert worker is not None, "only a worker begins as a standby process"
    role = worker.role.value
    show_as(role, "--name", assignment.part.name, "--lifeline", str(lifeline_fd))
    _be(role_of(role), assignment, end, (signal.SIGTERM,))


def _assigned(end: ChildEnd) -> Assignment:
    try:
        return end.receive()
    except BatonError as error:
        end.send(fatal(error))
        sys.exit(1)


def _be(
    role_main: RoleMain,
    assignment: Assignment,
    end: ChildEnd,
    stops: Sequence[signal.Signals],
    hear_out: Callable[[], None] | None = None,
) -> NoReturn:
    logs.configure(assignment.config.log, assignment.part.name)
    status = _run_to_end(role_main, assignment, end, stops)
    _take_leave(assignment)
    if hear_out is not None:
        end.hang_up()
        hear_out()
    logging.shutdown()
    # Not sys.exit: a thread may still be loading weights or sit in a library that never returns, and what must be
    # undone has been.
    os._exit(status)


def _call_niced(call: Callable[[], None]) -> None:
    """Calls in a thread of the lowest priority. On Linux that is a thread's own, so that the process, which could not
    take it back without privileges, keeps its priority for the time when it serves.
    """

    def niced() -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)
        call()

    with ThreadPoolExecutor(1) as executor:
        executor.submit(niced).result()


def _run_to_end(
    role_main: RoleMain, assignment: Assignment, end: ChildEnd, stops: Sequence[signal.Signals]
) -> int:
    # Never closed: closing waits for the threads of `asyncio.to_thread`, and one of them may be loading weights.
    runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
    try:
        runner.run(_live(role_main, assignment, end, stops))
    except BatonError as error:
        end.send(fatal(error))
        return 1
    except Exception as error:  # noqa: BLE001  # the outermost frame: the launcher must hear of anything
        _log.error("process failed", cause=error)
        end.send(fatal(BatonError(f"{assignment.part.name}: {type(error).__name__}: {error}")))
        return 1
    return 0


async def _live(
    role_main: RoleMain, assignment: Assignment, end: ChildEnd, stops: Sequence[signal.Signals]
) -> None:
    child = Child(assignment, end)
    loop = asyncio.get_running_loop()
    for number in stops:
        loop.add_signal_handler(number, child.stop.set)
    end.watch(lambda: _orphaned(child, loop), lambda news: _told(child, loop, news))
    role = asyncio.ensure_future(role_main(child))
    stopped = asyncio.ensure_future(child.stop.wait())
    await asyncio.wait({role, stopped}, return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if role.done() or child.serves:
        await role
    # Else it is asked to go while it starts: nothing is in flight, and what it loads is not needed.


def _told(child: Child, loop: asyncio.AbstractEventLoop, news: WorkersChanged) -> None:
    def tell() -> None:
        if child.on_workers is not None:
            child.on_workers(news)

    with contextlib.suppress(RuntimeError):  # the loop is closed: this process is ending already
        loop.call_soon_threadsafe(tell)


def _orphaned(child: Child, loop: asyncio.AbstractEventLoop) -> None:
    """The launcher is gone: stop as if asked to, and see to it that a role that hangs does not stay for ever."""
    try:
        loop.call_soon_threadsafe(child.stop.set)
    except RuntimeError:
        return  # The loop is closed: this process is ending already.
    time.sleep(child.assignment.config.cluster.drain_timeout_s + _ORPHAN_GRACE_S)
    try:
        _take_leave(child.assignment)
    finally:
        os._exit(1)


def _take_leave(assignment: Assignment) -> None:
    for socket_path in assignment.part.sockets:
        socket_path.unlink(missing_ok=True)
    leave(Path(assignment.config.cluster.runtime_dir), assignment.part.lock_fd)
