"""One node's standing in the pool: its lease in the directory, what it has told of its blocks, and its part of tenants' quotas."""

from dataclasses import replace

from baton.clock import Clock
from kvpool.ledger import NodeLedger
from kvpool.messages import NodeState, Selection
from kvpool.quota_shares import QuotaShares
from kvpool.registrar import Registrar

_RENEWALS_PER_LEASE = 3
_RETRY_S = 1.0
"""How often a directory that is away is asked: not with every change."""


class Membership:
    """For one event loop. Every method returns, whether or not the directory answers.

    Args:
        ledger: Of the node; who calls `renew` or `share_quotas` carries out what it wants done after that.
        registrar: Speaks with the directory.
        shares: Divides quotas.
        lease_s: For how long a renewal holds.
        clock: Renewals and tenants' activity go by it.
    """

    def __init__(
        self,
        ledger: NodeLedger,
        registrar: Registrar,
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
        """Says that the node lives, and hears what tenants have on the others; as often as it is called, but no more than is due:
        at once when the node is new, then three times per lease.
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

    async def flush(self, selection: Selection) -> None:
        """Has the other nodes give up what `selection` covers."""
        await self._registrar.flush(selection)

    async def retire(self, state: NodeState) -> None:
        """The node stops."""
        await self._registrar.retire(state)
