"""The legs on a prefill worker, and where each stands: by its router, by its sequence in the engine, by its transfer.

QUEUED ── first chunk ── PREFILLING ── first tokens ── HANDING_OFF ── committed, or in the pool ── DONE
   │                         │    └─ every sample ended with its first token ──────────────────────┘
   └─────────────────────────┴───────────────┴── FAILED (engine, decode worker) or CANCELLED (router)
"""

from collections import Counter
from dataclasses import dataclass
from enum import Enum

from baton.errors import InvariantError
from baton.generation import Prompt
from baton.ids import BlockId, LegId, SeqId, XferId
from baton.rpc.frames import LegKey, StreamId
from baton_engine.ports import PageExport
from prefill_worker.messages import Submit

OWNER = "prefill"
NO_BLOCK = BlockId(-1)


class LegState(Enum):
    """Where one leg stands."""

    QUEUED = "queued"
    PREFILLING = "prefilling"
    HANDING_OFF = "handing_off"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


_L = LegState
_LOST = frozenset({_L.FAILED, _L.CANCELLED})
TRANSITIONS: dict[LegState, frozenset[LegState]] = {
    _L.QUEUED: frozenset({_L.PREFILLING}) | _LOST,
    _L.PREFILLING: frozenset({_L.HANDING_OFF, _L.DONE}) | _LOST,
    _L.HANDING_OFF: frozenset({_L.DONE}) | _LOST,
    _L.DONE: frozenset(),
    _L.FAILED: frozenset(),
    _L.CANCELLED: frozenset(),
}
ENDS = frozenset({_L.DONE, _L.FAILED, _L.CANCELLED})


@dataclass(slots=True, eq=False)
class Leg:
    """One leg.

    Attributes:
        blocks: Its pages, in order, as the engine last exported them.
        waits_since_s: When its first tokens were drawn, or the pool last did not take its prompt.
        being_put: Whether its prompt is on its way to the pool.
    """

    stream: StreamId
    leg_id: LegId
    seq_id: SeqId
    xfer_id: XferId
    prompt: Prompt
    blocks: list[BlockId]
    arrived_s: float
    state: LegState = _L.QUEUED
    started_s: float = 0.0
    cached_tokens: int = 0
    pooled_tokens: int = 0
    waits_since_s: float = 0.0
    being_put: bool = False

    @property
    def prompt_tokens(self) -> int:
        """Of its prompt."""
        return len(self.prompt.tokens)

    def exported(self, export: PageExport) -> None:
        """The engine completed pages, perhaps others than it had for the same blocks before it preempted the prompt."""
        end = export.first_block + len(export.blocks)
        self.blocks[export.first_block : end] = export.blocks

    @property
    def key(self) -> LegKey:
        """How its router names it."""
        return self.stream, self.leg_id

    @property
    def over(self) -> bool:
        """Whether its router has been told its end."""
        return self.state in ENDS


class LegTable:
    """Every leg that its router or the engine still knows. Pure; one owner.

    Attributes:
        transfers: Legs that are not over, by their transfer.
        outcomes: How many have ended in which way.
    """

    def __init__(self) -> None:
        self._live: dict[LegKey, Leg] = {}
        self._seqs: dict[SeqId, Leg] = {}
        self._next = 0
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

    def of_seq(self, seq_id: SeqId) -> Leg | None:
        """The leg that one of the engine's sequences is computed for, unless it is over."""
        leg = self._seqs.get(seq_id)
        return None if leg is None or leg.over else leg

    def left(self) -> int:
        """Legs that are not over, and those whose sequence the engine still has."""
        return len(self._live) + sum(leg.over for leg in self._seqs.values())

    def admit(self, event: Submit, now_s: float) -> Leg:
        """Takes up a leg that a router has just sent."""
        self._next += 1
        leg = Leg(
            stream=event.stream,
            leg_id=event.leg_id,
            seq_id=SeqId(f"{OWNER}/{self._next}"),
            xfer_id=event.permit.xfer_id,
            prompt=event.prompt,
            blocks=[NO_BLOCK] * event.permit.num_blocks,
            arrived_s=now_s,
        )
        self._live[leg.key] = leg
        self._seqs[leg.seq_id] = leg
        self.transfers[leg.xfer_id] = leg
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
        """It is over for its router; the engine may still have its sequence."""
        self.move(leg, state)
        self.outcomes[state] += 1
        del self._live[leg.key]
        del self.transfers[leg.xfer_id]

    def drop_seq(self, seq_id: SeqId) -> Leg | None:
        """The engine has let go of a sequence; its leg, unless it is over."""
        leg = self.of_seq(seq_id)
        self._seqs.pop(seq_id, None)
        return leg

    def check_integrity(self) -> None:
        """Raises InvariantError if the tables contradict each other."""
        for key, leg in self._live.items():
            consistent = (
                key == leg.key
                and not leg.over
                and self._seqs.get(leg.seq_id) is leg
                and self.transfers.get(leg.xfer_id) is leg
            )
            if not consistent:
                raise InvariantError(f"leg {key} is inconsistent: {leg!r}")
        if len(self.transfers) != len(self._live):
            raise InvariantError("a transfer outlived its leg")
