"""One node's standing in the pool: its lease in the directory, what it has told of its blocks,
and its part of tenants' quotas.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Protocol

from baton.clock import Clock
from baton.errors import OverloadedError, PoolUnavailableError
from baton.ids import WorkerIdentity
from baton.telemetry.logs import get_logger
from kvpool.messages import DirectoryChanges, NodeState, Selection, Stored
from kvpool.node.ledger import NodeLedger
from kvpool.node.quotas import QuotaShares
from kvpool.ports import Directory

_RENEWALS_PER_LEASE = 3
_RETRY_S = 1.0
"""How often a directory that is away is asked: not with every change."""


class LedgerView(Protocol):
    """What the directory is told of the node's ledger, and asks of it."""

    def take_replica_changes(self, limit: int = 4096) -> DirectoryChanges | None:
        """What the directory has yet to be told."""

    def take_stored(self) -> Iterator[Stored]:
        """Everything that is held now; what changes before its turn is left to the changes."""


class FlushTarget(Protocol):
    """What carries out flushes, and remembers over restarts how far it has."""

    flushes_carried_out: int

    def carry_out_flushes(self, selections: Sequence[Selection], number: int) -> None:
        """Gives up what missed flushes cover, the last of them with that number; returns at once."""


class DirectoryClient:
    """One node at one directory. Every method returns, whether or not the directory answers.

    Args:
        directory: Of the pool.
        ledger: Of the node.
        flushes: Where its flushes are carried out.
        lease_s: For how long the node is taken to live after each renewal.
    """

    def __init__(
        self, directory: Directory, ledger: LedgerView, flushes: FlushTarget, *, lease_s: float
    ) -> None:
        self._directory = directory
        self._ledger = ledger
        self._flushes = flushes
        self._lease_s = lease_s
        self._reachable: bool | None = None  # None before it is first asked
        self._earlier_starts_ended = False

    @property
    def reachable(self) -> bool:
        """Whether the directory answered when it was last asked."""
        return bool(self._reachable)

    async def renew(self, state: NodeState) -> tuple[NodeState, ...] | None:
        """Prolongs the lease, carries out flushes of others, and tells everything to a directory that knows nothing. The
        first time it ends the leases of earlier starts of this node.

        Returns:
            What the living nodes say of themselves; None where the directory is away.
        """
        try:
            if not self._reachable:
                await self._directory.retire(state.node)  # some change may never have arrived
            if not self._earlier_starts_ended:
                await self._end_earlier_starts(state.node)
            if await self._prolong(state):
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
        """Has all nodes give up what `selection` covers; False where the directory is away, or so many others flush that
        it did not come to that, and only this node will.
        """
        try:
            await self._directory.flush(selection)
        except OverloadedError as error:
            _log.warning("a flush is not told to other nodes", reason=error.message)
            return False
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

    async def _end_earlier_starts(self, node: WorkerIdentity) -> None:
        """A start that was killed has its lease for a while: what it held is void, and tenants have it no more.

        Once per start. Of two nodes that are configured with one name, against the rules, the first one registers again
        with its next renewal, and both are known from then on.
        """
        for other in await self._directory.nodes():
            if other.node.worker_id == node.worker_id and other.node != node:
                _log.info("the lease of another start of this node is ended", start=str(other.node))
                await self._directory.retire(other.node)
        self._earlier_starts_ended = True

    async def _prolong(self, state: NodeState) -> bool:
        """Prolongs the lease and carries out flushes of others; whether the directory knows nothing of the node."""
        carried_out = self._flushes.flushes_carried_out
        renewal = await self._directory.renew(state, self._lease_s, carried_out)
        if renewal.selections:
            self._flushes.carry_out_flushes(renewal.selections, renewal.flushes)
        return renewal.anew

    async def _tell_all(self, state: NodeState) -> None:
        """May take longer than a lease: a large node has millions of blocks."""
        stored = self._ledger.take_stored()
        while part := tuple(islice(stored, _AT_ONCE)):
            await self._directory.publish(state.node, DirectoryChanges(stored=part))
            if await self._prolong(state):
                raise PoolUnavailableError("the lease ended while the directory was told")

    def _lost(self, error: PoolUnavailableError) -> None:
        if self._reachable is not False:
            _log.warning(
                "the pool's directory is away: blocks of other hosts are not found",
                reason=str(error),
            )
        self._reachable = False


class Membership:
    """For one event loop. Every method returns, whether or not the directory answers.

    Args:
        ledger: Of the node; the caller of `renew` or `share_quotas` carries out what it wants done after that.
        registrar: Speaks with the directory.
        shares: Divides quotas.
        lease_s: For how long a renewal holds.
        clock: Renewals and tenants' activity go by it.
    """

    def __init__(
        self,
        ledger: NodeLedger,
        registrar: DirectoryClient,
        shares: QuotaShares,
        *,
        lease_s: float,
        clock: Clock,
    ) -> None:
        self._ledger = ledger
        self._registrar = registrar
        self._shares = shares
        self._every_s = lease_s / _RENEWALS_PER_LEASE
        self._clock = clock
        self._renewed_s = float("-inf")

    @property
    def reachable(self) -> bool:
        """Whether the directory answered when it was last asked."""
        return self._registrar.reachable

    async def renew(self, state: NodeState) -> None:
        """Says that the node lives, and hears what tenants have on the others; as often as it is called, but no more
        than is due: at once when the node is new, then three times per lease.
        """
        now_s = self._clock.now_s()
        every_s = self._every_s if self.reachable else min(self._every_s, _RETRY_S)
        if now_s - self._renewed_s < every_s:
            return
        self._renewed_s = now_s
        parts = self._shares.parts(self._ledger.owners(), now_s)
        states = await self._registrar.renew(replace(state, parts=parts))
        if states is not None:
            self._shares.learn(states)
            self.share_quotas()

    def share_quotas(self) -> None:
        """Obeys this node's part of every quota; what the operator says has changed, or what others have."""
        due = self._shares.due(self._ledger.owners(), self._clock.now_s())
        for tenant, allowance in due.items():
            self._ledger.allow(tenant, allowance)

    async def publish(self, state: NodeState) -> None:
        """Tells what has changed since the last call."""
        await self._registrar.publish(state)

    async def flush(self, selection: Selection) -> bool:
        """Has the other nodes give up what `selection` covers; False where they have not been told."""
        return await self._registrar.flush(selection)

    async def retire(self, state: NodeState) -> None:
        """The node stops."""
        await self._registrar.retire(state)


_AT_ONCE = 4096
_log = get_logger(__name__)
