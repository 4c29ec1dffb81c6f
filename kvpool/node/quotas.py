"""Tenants' quotas: what the operator allows in the whole pool, and this node's part of it.

No node decides for all. Each node tells the directory with its lease what limited tenants have there, reads the same of
the others, and sets its own limit (`QuotaShares`, `may_hold`; pure). What is not used is open to the node that puts
next; where nothing is left, a node that has less than half of an even part gets that much, from those that have more.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from baton.errors import BatonError, ConfigError
from baton.ids import WorkerIdentity
from baton.telemetry.logs import get_logger
from kvpool.messages import Allowance, NodeState, OwnerUsage, TenantPart
from kvpool.ports import AllowanceSource

IDLE_S = 30.0
"""A tenant that has neither put nor read for this long leaves its quota to other nodes."""

MOST_TOLD = 256
"""Tenants that other nodes are told of; those that have most. More would make every renewal long for little."""


@dataclass(slots=True, eq=False)
class _Asked:
    hit_blocks: int = 0
    missed_blocks: int = 0


class TenantRecords:
    """What the operator allows each tenant, and how often it found the blocks that it asked for. Pure, one owner.

    Args:
        usual: What a tenant may take for which nothing else is configured.
    """

    def __init__(self, usual: Allowance) -> None:
        self._usual = usual
        self._allowances: Mapping[str, Allowance] = {}
        self._asked: OrderedDict[str, _Asked] = OrderedDict()

    @property
    def allowances(self) -> Mapping[str, Allowance]:
        """Of tenants for which something else is configured."""
        return self._allowances

    def allow(self, allowances: Mapping[str, Allowance]) -> None:
        """From now on these hold, and no others."""
        self._allowances = allowances

    def allowance(self, tenant: str) -> Allowance:
        """What a tenant may take, in the whole pool."""
        return self._allowances.get(tenant, self._usual)

    def asked(self, tenant: str, *, hit_blocks: int, missed_blocks: int) -> None:
        """A prompt of `tenant` was looked up; without a tenant nothing is counted."""
        if not tenant:
            return
        asked = self._asked.setdefault(tenant, _Asked())
        self._asked.move_to_end(tenant)
        asked.hit_blocks += hit_blocks
        asked.missed_blocks += missed_blocks
        if len(self._asked) > MAX_ASKERS:
            self._asked.popitem(last=False)

    def complete(self, owners: Iterable[OwnerUsage]) -> tuple[OwnerUsage, ...]:
        """What tenants take, with what is known here; those too that asked and have nothing."""
        taking = {owner.tenant: owner for owner in owners}
        tenants = taking | {
            tenant: OwnerUsage(tenant=tenant) for tenant in self._asked if tenant not in taking
        }
        return tuple(self._completed(owner) for owner in tenants.values())

    def _completed(self, owner: OwnerUsage) -> OwnerUsage:
        allowance = self.allowance(owner.tenant)
        asked = self._asked.get(owner.tenant, _Asked())
        return replace(
            owner,
            quota_bytes=allowance.max_bytes,
            weight=allowance.weight,
            hit_blocks=asked.hit_blocks,
            missed_blocks=asked.missed_blocks,
        )


class QuotaShares:
    """This node's part of every tenant's quota. Pure, one owner.

    Args:
        here: This node.
        records: What the operator allows, in the whole pool.
        block_bytes: What a block is billed here.
    """

    def __init__(self, here: WorkerIdentity, records: TenantRecords, block_bytes: int) -> None:
        self._here = here
        self._records = records
        self._block_bytes = block_bytes
        self._elsewhere: dict[str, list[TenantPart]] = {}
        self._told: dict[str, Allowance] = {}

    def parts(self, owners: Iterable[OwnerUsage], now_s: float) -> tuple[TenantPart, ...]:
        """What the other nodes are told: what limited tenants have here."""
        limited = [
            self._part(owner, now_s)
            for owner in owners
            if self._records.allowance(owner.tenant).max_bytes is not None
        ]
        return tuple(sorted(limited, key=lambda part: -part.size_bytes)[:MOST_TOLD])

    def learn(self, states: Iterable[NodeState]) -> None:
        """What all living nodes said last."""
        self._elsewhere = {}
        for state in states:
            for part in state.parts if state.node != self._here else ():
                self._elsewhere.setdefault(part.tenant, []).append(part)

    def due(self, owners: Iterable[OwnerUsage], now_s: float) -> dict[str, Allowance | None]:
        """What tenants may take on this node from now on, where that has changed; None for what is usual."""
        having = {owner.tenant: self._part(owner, now_s) for owner in owners}
        named = self._records.allowances.keys() | self._elsewhere.keys()
        shares = {tenant: self._share(tenant, having.get(tenant)) for tenant in named}
        before, self._told = self._told, shares
        return {
            tenant: shares.get(tenant)
            for tenant in before.keys() | shares.keys()
            if before.get(tenant) != shares.get(tenant)
        }

    def _share(self, tenant: str, here: TenantPart | None) -> Allowance:
        allowance, elsewhere = self._records.allowance(tenant), self._elsewhere.get(tenant)
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


_IDLE_WORTH = 0.5
"""Of its bytes, that a node counts with where the tenant is idle: round by round they go to where it is not."""


def may_hold(quota_bytes: int, here: TenantPart, elsewhere: Iterable[TenantPart]) -> int:
    """Bytes that a tenant may have on a node, so that what it has on all nodes comes to its quota.

    Args:
        quota_bytes: Over all nodes.
        here: What it has on this one.
        elsewhere: And on the others, as they last said.
    """
    if not here.size_bytes:
        here = replace(here, active=True)  # it is about to begin
    parts = [here, *elsewhere]
    num_active = max(1, sum(part.active for part in parts))
    least = quota_bytes / (2 * num_active)
    claims = [_claim(part, least) for part in parts]
    fair = quota_bytes * claims[0] / max(1.0, sum(claims))
    spare = quota_bytes - sum(part.size_bytes for part in parts)
    if spare < 0:
        return int(fair)
    return int(max(fair, here.size_bytes + spare / num_active))


def _claim(part: TenantPart, least: float) -> float:
    return max(part.size_bytes, least) if part.active else _IDLE_WORTH * part.size_bytes


MAX_ASKERS = 4096
"""Tenants whose hits are counted. With more, the one that has not asked for longest is forgotten."""


_log = get_logger(__name__)


class QuotaKeeper:
    """Applies what the operator allows tenants, while the node serves: looks for changes every few seconds.

    A faulty configuration is logged and changes nothing: the last good one holds.

    Args:
        source: Where allowances come from.
        allow: Has them obeyed.
        pause_s: Between two looks.
    """

    def __init__(
        self,
        source: AllowanceSource,
        allow: Callable[[Mapping[str, Allowance]], None],
        *,
        pause_s: float,
    ) -> None:
        self._source = source
        self._allow = allow
        self._pause_s = pause_s
        self._fault = ""

    async def look(self) -> bool:
        """Takes over what is new; whether anything was. Raises nothing that an operator can cause."""
        try:
            allowances = await self._source.next()
        except BatonError as error:
            fault = error.message if isinstance(error, ConfigError) else "no answer"
            if fault != self._fault:
                _log.warning("what tenants may keep in the pool stays as it was", why=error.message)
            self._fault = fault
            return False
        self._fault = ""
        if allowances is None:
            return False
        self._allow(allowances)
        _log.info("tenants' quotas taken over", tenants=len(allowances))
        return True

    async def run(self) -> None:
        """Looks until cancelled."""
        while True:
            await asyncio.sleep(self._pause_s)
            await self.look()
