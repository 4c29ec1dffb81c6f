"""One attempt at some samples of a job: its legs on one pair of workers, and the states they go through.

    WAITING ──► PREFILLING ──► HANDING_OVER ──► DECODING ──► ENDED
       │                           └──► SETTLING ───────────►  ▲
       └──────► LOCAL ─────────────────────────────────────────┘

A flight that fails is ENDED; whatever its samples still want is continued by new flights of the same job.
"""

from dataclasses import dataclass, field
from enum import Enum

from baton.errors import BatonError, InvariantError
from baton.ids import LegId, WorkerIdentity
from router.events import DecodeTokens, SampleFinished, Service
from router.job import Job
from router.routing.view import WorkerView


class FlightState(Enum):
    """Where an attempt stands."""

    WAITING = "no pair of workers yet"
    PREFILLING = "both legs open, no token yet"
    HANDING_OVER = "first tokens are out, P has not reported the hand-off"
    DECODING = "P is done"
    SETTLING = "D is done, P has not reported the hand-off"
    LOCAL = "one worker does both"
    ENDED = "no leg left"


_S = FlightState
TRANSITIONS: dict[FlightState, frozenset[FlightState]] = {
    _S.WAITING: frozenset({_S.PREFILLING, _S.LOCAL, _S.ENDED}),
    _S.PREFILLING: frozenset({_S.HANDING_OVER, _S.ENDED}),
    _S.HANDING_OVER: frozenset({_S.DECODING, _S.SETTLING, _S.ENDED}),
    _S.DECODING: frozenset({_S.ENDED}),
    _S.SETTLING: frozenset({_S.ENDED}),
    _S.LOCAL: frozenset({_S.ENDED}),
    _S.ENDED: frozenset(),
}


@dataclass(slots=True, eq=False)
class Leg:
    """One leg on one worker, and what it adds to the worker's counts while it is open."""

    leg_id: LegId
    service: Service
    worker: WorkerView
    flight: "Flight"
    prefill_tokens: int = 0
    sequences: int = 0
    context_tokens: int = 0

    def open(self, now_s: float) -> None:
        """Counts it on its worker."""
        worker = self.worker
        if worker.legs == 0:
            worker.progress_s = now_s
        worker.legs += 1
        worker.prefill_tokens += self.prefill_tokens
        worker.decode_sequences += self.sequences
        worker.decode_tokens += self.context_tokens

    def computed(self) -> None:
        """The prompt's KV is computed."""
        self.worker.prefill_tokens -= self.prefill_tokens
        self.prefill_tokens = 0

    def grew(self, num_tokens: int) -> None:
        """The context got longer."""
        self.context_tokens += num_tokens
        self.worker.decode_tokens += num_tokens

    def close(self) -> None:
        """Takes all it counted off its worker."""
        worker = self.worker
        worker.legs -= 1
        worker.prefill_tokens -= self.prefill_tokens
        worker.decode_sequences -= self.sequences
        worker.decode_tokens -= self.context_tokens


@dataclass(slots=True, eq=False)
class Flight:
    """See the module. Changed by the dispatcher only.

    Attributes:
        job: Whose samples these are.
        samples: The samples of this attempt.
        attempt: 1 for the first one.
        avoid: Workers that failed an earlier attempt; taken again only when there is no other.
        cause: What ended the attempt before.
        since_s: When it entered its state.
        prefill: P's leg while it is open.
        decode: D's leg while it is open.
        decoding: Samples that D has not finished; known once the first tokens are.
        decoded: Whether D has sent a token.
        early: What D sent before P's first tokens arrived, held back.
    """

    job: Job
    samples: tuple[int, ...]
    since_s: float
    attempt: int = 1
    avoid: frozenset[WorkerIdentity] = frozenset()
    cause: BatonError | None = None
    state: FlightState = FlightState.WAITING
    prefill: Leg | None = None
    decode: Leg | None = None
    decoding: set[int] = field(default_factory=set)
    decoded: bool = False
    early: list[DecodeTokens | SampleFinished] = field(default_factory=list)

    @property
    def legs(self) -> list[Leg]:
        """The open ones."""
        return [leg for leg in (self.prefill, self.decode) if leg is not None]

    @property
    def wanted(self) -> bool:
        """Whether any of its samples still wants tokens."""
        return any(not self.job.finished(sample) for sample in self.samples)

    def move(self, state: FlightState, now_s: float) -> None:
        """Enters `state`.

        Raises:
            InvariantError: The table has no such transition.
        """
        if state not in TRANSITIONS[self.state]:
            raise InvariantError(f"{self.job.request_id}: flight {self.state} to {state}")
        self.state = state
        self.since_s = now_s
