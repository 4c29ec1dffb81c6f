"""A process with its imports done that waits to become the next worker which the launcher starts.

Most of a small model's start is imports (torch's above all). A worker that takes over such a process is what it would
be if it had been started directly: the same module, environment, descriptors, session and,
once it has its part, command line.
"""

import asyncio
import contextlib
import os
import signal

from baton.config.schema import BatonConfig
from baton.ids import Incarnation
from baton.telemetry.logs import get_logger
from baton_cluster.launch.assignment import Assignment, Part
from baton_cluster.launch.child_process import ChildProcess, Spawned, spawn
from baton_cluster.launch.lifeline import Fatal, Ready
from baton_cluster.launch.plan import ChildPlan

STANDBY = "standby"
"""In place of a role, until the process is given one."""

NAME = "imports-done-and-no-role-yet"
"""Longer than a worker's name, which is written over it."""

_log = get_logger(__name__)


class StandbyProcess:
    """At most one such process at a time, begun anew after it was used. For one event loop.

    Args:
        like: The worker whose environment it is given; all workers of a cluster have the same.
        config: Of the cluster.
        lock_fd: Holds its runtime directory.
        module: What children run.
    """

    def __init__(self, like: ChildPlan, *, config: BatonConfig, lock_fd: int, module: str) -> None:
        self._like = like
        part = Part(name=STANDBY, incarnation=Incarnation(0), lock_fd=lock_fd)
        self._assignment = Assignment(config=config, part=part)
        self._module = module
        self._waiting: Spawned | None = None
        self._starting: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def pid(self) -> int | None:
        """Of the process that waits, with its imports done."""
        return None if self._waiting is None else self._waiting.process.pid

    def begin(self) -> None:
        """Starts a process in the background, unless there is one."""
        gone = self._waiting is not None and self._waiting.process.returncode is not None
        busy = self._starting is not None and not self._starting.done()
        if not self._closed and not busy and (self._waiting is None or gone):
            self._starting = asyncio.create_task(self._start(), name="standby")

    async def become(self, plan: ChildPlan, assignment: Assignment) -> ChildProcess | None:
        """The process that waits, as the worker `plan` from now on; None where there is none."""
        spawned = self._waiting
        if spawned is None or spawned.process.returncode is not None:
            return None
        self._waiting = None
        return await ChildProcess.assign(spawned, plan, assignment)

    async def close(self) -> None:
        """Ends it; it has nothing to finish."""
        self._closed = True
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.wait([self._starting])
        if self._waiting is not None:
            await _end(self._waiting)
            self._waiting = None

    async def _start(self) -> None:
        if self._waiting is not None:
            await _end(self._waiting)
            self._waiting = None
        try:
            spawned = await spawn(
                self._like, self._assignment, module=self._module, shown=(STANDBY, NAME)
            )
        except OSError as error:
            _log.warning("no standby process can be started", reason=error.strerror or str(error))
            return
        try:
            await spawned.lifeline.assign(self._assignment)
            status = await spawned.lifeline.status()
        except BaseException:
            await _end(spawned)
            raise
        if isinstance(status, Ready):
            self._waiting = spawned
        else:
            await _end(spawned)
            reason = status.message if isinstance(status, Fatal) else "it ended"
            _log.warning("no standby process can be started", reason=reason)


async def _end(spawned: Spawned) -> None:
    if spawned.process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(spawned.process.pid, signal.SIGKILL)
    await spawned.process.wait()
    await spawned.lifeline.close()
