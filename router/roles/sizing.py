"""Decides how many workers there are to be, after roles: the pure core of worker counts that follow the load.

It begins where changes of roles end. A worker is added if a pool has had more to do than it should for a while and no
change of a role would help. One is removed if, for a while, its pool would have clearly less to do than it may without
it. What a pool would have with another number of workers is the role planner's prediction (`planner.py`).

It cannot go back and forth under a constant load: one is added to a pool of n only at a pressure above `high`, and one
taken from n + 1 only if less than `low`, which is below `high`, is predicted for n.

A worker that is wanted and not there is waited for, but not for ever: one that never comes is passed over after a
while, and is the first to be wanted no longer.
"""

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass

from baton.ids import Role
from baton.story import StoryEntry, StoryLog
from router.roles.planner import PLANNER


@dataclass(frozen=True, slots=True, kw_only=True)
class SizingPolicy:
    """When there are more or fewer workers.

    Attributes:
        least: So many there are at least, of all kinds; an operator may have fewer.
        most: So many there are at most.
        high: Pressure above which a worker is added.
        low: Pressure that must be predicted for a pool with one worker less.
        sustained_s: For so long that has to be so.
        cooldown_s: After a change has been carried out there is no other for so long.
        start_timeout_s: A worker that is not there is waited for as long as this.
        warm_up_s: For so long after its first look the planner removes none: what it has averaged is too little still.
        pinned_s: Numbers that an operator has changed are left alone for so long.
    """

    least: int = 2
    most: int = 8
    high: float = 0.8
    low: float = 0.5
    sustained_s: float = 60.0
    cooldown_s: float = 120.0
    start_timeout_s: float = 600.0
    warm_up_s: float = 60.0
    pinned_s: float = 900.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SizingLook:
    """The workers at one moment.

    Attributes:
        pools: How many workers are wanted, by the role with which they were started.
        connected: The names of those that there are, whatever they do.
        roles: What those that are given work take now, by their names.
        pressure: Predicted for so many workers of a role; what is, for as many as there are.
        flip_is_near: Whether a worker is about to change its role.
    """

    pools: Mapping[str, int]
    connected: Set[str]
    roles: Mapping[str, Role]
    pressure: Callable[[Role, int], float]
    flip_is_near: bool

    @property
    def missing(self) -> Set[str]:
        """The names of those that are wanted and not there."""
        wanted = {f"{pool}-{i}" for pool, count in self.pools.items() for i in range(count)}
        return wanted - self.connected


@dataclass(frozen=True, slots=True, kw_only=True)
class Resize:
    """A pool is to have one worker more or less, and why."""

    pool: str
    workers: int
    why: str


