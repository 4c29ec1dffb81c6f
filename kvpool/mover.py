"""Carries out what a node's ledger wants done on the disk, on one thread: in the order in which it was said."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from baton.errors import CorruptKvError
from baton.telemetry.logs import get_logger
from kvpool.actions import Demote, Erase, NodeAction, Promote
from kvpool.ports import ExtentStore
from kvpool.slab import Slab

Done = Callable[[Demote | Promote, bool], None]
"""Told, on the mover's thread, whether a copy succeeded."""

_log = get_logger(__name__)


class Mover:
    """Copies blocks between slab and disk, beside the event loop.

    Args:
        store: The disk.
        slab: The memory.
        done: Told of every copy. Of an erasure nobody is told.
    """

    def __init__(self, store: ExtentStore, slab: Slab, done: Done) -> None:
        self._store = store
        self._slab = slab
        self._done = done
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="pool-disk")

    def carry_out(self, actions: list[NodeAction]) -> Future[None]:
        """Queues actions; returns at once."""
        return self._thread.submit(self._carry_out, actions)

    def close(self) -> None:
        """Waits for what is queued."""
        self._thread.shutdown()
        try:
            self._store.close()
        except OSError as error:
            _log.error("the pool's disk could not be closed in order", reason=str(error))

    def _carry_out(self, actions: list[NodeAction]) -> None:
        for action in actions:
            try:
                self._do(action)
            except (OSError, CorruptKvError) as error:
                _log.warning(
                    "a block could not be moved", action=type(action).__name__, reason=str(error)
                )
                if not isinstance(action, Erase):
                    self._done(action, False)
            else:
                if not isinstance(action, Erase):
                    self._done(action, True)

    def _do(self, action: NodeAction) -> None:
        match action:
            case Demote(slot=slot, block=block):
                self._store.write(block, self._slab.slot(slot)[: block.size_bytes])
            case Promote(slot=slot, block=block):
                self._store.read(block, self._slab.slot(slot)[: block.size_bytes])
            case Erase(extent=extent, epoch=epoch):
                self._store.erase(extent, epoch)
