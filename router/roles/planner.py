"""Decides which worker changes its role, from what the workers have to do: the pure core of roles that follow the load.

Each pool has a *pressure*: 1 is as much as it may have. A prefill pool's is the work that comes to it, and what has
piled up, per worker; a decode pool's is the time of a step against its target, or the share of its places or pages that
is taken, whichever is most. Both are predicted for any number of workers, so that it is known beforehand what a flip
would do to the pool that gives a worker (N/(N-1) of its load on each that is left) and to the one that gets it.

A worker flips when the worse of the two pressures has been high for a while, and would be clearly lower afterwards, the
time included in which the worker serves neither pool. Then nothing flips for a while. What is decided, and why,
is said in words. Where requests miss what their classes of service promise although less was predicted, the prediction
is corrected by what was measured.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from baton.ids import Role, WorkerIdentity
from baton.story import StoryEntry, StoryLog
from router.attainment import NOTHING_MISSED, Missed

PLANNER = "planner"
"""The name under which its story is told."""

_ITERATIONS = 8
_BUSY = 0.5
"""Of the pressure above which a flip is considered: what is missed with less to do is not for want of workers."""
_SETTLING_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerPolicy:
    """When a worker flips.

    Attributes:
        ttft_s: Time to first token to aim at, for requests whose class promises none:
            what has piled up is to be computed in it.
        tbt_s: Time between tokens to aim at where no request was promised one.
        high: Pressure above which a flip is considered.
        gain: By so much, of the worse pressure, a flip must lower it.
        sustained_s: For so long that has to be so before a worker flips.
        cooldown_s: Nothing flips for so long after a flip.
        memory_s: Time constant of the averages.
        pinned_s: A worker whose role an operator has changed is left alone for so long.
        tolerated: Share of promises that may be missed before a pool is taken to have more to do than was thought.
    """

    ttft_s: float = 2.0
    tbt_s: float = 0.05
    high: float = 0.8
    gain: float = 0.15
    sustained_s: float = 10.0
    cooldown_s: float = 60.0
    memory_s: float = 20.0
    pinned_s: float = 900.0
    tolerated: float = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLook:
    """What a worker has to do at one moment.

    Attributes:
        role: What it serves.
        usable: Whether it is given new work.
        backlog_s: Seconds until the prompts that it has are computed.
        sequences: That decode there.
        context_tokens: Of those.
        places: Sequences that it runs at once.
        pages_used: Share of its pages that is in use.
        step_s: Fixed seconds per decode step, by what was measured.
        sequence_s: Seconds per sequence in a step.
        context_s: Seconds per token of context in a step.
    """

    identity: WorkerIdentity
    role: Role
    usable: bool
    backlog_s: float
    sequences: int
    context_tokens: int
    places: int
    pages_used: float
    step_s: float
    sequence_s: float
    context_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """The whole cluster at one moment.

    Attributes:
        workers: All that are connected.
        waiting: Requests in line in the router because no decode worker has room.
        waiting_s: Seconds of prefill of requests in line because no prefill worker has room.
        tbt_s: The shortest time between tokens that a request there was promised; None if none was.
        missed: What requests were promised lately, and did not get.
    """

    workers: Sequence[WorkerLook]
    waiting: int = 0
    waiting_s: float = 0.0
    tbt_s: float | None = None
    missed: Missed = NOTHING_MISSED


@dataclass(frozen=True, slots=True, kw_only=True)
class Flip:
    """A worker is to change its role, and why."""

    worker: WorkerIdentity
    role: Role
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Pressures:
    """What was found: pressure and size of each pool, which promises were missed, and what the planner makes of it."""

    prefill: float = 0.0
    decode: float = 0.0
    prefill_workers: int = 0
    decode_workers: int = 0
    missed: Missed = NOTHING_MISSED
    verdict: str = "nothing has been looked at yet"


class RolePlanner:
    """Looks at the cluster again and again, and says now and then that a worker is to flip.

    Pure: no sockets, no clock; time comes in as `now_s`. The owner carries a flip out and tells how it went with
    `flipped`; until then there is no other. Not thread-safe.

    Args:
        policy: When a worker flips.
    """

    def __init__(self, policy: PlannerPolicy) -> None:
        self._policy = policy
        self._story = StoryLog(PLANNER)
        self._mean: dict[str, float] = {}
        self._looked_s: float | None = None
        self._wanted: tuple[Role, float] | None = None
        self._flipping: tuple[Flip, float] | None = None
        self._settling: tuple[WorkerIdentity, float] | None = None
        self._rests_until_s = float("-inf")
        self._drain_s = policy.sustained_s
        self._roles: dict[WorkerIdentity, Role] = {}
        self._pinned_until_s: dict[WorkerIdentity, float] = {}
        self._last: Look | None = None
        self._missed = dict.fromkeys((Role.PREFILL, Role.DECODE), 0.0)
        self._corrections = dict.fromkeys((Role.PREFILL, Role.DECODE), 1.0)
        self.pressures = Pressures()

    @property
    def flip_is_near(self) -> bool:
        """Whether a worker is changing its role, or is about to."""
        return self._flipping is not None or self._wanted is not None

    def predicted(self, role: Role, workers: int) -> float:
        """The pressure that the pool of `role` would have with so many workers, by the last look."""
        assert self._last is not None, "it has looked"
        return self._pressure(role, workers)

    def story(self) -> tuple[StoryEntry, ...]:
        """The last verdicts and flips."""
        return self._story.story(PLANNER)

    def look(self, look: Look, now_s: float) -> Flip | None:
        """Takes what the cluster has to do at `now_s`; the flip that is due, if one is."""
        self._note_roles(look, now_s)
        self._last = look
        pools = {role: _pool(look, role) for role in (Role.PREFILL, Role.DECODE)}
        self._average(look, now_s)
        counts = (len(pools[Role.PREFILL]), len(pools[Role.DECODE]))
        self._correct(look, counts)
        flip, verdict = self._decide(pools, now_s)
        if verdict != self.pressures.verdict:
            self._story.record(PLANNER, now_s, verdict)
        self.pressures = Pressures(
            prefill=self._pressure(Role.PREFILL, counts[0]),
            decode=self._pressure(Role.DECODE, counts[1]),
            prefill_workers=counts[0],
            decode_workers=counts[1],
            missed=look.missed,
            verdict=verdict,
        )
        if flip is not None:
            self._flipping, self._wanted = (flip, now_s), None
            self._story.record(PLANNER, now_s, flip.why)
        return flip

    def flipped(self, now_s: float, *, outcome: str, changed: bool) -> None:
        """The flip has been carried out, or was not."""
        assert self._flipping is not None, "a flip that was asked for"
        flip, since_s = self._flipping
        self._flipping = None
        self._rests_until_s = now_s + self._policy.cooldown_s
        self._settling = (flip.worker, now_s + _SETTLING_S)
        if changed:
            self._drain_s += 0.5 * (now_s - since_s - self._drain_s)
        self._story.record(PLANNER, now_s, f"{flip.worker.worker_id}: {outcome}")

    def pin(self, worker: WorkerIdentity, now_s: float) -> None:
        """An operator has said what it is to be: it is left alone for a while."""
        self._pinned_until_s[worker] = now_s + self._policy.pinned_s
        what = f"an operator decides on {worker.worker_id}: it is left alone for {self._policy.pinned_s:g} s"
        self._story.record(PLANNER, now_s, what)

    def stand_by(self, why: str, now_s: float) -> None:
        """Somebody else plans, or nobody: what was seen so far is out of date when this planner looks again."""
        if why == self.pressures.verdict:
            return
        self._mean.clear()
        self._roles.clear()
        self._looked_s = self._wanted = None
        self.pressures = Pressures(verdict=why)
        self._story.record(PLANNER, now_s, why)

    def _note_roles(self, look: Look, now_s: float) -> None:
        """A role that changed without this planner was changed by an operator, who is not to be contradicted."""
        own = set[WorkerIdentity]()
        if self._flipping is not None:
            own.add(self._flipping[0].worker)
        if self._settling is not None and now_s < self._settling[1]:
            own.add(self._settling[0])  # its greeting may come after its answer
        for worker in look.workers:
            known = self._roles.get(worker.identity, worker.role)
            if known is not worker.role and worker.identity not in own:
                self.pin(worker.identity, now_s)
        self._roles = {worker.identity: worker.role for worker in look.workers}
        self._pinned_until_s = {
            name: until_s for name, until_s in self._pinned_until_s.items() if until_s > now_s
        }

    def _average(self, look: Look, now_s: float) -> None:
        prefilling = [worker for worker in look.workers if worker.role is Role.PREFILL]
        decoding = [worker for worker in look.workers if worker.role is Role.DECODE]
        seen = {
            "busy": float(sum(worker.backlog_s > 0.0 for worker in prefilling)),
            "backlog_s": sum(worker.backlog_s for worker in prefilling) + look.waiting_s,
            "sequences": sum(worker.sequences for worker in decoding) + look.waiting,
            "context": sum(worker.context_tokens for worker in decoding),
            "pages": sum(worker.pages_used for worker in decoding),
            "waiting": float(look.waiting),
        }
        passed_s = 0.0 if self._looked_s is None else now_s - self._looked_s
        self._looked_s = now_s
        share = min(1.0, passed_s / self._policy.memory_s)
        for name, value in seen.items():
            before = self._mean.get(name, 0.0)
            self._mean[name] = before + share * (value - before)

    def _correct(self, look: Look, counts: tuple[int, int]) -> None:
        """What was promised and missed says more than what was thought: a pool that has something to do, and misses more
        than is tolerated, has more than it should, by as much for any number of workers. Late first tokens are those of
        prefill workers, unless requests wait for a place to decode. A pool that is nearly idle misses what no number of
        workers would give.
        """
        ttft, tbt = look.missed.ttft, look.missed.tbt
        if self._mean["waiting"] >= 1.0:
            ttft, tbt = 0.0, max(ttft, tbt)
        self._missed = {Role.PREFILL: ttft, Role.DECODE: tbt}
        self._corrections = dict.fromkeys(self._missed, 1.0)
        for (role, share), count in zip(self._missed.items(), counts, strict=True):
            thought = self._pressure(role, count)
            if share > self._policy.tolerated and thought >= _BUSY * self._policy.high:
                self._corrections[role] = max(1.0, (1.0 + share) / thought)

    def _pressure(self, role: Role, workers: int) -> float:
        """Of a pool with so many workers, by the last look."""
        assert self._last is not None, "it has looked"
        if role is Role.PREFILL:
            thought = self._prefill_pressure(workers)
        else:
            thought = self._decode_pressure(self._last, _pool(self._last, Role.DECODE), workers)
        return self._corrections[role] * thought

    def _prefill_pressure(self, workers: int) -> float:
        """With so many: the share of time for which they compute,
        and what has piled up against the time to first token.
        """
        if workers == 0:
            return float("inf")
        piled_up = self._mean["backlog_s"] / self._policy.ttft_s
        return (self._mean["busy"] + piled_up) / workers

    def _decode_pressure(self, look: Look, pool: Sequence[WorkerLook], workers: int) -> float:
        """With so many: the time of a step against its target, or places, or pages. A longer step holds sequences for
        longer, so that there are more of them (Little's law).
        """
        if workers == 0 or not pool:
            return float("inf")
        target_s = self._policy.tbt_s if look.tbt_s is None else min(look.tbt_s, self._policy.tbt_s)
        now = _step_s(pool, self._mean["sequences"] / len(pool), self._mean["context"] / len(pool))
        grown = 1.0
        for _ in range(_ITERATIONS):
            sequences = grown * self._mean["sequences"] / workers
            step_s = _step_s(pool, sequences, grown * self._mean["context"] / workers)
            grown = min(step_s / now, 10.0) if now > 0.0 else 1.0
        places = sum(worker.places for worker in pool) / len(pool)
        pages = grown * self._mean["pages"] / workers
        busy = step_s / target_s if self._mean["sequences"] else 0.0
        return max(busy, sequences / max(1.0, places), pages)

    def _decide(self, pools: dict[Role, list[WorkerLook]], now_s: float) -> tuple[Flip | None, str]:
        policy = self._policy
        prefill, decode = len(pools[Role.PREFILL]), len(pools[Role.DECODE])
        if self._flipping is not None:
            return None, f"{self._flipping[0].worker.worker_id} is changing its role"
        if prefill == 0 or decode == 0:
            self._wanted = None
            return None, "a pool has no worker that is given work: roles stay what they are"

        def worst(prefill: int, decode: int) -> float:
            return max(self._pressure(Role.PREFILL, prefill), self._pressure(Role.DECODE, decode))

        before = worst(prefill, decode)
        if before < policy.high:
            self._wanted = None
            return None, "no pool has more to do than it should"
        to_prefill = self._pressure(Role.PREFILL, prefill) >= before
        role = Role.PREFILL if to_prefill else Role.DECODE
        givers = pools[Role.DECODE if to_prefill else Role.PREFILL]
        free = [worker for worker in givers if worker.identity not in self._pinned_until_s]
        if len(givers) < 2 or not free:
            self._wanted = None
            return None, f"the {role.value} pool needs a worker, and the other has none to give"
        step = 1 if to_prefill else -1
        after = worst(prefill + step, decode - step)
        meanwhile = worst(prefill, decode - 1) if to_prefill else worst(prefill - 1, decode)
        won = (before - after) * (policy.cooldown_s - self._drain_s)
        lost = (meanwhile - before) * self._drain_s
        if after > before * (1.0 - policy.gain) or won <= lost:
            self._wanted = None
            return None, f"the {role.value} pool needs a worker, and the other needs all of its own"
        if self._wanted is None or self._wanted[0] is not role:
            self._wanted = (role, now_s)
        due_s = max(self._wanted[1] + policy.sustained_s, self._rests_until_s)
        if now_s < due_s:
            return None, f"the {role.value} pool is about to get a worker"
        worker = min(free, key=lambda one: one.sequences if to_prefill else one.backlog_s)
        why = (
            f"{worker.identity.worker_id} becomes a {role.value} worker: pressure {before:.2f} of {prefill} prefill and"
            f" {decode} decode workers, {after:.2f} is predicted for {prefill + step} and {decode - step}"
        )
        if self._corrections[role] > 1.0:
            why += (
                f"; {self._missed[role]:.0%} of a class's requests missed what they were promised"
            )
        return Flip(worker=worker.identity, role=role, why=why), why


def _pool(look: Look, role: Role) -> list[WorkerLook]:
    return [worker for worker in look.workers if worker.role is role and worker.usable]


def _step_s(pool: Sequence[WorkerLook], sequences: float, context: float) -> float:
    """Of the mean worker of `pool` with so much on it."""
    total_s = sum(one.step_s + one.sequence_s * sequences + one.context_s * context for one in pool)
    return total_s / len(pool)
