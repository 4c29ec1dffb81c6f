"""What is moved between a pool node's memory and its disk: the moves under way, and how each ends.

    demote    slot RESIDENT ─▶ DEMOTING      extent FILLING      written ─▶ extent RESIDENT; the slot is free, unless a reader has come
    promote   slot FILLING                   extent RESIDENT     loaded  ─▶ both RESIDENT
    failed    what could not be written stays in memory; what could not be read is given up

Blocks are demoted ahead of need, once memory is fuller than the high watermark, and promoted when a lease asks for
them. Slot and extent are in use until the shell has answered, whatever happens to the block meanwhile. A disk that
keeps failing is not written to for a while, and read all the same.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

from baton.errors import InvariantError
from kvpool.messages import Demote, DiskBlock, Promote
from kvpool.node.accounts import Account, Counts
from kvpool.node.block_store import BlockStore, Slot, SlotState
from kvpool.node.evictor import Evictor

_S = SlotState
_DISK_FAILURES = 3
_DISK_REST_S = 30.0
"""A disk that failed so often in a row is not written to for so long, and read all the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Move:
    """What the shell was told to copy and has not answered."""

    slot: Slot
    extent: Slot


class TierMoves:
    """Pure: no clock, no bytes. Time comes in as `now_s`. A part of `NodeLedger`, over the same blocks; same owner.

    What to do goes to `BlockStore.actions`. An answer to a move that is over has no effect.

    Args:
        blocks: The slots of both tiers.
        evictor: Chooses what goes to the disk, and makes room there.
        counts: Of what happened.
        has_disk: Whether there is one.
    """

    def __init__(
        self, blocks: BlockStore, evictor: Evictor, counts: Counts, *, has_disk: bool
    ) -> None:
        self._blocks = blocks
        self._story = blocks.story
        self._evictor = evictor
        self._counts = counts
        self._has_disk = has_disk
        self._numbers = count(1)
        self._moves: dict[int, _Move] = {}
        self._disk_failures = 0
        self._disk_rests_until_s = 0.0

    @property
    def disk_works(self) -> bool:
        """Whether there is a disk, and it did not fail of late."""
        return self._has_disk and self._disk_failures < _DISK_FAILURES

    @property
    def num_users(self) -> int:
        """How many uses of slots and extents are those of moves."""
        return 2 * len(self._moves)

    def make_headroom(self, now_s: float) -> None:
        """Begins to move blocks to the disk if memory is fuller than the high watermark,
        and the disk is to be written to.
        """
        resting = not self.disk_works and now_s < self._disk_rests_until_s
        if resting or not self._has_disk:
            return
        num_leaving = sum(move.slot.state is _S.DEMOTING for move in self._moves.values())
        for account, slots in self._evictor.choose_demotions(num_leaving, now_s):
            self._demote(slots, account, now_s)

    def load(self, extent: Slot) -> Slot:
        """Begins to read a block, for which there is a free slot; what used its extent uses that slot instead."""
        blocks = self._blocks
        slot = blocks.take(blocks.memory, extent.key, extent.billing, extent.position, _S.FILLING)
        slot.users += 1
        slot.checksums = extent.checksums
        self._begin(Promote, slot, extent)
        blocks.release(extent)
        return slot

    def written(self, action: Demote, now_s: float) -> None:
        """A block was copied to the disk. It leaves memory, unless a reader has come."""
        self._story.now_s = now_s
        move = self._end(action.move)
        if move is not None:
            self._disk_failures = 0
            if move.extent.state is _S.FILLING:
                self._blocks.make_resident((move.extent,))
                self._story.record("written to the disk", (move.extent,))
            if move.slot.state is _S.DEMOTING:
                if self._blocks.may_go(move.slot):
                    self._counts.demoted_blocks += 1
                    self._blocks.give_up(move.slot)
                else:
                    self._blocks.stay(move.slot)
        self.make_headroom(now_s)

    def loaded(self, action: Promote) -> None:
        """A block was read from the disk, and its checksums are right."""
        move = self._end(action.move)
        if move is not None and move.slot.state is _S.FILLING:
            self._counts.promoted_blocks += 1
            self._counts.hit_blocks += 1
            self._blocks.make_resident((move.slot,))
            self._story.record("read from the disk", (move.slot,))

    def io_failed(self, action: Demote | Promote, now_s: float) -> None:
        """A block could not be written, or not be read; nothing is under way in its slot and extent any more.

        What could not be read is given up; what could not be written stays in memory.
        """
        self._story.now_s = now_s
        move = self._end(action.move)
        if move is None:
            return
        slot, extent = move.slot, move.extent
        self._story.record(f"{type(action).__name__} failed", (slot,))
        if isinstance(action, Demote):
            self._disk_failures += 1
            self._disk_rests_until_s = now_s + _DISK_REST_S
            if slot.state is _S.DEMOTING:
                self._blocks.stay(slot)
            if extent.state is _S.FILLING:
                self._blocks.give_up(extent)
            return
        if slot.state is _S.FILLING:
            self._blocks.give_up(slot)
        if extent.state is _S.RESIDENT:
            self._counts.corrupt_blocks += 1
            self._blocks.give_up(extent)

    def check_integrity(self) -> None:
        """Raises InvariantError if a slot that is being copied is not in use."""
        for move in self._moves.values():
            if not (move.slot.users and move.extent.users):
                raise InvariantError(
                    f"a slot that is being copied is not in use: {move!r}",
                    story=self._story.story(move.slot.key.hex()),
                )

    def _demote(self, slots: list[Slot], account: Account, now_s: float) -> None:
        """Begins to move resident blocks of one tenant that their policy has given up."""
        blocks, memory, disk = self._blocks, self._blocks.memory, self._blocks.disk
        self._evictor.make_extents(len(slots), account, now_s)
        self._story.record("being copied to the disk", slots[: disk.num_free])
        for slot in slots:
            if not disk.num_free:
                memory.admit((slot,))  # all of the disk is in use: it stays
                continue
            extent = blocks.take(disk, slot.key, slot.billing, slot.position, _S.FILLING)
            extent.checksums = slot.checksums
            memory.move(slot, _S.DEMOTING)
            self._begin(Demote, slot, extent)

    def _begin(self, kind: Callable[..., Demote | Promote], slot: Slot, extent: Slot) -> None:
        slot.users += 1
        extent.users += 1
        number = next(self._numbers)
        self._moves[number] = _Move(slot=slot, extent=extent)
        self._blocks.actions.append(kind(move=number, slot=slot.index, block=_on_disk(extent)))

    def _end(self, number: int) -> _Move | None:
        move = self._moves.pop(number, None)
        if move is not None:
            self._blocks.release(move.slot)
            self._blocks.release(move.extent)
        return move


def _on_disk(extent: Slot) -> DiskBlock:
    return DiskBlock(
        extent=extent.index,
        epoch=extent.epoch,
        key=extent.key,
        owner=extent.billing.owner,
        size_bytes=extent.billing.size_bytes,
        position=extent.position,
        checksums=extent.checksums,
    )
