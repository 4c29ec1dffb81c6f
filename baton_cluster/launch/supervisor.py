"""Decides when the processes of a local cluster start, start again, and stop. The launcher carries it out.

Pure: no processes, no clock. Time comes in as `now_s` (monotonic seconds). The states of one child:

    WAITING ──due──▶ STARTING ──ready──▶ READY
       ▲                 │ exit            │ exit
       └────back-off─────┴─────────────────┘        on stop: any ──▶ STOPPING ──exit──▶ GONE

A child that ends before it was ever ready ends the launch: a wrong model path does not get better by trying again. Once
it has been ready, its end is an accident, and it starts again: at once if it has served and did not end lately, else
after a wait that doubles (`baton.backoff`) with each end that is not forgiven yet. So one that ends soon after every
start waits, and one that serves between its ends does not. A child without which the others can serve is never waited
for, and whenever it ends, that is an accident.

Children may be added and retired while the cluster runs. An added one is never needed, so that one that cannot start
ends nothing. A retired one stops, and is forgotten once its process is gone; one that is added again meanwhile is a new
child from then on.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from math import ceil

from baton.backoff import Backoff
from baton.errors import BatonError, InvariantError, UnavailableError
from baton.ids import Incarnation
from baton.story import StoryEntry, StoryLog


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


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildAdded:
    """One more child is wanted, or one that was retired and is not gone yet is wanted again."""

    name: str
    stop_rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildRetired:
    """The child is not wanted any more."""

    name: str


Event = (
    ChildReady
    | ChildProgress
    | ChildFatal
    | ChildExited
    | ChildAdded
    | ChildRetired
    | Tick
    | StopRequested
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StartProcess:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class AnnounceJoined:
    """A child that was added is ready for the first time."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AnnounceLeft:
    """A child that was retired is gone, and not known any more."""

    name: str


Announcement = AnnounceReady | AnnounceRestart | AnnounceRecovered | AnnounceJoined | AnnounceLeft
Action = StartProcess | Stop | Kill | GiveUp | Announcement

SERVED_S = 1.0
"""Ready for this long, a child has served: what ended it need not be in the way of its next start."""

FORGIVEN_S = 5.0
"""For each such time for which a child was ready one of its earlier ends is forgiven."""

MOST_ENDS = 12
"""More are not counted: after a minute all are forgiven."""

KILL_GRACE_S = 5.0
"""A child drains by itself for the drain timeout; only this much later is it killed."""


class ChildState(Enum):
    """Where one child stands."""

    WAITING = "waiting"
    STARTING = "starting"
    READY = "ready"
    STOPPING = "stopping"
    GONE = "gone"


_ALLOWED: dict[ChildState, frozenset[ChildState]] = {
    ChildState.WAITING: frozenset({ChildState.STARTING, ChildState.GONE}),
    ChildState.STARTING: frozenset(
        {ChildState.READY, ChildState.WAITING, ChildState.STOPPING, ChildState.GONE}
    ),
    ChildState.READY: frozenset({ChildState.WAITING, ChildState.STOPPING, ChildState.GONE}),
    ChildState.STOPPING: frozenset({ChildState.GONE}),
    ChildState.GONE: frozenset(),
}

RUNNING = frozenset({ChildState.STARTING, ChildState.READY, ChildState.STOPPING})
"""The states in which a child has a process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisorPolicy:
    """The waits and timeouts of a supervisor, as `ClusterConfig` has them."""

    restart_backoff: Backoff
    startup_timeout_s: float
    drain_timeout_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One child to supervise.

    Attributes:
        name: Of the child.
        stop_rank: On a stop, a lower one is gone before a higher one is asked to go.
        is_needed: Whether the cluster cannot serve without it.
    """

    name: str
    stop_rank: int
    is_needed: bool = True


@dataclass(slots=True, eq=False, kw_only=True)
class _Child:
    member: Member
    state: ChildState = ChildState.WAITING
    incarnation: Incarnation | None = None
    was_ready: bool = False
    has_ended: bool = False
    ends: float = 0.0
    last_words: BatonError | None = None
    was_added: bool = False
    is_retired: bool = False
    is_wanted_again: bool = False
    # What the moment means depends on the state: when to start, when it last moved, since when ready, when to kill.
    moment_s: float = 0.0


