"""All ranks of one decode worker start a sequence together, or none does.

Each rank has an arena, sessions and a ledger of its own (`ledger.py`), which knows when that rank's pages are there and
right. This core hears all of them:

    rank 0  committed ─┐
    rank 1  committed ─┼── all ── start on every rank
    rank 2  committed ─┘
                └─ one fails, or the router withdraws: ranks that have committed drop the sequence, the others are withdrawn
"""

from dataclasses import dataclass, field

from baton.errors import BatonError, InvariantError, TransferError
from baton.generation import TokenSample
from baton.ids import XferId


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
class _Joint:
    """One transfer on all ranks."""

    committed: dict[int, tuple[TokenSample, ...]] = field(default_factory=dict)
    over: set[int] = field(default_factory=set)
    failed: bool = False


class RankGroup:
    """Pure. Every rank says once of every transfer how it ended there: committed or failed."""

    def __init__(self, ranks: int) -> None:
        self._ranks = range(ranks)
        self._joint: dict[XferId, _Joint] = {}

    def open(self, xfer_id: XferId) -> None:
        """The router announced a transfer to all ranks."""
        if xfer_id in self._joint:
            raise InvariantError(f"transfer {xfer_id} was opened twice")
        self._joint[xfer_id] = _Joint()

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

    def _committed(self, joint: _Joint, event: RankCommitted) -> list[GroupAction]:
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
        self, joint: _Joint, xfer_id: XferId, error: BatonError, *, told: bool
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

    def _forget(self, joint: _Joint, xfer_id: XferId) -> None:
        if len(joint.over) == len(self._ranks):
            del self._joint[xfer_id]
