"""What a node knows of tenants besides their blocks: what the operator allows them, and how often they found what they asked for."""

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from kvpool.accounts import Allowance
from kvpool.messages import OwnerUsage

MAX_ASKERS = 4096
"""Tenants whose hits are counted. With more, who has not asked for longest is forgotten."""


@dataclass(slots=True, eq=False)
class _Asked:
    hit_blocks: int = 0
    missed_blocks: int = 0


class TenantBook:
    """Pure, one owner.

    Args:
        usual: What a tenant may take of whom nothing else is said.
    """

    def __init__(self, usual: Allowance) -> None:
        self._usual = usual
        self._allowances: Mapping[str, Allowance] = {}
        self._asked: OrderedDict[str, _Asked] = OrderedDict()

    @property
    def allowances(self) -> Mapping[str, Allowance]:
        """Of those of whom something else is said."""
        return self._allowances

    def allow(self, allowances: Mapping[str, Allowance]) -> None:
        """From now on these hold, and no others."""
        self._allowances = allowances

    def allowance(self, tenant: str) -> Allowance:
        """What a tenant may take, in the whole pool."""
        return self._allowances.get(tenant, self._usual)

    def asked(self, tenant: str, *, hit_blocks: int, missed_blocks: int) -> None:
        """A prompt of `tenant` was looked up; nothing is counted for nobody."""
        if not tenant:
            return
        asked = self._asked.setdefault(tenant, _Asked())
        self._asked.move_to_end(tenant)
        asked.hit_blocks += hit_blocks
        asked.missed_blocks += missed_blocks
        if len(self._asked) > MAX_ASKERS:
            self._asked.popitem(last=False)

    def complete(self, owners: Iterable[OwnerUsage]) -> tuple[OwnerUsage, ...]:
        """What tenants take, with what is known here; those too who asked and have nothing."""
        taking = {owner.tenant: owner for owner in owners}
        everybody = taking | {
            tenant: OwnerUsage(tenant=tenant) for tenant in self._asked if tenant not in taking
        }
        return tuple(self._completed(owner) for owner in everybody.values())

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
