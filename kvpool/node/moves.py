"""Blocks on their way between memory and disk.

Both places are in use until the shell has answered: neither the slot that is copied from nor the extent that is read is given to
another block, whatever happens to the block meanwhile.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

from baton.errors import InvariantError
from kvpool.messages import Demote, DiskBlock, Promote
from kvpool.node.block_store import BlockStore, Slot, SlotState
from kvpool.node.counts import Counts
from kvpool.node.disk_health import DiskHealth

_S = SlotState


@dataclass(frozen=True, slots=True, kw_only=True)
class _Move:
    slot: Slot
    extent: Slot


class Moves:
    """What the shell was told to copy and has not answered. An answer that comes twice has no effect."""

    def __init__(self, book: BlockStore, health: DiskHealth, counts: Counts) -> None:
        self._book = book
        self._health = health
        self._counts = counts
        self._numbers = count(1)
        self._moves: dict[int, _Move] = {}

    def __len__(self) -> int:
        return len(self._moves)

    @property
    def num_leaving(self) -> int:
        """Slots that will be free once what is under way is answered."""
        return sum(move.slot.state is _S.DEMOTING for move in self._moves.values())

    def demote(self, slot: Slot, extent: Slot) -> None:
        """Begins to copy a resident block that its policy has given up to an extent taken for it."""
        slot.move(_S.DEMOTING)
        extent.checksums = slot.checksums
        self._begin(Demote, slot, extent)

    def promote(self, extent: Slot, slot: Slot) -> None:
        """Begins to read a block on the disk into a slot taken for it."""
        slot.checksums = extent.checksums
        self._begin(Promote, slot, extent)

    def written(self, action: Demote) -> None:
        """A block is on the disk. It leaves memory, unless somebody has come to read it."""
        move = self._end(action.move)
        if move is None:
            return
        self._health.wrote()
        slot, extent = move.slot, move.extent
        if extent.state is _S.FILLING:
            self._book.settle((extent,))
        if slot.state is not _S.DEMOTING:
            return
        if self._book.may_go(slot):
            self._counts.demoted_blocks += 1
            self._book.give_up(slot)
        else:
            self._book.stay(slot)

    def loaded(self, action: Promote) -> None:
        """A block is in memory too."""
        move = self._end(action.move)
        if move is not None and move.slot.state is _S.FILLING:
            self._counts.promoted_blocks += 1
            self._counts.hit_blocks += 1
            self._book.settle((move.slot,))

    def failed(self, action: Demote | Promote, now_s: float) -> None:
        """A copy was not made. What could not be read is given up; what could not be written stays in memory."""
        move = self._end(action.move)
        if move is None:
            return
        slot, extent = move.slot, move.extent
        if isinstance(action, Demote):
            self._health.failed(now_s)
            if slot.state is _S.DEMOTING:
                self._book.stay(slot)
            if extent.state is _S.FILLING:
                self._book.give_up(extent)
            return
        if slot.state is _S.FILLING:
            self._book.give_up(slot)
        if extent.state is _S.RESIDENT:
            self._counts.corrupt_blocks += 1
            self._book.give_up(extent)

    def check_integrity(self) -> None:
        """Raises InvariantError unless both places of every move are in use."""
        for move in self._moves.values():
            if not (move.slot.users and move.extent.users):
                raise InvariantError(f"a place of a move is not in use: {move!r}")

    def _begin(self, kind: Callable[..., Demote | Promote], slot: Slot, extent: Slot) -> None:
        slot.users += 1
        extent.users += 1
        number = next(self._numbers)
        self._moves[number] = _Move(slot=slot, extent=extent)
        self._book.actions.append(kind(move=number, slot=slot.index, block=_on_disk(extent)))

    def _end(self, number: int) -> _Move | None:
        move = self._moves.pop(number, None)
        if move is not None:
            self._book.release(move.slot)
            self._book.release(move.extent)
        return move


def _on_disk(extent: Slot) -> DiskBlock:
    return DiskBlock(
        extent=extent.index,
        epoch=extent.epoch,
        key=extent.key,
        owner=extent.holding.owner,
        size_bytes=extent.holding.size_bytes,
        position=extent.position,
        checksums=extent.checksums,
    )
