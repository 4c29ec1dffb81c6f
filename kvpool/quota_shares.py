"""This node's part of every tenant's quota, which holds over all nodes of the pool. Pure; `kvpool.node` tells and obeys."""

from collections.abc import Iterable
from dataclasses import replace

from baton.ids import WorkerIdentity
from kvpool.accounts import Allowance
from kvpool.messages import NodeState, OwnerUsage
from kvpool.tenant_book import TenantBook
from kvpool.tenant_parts import TenantPart, may_hold

IDLE_S = 30.0
"""A tenant that has neither put nor read for this long leaves its quota to other nodes."""

MOST_TOLD = 256
"""Tenants of whom others are told; those that have most. More would make every renewal long for little."""


class QuotaShares:
    """One owner.

    Args:
        here: This node.
        book: What the operator allows, in the whole pool.
        block_bytes: What a block is billed here.
    """

    def __init__(self, here: WorkerIdentity, book: TenantBook, block_bytes: int) -> None:
        self._here = here
        self._book = book
        self._block_bytes = block_bytes
        self._elsewhere: dict[str, list[TenantPart]] = {}
        self._told: dict[str, Allowance] = {}

    def parts(self, owners: Iterable[OwnerUsage], now_s: float) -> tuple[TenantPart, ...]:
        """What the other nodes are told: what limited tenants have here."""
        limited = [
            self._part(owner, now_s)
            for owner in owners
            if self._book.allowance(owner.tenant).max_bytes is not None
        ]
        return tuple(sorted(limited, key=lambda part: -part.size_bytes)[:MOST_TOLD])

    def learn(self, states: Iterable[NodeState]) -> None:
        """What all living nodes said last."""
        self._elsewhere = {}
        for state in states:
            for part in state.parts if state.node != self._here else ():
                self._elsewhere.setdefault(part.tenant, []).append(part)

    def due(self, owners: Iterable[OwnerUsage], now_s: float) -> dict[str, Allowance | None]:
        """What tenants may take on this node from now on, of those for whom that has changed; None for what is usual."""
        having = {owner.tenant: self._part(owner, now_s) for owner in owners}
        named = self._book.allowances.keys() | self._elsewhere.keys()
        shares = {tenant: self._share(tenant, having.get(tenant)) for tenant in named}
        before, self._told = self._told, shares
        return {
            tenant: shares.get(tenant)
            for tenant in before.keys() | shares.keys()
            if before.get(tenant) != shares.get(tenant)
        }

    def _share(self, tenant: str, here: TenantPart | None) -> Allowance:
        allowance, elsewhere = self._book.allowance(tenant), self._elsewhere.get(tenant)
        if allowance.max_bytes is None or not elsewhere:
            return allowance
        here = here or TenantPart(tenant=tenant, size_bytes=0, active=False)
        return replace(allowance, max_bytes=may_hold(allowance.max_bytes, here, elsewhere))

    def _part(self, owner: OwnerUsage, now_s: float) -> TenantPart:
        return TenantPart(
            tenant=owner.tenant,
            size_bytes=owner.blocks * self._block_bytes,
            active=now_s - owner.active_s <= IDLE_S,
        )
