"""All ranks of one decode worker start a sequence together, or none does.

Each rank has an arena, sessions and a ledger of its own (`ledger.py`), which knows when that rank's pages are there and
right. This core hears all of them:

    rank 0  committed ─┐
    rank 1  committed ─┼── all ── start on every rank
    rank 2  committed ─┘
                └─ one fails, or the router withdraws: ranks that have committed drop the sequence,
                the others are withdrawn
"""

from dataclasses import dataclass, field

from baton.errors import BatonError, InvariantError, TransferError
from baton.generation import TokenSample
from baton.ids import XferId
from baton.layout import KvLayout
from baton.pages import PageWrite
from kv_transfer.ledger.outbox import (
    FirstTokensDrawn,
    FromDecode,
    HandOffDone,
    HandOffFailed,
    Opened,
    Outbox,
    OutboxAction,
    OutboxEvent,
    OutgoingCancelled,
    PeerDown,
    PeerUp,
    PushDone,
    Send,
    Started,
    StartPush,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCommitted:
    """A rank's ledger would start decoding."""

    xfer_id: XferId
    rank: int
    first_tokens: tuple[TokenSample, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFailed:
    """A rank's ledger gave the transfer up: by itself, or as it was told by `WithdrawOn`."""

    xfer_id: XferId
    rank: int
    error: BatonError


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupWithdrawn:
    """The router wants the transfer no more."""

    xfer_id: XferId
    error: BatonError


@dataclass(frozen=True, slots=True, kw_only=True)
class StartAll:
    """To the engines of all ranks: the pages hold the prompt's KV."""

    xfer_id: XferId
    first_tokens: tuple[TokenSample, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DropOn:
    """To the engine of a rank that has committed: free the pages, the sequence will not start."""

    xfer_id: XferId
    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WithdrawOn:
    """To the ledger of a rank that has not: `Withdrawn`. `RankFailed` answers, or `RankCommitted` if that was first."""

    xfer_id: XferId
    rank: int
    error: BatonError


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupFailed:
    """To the leg: said once, and never of a transfer that the router withdrew."""

    xfer_id: XferId
    error: BatonError


GroupEvent = RankCommitted | RankFailed | GroupWithdrawn
GroupAction = StartAll | DropOn | WithdrawOn | GroupFailed


@dataclass(slots=True, eq=False)
class _JointReceive:
    """One transfer on all ranks."""

    committed: dict[int, tuple[TokenSample, ...]] = field(default_factory=dict)
    over: set[int] = field(default_factory=set)
    failed: bool = False


class RankGroup:
    """Pure. Every rank says once of every transfer how it ended there: committed or failed."""

    def __init__(self, ranks: int) -> None:
        self._ranks = range(ranks)
        self._joint: dict[XferId, _JointReceive] = {}

    def open(self, xfer_id: XferId) -> None:
        """The router announced a transfer to all ranks."""
        if xfer_id in self._joint:
            raise InvariantError(f"transfer {xfer_id} was opened twice")
        self._joint[xfer_id] = _JointReceive()

    def handle(self, event: GroupEvent) -> list[GroupAction]:
        """Applies one event; of a transfer that has ended nothing follows."""
        joint = self._joint.get(event.xfer_id)
        if joint is None:
            return []
        match event:
            case RankCommitted():
                return self._committed(joint, event)
            case RankFailed():
                joint.over.add(event.rank)
                return self._fail(joint, event.xfer_id, event.error, told=True)
            case GroupWithdrawn():
                return self._fail(joint, event.xfer_id, event.error, told=False)

    def in_flight(self) -> int:
        """Transfers that have not started on every rank, nor ended on every rank."""
        return len(self._joint)

    def check_integrity(self) -> None:
        """Raises InvariantError if the book contradicts itself."""
        for xfer_id, joint in self._joint.items():
            ended = joint.over | joint.committed.keys()
            if not ended < set(self._ranks) or (joint.over and not joint.failed):
                raise InvariantError(f"transfer {xfer_id} is over and still here: {joint!r}")

    def _committed(self, joint: _JointReceive, event: RankCommitted) -> list[GroupAction]:
        if joint.failed:
            # It committed before it heard of the withdrawal.
            joint.over.add(event.rank)
            self._forget(joint, event.xfer_id)
            return [DropOn(xfer_id=event.xfer_id, rank=event.rank)]
        joint.committed[event.rank] = event.first_tokens
        if len(set(joint.committed.values())) > 1:
            error = TransferError("the ranks were told different first tokens")
            return self._fail(joint, event.xfer_id, error, told=True)
        if len(joint.committed) < len(self._ranks):
            return []
        del self._joint[event.xfer_id]
        return [StartAll(xfer_id=event.xfer_id, first_tokens=event.first_tokens)]

    def _fail(
        self, joint: _JointReceive, xfer_id: XferId, error: BatonError, *, told: bool
    ) -> list[GroupAction]:
        actions: list[GroupAction] = []
        if not joint.failed:
            joint.failed = True
            waiting = set(self._ranks) - joint.over - joint.committed.keys()
            actions += [DropOn(xfer_id=xfer_id, rank=rank) for rank in joint.committed]
            actions += [
                WithdrawOn(xfer_id=xfer_id, rank=rank, error=error) for rank in sorted(waiting)
            ]
            actions += [GroupFailed(xfer_id=xfer_id, error=error)] if told else []
            joint.over |= joint.committed.keys()
            joint.committed.clear()
        self._forget(joint, xfer_id)
        return actions

    def _forget(self, joint: _JointReceive, xfer_id: XferId) -> None:
        if len(joint.over) == len(self._ranks):
            del self._joint[xfer_id]


FromEngine = Opened | Started | PageWrite | FirstTokensDrawn | OutgoingCancelled
FromRank = PeerUp | PeerDown | FromDecode | PushDone


@dataclass(frozen=True, slots=True, kw_only=True)
class ForRank:
    """To the session with one of the decode worker's ranks, or to the writer of its pages."""

    rank: int
    action: Send | StartPush


FanOutAction = ForRank | HandOffDone | HandOffFailed


@dataclass(slots=True, eq=False)
class _JointSend:
    """One prompt's hand-offs."""

    done: dict[int, HandOffDone] = field(default_factory=dict)


class FanOut:
    """Pure: no sockets, no clock, no engine. Time comes in as `now_s` (monotonic seconds)."""

    def __init__(self, layout: KvLayout, ranks: int) -> None:
        """For a decode worker of which `ranks` hold heads that `layout` has."""
        self._outboxes = tuple(Outbox(layout) for _ in range(ranks))
        self._joint: dict[XferId, _JointSend] = {}

    def handle(self, event: FromEngine, now_s: float) -> list[FanOutAction]:
        """The engine's word, and the router's, on a prompt."""
        match event:
            case Opened():
                self._joint[event.permit.xfer_id] = _JointSend()
            case OutgoingCancelled():
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
                told = [entry for outbox in self._outboxes for entry in outbox.story(xfer_id)]
                told.sort(key=lambda entry: entry.at_s)
                message = f"a rank has lost hand-off {xfer_id}: {joint!r}"
                raise InvariantError(message, story=told)

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
            case HandOffDone():
                return self._done(rank, action)
            case HandOffFailed():
                return self._failed(rank, action, now_s)
            case _:
                return [ForRank(rank=rank, action=action)]

    def _done(self, rank: int, done: HandOffDone) -> list[FanOutAction]:
        joint = self._joint.get(done.xfer_id)
        if joint is None:
            return []  # another rank's has failed meanwhile
        joint.done[rank] = done
        if len(joint.done) < len(self._outboxes):
            return []
        del self._joint[done.xfer_id]
        parts = joint.done.values()
        whole = HandOffDone(
            xfer_id=done.xfer_id,
            peer=done.peer,
            blocks_sent=max(part.blocks_sent for part in parts),
            bytes_sent=sum(part.bytes_sent for part in parts),
            reserve_wait_s=max(part.reserve_wait_s for part in parts),
            unhidden_s=max(part.unhidden_s for part in parts),
        )
        return [whole]

    def _failed(self, rank: int, failed: HandOffFailed, now_s: float) -> list[FanOutAction]:
        joint = self._joint.pop(failed.xfer_id, None)
        if joint is None:
            return []
        others = [n for n in range(len(self._outboxes)) if n != rank]
        return [failed, *self._to_ranks(others, OutgoingCancelled(xfer_id=failed.xfer_id), now_s)]
