"""What happens to the children of a cluster, and what the supervisor wants done about it."""

from dataclasses import dataclass

from baton.errors import BatonError
from baton.ids import Incarnation


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildReady:
    """The child serves."""

    name: str
    incarnation: Incarnation


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildProgress:
    """The child gets on with its start; `done` is a share from 0 to 1 where one is known."""

    name: str
    incarnation: Incarnation
    what: str
    done: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildFatal:
    """The child says why it is about to end."""

    name: str
    incarnation: Incarnation
    error: BatonError


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildExited:
    """The process is gone; `returncode` is negative for a signal."""

    name: str
    incarnation: Incarnation
    returncode: int


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed; due at `Supervisor.next_deadline_s`."""


@dataclass(frozen=True, slots=True)
class StopRequested:
    """The operator wants the cluster to end; asked a second time, at once."""


Event = ChildReady | ChildProgress | ChildFatal | ChildExited | Tick | StopRequested


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Start the child's process under this incarnation."""

    name: str
    incarnation: Incarnation


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """Ask the child to end (SIGTERM)."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """End the child now (SIGKILL)."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GiveUp:
    """The launch has failed; what still runs is being stopped."""

    error: BatonError


@dataclass(frozen=True, slots=True)
class AnnounceReady:
    """Every child is ready for the first time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnnounceRestart:
    """The child ended by accident and starts again after a wait; without `was_ready` it has never served yet."""

    name: str
    after_s: float
    reason: str
    was_ready: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class AnnounceRecovered:
    """The child is ready again."""

    name: str


Announcement = AnnounceReady | AnnounceRestart | AnnounceRecovered
Action = Start | Stop | Kill | GiveUp | Announcement
