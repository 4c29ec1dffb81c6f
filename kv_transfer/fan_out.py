"""One rank's pages of a prompt for every rank of a decode worker that holds some of its heads.

    prefill rank ─┬─ Outbox ── session ──▶ decode rank 0      a reservation, pushes and a commit for each of them;
                  └─ Outbox ── session ──▶ decode rank 1      handed over when all of them have committed

The counterpart of `rank_group.py`. The engine's word goes to the hand-offs to all ranks; the first that fails ends the others.
"""

from dataclasses import dataclass, field

from baton.errors import InvariantError
from baton.ids import XferId
from baton.layout import KvLayout
from kv_transfer.outbox import Outbox
from kv_transfer.outbox_messages import (
    Drew,
    Exported,
    FromDecode,
    GivenUp,
    HandOver,
    HandOverFailed,
    Opened,
    OutboxAction,
    OutboxEvent,
    PeerDown,
    PeerUp,
    PushDone,
    Send,
    Started,
    StartPush,
)

FromEngine = Opened | Started | Exported | Drew | GivenUp
FromRank = PeerUp | PeerDown | FromDecode | PushDone


@dataclass(frozen=True, slots=True, kw_only=True)
class ForRank:
    """To the session with one of the decode worker's ranks, or to the writer of its pages."""

    rank: int
    action: Send | StartPush


FanOutAction = ForRank | HandOver | HandOverFailed


@dataclass(slots=True, eq=False)
class _Joint:
    """One prompt's hand-offs."""

    done: dict[int, HandOver] = field(default_factory=dict)


class FanOut:
    """Pure: no sockets, no clock, no engine. Time comes in as `now_s` (monotonic seconds)."""

    def __init__(self, layout: KvLayout, ranks: int) -> None:
        """For a decode worker of which `ranks` hold heads that `layout` has."""
        self._outboxes = tuple(Outbox(layout) for _ in range(ranks))
        self._joint: dict[XferId, _Joint] = {}

    def handle(self, event: FromEngine, now_s: float) -> list[FanOutAction]:
        """The engine's word, and the router's, on a prompt."""
        match event:
            case Opened():
                self._joint[event.permit.xfer_id] = _Joint()
            case GivenUp():
                self._joint.pop(event.xfer_id, None)
        return self._to_ranks(range(len(self._outboxes)), event, now_s)

    def handle_rank(self, rank: int, event: FromRank, now_s: float) -> list[FanOutAction]:
        """What became of one rank's hand-off."""
        return self._to_ranks([rank], event, now_s)

    def in_flight(self) -> int:
        """Hand-offs to single ranks that are not over."""
        return sum(outbox.in_flight() for outbox in self._outboxes)

    def check_integrity(self) -> None:
        """Raises InvariantError if the books contradict each other."""
        for outbox in self._outboxes:
            outbox.check_integrity()
        for xfer_id, joint in self._joint.items():
            there = {n for n, box in enumerate(self._outboxes) if box.state(xfer_id) is not None}
            if there | joint.done.keys() != set(range(len(self._outboxes))) or not there:
                raise InvariantError(f"a rank has lost hand-off {xfer_id}: {joint!r}")

    def _to_ranks(
        self, ranks: range | list[int], event: OutboxEvent, now_s: float
    ) -> list[FanOutAction]:
        return [
            joined
            for rank in ranks
            for action in self._outboxes[rank].handle(event, now_s)
            for joined in self._join(rank, action, now_s)
        ]

    def _join(self, rank: int, action: OutboxAction, now_s: float) -> list[FanOutAction]:
        match action:
            case HandOver():
                return self._done(rank, action)
            case HandOverFailed():
                return self._failed(rank, action, now_s)
            case _:
                return [ForRank(rank=rank, action=action)]

    def _done(self, rank: int, done: HandOver) -> list[FanOutAction]:
        joint = self._joint.get(done.xfer_id)
        if joint is None:
            return []  # another rank's has failed meanwhile
        joint.done[rank] = done
        if len(joint.done) < len(self._outboxes):
            return []
        del self._joint[done.xfer_id]
        parts = joint.done.values()
        whole = HandOver(
            xfer_id=done.xfer_id,
            peer=done.peer,
            blocks_sent=max(part.blocks_sent for part in parts),
            bytes_sent=sum(part.bytes_sent for part in parts),
            reserve_wait_s=max(part.reserve_wait_s for part in parts),
            unhidden_s=max(part.unhidden_s for part in parts),
        )
        return [whole]

    def _failed(self, rank: int, failed: HandOverFailed, now_s: float) -> list[FanOutAction]:
        joint = self._joint.pop(failed.xfer_id, None)
        if joint is None:
            return []
        others = [n for n in range(len(self._outboxes)) if n != rank]
        return [failed, *self._to_ranks(others, GivenUp(xfer_id=failed.xfer_id), now_s)]
