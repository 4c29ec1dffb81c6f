"""The nodes of the pool as routing sees them: holders in the prefix index from which the workers of a host can fetch.

A node computes nothing and is never chosen. What it holds counts for those workers that say they map its memory, and
only for that start of it which they map.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from baton.blocks import BlockReport
from baton.errors import IncompatibleError, InvariantError
from baton.generation import WorkerLoad
from baton.ids import Incarnation, WorkerId, WorkerIdentity
from router.routing.index import PrefixIndex, ReportOutcome

NO_SLOT = -1
"""Of a worker that can fetch from nowhere."""


class PooledWorker(Protocol):
    """A worker, as far as it matters here."""

    pool_slot: int
    load: WorkerLoad


@dataclass(frozen=True, slots=True, kw_only=True)
class _Node:
    """A node that is watched. `holder` is what the index knows it by: nodes of several hosts may have one name."""

    holder: WorkerIdentity
    slot: int


class PoolNodes:
    """Those that this router watches. Pure, one owner.

    Args:
        index: Told of what they hold.
        workers: The connected ones.
    """

    def __init__(self, index: PrefixIndex, workers: Callable[[], Iterable[PooledWorker]]) -> None:
        self._index = index
        self._workers = workers
        self._nodes: dict[WorkerIdentity, _Node] = {}

    def __len__(self) -> int:
        return len(self._nodes)

    def join(self, node: WorkerIdentity, address: str) -> None:
        """A node is watched from now on; what an older start of it at `address` held is void.

        Raises:
            IncompatibleError: It is watched at another address already.
        """
        holder = WorkerIdentity(
            worker_id=WorkerId(f"pool at {address}"), incarnation=node.incarnation
        )
        known = self._nodes.get(node)
        if known is not None and known.holder != holder:
            where = known.holder.worker_id
            raise IncompatibleError(f"{node} answers at {address} too: it is the {where} already")
        older = [
            name for name, one in self._nodes.items() if one.holder.worker_id == holder.worker_id
        ]
        for name in older:
            self.lose(name)
        # A pool evicts one block of a text and keeps those after it.
        self._nodes[node] = _Node(holder=holder, slot=self._index.admit(holder, ragged=True))
        self._attach_all()

    def lose(self, node: WorkerIdentity) -> None:
        """It is gone, and with it all that it held; nothing if that start of it is not watched."""
        gone = self._nodes.pop(node, None)
        if gone is not None:
            self._index.retire(gone.holder)
            self._attach_all()

    def report_blocks(self, node: WorkerIdentity, report: BlockReport) -> bool:
        """Takes a node's report on its blocks; whether something was missed, so that it has to begin anew."""
        known = self._nodes.get(node)
        return known is not None and self._index.apply(known.holder, report) is ReportOutcome.GAP

    def attach(self, worker: PooledWorker) -> None:
        """Notes which node `worker` says it maps."""
        worker.pool_slot = self._slot_for(worker.load)

    def check_integrity(self) -> None:
        """Raises `InvariantError` when a worker fetches from another node than it maps."""
        for worker in self._workers():
            if worker.pool_slot != self._slot_for(worker.load):
                raise InvariantError(f"a worker fetches from {worker.pool_slot}, not as it reports")

    def _slot_for(self, load: WorkerLoad) -> int:
        node = node_of(load)
        known = None if node is None else self._nodes.get(node)
        return NO_SLOT if known is None else known.slot

    def _attach_all(self) -> None:
        for worker in self._workers():
            self.attach(worker)


def node_of(load: WorkerLoad) -> WorkerIdentity | None:
    """The node that a worker says it maps, if any."""
    if not load.pool_node:
        return None
    return WorkerIdentity(
        worker_id=WorkerId(load.pool_node), incarnation=Incarnation(load.pool_incarnation)
    )
