"""A node's storage, made when its first worker attaches: a slab with its ledger and, where one is configured,
a disk below it.

The ledger decides, the slab holds the bytes, one thread copies them to the disk and back in the order that the ledger
says, another one has the disk forget.
"""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from urllib.parse import urlsplit

import xxhash

from baton.clock import Clock
from baton.config.schema import PoolConfig
from baton.errors import ConfigError, CorruptKvError
from baton.ids import WorkerIdentity
from baton.telemetry.logs import get_logger
from kvpool.messages import (
    Allowance,
    Demote,
    Erase,
    FlushMark,
    NodeAction,
    Promote,
    Selection,
)
from kvpool.node.ledger import NodeLedger, NodeLimits
from kvpool.node.slab import Slab
from kvpool.ports import ExtentStore

OpenDisk = Callable[[int], ExtentStore]
"""Opens the disk for blocks of so many bytes."""

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageConfig:
    """How a node's storage is made once the size of its blocks is known.

    Attributes:
        pool: The pool's configuration.
        memory_bytes: For the slab.
        region_path: Unix socket for the slab's descriptor.
        identity: The node's; no other start of any node names its puts and leases alike.
        open_disk: None without a disk.
    """

    pool: PoolConfig
    memory_bytes: int
    region_path: str
    identity: WorkerIdentity
    open_disk: OpenDisk | None


class NodeStorage:
    """Not thread-safe: methods are called on the event loop that made it.

    Args:
        config: What it is made of.
        slot_bytes: Of a block.
        clock: Puts and leases run on it.

    Attributes:
        slab: The memory.
        flushes_carried_out: The number of the latest flush of the directory that this node has carried out, in whichever
            start; 0 where it does not know of one.
        ledger: What lies where. A caller that has it do something that may move blocks calls `carry_out` after that.

    Raises:
        ConfigError: Not one block fits the memory.
        OutOfMemoryError: The machine has not got the memory.
        OSError: The slab's socket cannot be bound. Whatever is raised, the disk is free for the next try.
    """

    def __init__(self, config: StorageConfig, slot_bytes: int, clock: Clock) -> None:
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._moved = asyncio.Event()
        with ExitStack() as undo:
            self.slab = Slab(
                memory_bytes=config.memory_bytes, slot_bytes=slot_bytes, path=config.region_path
            )
            undo.callback(self.slab.close)
            disk = _open_disk(config.open_disk, slot_bytes)
            if disk is not None:
                undo.callback(disk.close)
            limits = _limits(config.pool, self.slab, 0 if disk is None else disk.num_extents)
            found = () if disk is None else disk.recover()
            self.ledger = NodeLedger(limits, f"{config.identity.incarnation:x}", found)
            self._directory = _directory_digest(config.pool)
            mark = None if disk is None else disk.flush_mark
            is_known = mark is not None and mark.directory == self._directory
            self.flushes_carried_out = mark.number if mark is not None and is_known else 0
            self._mover = None if disk is None else TierMover(disk, self.slab, self._on_moved)
            undo.pop_all()

    def carry_out(self) -> None:
        """Has the disk do what the ledger wants done."""
        if self._mover is not None:
            actions = self.ledger.take_actions()
            if actions:
                self._mover.carry_out(actions)

    async def flush(self, selection: Selection) -> int:
        """Gives up what `selection` covers. Returns how many blocks were held, once none of them can come back from the
        disk, whatever happens to process and power.

        Raises:
            OSError: They are given up, but the disk has not recorded that for certain.
        """
        flushed = self.ledger.flush(selection)
        self.carry_out()
        if self._mover is not None:
            forgotten = self._mover.forget(flushed.erased)
            forgotten.add_done_callback(_log_unrecorded)
            # Whoever asked may leave: the blocks are given up all the same, so they are erased.
            await asyncio.shield(asyncio.wrap_future(forgotten))
        return flushed.num_held

    def carry_out_flushes(self, selections: Sequence[Selection], number: int) -> None:
        """Gives up what missed flushes of the directory cover, the last of them with that number; returns at once. The
        number is that of the next start too once none of the blocks can come back from the disk.
        """
        erased = [each for selection in selections for each in self.ledger.flush(selection).erased]
        self.flushes_carried_out = number
        self.carry_out()
        if self._mover is not None:
            known = self._directory
            mark = None if known is None else FlushMark(directory=known, number=number)
            self._mover.forget(erased, mark).add_done_callback(_log_unrecorded)

    async def loaded(self, lease_id: str, wait_s: float) -> None:
        """Waits until all blocks of a lease are in memory, for `wait_s` at most."""
        try:
            async with asyncio.timeout(wait_s):
                while self.ledger.loading(lease_id):
                    self._moved.clear()
                    await self._moved.wait()
        except TimeoutError:
            return  # what has arrived by now is worth having

    async def close(self) -> None:
        """Lets go of memory and disk. What the ledger wants moved or erased from here on is not."""
        mover, self._mover = self._mover, None
        if mover is not None:
            await asyncio.to_thread(mover.close)
        await asyncio.to_thread(self.slab.close)

    def _on_moved(self, action: Demote | Promote, succeeded: bool) -> None:
        """On the mover's thread."""
        self._loop.call_soon_threadsafe(self._note_moved, action, succeeded)

    def _note_moved(self, action: Demote | Promote, succeeded: bool) -> None:
        now_s = self._clock.now_s()
        if not succeeded:
            self.ledger.tier_moves.io_failed(action, now_s)
        elif isinstance(action, Demote):
            self.ledger.tier_moves.written(action, now_s)
        else:
            self.ledger.tier_moves.loaded(action)
        self.carry_out()
        self._moved.set()


