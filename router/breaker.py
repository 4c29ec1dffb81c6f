"""A circuit breaker: what keeps failing is left alone for a while,
then tried with one request before it is trusted again.

One core for two uses: a worker whose legs keep failing gets no new ones (`router.routing.view`), and a tenant whose
requests keep breaking workers is slowed (`router.tenants.breakers`).
"""

from dataclasses import dataclass
from enum import Enum

from baton.backoff import Backoff
from baton.errors import InvariantError
from baton.story import StoryLog

_FADED = 0.05
"""Of an outcome: less is nothing."""
_OUTDATED_S = 3600.0


class Circuit(Enum):
    """Where a breaker stands."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakerPolicy:
    """When to open and for how long.

    Attributes:
        min_failures: Fewer recent failures never open it.
        failure_share: Nor does a smaller share of the recent outcomes.
        half_life_s: An outcome counts half after this long.
        pause_s: How long it stays open the first time; doubles each time a trial fails.
        max_pause_s: Longest such time. Closed for as long as this, all is forgiven.
        trial_timeout_s: A trial without an outcome counts as none after this long, and another may begin.
    """

    min_failures: float = 3.0
    failure_share: float = 0.5
    half_life_s: float = 30.0
    pause_s: float = 5.0
    max_pause_s: float = 60.0
    trial_timeout_s: float = 60.0


class Outcomes:
    """Counts of what went well and what failed, in which the past fades.

    Args:
        half_life_s: An outcome counts half after this long.

    Attributes:
        failures: Recent failures.
        total: Recent outcomes.
    """

    __slots__ = ("_counted_s", "_half_life_s", "failures", "total")

    def __init__(self, half_life_s: float) -> None:
        self.failures = 0.0
        self.total = 0.0
        self._half_life_s = half_life_s
        self._counted_s = 0.0

    @property
    def share(self) -> float:
        """The part that failed; 0 of nothing."""
        return self.failures / self.total if self.total else 0.0

    def failures_at(self, now_s: float) -> float:
        """What counts of the failures at `now_s`."""
        return self.failures * self._fading(now_s)

    def is_recent(self, now_s: float) -> bool:
        """Whether anything worth counting is left at `now_s`."""
        return self.total * self._fading(now_s) >= _FADED

    def add(self, now_s: float, *, failed: bool) -> None:
        """One outcome."""
        fading = self._fading(now_s)
        self.failures = self.failures * fading + failed
        self.total = self.total * fading + 1
        self._counted_s = now_s

    def clear(self) -> None:
        """Forgets all."""
        self.failures = self.total = 0.0

    def _fading(self, now_s: float) -> float:
        """What is left of an outcome that was counted last."""
        return float(0.5 ** (max(0.0, now_s - self._counted_s) / self._half_life_s))


class Breaker:
    """The state of one circuit.

    Pure: time comes in as `now_s`. Asking changes nothing; what happened is told by `started`, `succeeded`, `failed`
    and `abandoned`. Outcomes that come while it is open belong to what began before, and change nothing.

    Args:
        policy: When it opens; the usual if None.
        name: Whom it is about in `story`.
        story: What it does is logged there, by `name`: failures, and every change of its circuit.
        open_ones: Holds it while it is not closed, so that an owner of many need not ask each of them.
    """

    def __init__(
        self,
        policy: BreakerPolicy | None = None,
        *,
        name: str,
        story: StoryLog,
        open_ones: "set[Breaker] | None" = None,
    ) -> None:
        self._policy = policy or BreakerPolicy()
        self.name, self._story = name, story
        self._open_ones: set[Breaker] = set() if open_ones is None else open_ones
        self._recent = Outcomes(self._policy.half_life_s)
        self._opened = False
        self._until_s = 0.0
        self._backoff = Backoff(first_s=self._policy.pause_s, max_s=self._policy.max_pause_s)
        self._openings = 0  # in a row, without having been closed for long
        self._trial_s: float | None = None
        self._closed_s = float("-inf")

    def circuit(self, now_s: float) -> Circuit:
        """Where it stands."""
        if not self._opened:
            return Circuit.CLOSED
        return Circuit.OPEN if now_s < self._until_s else Circuit.HALF_OPEN

    def allows(self, now_s: float) -> bool:
        """Whether something may begin: anything while closed, one trial at a time while half open."""
        if not self._opened:
            return True  # asked of every worker for every request
        return now_s >= self._until_s and not self._on_trial(now_s)

    def wait_s(self, now_s: float) -> float:
        """How long until it may be worth asking again; 0 if it allows something now."""
        if self.allows(now_s):
            return 0.0
        if now_s < self._until_s:
            return self._until_s - now_s
        assert self._trial_s is not None, "half open and not allowing: a trial is under way"
        return self._trial_s + self._policy.trial_timeout_s - now_s

    def started(self, now_s: float) -> None:
        """Something began; while half open it is the trial."""
        if self.circuit(now_s) is Circuit.HALF_OPEN:
            self._trial_s = now_s
            self._story.record(self.name, now_s, "trial began")

    def abandoned(self, now_s: float) -> None:
        """Something ended without saying anything about health, as when a client leaves."""
        if self.circuit(now_s) is Circuit.HALF_OPEN:
            self._trial_s = None
            self._story.record(self.name, now_s, "trial ended without an outcome")

    def succeeded(self, now_s: float) -> None:
        """Something went well."""
        match self.circuit(now_s):
            case Circuit.CLOSED:
                self._recent.add(now_s, failed=False)
            case Circuit.HALF_OPEN:
                self._opened, self._trial_s = False, None
                self._open_ones.discard(self)
                self._recent.clear()
                self._closed_s = now_s
                self._story.record(self.name, now_s, "succeeded", ("closed",))

    def failed(self, now_s: float) -> None:
        """Something failed."""
        match self.circuit(now_s):
            case Circuit.CLOSED:
                self._recent.add(now_s, failed=True)
                if not self._too_many():
                    self._story.record(self.name, now_s, "failed")
                    return
                if self._forgiven(now_s):
                    self._openings = 0
                self._open(now_s)
            case Circuit.HALF_OPEN:
                self._open(now_s)

    def is_spotless(self, now_s: float) -> bool:
        """Whether it might as well be a new one."""
        recent = self._recent.failures_at(now_s)
        return not self._opened and recent < _FADED and self._forgiven(now_s)

    def is_outdated(self, now_s: float) -> bool:
        """Whether it is open, but could have been tried for an hour, and was not."""
        return self._opened and now_s - self._until_s >= _OUTDATED_S and not self._on_trial(now_s)

    def check_integrity(self) -> None:
        """Raises `InvariantError` when the counts or times make no sense."""
        recent = self._recent
        if not 0 <= recent.failures <= recent.total + 1e-9:
            raise self._broken(f"{recent.failures} failures of {recent.total} outcomes")
        if self._opened and not self._openings:
            raise self._broken("is open and was never opened")
        if self._trial_s is not None and not self._opened:
            raise self._broken("is closed and on trial")

    def _broken(self, what: str) -> InvariantError:
        message = f"circuit of {self.name}: {what}"
        return InvariantError(message, story=self._story.story(self.name))

    def _on_trial(self, now_s: float) -> bool:
        return self._trial_s is not None and now_s - self._trial_s < self._policy.trial_timeout_s

    def _forgiven(self, now_s: float) -> bool:
        """Whether it has been closed for so long that the last pause no longer counts."""
        return now_s - self._closed_s >= self._policy.max_pause_s

    def _too_many(self) -> bool:
        # Half a failure less, because those that count have faded a little since they happened.
        enough = self._recent.failures > self._policy.min_failures - 0.5
        return enough and self._recent.share >= self._policy.failure_share

    def _open(self, now_s: float) -> None:
        self._opened, self._trial_s = True, None
        self._openings += 1
        self._open_ones.add(self)
        pause_s = self._backoff.wait_s(self._openings)
        self._until_s = now_s + pause_s
        self._story.record(self.name, now_s, "failed", (f"opened for {pause_s:.3g} s",))
