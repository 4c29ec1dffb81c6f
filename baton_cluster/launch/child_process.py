"""One child process as the launcher sees it: started, assigned its part, listened to, signalled, reaped."""

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from baton.config import env
from baton.errors import from_code
from baton.ids import Incarnation
from baton_cluster.launch.assignment import Assignment
from baton_cluster.launch.lifeline import (
    Fatal,
    LauncherEnd,
    Progress,
    Ready,
    ScaleRequest,
    Status,
    WorkersChanged,
)
from baton_cluster.launch.plan import ChildPlan
from baton_cluster.launch.supervisor import (
    ChildExited,
    ChildFatal,
    ChildProgress,
    ChildReady,
    Event,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleAsked:
    """The router asks for other numbers of workers."""

    request: ScaleRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Spawned:
    """A process that waits for an assignment on its lifeline."""

    process: asyncio.subprocess.Process
    lifeline: LauncherEnd


class ChildProcess:
    """A running child. The caller that starts it reads `events` to the end, which reaps it.

    Attributes:
        plan: What it is.
        incarnation: Of this start.
        pid: Also the id of its session and process group, so that a terminal's Ctrl-C passes it by.
    """

    def __init__(
        self,
        plan: ChildPlan,
        incarnation: Incarnation,
        process: asyncio.subprocess.Process,
        lifeline: LauncherEnd,
    ) -> None:
        self.plan = plan
        self.incarnation = incarnation
        self.pid = process.pid
        self._process = process
        self._lifeline = lifeline

    @classmethod
    async def start(cls, plan: ChildPlan, assignment: Assignment, *, module: str) -> "ChildProcess":
        """Starts `python -m module` and tells it what to do.

        Raises:
            OSError: The machine refuses another process or socket.
        """
        spawned = await spawn(plan, assignment, module=module, shown=(plan.role, plan.name))
        return await cls.assign(spawned, plan, assignment)

    @classmethod
    async def assign(
        cls, spawned: Spawned, plan: ChildPlan, assignment: Assignment
    ) -> "ChildProcess":
        """Tells a process that has been started what to do."""
        await spawned.lifeline.assign(assignment)
        return cls(plan, assignment.part.incarnation, spawned.process, spawned.lifeline)

    def tell(self, news: WorkersChanged) -> None:
        """Tells it of changed workers."""
        self._lifeline.tell(news)

    async def events(self) -> AsyncIterator[Event | ScaleAsked]:
        """What happens to the child, up to its exit, which is always the last."""
        async for status in self._lifeline.statuses():
            yield event_of(status, self.plan.name, self.incarnation)
        returncode = await self._process.wait()
        await self._lifeline.close()
        yield ChildExited(name=self.plan.name, incarnation=self.incarnation, returncode=returncode)

    def terminate(self) -> None:
        """Asks it to end."""
        # It may have gone by itself a moment ago; its exit is then on the way to us.
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()

    def kill(self) -> None:
        """Ends it now, and whatever it may have started, such as a compiler."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)


def event_of(status: Status, name: str, incarnation: Incarnation) -> Event | ScaleAsked:
    """What the launcher is told when the child `name` says `status`."""
    match status:
        case Ready():
            return ChildReady(name=name, incarnation=incarnation)
        case Progress():
            return ChildProgress(
                name=name, incarnation=incarnation, what=status.what, done=status.done
            )
        case Fatal():
            error = from_code(status.code, status.message, status.param)
            return ChildFatal(name=name, incarnation=incarnation, error=error)
        case ScaleRequest():
            return ScaleAsked(request=status)


async def spawn(
    plan: ChildPlan, assignment: Assignment, *, module: str, shown: tuple[str, str]
) -> Spawned:
    """Starts `python -m module` for `plan`, with the descriptors of `assignment`, which it is still to be told.

    Args:
        plan: Decides its environment.
        assignment: What it will be told, or the like of it.
        module: What it runs.
        shown: Role and name in its command line.

    Raises:
        OSError: The machine refuses another process or socket.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        lifeline = await LauncherEnd.open(ours)
        try:
            process = await _exec(plan, assignment, theirs.fileno(), module, shown)
        except BaseException:
            await lifeline.close()
            raise
    return Spawned(process=process, lifeline=lifeline)


async def _exec(
    plan: ChildPlan,
    assignment: Assignment,
    lifeline_fd: int,
    module: str,
    shown: tuple[str, str],
) -> asyncio.subprocess.Process:
    role, name = shown
    arguments = (role, "--name", name, "--lifeline", str(lifeline_fd))
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        module,
        *arguments,
        stdin=asyncio.subprocess.DEVNULL,
        pass_fds=(lifeline_fd, *assignment.inherited_fds),
        env=env.child_environment(
            num_threads=plan.num_threads,
            # vLLM computes a step in hundreds of parallel regions:
            # one thread that waits for its core has all of them wait.
            threads_sleep=assignment.config.engine.kind == "vllm",
            import_path=_checkout(),
        ),
        start_new_session=True,
    )


def _checkout() -> str | None:
    """The directory of a checkout that Baton runs from without being installed; a child may have another path."""
    root = Path(__file__).resolve().parents[2]
    return str(root) if (root / "pyproject.toml").is_file() else None