def _open_disk(open_disk: OpenDisk | None, slot_bytes: int) -> ExtentStore | None:
    """The SSD tier; None without one, and where it cannot be opened: memory alone is worth having."""
    if open_disk is None:
        return None
    try:
        return open_disk(slot_bytes)
    except (OSError, ConfigError) as error:
        _log.error("the pool goes on without its disk", reason=str(error))
        return None


def _directory_digest(config: PoolConfig) -> bytes | None:
    """What tells one directory's flushes from another's; None for one in the node's process, whose numbers nobody needs
    after that.
    """
    if config.directory == "memory":
        return None
    url = urlsplit(config.redis_url)
    # Not who asks: a password that changes is no reason to flush everything.
    place = f"{url.netloc.rpartition('@')[2]} {url.path} {url.query} {config.redis_prefix}"
    return xxhash.xxh3_128_digest(place.encode())


def _log_unrecorded(forgotten: Future[None]) -> None:
    error = None if forgotten.cancelled() else forgotten.exception()
    if error is not None:
        _log.error("a flush is not recorded on the pool's disk", reason=str(error))


def _limits(config: PoolConfig, slab: Slab, num_extents: int) -> NodeLimits:
    return NodeLimits(
        num_slots=slab.num_slots,
        slot_bytes=slab.slot_bytes,
        num_extents=num_extents,
        eviction=config.eviction,
        ssd_eviction=config.ssd_eviction,
        high_watermark=config.high_watermark,
        low_watermark=config.low_watermark,
        put_timeout_s=config.put_timeout_s,
        usual=Allowance(max_bytes=config.tenant_bytes),
    )


Done = Callable[[Demote | Promote, bool], None]
"""Told, on the mover's thread, whether a copy succeeded."""


class TierMover:
    """Copies blocks between slab and disk, beside the event loop. Erasures do not wait for copies: nothing is copied
    where a ledger has something erased, and a late erasure leaves alone what came after it.

    Args:
        store: The disk.
        slab: The memory.
        done: Called after every copy, not after an erasure.
    """

    def __init__(self, store: ExtentStore, slab: Slab, done: Done) -> None:
        self._store = store
        self._slab = slab
        self._done = done
        self._copying = ThreadPoolExecutor(max_workers=1, thread_name_prefix="pool-disk")
        self._erasing = ThreadPoolExecutor(max_workers=1, thread_name_prefix="pool-disk-erase")

    def carry_out(self, actions: list[NodeAction]) -> None:
        """Queues actions; returns at once."""
        erased = [action for action in actions if isinstance(action, Erase)]
        moves = [action for action in actions if not isinstance(action, Erase)]
        if erased:
            self._erasing.submit(self._erase, erased)
        if moves:
            self._copying.submit(self._copy, moves)

    def forget(self, erased: Sequence[Erase], mark: FlushMark | None = None) -> Future[None]:
        """Erases after what is queued to be erased, whatever is being copied; returns at once. The future is done when
        all of that is certain, see `ExtentStore.forget`.
        """
        return self._erasing.submit(self._store.forget, erased, mark)

    def close(self) -> None:
        """Waits for what is queued."""
        self._copying.shutdown()
        self._erasing.shutdown()
        try:
            self._store.close()
        except OSError as error:
            _log.error("the pool's disk could not be closed in order", reason=str(error))

    def _erase(self, erased: list[Erase]) -> None:
        for action in erased:
            try:
                self._store.erase(action.extent, action.epoch)
            except OSError as error:
                _log_fault(action, error)

    def _copy(self, moves: list[Demote | Promote]) -> None:
        for action in moves:
            try:
                self._do(action)
            except (OSError, CorruptKvError) as error:
                _log_fault(action, error)
                self._done(action, False)
            else:
                self._done(action, True)

    def _do(self, action: Demote | Promote) -> None:
        match action:
            case Demote(slot=slot, block=block):
                self._store.write(block, self._slab.slot(slot)[: block.size_bytes])
            case Promote(slot=slot, block=block):
                self._store.read(block, self._slab.slot(slot)[: block.size_bytes])


def _log_fault(action: NodeAction, error: Exception) -> None:
    _log.warning("a block could not be moved", action=type(action).__name__, reason=str(error))