class Supervisor:
    """The children of one cluster and what is to be done about them. Not thread-safe: one owner.

    Args:
        members: The children.
        policy: Waits and timeouts.
        new_incarnation: Draws a number that no other start has.
        now_s: The time at which all of them are due to start.
    """

    def __init__(
        self,
        members: Iterable[Member],
        policy: SupervisorPolicy,
        *,
        new_incarnation: Callable[[], Incarnation],
        now_s: float,
    ) -> None:
        self._children = {m.name: _Child(member=m, moment_s=now_s) for m in members}
        self._policy = policy
        self._new_incarnation = new_incarnation
        self._log = StoryLog("supervisor")
        self._launched = False
        self._stopping = False

    @property
    def finished(self) -> bool:
        """Whether a stop is over: no child has a process, none will."""
        return all(child.state is ChildState.GONE for child in self._children.values())

    def state(self, name: str) -> ChildState:
        """Where the child stands."""
        return self._children[name].state

    def next_deadline_s(self) -> float | None:
        """When the next `Tick` is due, or None while nothing depends on time."""
        deadlines = [self._deadline_s(child) for child in self._children.values()]
        return min((moment for moment in deadlines if moment is not None), default=None)

    def story(self, name: str) -> tuple[StoryEntry, ...]:
        """The last events that concerned the child, and what was done about them."""
        return self._log.story(name)

    def handle(self, event: Event, now_s: float) -> list[Action]:
        """What is to be done about `event`, in order."""
        actions = self._decide(event, now_s)
        if not isinstance(event, ChildProgress):
            self._record(event, actions, now_s)
        return actions

    def _record(self, event: Event, actions: list[Action], now_s: float) -> None:
        """Logs the event under each child that it or one of the actions names,
        with the actions that name no other child.
        """
        about = {name: None for what in (event, *actions) if (name := getattr(what, "name", ""))}
        for name in about:
            its = [action for action in actions if getattr(action, "name", name) == name]
            self._log.record(name, now_s, event, its)

    def _decide(self, event: Event, now_s: float) -> list[Action]:
        match event:
            case Tick():
                return self._tick(now_s)
            case StopRequested():
                return self._kill_all() if self._stopping else self._begin_stop(now_s)
            case ChildAdded():
                return self._add(event, now_s)
            case ChildRetired():
                return self._retire(event.name, now_s)
        child = self._children.get(event.name)
        if child is None or child.incarnation != event.incarnation or child.state not in RUNNING:
            return []
        match event:
            case ChildReady():
                return self._ready(child, now_s)
            case ChildProgress():
                if child.state is ChildState.STARTING:
                    child.moment_s = now_s
                return []
            case ChildFatal():
                child.last_words = event.error
                return []
            case ChildExited():
                return self._exited(child, event.returncode, now_s)

    def check_integrity(self) -> None:
        """Raises `InvariantError` if the records contradict each other."""
        for name, child in self._children.items():
            if child.state in RUNNING and child.incarnation is None:
                raise self._broken(name, "runs without an incarnation")
            if child.state is ChildState.READY and not child.was_ready:
                raise self._broken(name, "is ready and never was")
            if self._stopping and child.state is ChildState.WAITING:
                raise self._broken(name, "waits for a start while the cluster stops")
            ends = child.state in (ChildState.STOPPING, ChildState.GONE)
            if not self._stopping and ends != child.is_retired:
                raise self._broken(name, f"is {child.state.value}, retired: {child.is_retired}")

    def _broken(self, name: str, what: str) -> InvariantError:
        return InvariantError(f"{name} {what}", story=self.story(name))

    def _move(self, child: _Child, state: ChildState, moment_s: float) -> None:
        if state not in _ALLOWED[child.state]:
            raise self._broken(
                child.member.name, f"moves from {child.state.value} to {state.value}"
            )
        child.state, child.moment_s = state, moment_s

    def _deadline_s(self, child: _Child) -> float | None:
        match child.state:
            case ChildState.WAITING:
                return child.moment_s
            case ChildState.STARTING:
                return child.moment_s + self._policy.startup_timeout_s
            case ChildState.STOPPING:
                return child.moment_s if child.moment_s < float("inf") else None
            case _:
                return None

    def _tick(self, now_s: float) -> list[Action]:
        actions: list[Action] = []
        for child in self._children.values():
            deadline_s = self._deadline_s(child)
            if deadline_s is not None and deadline_s <= now_s:
                actions.append(self._due(child, now_s))
        return actions

    def _due(self, child: _Child, now_s: float) -> Action:
        name = child.member.name
        if child.state is ChildState.WAITING:
            self._move(child, ChildState.STARTING, now_s)
            child.incarnation, child.last_words = self._new_incarnation(), None
            return StartProcess(name=name, incarnation=child.incarnation)
        if child.state is ChildState.STARTING:
            child.last_words = UnavailableError(
                f"{name} made no progress for {self._policy.startup_timeout_s:g} s while starting"
            )
            child.moment_s = now_s
        else:
            child.moment_s = float("inf")  # Killed once; nothing more can be done but wait.
        return Kill(name=name)

    def _add(self, event: ChildAdded, now_s: float) -> list[Action]:
        if self._stopping:
            return []
        child = self._children.get(event.name)
        if child is None:
            member = Member(name=event.name, stop_rank=event.stop_rank, is_needed=False)
            self._children[event.name] = _Child(member=member, moment_s=now_s, was_added=True)
        else:
            child.is_wanted_again = child.is_retired
        return []

    def _retire(self, name: str, now_s: float) -> list[Action]:
        child = self._children.get(name)
        if self._stopping or child is None:
            return []
        if child.is_retired:
            child.is_wanted_again = False
            return []
        if child.state is ChildState.WAITING:
            return self._forget(child, now_s)
        child.is_retired = True
        self._move(child, ChildState.STOPPING, self._kill_s(now_s))
        return [Stop(name=name)]

    def _forget(self, child: _Child, now_s: float) -> list[Action]:
        del self._children[child.member.name]
        if child.is_wanted_again:
            again = ChildAdded(name=child.member.name, stop_rank=child.member.stop_rank)
            return self._add(again, now_s)
        return [AnnounceLeft(name=child.member.name)]

    def _kill_s(self, now_s: float) -> float:
        return now_s + self._policy.drain_timeout_s + KILL_GRACE_S

    def _ready(self, child: _Child, now_s: float) -> list[Action]:
        if child.state is not ChildState.STARTING:
            return []
        self._move(child, ChildState.READY, now_s)
        is_first, child.was_ready = not child.was_ready, True
        if not self._launched and self._can_serve():
            self._launched = True
            return [AnnounceReady()]
        if child.was_added and is_first:
            return [AnnounceJoined(name=child.member.name)]
        return [AnnounceRecovered(name=child.member.name)] if child.has_ended else []

    def _can_serve(self) -> bool:
        needed = (child for child in self._children.values() if child.member.is_needed)
        return all(child.state is ChildState.READY for child in needed)

    def _exited(self, child: _Child, returncode: int, now_s: float) -> list[Action]:
        if self._stopping:
            self._move(child, ChildState.GONE, now_s)
            return self._stop_next(now_s)
        if child.is_retired:
            return self._forget(child, now_s)
        if not child.was_ready and child.member.is_needed:
            error = child.last_words or UnavailableError(
                f"{child.member.name} {describe_exit(returncode)} while starting"
            )
            actions = self._begin_stop(now_s, exited=child)
            return [GiveUp(error=error), *actions]
        return [self._back_off(child, returncode, now_s)]

    def _back_off(self, child: _Child, returncode: int, now_s: float) -> Action:
        ready_s = now_s - child.moment_s if child.state is ChildState.READY else 0.0
        unforgiven = max(0.0, child.ends - ready_s / FORGIVEN_S)
        after_s = self._policy.restart_backoff.wait_s(ceil(unforgiven) + (ready_s < SERVED_S))
        child.has_ended, child.ends = True, min(unforgiven + 1, MOST_ENDS)
        reason = describe_exit(returncode)
        if child.last_words is not None:
            reason = f"{reason}: {child.last_words.message}"
        self._move(child, ChildState.WAITING, now_s + after_s)
        return AnnounceRestart(
            name=child.member.name, after_s=after_s, reason=reason, was_ready=child.was_ready
        )

    def _begin_stop(self, now_s: float, *, exited: _Child | None = None) -> list[Action]:
        self._stopping = True
        for child in self._children.values():
            if child is exited or child.state is ChildState.WAITING:
                self._move(child, ChildState.GONE, now_s)
        return self._stop_next(now_s)

    def _stop_next(self, now_s: float) -> list[Action]:
        left = [c for c in self._children.values() if c.state is not ChildState.GONE]
        rank = min((child.member.stop_rank for child in left), default=0)
        next_ones = [
            child
            for child in left
            if child.member.stop_rank == rank and child.state is not ChildState.STOPPING
        ]
        for child in next_ones:
            self._move(child, ChildState.STOPPING, self._kill_s(now_s))
        return [Stop(name=child.member.name) for child in next_ones]

    def _kill_all(self) -> list[Action]:
        running = [c for c in self._children.values() if c.state in RUNNING]
        for child in running:
            if child.state is not ChildState.STOPPING:
                self._move(child, ChildState.STOPPING, float("inf"))
            child.moment_s = float("inf")
        return [Kill(name=child.member.name) for child in running]


def describe_exit(returncode: int) -> str:
    """How a process ended, for people: `ended with status 1`, `was killed by signal 9`."""
    if returncode < 0:
        return f"was killed by signal {-returncode}"
    return f"ended with status {returncode}"
