"""The legs of a worker: what each is for, where it stands, and where it may go from there.

 PREFILL    QUEUED ── first chunk ── PREFILLING ── first tokens ── HANDING_OFF ── committed, or in the pool ── DONE
                                          └─ every sample ended with its first token ───────────────────────┘
 RECEIVE    RECEIVING ── pages reserved, written, committed ── RUNNING ── every sample finished ── DONE
 GENERATE   QUEUED ── first chunk ── PREFILLING ── first token ── RUNNING ── every sample finished ── DONE

 any state of any kind ── FAILED (engine, hand-off) or CANCELLED (router)

There is one table of legs. Three cores move them in it: `lifecycle.py` at the word of routers and of the engine, and
the hand-offs of prefill_worker and decode_worker at that of other workers.
"""

from collections import Counter
from dataclasses import dataclass, field
from enum import Enum
from typing import NewType

from baton.errors import InvariantError
from baton.generation import Prompt
from baton.ids import LegId, LegKind, RequestId, SeqId, XferId
from baton.story import StoryLog
from kv_transfer.ticket import Permit

StreamId = NewType("StreamId", int)
"""One router's stream, as the worker counts them."""

LegKey = tuple[StreamId, LegId]
"""One leg: routers number theirs themselves."""


class LegState(Enum):
    """Where one leg stands."""

    RECEIVING = "receiving"
    QUEUED = "queued"
    PREFILLING = "prefilling"
    HANDING_OFF = "handing_off"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


_S = LegState
_EARLY_ENDS = frozenset({_S.FAILED, _S.CANCELLED})
ENDS = frozenset({_S.DONE}) | _EARLY_ENDS
FIRST_STATE = {
    LegKind.PREFILL: _S.QUEUED,
    LegKind.RECEIVE: _S.RECEIVING,
    LegKind.GENERATE: _S.QUEUED,
}
TRANSITIONS: dict[LegKind, dict[LegState, frozenset[LegState]]] = {
    LegKind.PREFILL: {
        _S.QUEUED: frozenset({_S.PREFILLING}) | _EARLY_ENDS,
        _S.PREFILLING: frozenset({_S.HANDING_OFF, _S.DONE}) | _EARLY_ENDS,
        _S.HANDING_OFF: frozenset({_S.DONE}) | _EARLY_ENDS,
    },
    LegKind.RECEIVE: {
        _S.RECEIVING: frozenset({_S.RUNNING}) | _EARLY_ENDS,
        _S.RUNNING: frozenset({_S.DONE}) | _EARLY_ENDS,
    },
    LegKind.GENERATE: {
        _S.QUEUED: frozenset({_S.PREFILLING}) | _EARLY_ENDS,
        _S.PREFILLING: frozenset({_S.RUNNING}) | _EARLY_ENDS,
        _S.RUNNING: frozenset({_S.DONE}) | _EARLY_ENDS,
    },
}
"""Where a leg of each kind may go from each state; from the others, nowhere."""


@dataclass(slots=True, eq=False, kw_only=True)
class WorkerLeg:
    """One leg: what its router wants, and where it stands here.

    Attributes:
        permit: For the hand-off; None for a leg of kind generate.
        address: Of the worker that receives the pages of a prefill leg.
        state: Where it stands; changed by `WorkerLegTable` only.
        seq_id: The engine's name for it; empty until it is admitted.
        arrived_s: When it was admitted.
        unfinished: Its samples that go on.
        started_s: When its first chunk was scheduled.
    """

    stream: StreamId
    leg_id: LegId
    kind: LegKind
    request_id: RequestId
    prompt: Prompt
    permit: Permit | None = None
    address: str = ""
    state: LegState = field(init=False)
    seq_id: SeqId = field(init=False, default=SeqId(""))
    arrived_s: float = field(init=False, default=0.0)
    unfinished: int = field(init=False)
    started_s: float = field(init=False, default=0.0)
    cached_tokens: int = field(init=False, default=0)
    pooled_tokens: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.state = FIRST_STATE[self.kind]
        self.unfinished = len(self.prompt.samples)

    @property
    def key(self) -> LegKey:
        """How its router names it."""
        return self.stream, self.leg_id

    @property
    def xfer_id(self) -> XferId | None:
        """Of its hand-off; None for a leg of kind generate."""
        return None if self.permit is None else self.permit.xfer_id

    @property
    def ended(self) -> bool:
        """Whether its router has been told its end, or has cancelled it."""
        return self.state in ENDS


@dataclass(frozen=True, slots=True, kw_only=True)
class LegNames:
    """Under which names the cores of a worker know one leg, which may have ended.

    Attributes:
        key: The leg's own.
        kind: Which half has its hand-off.
        seq_id: The engine's; empty for a leg that was refused.
        xfer_id: Of its hand-off; None where it has none.
    """

    key: LegKey
    kind: LegKind
    seq_id: SeqId
    xfer_id: XferId | None


class WorkerLegTable:
    """Every leg that its router or the engine still knows. Pure; one owner.

    Attributes:
        seqs: Legs whose sequence the engine still has; ended ones included.
        outcomes: How many legs have ended in which way, by kind.
        story: What happened to legs, by `LegKey`.
    """

    def __init__(self) -> None:
        self._live: dict[LegKey, WorkerLeg] = {}
        self._next = 0
        self.seqs: dict[SeqId, WorkerLeg] = {}
        self.outcomes: Counter[tuple[LegKind, LegState]] = Counter()
        self.story = StoryLog("leg")

    def __contains__(self, key: LegKey) -> bool:
        """Whether that leg has not ended."""
        return key in self._live

    def get(self, key: LegKey) -> WorkerLeg | None:
        """That leg, unless it has ended."""
        return self._live.get(key)

    def of_stream(self, stream: StreamId) -> list[WorkerLeg]:
        """A router's legs that have not ended."""
        return [leg for leg in self._live.values() if leg.stream == stream]

    def of_seq(self, seq_id: SeqId) -> WorkerLeg | None:
        """The leg that one of the engine's sequences is computed for, unless it has ended."""
        leg = self.seqs.get(seq_id)
        return None if leg is None or leg.ended else leg

    def held(self) -> set[WorkerLeg]:
        """Legs that have not ended, and those whose sequence the engine still has."""
        return {*self._live.values(), *self.seqs.values()}

    def admit(self, leg: WorkerLeg, now_s: float) -> None:
        """Takes up a leg that a router has just sent."""
        self._next += 1
        leg.seq_id, leg.arrived_s = SeqId(f"leg-{self._next}"), now_s
        self._live[leg.key] = leg

    def move(self, leg: WorkerLeg, state: LegState) -> None:
        """Takes a step of `TRANSITIONS`.

        Raises:
            InvariantError: It is none.
        """
        if state not in TRANSITIONS[leg.kind].get(leg.state, ()):
            story = self.story.story(leg.key)
            raise InvariantError(f"leg {leg.key}: {leg.state} to {state}", story=story)
        leg.state = state

    def end(self, leg: WorkerLeg, state: LegState) -> None:
        """It has ended for its router; the engine and a hand-off may still have something of it."""
        self.move(leg, state)
        self.outcomes[leg.kind, state] += 1
        del self._live[leg.key]

    def check_integrity(self) -> None:
        """Raises InvariantError if the tables contradict each other."""
        for key, leg in self._live.items():
            known = leg.seq_id in self.seqs or leg.state is _S.RECEIVING
            if key != leg.key or leg.ended or not known:
                raise InvariantError(
                    f"leg {key} is inconsistent: {leg!r}", story=self.story.story(key)
                )
