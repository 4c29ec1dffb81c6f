"""One attempt at some samples of a job: its legs on one pair of workers, and the states they go through.

    WAITING ──► PREFILLING ──► HANDING_OVER ──► DECODING ──► ENDED
       │          ▲ P lost, another on D's pages ─┤           ▲
       │          └───────────────────────────────┤           │
       │                                          └► SETTLING ┤
       └──────► LOCAL ────────────────────────────────────────┘

A flight that fails is ENDED; whatever its samples still want is continued by new flights of the same job.
"""

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from baton.errors import BatonError, InvariantError
from baton.generation import Prompt, TokenSample
from baton.ids import WorkerIdentity
from kv_transfer.ticket import Permit
from router.events import DecodeTokens, SampleFinished
from router.job import Job

if TYPE_CHECKING:
    from router.legs import Leg


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
    _S.PREFILLING: frozenset({_S.PREFILLING, _S.HANDING_OVER, _S.ENDED}),
    _S.HANDING_OVER: frozenset({_S.PREFILLING, _S.DECODING, _S.SETTLING, _S.ENDED}),
    _S.DECODING: frozenset({_S.ENDED}),
    _S.SETTLING: frozenset({_S.ENDED}),
    _S.LOCAL: frozenset({_S.ENDED}),
    _S.ENDED: frozenset(),
}


@dataclass(slots=True, eq=False)
class Flight:
    """See the module. Changed by the dispatcher only.

    Attributes:
        job: Whose samples these are.
        samples: The samples of this attempt.
        attempt: 1 for the first one.
        avoid: Workers that failed an earlier attempt; taken again only when there is no other.
        cause: What ended the attempt before.
        pinned: The worker that is to do all of it itself.
        permit: What its legs are tied by.
        took_over: Whether a second P writes into the pages that D reserved for the first.
        asked: The prompt that its pair was given.
        first: The first tokens, once the client has them.
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
    pinned: WorkerIdentity | None = None
    permit: Permit | None = None
    took_over: bool = False
    asked: Prompt | None = None
    first: "tuple[TokenSample, ...] | None" = None
    state: FlightState = FlightState.WAITING
    prefill: "Leg | None" = None
    decode: "Leg | None" = None
    decoding: set[int] = field(default_factory=set)
    decoded: bool = False
    early: list[DecodeTokens | SampleFinished] = field(default_factory=list)

    @property
    def legs(self) -> "list[Leg]":
        """The open ones."""
        return [leg for leg in (self.prefill, self.decode) if leg is not None]

    @property
    def wanted(self) -> bool:
        """Whether any of its samples still wants tokens."""
        return bool(self.unfinished)

    @property
    def unfinished(self) -> tuple[int, ...]:
        """Its samples that still want tokens."""
        return tuple(sample for sample in self.samples if not self.job.finished(sample))

    def prompt(self) -> Prompt:
        """The job's prompt as this attempt asks for it."""
        return self.job.prompt_for(self.samples)

    def begin_decoding(self, now_s: float) -> None:
        """D has sent its first token."""
        self.decoded = True
        self.job.watch.decode_began(now_s)

    def move(self, state: FlightState, now_s: float) -> None:
        """Enters `state`.

        Raises:
            InvariantError: The table has no such transition.
        """
        if state not in TRANSITIONS[self.state]:
            raise InvariantError(f"{self.job.request_id}: flight {self.state} to {state}")
        self.state = state
        self.since_s = now_s
