"""What a person sees while a cluster starts and runs: one moving line on a terminal, plain lines elsewhere."""

import sys
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.status import Status

from baton.telemetry import logs
from baton_cluster.launch.supervisor import (
    AnnounceJoined,
    AnnounceLeft,
    Announcement,
    AnnounceReady,
    AnnounceRecovered,
    AnnounceRestart,
    ChildProgress,
)

_log = logs.get_logger(__name__)


class StartDisplay:
    """Shows each child's progress on standard error until the cluster is ready; afterwards logs accidents.

    Use as a context manager around the cluster, so that the terminal is left in order whatever happens.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(file=sys.stderr)
        self._doing: dict[str, str] = {}
        self._status: Status | None = None
        self._is_starting = True

    def __enter__(self) -> Self:
        """Starts the moving line, on a terminal."""
        if self._console.is_terminal:
            self._status = self._console.status("starting the cluster")
            self._status.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Takes the moving line away."""
        self._close()

    def progress(self, event: ChildProgress) -> None:
        """A child gets on with its start; of a later one, after an accident, only the end is worth a line."""
        if not self._is_starting:
            return
        share = "" if event.done is None else f" {event.done:.0%}"
        if self._status is not None:
            self._doing[event.name] = f"{event.what}{share}"
            parts = [f"{name}: {doing}" for name, doing in sorted(self._doing.items())]
            self._status.update(" · ".join(parts))
        elif self._doing.get(event.name) != event.what:
            self._doing[event.name] = event.what
            print(f"baton: {event.name}: {event.what}", file=self._console.file, flush=True)

    def announce(self, announcement: Announcement) -> None:
        """A child ended by accident, is back, or came or went because the number of workers was changed."""
        match announcement:
            case AnnounceRestart():
                _log_restart(announcement)
            case AnnounceRecovered():
                _log.info("process is back", process=announcement.name)
            case AnnounceJoined():
                _log.info("worker added", process=announcement.name)
            case AnnounceLeft():
                _log.info("worker removed", process=announcement.name)
            case AnnounceReady():
                self._is_starting = False
                self._close()

    def _close(self) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None


def _log_restart(restart: AnnounceRestart) -> None:
    # One that has never served may never do so, and what it is for is missing until then: that must not go unseen.
    say = _log.warning if restart.was_ready else _log.error
    what = (
        "process ended"
        if restart.was_ready
        else "process cannot start, the cluster serves without it"
    )
    say(
        f"{what}, starting it again",
        process=restart.name,
        reason=restart.reason,
        after_s=restart.after_s,
    )
