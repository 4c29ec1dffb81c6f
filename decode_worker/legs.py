"""The legs on a decode worker, and where each stands: by its router, by its sequence in the engine, by its transfer.

EXPECTING ── pages reserved, written, committed ──┐
QUEUED ── first chunk ── PREFILLING ── first token ──── RUNNING ── every sample finished ── DONE
   └──────────────────────────┴───────────────────────────┴── FAILED (engine, hand-off) or CANCELLED (router)
"""

from collections import Counter
from dataclasses import dataclass
from enum import Enum

from baton.errors import InvariantError
from baton.generation import Prompt
from baton.ids import LegId, SeqId, XferId
from baton.rpc.frames import LegKey, StreamId
from decode_worker.messages import ExpectLeg, GenerateLeg

OWNER = "decode"


class LegState(Enum):
    """Where one leg stands."""

    EXPECTING = "expecting"
    QUEUED = "queued"
    PREFILLING = "prefilling"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


_L = LegState
_LOST = frozenset({_L.FAILED, _L.CANCELLED})
TRANSITIONS: dict[LegState, frozenset[LegState]] = {
    _L.EXPECTING: frozenset({_L.RUNNING}) | _LOST,
    _L.QUEUED: frozenset({_L.PREFILLING}) | _LOST,
    _L.PREFILLING: frozenset({_L.RUNNING, _L.DONE}) | _LOST,
    _L.RUNNING: frozenset({_L.DONE}) | _LOST,
    _L.DONE: frozenset(),
    _L.FAILED: frozenset(),
    _L.CANCELLED: frozenset(),
}
ENDS = frozenset({_L.DONE, _L.FAILED, _L.CANCELLED})


@dataclass(slots=True, eq=False)
class Leg:
    """One leg; `unfinished` counts its samples that go on."""

    stream: StreamId
    leg_id: LegId
    seq_id: SeqId
    prompt: Prompt
    state: LegState
    arrived_s: float
    unfinished: int
    xfer_id: XferId | None = None
    started_s: float = 0.0
    cached_tokens: int = 0
    pooled_tokens: int = 0

    @property
    def key(self) -> LegKey:
        """How its router names it."""
        return self.stream, self.leg_id

    @property
    def over(self) -> bool:
        """Whether its router has been told its end."""
        return self.state in ENDS


class LegTable:
    """Every leg that its router, the engine or the hand-off still knows. Pure; one owner.

    Attributes:
        seqs: Legs whose sequence the engine still has; ended ones included.
        transfers: Legs whose transfer the ledger still has; ended ones included.
        outcomes: How many have ended in which way.
    """

    def __init__(self) -> None:
        self._live: dict[LegKey, Leg] = {}
        self._next = 0
        self.seqs: dict[SeqId, Leg] = {}
        self.transfers: dict[XferId, Leg] = {}
        self.outcomes: Counter[LegState] = Counter()

    def __contains__(self, key: LegKey) -> bool:
        """Whether that leg is not over."""
        return key in self._live

    def get(self, key: LegKey) -> Leg | None:
        """That leg, unless it is over."""
        return self._live.get(key)

    def of_stream(self, stream: StreamId) -> list[Leg]:
        """A router's legs that are not over."""
        return [leg for leg in self._live.values() if leg.stream == stream]

    def left(self) -> int:
        """Legs that are not over, and those that the engine or the ledger still has."""
        return len({*self._live.values(), *self.seqs.values(), *self.transfers.values()})

    def admit(self, event: ExpectLeg | GenerateLeg, state: LegState, now_s: float) -> Leg:
        """Takes up a leg that a router has just sent."""
        self._next += 1
        leg = Leg(
            stream=event.stream,
            leg_id=event.leg_id,
            seq_id=SeqId(f"{OWNER}/{self._next}"),
            prompt=event.prompt,
            state=state,
            arrived_s=now_s,
            unfinished=len(event.prompt.samples),
        )
        self._live[leg.key] = leg
        return leg

    def move(self, leg: Leg, state: LegState) -> None:
        """Takes a step of the drawing above.

        Raises:
            InvariantError: It is none.
        """
        if state not in TRANSITIONS[leg.state]:
            raise InvariantError(f"leg {leg.leg_id}: {leg.state} to {state}")
        leg.state = state

    def end(self, leg: Leg, state: LegState) -> None:
        """It is over for its router; engine and ledger may still have something of it."""
        self.move(leg, state)
        self.outcomes[state] += 1
        del self._live[leg.key]

    def check_integrity(self) -> None:
        """Raises InvariantError if the tables contradict each other."""
        for key, leg in self._live.items():
            expecting = leg.state is _L.EXPECTING
            consistent = (
                key == leg.key
                and not leg.over
                and (leg.seq_id in self.seqs or expecting)
                and (leg.xfer_id in self.transfers) == expecting
            )
            if not consistent:
                raise InvariantError(f"leg {key} is inconsistent: {leg!r}")
