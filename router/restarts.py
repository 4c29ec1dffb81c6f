"""How hard jobs are tried, and what that came to: the bounds of retrying, and counts of every rung that was taken."""

from collections import Counter
from dataclasses import dataclass, field
from enum import Enum

_LONGER = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How hard a job is tried.

    Attributes:
        max_attempts: How often a sample's legs may be started.
        worker_wait_s: How long a job waits for a worker to appear: about what a restart takes.
        retry_pause_s: How long workers that failed a job are avoided when there are no others; four times longer with each attempt.
        retry_pause_max_s: Longest such pause. Who has not been heard for so long is no longer asked at all.
        recompute_tokens: Up to so many tokens of a prompt are computed by D itself once no P took it over.
        settle_s: How long a job whose tokens are all out waits for P's account of the hand-off.
    """

    max_attempts: int = 3
    worker_wait_s: float = 15.0
    retry_pause_s: float = 0.5
    retry_pause_max_s: float = 5.0
    recompute_tokens: int = 2048
    settle_s: float = 1.0

    def pause_s(self, attempt: int) -> float:
        """How long the attempt of this number waits, 2 being the first after a failure, when those who failed are all there is.

        A worker that stands still fails every attempt at once, since the way to it is known to be broken: attempts that followed
        each other closely would be used up before anybody can know whether it is lost.
        """
        longer: int = _LONGER ** max(attempt - 2, 0)
        return min(self.retry_pause_s * longer, self.retry_pause_max_s)


class Rung(Enum):
    """What is done about a hand-off that does not come to its end, from the best to the last."""

    ANOTHER_PREFILLER = "another_prefiller"  # onto the same reservation
    NO_ROOM = "no_room"  # D had no room: P left the prompt in the pool, D fetches it when it has
    POOL = "pool"  # P was lost: D fetches what the pool has, and computes the rest
    RECOMPUTE = "recompute"  # D computes the prompt
    ELSEWHERE = "elsewhere"  # another attempt, wherever there is one
    REFUSED = "refused"  # 503 with Retry-After, or the error itself after too many attempts


@dataclass(slots=True, eq=False)
class Restarts:
    """How often attempts were lost and others took their places, counted as it happens, whatever becomes of the job.

    Attributes:
        retries: Before their first token.
        resumptions: After it.
        rungs: How the jobs went on.
    """

    retries: int = 0
    resumptions: int = 0
    rungs: Counter[Rung] = field(default_factory=Counter)
