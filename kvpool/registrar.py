"""Keeps the directory of the whole pool true of one node: its lease, what it holds, what has been flushed.

A directory that is away is tried again with every renewal, and nothing else in the node waits for it. What changed meanwhile is not remembered:
when the directory is back the node registers anew and tells it everything it holds.
"""

from collections.abc import Iterable
from itertools import islice
from typing import Protocol

from baton.errors import PoolUnavailableError
from baton.telemetry.logs import get_logger
from kvpool.messages import DirectoryChanges, NodeState, Selection, Stored
from kvpool.ports import Directory

_AT_ONCE = 4096
_log = get_logger(__name__)


class Holdings(Protocol):
    """What the registrar asks of the node's ledger."""

    def take_replica_changes(self, limit: int = 4096) -> DirectoryChanges | None:
        """What the directory has yet to be told."""

    def stored(self) -> Iterable[Stored]:
        """Everything that is held."""

    def flush(self, selection: Selection) -> int:
        """Gives up what a flush covers."""


class Registrar:
    """One node at one directory. Every method returns, whether or not the directory answers.

    Args:
        directory: Of the pool.
        ledger: Of the node.
        lease_s: For how long the node is taken to live after each renewal.
    """

    def __init__(self, directory: Directory, ledger: Holdings, *, lease_s: float) -> None:
        self._directory = directory
        self._ledger = ledger
        self._lease_s = lease_s
        self._flushes = 0
        self._reachable = False

    @property
    def reachable(self) -> bool:
        """Whether the directory answered when it was last asked."""
        return self._reachable

    async def renew(self, state: NodeState) -> tuple[NodeState, ...] | None:
        """Prolongs the lease, carries out flushes of others, and tells everything to a directory that knows nothing.

        Returns:
            What the living nodes say of themselves; None where the directory is away.
        """
        try:
            if not self._reachable:
                await self._directory.retire(state.node)  # some change may never have arrived
            renewal = await self._directory.renew(state, self._lease_s, self._flushes)
            for selection in renewal.selections:
                self._ledger.flush(selection)
            self._flushes = renewal.flushes
            if renewal.anew:
                await self._tell_all(state)
            self._reachable = True
            return await self._directory.nodes()
        except PoolUnavailableError as error:
            self._lost(error)
            return None

    async def publish(self, state: NodeState) -> None:
        """Tells what has changed since the last call."""
        try:
            while self._reachable and (changes := self._ledger.take_replica_changes()) is not None:
                await self._directory.publish(state.node, changes)
        except PoolUnavailableError as error:
            self._lost(error)

    async def flush(self, selection: Selection) -> bool:
        """Has all nodes give up what `selection` covers; False where the directory is away and only this node will."""
        try:
            await self._directory.flush(selection)
        except PoolUnavailableError as error:
            self._lost(error)
            return False
        return True

    async def retire(self, state: NodeState) -> None:
        """The node stops."""
        try:
            await self._directory.retire(state.node)
        except PoolUnavailableError as error:
            self._lost(error)

    async def _tell_all(self, state: NodeState) -> None:
        while self._ledger.take_replica_changes() is not None:
            continue  # all of it stands in what is told now
        stored = iter(list(self._ledger.stored()))  # it changes while the directory is told
        while part := tuple(islice(stored, _AT_ONCE)):
            await self._directory.publish(state.node, DirectoryChanges(stored=part))

    def _lost(self, error: PoolUnavailableError) -> None:
        if self._reachable:
            _log.warning(
                "the pool's directory is away: blocks of other hosts are not found",
                reason=str(error),
            )
        self._reachable = False