class WorkerCountPlanner:
    """Looks again and again, and says now and then that there is to be one worker more or less.

    Pure: no sockets, no clock; time comes in as `now_s`. The owner carries a change out and tells how it went with
    `resized`; until then there is no other. Not thread-safe.

    Args:
        policy: When there is.
    """

    def __init__(self, policy: SizingPolicy) -> None:
        self._policy = policy
        self._story = StoryLog(PLANNER)
        self._pools: dict[str, int] | None = None
        self._since_s: float | None = None
        self._wanted: tuple[str, float] | None = None
        self._resizing: Resize | None = None
        self._rests_until_s = float("-inf")
        self._pinned_until_s = float("-inf")
        self._whole_since_s: float | None = None
        self._waits_until_s = float("-inf")
        self.verdict = "nothing has been looked at yet"

    def story(self) -> tuple[StoryEntry, ...]:
        """The last verdicts and changes."""
        return self._story.story(PLANNER)

    def look(self, look: SizingLook, now_s: float) -> Resize | None:
        """Takes how the workers are at `now_s`; the change that is due, if one is."""
        if self._since_s is None:
            self._since_s = now_s
        self._note_operator(look, now_s)
        resize, verdict = self._decide(look, now_s)
        if verdict != self.verdict:
            self._story.record(PLANNER, now_s, verdict)
            self.verdict = verdict
        if resize is not None:
            self._resizing, self._wanted = resize, None
        return resize

    def resized(self, now_s: float, *, outcome: str, changed: bool) -> None:
        """The change has been begun, or was refused."""
        assert self._resizing is not None, "a change that was asked for"
        if changed and self._pools is not None:
            self._pools[self._resizing.pool] = self._resizing.workers
            self._waits_until_s = now_s + self._policy.start_timeout_s
        self._story.record(PLANNER, now_s, f"{self._resizing.pool} workers: {outcome}")
        self._resizing = None
        self._rests_until_s = now_s + self._policy.cooldown_s

    def stand_by(self) -> None:
        """Somebody else plans, or nobody: what was seen so far is out of date when this planner looks again."""
        self._wanted = self._pools = self._since_s = self._whole_since_s = None
        self.verdict = "numbers of workers stay what they are"

    def _note_operator(self, look: SizingLook, now_s: float) -> None:
        """Numbers that changed without this planner were changed by an operator, who is not to be contradicted."""
        if self._resizing is not None:
            return
        pools = dict(look.pools)
        if self._pools not in (None, pools):
            self._pinned_until_s = now_s + self._policy.pinned_s
            self._wanted = None
            shown = " ".join(f"{pool}={count}" for pool, count in pools.items())
            what = f"an operator decides on the numbers of workers, {shown}: left alone for {self._policy.pinned_s:g} s"
            self._story.record(PLANNER, now_s, what)
        if self._pools != pools:
            self._waits_until_s = now_s + self._policy.start_timeout_s
        self._pools = pools

    def _waits(self, missing: Set[str], now_s: float) -> bool:
        """Whether those that are not there are still waited for: since the numbers changed, or a worker was lost after
        all had been there for a while. One that comes and goes is not waited for each time.
        """
        if not missing:
            if self._whole_since_s is None:
                self._whole_since_s = now_s
            return False
        since_s, self._whole_since_s = self._whole_since_s, None
        if since_s is not None and now_s - since_s >= self._policy.cooldown_s:
            self._waits_until_s = now_s + self._policy.start_timeout_s
        return now_s < self._waits_until_s

    def _decide(self, look: SizingLook, now_s: float) -> tuple[Resize | None, str]:
        counts = {role: list(look.roles.values()).count(role) for role in _ROLES}
        total, missing = sum(look.pools.values()), look.missing
        waits = self._waits(missing, now_s)
        if self._resizing is not None:
            return None, "the number of workers is being changed"
        if now_s < self._pinned_until_s:
            return self._none("an operator has decided on the numbers of workers")
        if waits:
            return self._none(f"{total - len(missing)} of {total} workers are there")
        if look.flip_is_near:
            return self._none("roles change first")
        if not all(counts.values()):
            return self._none("a pool has no worker that is given work: numbers stay what they are")
        now = {role: look.pressure(role, counts[role]) for role in _ROLES}
        worst = max(_ROLES, key=lambda role: now[role])
        if now[worst] >= self._policy.high:
            return self._more(look, worst, counts[worst], now[worst], total, now_s)
        return self._fewer(look, counts, total, now_s)

    def _more(
        self, look: SizingLook, role: Role, workers: int, pressure: float, total: int, now_s: float
    ) -> tuple[Resize | None, str]:
        if total >= self._policy.most:
            return self._none(f"a {role.value} worker is needed, and there are {total} already")
        why = (
            f"one {role.value} worker more: pressure {pressure:.2f} of {workers},"
            f" {look.pressure(role, workers + 1):.2f} is predicted for {workers + 1}, and no change of a role helps"
        )
        # Not after a warm-up: an average that is too low so far delays it, no more.
        return self._due(look, role.value, 1, why, now_s)

    def _fewer(
        self, look: SizingLook, counts: Mapping[Role, int], total: int, now_s: float
    ) -> tuple[Resize | None, str]:
        if total <= self._policy.least:
            return self._none(
                f"no pool has more to do than it should, and there are {total} workers"
            )
        assert self._since_s is not None, "this is a look"
        if now_s < self._since_s + self._policy.warm_up_s:
            return self._none("no pool has more to do than it should so far")
        # Of a pool the worker with the highest name goes; it may have another role now. One that is not there goes
        # first: the others do without it already.
        found: list[tuple[bool, float, str, str]] = []
        for pool, count in look.pools.items():
            name = f"{pool}-{count - 1}"
            there = name not in look.missing
            role = look.roles.get(name) if there else Role(pool)
            if role is None or role not in counts or count == 1:
                continue
            left = counts[role] - 1 if there else counts[role]
            pressure = look.pressure(role, left)  # beyond all bounds for none
            if pressure < self._policy.low:
                less = f"one worker less, {name}{'' if there else ', which is not there'}"
                why = (
                    f"{less}: pressure {pressure:.2f} is predicted for {left} {role.value} workers"
                )
                found.append((there, pressure, pool, why))
        if not found:
            return self._none("every worker is needed")
        _, _, pool, why = min(found)
        return self._due(look, pool, -1, why, now_s)

    def _due(
        self, look: SizingLook, pool: str, step: int, why: str, now_s: float
    ) -> tuple[Resize | None, str]:
        """The change, once it has been wanted for long enough."""
        key = f"{pool}{step:+d}"
        if self._wanted is None or self._wanted[0] != key:
            self._wanted = (key, now_s)
        due_s = max(self._wanted[1] + self._policy.sustained_s, self._rests_until_s)
        if now_s < due_s:
            return None, f"there is about to be one {pool} worker {'more' if step > 0 else 'less'}"
        return Resize(pool=pool, workers=look.pools[pool] + step, why=why), why

    def _none(self, verdict: str) -> tuple[None, str]:
        self._wanted = None
        return None, verdict


_ROLES = (Role.PREFILL, Role.DECODE)
